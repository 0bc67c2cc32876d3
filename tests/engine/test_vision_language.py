"""Vision-language models: an engine that was pushed to answers about pictures as a cold one does.

All of them are pushed on a GPU, and here when the evidence is written.
"""

from __future__ import annotations

import os

import pytest
import vision_pushes
from vision_models import KINDS

pytestmark = pytest.mark.engine

ALL = os.environ.get("WEIGHTSYNC_WRITE_DOCS") == "1"
OTHERS = ["gemma3:adapters", "qwen2.5-vl:merged", "gemma3:text", "gemma3:sleep"]
SERVED = ["qwen2.5-vl:tower", "llava-onevision:tower", "qwen3-vl:left-out", "gemma3:left-out", *OTHERS]


def test_pushed_equals_cold() -> None:
    all_cases = [*(f"{kind}:{tower}" for tower in ("tower", "left-out") for kind in KINDS), *OTHERS]
    vision_pushes.run(*(all_cases if ALL else SERVED))
