"""Vision-language models: an engine that was pushed to answers about pictures as a cold one does.

All of them are pushed on a GPU, and here when `docs/models.md` is written.
"""

from __future__ import annotations

import os

import pytest
import vision_pushes
from vision_models import KINDS

pytestmark = pytest.mark.engine

ALL = os.environ.get("WEIGHTSYNC_WRITE_DOCS") == "1"
SERVED = {"tower": ("qwen2.5-vl", "llava-onevision"), "left-out": ("qwen3-vl", "gemma3")}


@pytest.mark.parametrize("tower", SERVED)
def test_pushed_equals_cold(tower: str) -> None:
    vision_pushes.run(tower, *(KINDS if ALL else SERVED[tower]))
