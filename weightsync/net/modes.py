"""A push outside of the torch modes of its caller's thread, such as `torch.autocast`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


class PlainModes:
    """A context in which torch computes as in a new thread, regardless of the caller's modes.

    Autocast would merge adapters in another dtype. A tensor made in inference mode cannot be written outside of it, so
    the next push would fail. A default device would move CPU buffers to a GPU. A dispatch mode, such as
    `FakeTensorMode`, would intercept the push's operators. A transform of `torch.func`, such as `grad`, would refuse
    writes to memory from outside of it. Settings of the whole process, such as the default dtype, stay: other threads
    compute meanwhile.
    """

    def __init__(self) -> None:
        self._entered = ExitStack()

    def __enter__(self) -> PlainModes:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the context, unless it is left already."""
        self._entered.close()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the context while the body, the caller's code, runs."""
        self.leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(temporarily_clear_interpreter_stack())
            entered.enter_context(_disable_current_modes())
            entered.enter_context(torch.inference_mode(False))
            entered.enter_context(torch.no_grad())
            for kind in ("cpu", "cuda"):
                entered.enter_context(torch.autocast(kind, enabled=False))
            if torch.empty(0).device.type != "cpu":
                entered.enter_context(torch.device("cpu"))  # not always: it makes every call of torch slower
            self._entered = entered.pop_all()
