"""weightsync in the trainers of other projects: one module for each, which nothing else of weightsync imports."""
