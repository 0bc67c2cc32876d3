"""Memory that workers read where it lies, and that the trainer has exchanged for other memory at the same address."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, module_of

from weightsync import WeightSync
from weightsync.errors import DigestError

_MAP_FIXED = 0x10


def put_other_memory_in_place_of(tensor: torch.Tensor) -> None:
    """Do what freeing a tensor does when the next allocation gets its address, for sure."""
    values = tensor.detach().clone()
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = tensor.untyped_storage().data_ptr()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found = libc.mmap(address, tensor.untyped_storage().nbytes(), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found == address
    with torch.no_grad():
        tensor.copy_(values + 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_push_of_other_memory_at_the_same_address_raises_and_the_next_push_recovers(workers: int):
    model = module_of(checkpoint(1)).share_memory()
    engine = FakeEngine(
        *(ModuleHost(TinyEngineModel, checkpoint(2), rank=number, world=workers) for number in range(workers))
    )
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=20)
    sync.push(model)
    sync.push(model)
    for parameter in model.parameters():
        put_other_memory_in_place_of(parameter)
    with pytest.raises(DigestError, match="no longer holds its tensors"):
        sync.push(model)
    fresh = module_of({name: parameter.detach() for name, parameter in model.named_parameters()})
    assert sync.push(fresh).version == 3
    sync.close()
    engine.close()
