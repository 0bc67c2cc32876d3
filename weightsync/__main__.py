"""`python -m weightsync`, for a path without the console script."""

import sys

from weightsync.tools.cli import main

if __name__ == "__main__":  # spawned child processes import this module too
    sys.exit(main())
