"""What the caller's thread is inside of, such as `torch.autocast`, and a push is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


class PlainModes:
    """A context in which torch computes as in a new thread, whatever the caller has entered.

    Autocast would merge adapters in another dtype. Tensors that are made in inference mode cannot be written outside of
    it, so that the next push would fail. A default device would take the memory that is meant for a CPU. A mode of
    operators, such as `FakeTensorMode`, would see the push's own. What holds for the whole process, such as the default
    dtype, stays: other threads compute meanwhile.
    """

    def __init__(self) -> None:
        self._entered = ExitStack()

    def __enter__(self) -> PlainModes:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the context, if it was not left."""
        self._entered.close()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the context meanwhile: the body is the caller's."""
        self.leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(_disable_current_modes())
            entered.enter_context(torch.inference_mode(False))
            entered.enter_context(torch.no_grad())
            for kind in ("cpu", "cuda"):
                entered.enter_context(torch.autocast(kind, enabled=False))
            if torch.empty(0).device.type != "cpu":
                entered.enter_context(torch.device("cpu"))  # only then, since it makes each call of torch slower
            self._entered = entered.pop_all()
