"""`python -m weightsync.cli`, where the console script is not on the path."""

import sys

from weightsync.cli import main

sys.exit(main())
