"""Weights quantised on their way: found by experiment, taken only where it gives the reload's bits."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fake_engine import Attention, ModuleHost, TinyEngineModel, checkpoint
from memory_trainer import MemoryTrainer
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.kernels.quantize import Form, fp8_per_channel, fp8_per_tensor, int8_per_channel
from weightsync.net.wire import POISONED
from weightsync.worker.fused_quantize import find_recipes
from weightsync.worker.load_paths import FusedQuantize, Weight
from weightsync.worker.load_planner import FUSED_QUANTIZE, NATIVE_LOADER, RELOAD

TIMEOUT_S = 10.0
"""Of a worker that waits for the other."""
FORMS: dict[str, Form] = {"fp8": fp8_per_channel, "int8": int8_per_channel, "fp8 per tensor": fp8_per_tensor}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

PostProcess = Callable[[nn.Module], None]


def quantise(form: Form, module: nn.Module) -> None:
    """What an engine with kernels for 8 bits does to q, k and v, which are one weight."""
    if isinstance(module, Attention):
        values, scale = form(module.weight.data)
        put(module, values, scale)


def put(module: nn.Module, values: torch.Tensor, scale: torch.Tensor) -> None:
    module.weight = nn.Parameter(values.t(), requires_grad=False)  # a kernel wants it transposed
    module.weight_scale = nn.Parameter(scale, requires_grad=False)
    module.is_ready = True


def quantise_otherwise(module: nn.Module) -> None:
    """With the reciprocal of the scale: one value in many is another."""
    if isinstance(module, Attention):
        scale = fp8_per_channel.scale(module.weight.data.abs().amax(dim=1, keepdim=True))
        put(module, (module.weight.data * (1.0009 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale)


def quantise_and_more(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module.bias.data *= 2
    quantise(fp8_per_channel, module)


def quantise_and_keep(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module.norms = module.weight.data.norm(dim=1)
    quantise(fp8_per_channel, module)


def quantise_and_remember(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module.largest = module.weight.data.abs().max().item()
    quantise(fp8_per_channel, module)


def remember(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module._private = {"largest": module.weight.data.abs().max().item()}


ROW = 24
"""Bytes of a row of q, k and v."""
CHUNKS = {
    "one chunk": {},
    "a chunk each": {"max_bytes": 1 << 7},
    "rows": {"max_bytes": ROW},
    "parts of rows": {"max_bytes": ROW // 2},
    "in place": {"in_place": list(checkpoint(0))},
}
CUT = pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)


def push(host: ModuleHost, seed: int, **chunks: Any) -> dict[str, int]:
    """Push `checkpoint(seed)`. Return how many modules take each load path."""
    trainer = MemoryTrainer(host, tensors=checkpoint(seed), **chunks)
    trainer.push()
    return trainer.load_paths


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not same_bytes(mine[name], theirs[name])] == []


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


@EVERY
@CUT
def test_quantised_on_the_way_is_as_cold(form: Form, chunks: dict[str, Any]):
    process = functools.partial(quantise, form)
    host = ModuleHost(TinyEngineModel, checkpoint(0), process)
    before = pointers(host.live)
    for seed in (1, 2, 1):
        load_paths = push(host, seed, **chunks)
        assert load_paths[FUSED_QUANTIZE] == 2
        assert RELOAD not in load_paths
        assert_same_model(host.live, ModuleHost(TinyEngineModel, checkpoint(seed), process).live)
    assert pointers(host.live) == before


@pytest.mark.parametrize(
    "process", [quantise_otherwise, quantise_and_more, quantise_and_keep, quantise_and_remember, remember]
)
def test_what_is_done_in_any_other_way_is_reloaded(process: PostProcess):
    host = ModuleHost(TinyEngineModel, checkpoint(0), process)
    load_paths = push(host, 1, max_bytes=ROW)
    assert load_paths[RELOAD] == 2
    assert FUSED_QUANTIZE not in load_paths
    cold = ModuleHost(TinyEngineModel, checkpoint(1), process).live
    assert_same_model(host.live, cold)
    for mine, theirs in zip(host.live.layers, cold.layers, strict=True):
        for key in ("largest", "_private"):
            assert getattr(mine.attn, key, None) == getattr(theirs.attn, key, None)


class Workers:
    """Two that share maxima: ranks of `model`, in which modules of class `kind` are quantised."""

    def __init__(self, model: Callable[[int], nn.Module], kind: type[nn.Module]) -> None:
        self._model, self._kind = model, kind
        self._barrier = threading.Barrier(2, timeout=TIMEOUT_S)
        self._seen: dict[int, torch.Tensor] = {}

    def largest(self, rank: int, numbers: torch.Tensor) -> None:
        self._seen[rank] = numbers.clone()
        self._barrier.wait()
        assert self._seen[0].shape == self._seen[1].shape
        numbers.copy_(torch.maximum(self._seen[0], self._seen[1]))
        self._barrier.wait()

    def quantise(self, rank: int, module: nn.Module) -> None:
        """As `quantise`, with scales that both have."""
        if isinstance(module, self._kind):
            weight = module.weight.data
            maxima = weight.abs().amax(dim=1)
            self.largest(rank, maxima)
            scale = int8_per_channel.scale(maxima[:, None])
            put(module, int8_per_channel.values(weight, scale), scale)

    def host(self, rank: int, weights: dict[str, torch.Tensor]) -> ModuleHost:
        model = functools.partial(self._model, rank)
        made = ModuleHost(model, weights, functools.partial(self.quantise, rank), rank=rank, world=2)
        made.all_reduce_max = functools.partial(self.largest, rank)
        return made

    def hosts(self, weights: dict[str, torch.Tensor]) -> list[ModuleHost]:
        made: dict[int, ModuleHost] = {}
        threads = [threading.Thread(target=lambda r=rank: made.update({r: self.host(r, weights)})) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [made[0], made[1]]


@CUT
def test_workers_that_share_scales(chunks: dict[str, Any]):
    """Cut by rows, the two workers have the last rows of their halves of q, k and v in different chunks."""
    workers = Workers(functools.partial(TinyEngineModel, tp=2), Attention)
    hosts = workers.hosts(checkpoint(0))
    trainer = MemoryTrainer(*hosts, tensors=checkpoint(1), **chunks)
    for _ in range(2):
        trainer.push()
    assert trainer.load_paths[FUSED_QUANTIZE] == 4
    for host, cold in zip(hosts, workers.hosts(checkpoint(1)), strict=True):
        assert_same_model(host.live, cold.live)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(4, 6)), nn.Parameter(torch.empty(4))


class ExpertParallel(nn.Module):
    """Each of two workers reads tensors of its own for the same two modules."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.a, self.b = Expert(), Expert()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            param, _, rank = name.rpartition(".")
            if int(rank) == self.rank:
                self.get_parameter(param).data.copy_(tensor)


class MoreThanQuantised(Workers):
    """Workers that reload, since a bias is changed too, and exchange maxima while they do."""

    def quantise(self, rank: int, module: nn.Module) -> None:
        if isinstance(module, self._kind):
            module.bias.data *= 2
        super().quantise(rank, module)


@pytest.mark.parametrize("max_bytes", [None, 48])
@pytest.mark.parametrize(("kind", "load_path"), [(Workers, FUSED_QUANTIZE), (MoreThanQuantised, RELOAD)])
def test_workers_exchange_in_one_order_although_their_tensors_come_in_another(
    kind: type[Workers], load_path: str, max_bytes: int | None
):
    """The first worker has all of `a` before `b`, and the second one all of `b` before `a`."""
    workers = kind(ExpertParallel, Expert)
    names = [f"{part}.{key}.{rank}" for part, rank in ("a0", "b0", "b1", "a1") for key in ("weight", "bias")]
    draw = torch.Generator().manual_seed(2)
    shapes = {"weight": (4, 6), "bias": (4,)}
    first, second = (
        {name: torch.randn(shapes[name.split(".")[1]], generator=draw) for name in names} for _ in range(2)
    )
    hosts = workers.hosts(first)
    trainer = MemoryTrainer(*hosts, tensors=second, max_bytes=max_bytes)
    trainer.push()
    assert trainer.load_paths == {load_path: 4}
    for host, cold in zip(hosts, workers.hosts(second), strict=True):
        assert_same_model(host.live, cold.live)


class Padded(nn.Module):
    """The last two of six rows are a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Down()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.down.weight.data[4:].fill_(3)
            self.down.weight.data[:4].copy_(tensor)


@EVERY
def test_constants_beside_what_arrives_are_quantised_too(form: Form):
    def process(module: nn.Module) -> None:
        if isinstance(module, Down):
            put(module, *form(module.weight.data))

    first, second = ({"weight": torch.randn(4, 4)} for _ in range(2))
    host = ModuleHost(Padded, first, process)
    with torch.no_grad():
        host.live.down.weight_scale.zero_()
    trainer = MemoryTrainer(host, tensors=second, max_bytes=32)
    trainer.push()
    assert trainer.load_paths == {FUSED_QUANTIZE: 1}
    assert_same_model(host.live, ModuleHost(Padded, second, process).live)


class Interleaved(TinyEngineModel):
    """A loader that computes: it reorders the rows of q, k and v before they are copied."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor.flip(0).clone() if ".attn." in name else tensor) for name, tensor in weights)


def test_a_computing_loader_gives_the_whole_module():
    process = functools.partial(quantise, fp8_per_channel)
    host = ModuleHost(Interleaved, checkpoint(0), process)
    assert push(host, 1, max_bytes=ROW)[NATIVE_LOADER] >= 2
    assert_same_model(host.live, ModuleHost(Interleaved, checkpoint(1), process).live)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))


class RowParallel(nn.Module):
    """Each of two workers has half of the columns."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList(Down() for _ in range(3))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor.narrow(1, 4 * self.rank, 4))


@pytest.mark.parametrize("max_bytes", [None, 64, 32, 16])  # a weight, two rows, a row, or half a row of 8 at once
def test_workers_exchange_the_same_although_their_rows_are_cut_differently(max_bytes: int | None):
    """Half a row is whole for one worker in each chunk, and nothing for the other."""
    workers = Workers(RowParallel, Down)
    draw = torch.Generator().manual_seed(1)
    first, second = ({f"layers.{n}.weight": torch.randn(6, 8, generator=draw) for n in range(3)} for _ in range(2))
    hosts, cold = workers.hosts(first), workers.hosts(second)
    trainer = MemoryTrainer(*hosts, tensors=second, max_bytes=max_bytes)
    trainer.push()
    assert trainer.load_paths == {FUSED_QUANTIZE: 6}
    for host, other in zip(hosts, cold, strict=True):
        assert_same_model(host.live, other.live)


def test_rows_of_their_own_scale_are_quantised_out_of_every_chunk_that_brings_them(monkeypatch: pytest.MonkeyPatch):
    """No weight is put together first where its rows come whole."""
    process = functools.partial(quantise, fp8_per_channel)
    host = ModuleHost(TinyEngineModel, checkpoint(0), process)
    trainer = MemoryTrainer(host, tensors=checkpoint(1), max_bytes=2 * ROW)
    trainer.connect()

    def must_not(path: FusedQuantize, weight: Weight) -> torch.Tensor:
        raise AssertionError("a weight is put together")

    monkeypatch.setattr(FusedQuantize, "put_together", must_not)
    trainer.push()
    assert_same_model(host.live, ModuleHost(TinyEngineModel, checkpoint(1), process).live)


def test_a_buffer_that_has_moved_fails_the_push():
    host = ModuleHost(TinyEngineModel, checkpoint(0))
    trainer = MemoryTrainer(host, tensors=checkpoint(1))
    trainer.push()
    host.live.layers[1].norm.seen = torch.zeros(())
    with pytest.raises(UnsupportedError, match=r"layers\.1\.norm\.seen"):
        trainer.push()
    assert trainer.receivers[0].state == POISONED


@EVERY
def test_a_recipe_is_found_for_one_weight_and_its_scale_alone(form: Form):
    weight, bias = torch.randn(12, 6), torch.randn(12)
    values, scale = form(weight)
    loaded, processed = {"weight": weight, "bias": bias}, {"weight": values, "bias": bias, "weight_scale": scale}
    (recipe,) = find_recipes(loaded, processed, None, set())
    assert (recipe.form, recipe.weight, recipe.scale) == (form, "weight", "weight_scale")
    assert recipe.fits(processed)
    assert not recipe.fits({**processed, "weight": values.t()})
    others = [
        {**processed, "weight": values.t().contiguous().t()},  # columns lie together
        {**processed, "bias": bias + 1},
        {**processed, "other": torch.randn(3)},
        {**processed, "weight_scale": scale * 2},
        loaded,
    ]
    assert [find_recipes(loaded, other, None, set()) for other in others] == [()] * 5
