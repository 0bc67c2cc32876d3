"""Many copies in one go: what torch's `copy_` does one after the other, between any views, with any cast."""

from __future__ import annotations

import ctypes
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from weightsync.kernels import copies_cpu
from weightsync.kernels.copies import BatchedCopy, Copy, Dimension, collapse
from weightsync.tools.testing.assertions import same_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
KINDS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SAME = [*KINDS, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.complex64, torch.complex128]


def filled(numel: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Any bytes; where they are to be cast, numbers of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    if dtype in KINDS:
        found = torch.randn(numel, generator=draw, dtype=torch.float64) * 10 ** torch.linspace(-9, 3, numel).double()
        found[:: max(1, numel // 7)] = torch.tensor(float("inf"))
        return found.to(dtype).to(device)
    found = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), generator=draw)
    return found.to(torch.uint8).view(dtype).to(device)


def a_view(size: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, draw: random.Random) -> torch.Tensor:
    """A view of that size in a larger tensor: its dimensions in any order in memory, with gaps or without."""
    stride, order, at = [0] * len(size), list(range(len(size))), 1
    if draw.random() < 0.3:
        draw.shuffle(order)
    for dim in reversed(order):
        stride[dim] = at
        at = at * size[dim] + draw.choice([0, 0, 0, 1, 8, 16])
    offset = draw.choice([0, 0, 1, 3, 8, 64])
    return filled(offset + at + 64, dtype, device, seed).as_strided(size, stride, offset)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def some_pairs(
    of: torch.dtype, to: torch.dtype, device: str, sizes: list[tuple[int, ...]]
) -> tuple[Pairs, list[torch.Tensor]]:
    """A view to copy from and one to copy to of each size, and the tensors that the latter are views of."""
    draw = random.Random(f"{of} {to}")
    pairs = [
        (a_view(size, to, device, 2 * number, draw), a_view(size, of, device, 2 * number + 1, draw))
        for number, size in enumerate(sizes)
    ]
    wholes = [target._base for target, _ in pairs]
    return pairs, wholes


def check(
    pairs: Pairs,
    wholes: list[torch.Tensor],
    links: int = 1,
    batched: Callable[[list[Copy]], Any] = BatchedCopy,
) -> None:
    """Every byte of the tensors that targets are views of is as after `copy_`, those between the targets too."""
    before = [whole.clone() for whole in wholes]
    for target, source in pairs:
        target.copy_(source)
    expected = [whole.clone() for whole in wholes]
    for whole, old in zip(wholes, before, strict=True):
        whole.copy_(old)
    batched([(*pair, number % links) for number, pair in enumerate(pairs)]).run()
    for whole, wanted in zip(wholes, expected, strict=True):
        assert same_bytes(whole, wanted)


SIZES = [
    (),
    (1,),
    (7,),
    (4096,),
    (70_001,),
    (33, 48),
    (128, 5000),
    (3, 5000),
    (3, 1),
    (5, 24, 40),
    (2, 3, 4, 17),
    (2, 2, 2, 2, 9),
    (0, 4),
]


def check_groups(pairs: Pairs, wholes: list[torch.Tensor], batched: Callable[..., Any] = BatchedCopy) -> None:
    """A run of one group of copies writes its own targets alone. The groups have different numbers of links."""
    groups = [[(*pair, number * link) for number, pair in enumerate(pairs[link::3])] for link in range(3)]
    copies = batched(*groups, [])
    for group, own in enumerate([*groups, []]):
        for whole in wholes:
            whole.zero_()
        for target, source, _ in own:
            target.copy_(source)
        expected = [whole.clone() for whole in wholes]
        for whole in wholes:
            whole.zero_()
        copies.run(group)
        assert all(map(same_bytes, wholes, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=str)
def test_groups_are_copied_one_by_one(of: torch.dtype, device: str):
    check_groups(*some_pairs(of, torch.bfloat16, device, SIZES))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("programs", [None, 2])
@pytest.mark.parametrize("dtype", SAME, ids=str)
def test_any_views_of_any_type(dtype: torch.dtype, programs: int | None, device: str):
    pairs, wholes = some_pairs(dtype, dtype, device, SIZES * 3)
    check(pairs, wholes, links=3, batched=partial(BatchedCopy, programs=programs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", KINDS, ids=str)
@pytest.mark.parametrize("of", KINDS, ids=str)
def test_casts_round_as_torch_does(of: torch.dtype, to: torch.dtype, device: str):
    pairs, wholes = some_pairs(of, to, device, SIZES)
    check(pairs, wholes)


@pytest.mark.parametrize("device", DEVICES)
def test_it_copies_what_the_sources_hold_at_each_run(device: str):
    source, target = torch.ones(64, 96, device=device), torch.zeros(64, 96, device=device)
    batched = BatchedCopy([(target[:32], source[:32], 0), (target[32:], source[32:], 1)])
    for _ in range(3):
        source.mul_(1.5).add_(1)
        batched.run()
        assert torch.equal(target, source)


def test_what_is_long_is_shared_out_among_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies_cpu, "_TILE_BYTES", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(copies_cpu, "_cores", lambda: {*os.sched_getaffinity(0), 500, 501})  # as on a larger machine
    took_part = set()

    def copy_slowly(*tile: int) -> None:
        took_part.add(threading.current_thread())
        time.sleep(0.01)
        ctypes.memmove(*tile)

    monkeypatch.setattr(copies_cpu, "memmove", copy_slowly)
    pairs = [(filled(n, torch.int32, "cpu", n), filled(n, torch.int32, "cpu", n + 1)) for n in (1, 250, 251, 9999)]
    check(pairs, [target for target, _ in pairs])
    assert len(took_part) == 3


def test_it_copies_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    refused = []

    def refuse(*_: object) -> None:
        refused.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copies_cpu, "_TILE_BYTES", 1000)
    monkeypatch.setattr(copies_cpu, "spawn", refuse)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(copies_cpu, "_cores", lambda: {*os.sched_getaffinity(0), 500})
    pairs = [(filled(9999, torch.int32, "cpu", 1), filled(9999, torch.int32, "cpu", 2))]
    check(pairs, [pairs[0][0]])
    assert refused


def test_threads_run_where_any_thread_of_the_process_may() -> None:
    """OpenMP binds the main thread to its first core, and whatever that starts inherits it."""
    found: queue.SimpleQueue[set[int]] = queue.SimpleQueue()

    def bound() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.put(copies_cpu._cores())

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found.get(timeout=10.0) >= os.sched_getaffinity(0)


@pytest.mark.gpu(1)
def test_a_gpu_takes_what_lies_in_cpu_memory_too():
    sources = [torch.randn(64, 96, device=device) for device in ("cpu", "cuda", "cpu")]
    targets = [torch.zeros(64, 96, device="cuda", dtype=torch.bfloat16) for _ in sources]
    BatchedCopy([(target, source, 0) for target, source in zip(targets, sources, strict=True)]).run()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.to(torch.bfloat16).cpu())


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\(8,\) into \(4, 2\)"):
        BatchedCopy([(torch.empty(4, 2), torch.empty(8), 0)])


def joined(target: torch.Tensor, source: torch.Tensor) -> list[Dimension]:
    return collapse(target.shape, target.stride(), source.stride())


def test_dimensions_that_lie_behind_one_another_are_one():
    whole = torch.empty(4, 6, 8)
    assert joined(whole, whole) == [(192, 1, 1)]
    assert joined(whole[:, 2:4], torch.empty(4, 2, 8)) == [(4, 48, 16), (16, 1, 1)]
    assert joined(torch.empty(8, 4).t(), torch.empty(4, 8)) == [(4, 1, 8), (8, 4, 1)]
    assert joined(whole[:1, :1, :1], whole[1:2, 1:2, 1:2]) == [(1, 1, 1)]


def test_what_is_whole_and_columns_of_matrices_are_of_one_launch():
    """Launches come one after the other: the links that one of them does not need would idle meanwhile."""
    copies_triton = pytest.importorskip("weightsync.kernels.copies_triton")
    shapes = [(1536, 512), (512, 1536), (640, 12288)]
    views = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    halves = [whole[:, : whole.shape[1] // 2] for whole in views]
    pairs = [*zip(views, views, strict=True), *((half.contiguous(), half) for half in halves)]
    assert len({kind for pair in pairs for kind, *_ in copies_triton._cut_into_grids(*pair)}) == 1
