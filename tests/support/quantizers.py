"""bitsandbytes and torchao, which `make` puts into a folder of their own: PEFT imports both where it finds them."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import not_compiled

_FOLDER = Path(sys.prefix, "quantizers")


def need_quantizers() -> None:
    """Skip a test on a machine without both."""
    if not _FOLDER.exists() and not (find_spec("torchao") and find_spec("bitsandbytes")):
        pytest.skip(f"torchao and bitsandbytes are missing, which `make` puts into {_FOLDER}")


def find_quantizers() -> None:
    """Import both, which the rest of this process finds then."""
    sys.path.append(str(_FOLDER))
    with not_compiled():
        for name in ("bitsandbytes", "torchao"):
            importlib.import_module(name)
