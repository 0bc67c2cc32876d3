"""Vision-language models on a GPU: an engine that was pushed to answers about pictures as a cold one does."""

from __future__ import annotations

import pytest
import vision_pushes
from vision_models import KINDS


@pytest.mark.gpu(1)
@pytest.mark.parametrize("tower", ["tower", "left-out"])
@pytest.mark.parametrize("kind", KINDS)
def test_pushed_equals_cold(kind: str, tower: str) -> None:
    vision_pushes.run(f"{kind}:{tower}")


@pytest.mark.gpu(1)
def test_a_kept_tower_outlives_sleep_or_is_missed() -> None:
    vision_pushes.run("gemma3:sleep")
