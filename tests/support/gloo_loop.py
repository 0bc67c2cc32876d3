"""One thread for the sockets of all gloo groups of a process.

Each group has a device of its own otherwise, whose thread wakes up every 10 ms. VLLM makes 13 groups, and processes
that live for a whole run of the tests had 40 such threads, which took a tenth of the processors.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any


@functools.cache
def share_loop() -> None:
    """Give one device to all gloo groups that this process and its forks make from now on, each process its own."""
    from torch.distributed import ProcessGroupGloo

    make = ProcessGroupGloo.__init__

    @functools.cache
    def device_of(process: int) -> Any:
        return ProcessGroupGloo.create_default_device()

    # From torch 2.14 on there are further arguments.
    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device_of(os.getpid())], timeout
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init
