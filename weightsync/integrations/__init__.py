"""weightsync in the trainers of other projects: one module for each. Nothing else in weightsync imports them."""
