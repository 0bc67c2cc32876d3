"""Vision-language models: an engine that was pushed to answers about pictures as a cold one does."""

from __future__ import annotations

import pytest
import vision_pushes
from vision_models import KINDS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("tower", "kinds"), [("tower", KINDS), ("left-out", KINDS[2:])])
def test_pushed_equals_cold(tower: str, kinds: tuple[str, ...]) -> None:
    vision_pushes.run(tower, *kinds)
