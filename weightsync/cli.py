"""The command `weightsync`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from weightsync.errors import WeightSyncError
