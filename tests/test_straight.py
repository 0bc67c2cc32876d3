"""The straight road: found by experiment, taken only where it gives the reload's bits."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fake_engine import Attention, EngineModel, FakeEngine, ModuleHost, checkpoint, trainer_model
from torch import nn

from weightsync import PushReport, UnsupportedError, WeightSync
from weightsync.kernels.quantize import Form, fp8_per_channel, fp8_per_tensor, int8_per_channel
from weightsync.receiver.straight import find_recipe
from weightsync.senders import fsdp
from weightsync.senders.tensors import Held, flat_parts, memory_of
from weightsync.testing.promises import same_bytes

TIMEOUT_S = 10.0
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


def push(host: ModuleHost, seed: int, **options: Any) -> PushReport:
    engine = FakeEngine(host)
    try:
        with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S, **options) as sync:
            return sync.push(trainer_model(checkpoint(seed)))
    finally:
        engine.close()


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not same_bytes(mine[name], theirs[name])] == []


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


@EVERY
@pytest.mark.parametrize("bucketer", ["module", "parameter"])  # q, k and v together, or one after the other
def test_straight_is_as_cold(form: Form, bucketer: str):
    process = functools.partial(quantise, form)
    host = ModuleHost(EngineModel, checkpoint(0), process)
    before = pointers(host.live)
    for seed in (1, 2, 1):
        report = push(host, seed, bucketer=bucketer)
        assert report.roads["straight"] == 2
        assert report.roads["reload"] == 0
        assert_same_model(host.live, ModuleHost(EngineModel, checkpoint(seed), process).live)
    assert pointers(host.live) == before


@pytest.mark.parametrize(
    "process", [quantise_otherwise, quantise_and_more, quantise_and_keep, quantise_and_remember, remember]
)
def test_what_is_done_in_any_other_way_is_reloaded(process: PostProcess):
    host = ModuleHost(EngineModel, checkpoint(0), process)
    report = push(host, 1)
    assert report.roads["straight"] == 0
    assert report.roads["reload"] == 2
    cold = ModuleHost(EngineModel, checkpoint(1), process).live
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

    def share(self, rank: int, numbers: torch.Tensor) -> None:
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
            self.share(rank, maxima)
            scale = int8_per_channel.scale(maxima[:, None])
            put(module, int8_per_channel.values(weight, scale), scale)

    def host(self, rank: int, weights: dict[str, torch.Tensor]) -> ModuleHost:
        model = functools.partial(self._model, rank)
        made = ModuleHost(model, weights, functools.partial(self.quantise, rank), rank=rank, world=2)
        made.share = functools.partial(self.share, rank)
        return made

    def hosts(self, weights: dict[str, torch.Tensor]) -> list[ModuleHost]:
        made: dict[int, ModuleHost] = {}
        threads = [threading.Thread(target=lambda r=rank: made.update({r: self.host(r, weights)})) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [made[0], made[1]]


@pytest.mark.parametrize("bucketer", ["module", "parameter"])
def test_workers_that_share_scales(bucketer: str):
    workers = Workers(functools.partial(EngineModel, tp=2), Attention)
    hosts = workers.hosts(checkpoint(0))
    engine = FakeEngine(*hosts)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S, bucketer=bucketer) as sync:
        report = sync.push(trainer_model(checkpoint(1)))
    engine.close()
    assert report.roads["straight"] == 4
    for host, cold in zip(hosts, workers.hosts(checkpoint(1)), strict=True):
        assert_same_model(host.live, cold.live)


class Interleaved(EngineModel):
    """A loader that computes: it reorders the rows of q, k and v before they are copied."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor.flip(0).clone() if ".attn." in name else tensor) for name, tensor in weights)


def test_a_computing_loader_gives_the_whole_module():
    process = functools.partial(quantise, fp8_per_channel)
    host = ModuleHost(Interleaved, checkpoint(0), process)
    report = push(host, 1)
    assert report.roads["loader"] >= 2
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


def read_in_two(tensor: torch.Tensor) -> Held:
    values, shape = tensor.detach(), tuple(tensor.shape)
    flat = values.reshape(-1)
    parts = [*flat_parts(shape, 0, flat[:18]), *flat_parts(shape, 18, flat[18:])]
    return Held(shape, "float32", memory_of(values, shape), parts, True)


def test_workers_exchange_the_same_although_shards_cut_their_rows_differently(monkeypatch: pytest.MonkeyPatch):
    """Element 18 is in the first worker's half of a row of 8, so that only there a row comes in pieces."""
    monkeypatch.setattr(fsdp, "_read", read_in_two)
    workers = Workers(RowParallel, Down)
    draw = torch.Generator().manual_seed(1)
    first, second = ({f"layers.{n}.weight": torch.randn(6, 8, generator=draw) for n in range(3)} for _ in range(2))
    hosts, cold = workers.hosts(first), workers.hosts(second)
    engine = FakeEngine(*hosts)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        report = sync.push(trainer_model(second))
    engine.close()
    assert report.roads["straight"] == 6
    for host, other in zip(hosts, cold, strict=True):
        assert_same_model(host.live, other.live)


def test_nothing_of_the_model_is_kept_after_the_end():
    host = ModuleHost(EngineModel, checkpoint(0))
    engine = FakeEngine(host)
    model = trainer_model(checkpoint(1))
    alive = weakref.ref(model), weakref.ref(next(model.parameters()))
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S)
    sync.push(model)
    sync.push(model)
    sync.close()
    engine.close()
    del model
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_buffer_that_has_moved_fails_the_push():
    host = ModuleHost(EngineModel, checkpoint(0))
    engine = FakeEngine(host)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(1)))
        host.live.layers[1].norm.seen = torch.zeros(())
        with pytest.raises(UnsupportedError, match=r"layers\.1\.norm\.seen"):
            sync.push(trainer_model(checkpoint(2)))
    engine.close()


@EVERY
def test_a_recipe_is_found_for_one_weight_and_its_scale_alone(form: Form):
    weight, bias = torch.randn(12, 6), torch.randn(12)
    values, scale = form(weight)
    loaded, processed = {"weight": weight, "bias": bias}, {"weight": values, "bias": bias, "weight_scale": scale}
    recipe = find_recipe(loaded, processed, None)
    assert recipe is not None
    assert (recipe.form, recipe.weight, recipe.values, recipe.scale) == (form, "weight", "weight", "weight_scale")
    assert (
        find_recipe(loaded, {**processed, "weight": values.t().contiguous().t()}, None) is None
    )  # columns lie together
    assert find_recipe(loaded, {**processed, "bias": bias + 1}, None) is None
    assert find_recipe(loaded, {**processed, "other": torch.randn(3)}, None) is None
    assert find_recipe(loaded, {**processed, "weight_scale": scale * 2}, None) is None
    assert find_recipe(loaded, loaded, None) is None
    assert recipe.fits(processed)
    assert not recipe.fits({**processed, "weight": values.t()})
