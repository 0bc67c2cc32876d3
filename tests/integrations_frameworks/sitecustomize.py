"""Lets each process that Ray and vLLM start import the framework that FRAMEWORK names, from the folder FRAMEWORKS."""

import os
from pathlib import Path

if "FRAMEWORK" in os.environ:
    from sources import importable

    importable(os.environ["FRAMEWORK"], Path(os.environ["FRAMEWORKS"]))
