"""`python -m weightsync`, where the console script is not on the path."""

import sys

from weightsync.tools.cli import main

if __name__ == "__main__":  # a process that is spawned imports this module, too
    sys.exit(main())
