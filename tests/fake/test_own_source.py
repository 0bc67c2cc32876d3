"""What every weight source promises of `read`, and a source of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weightsync import TensorSelection, WeightSync
from weightsync.errors import ConfigError
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.sources import open_source
from weightsync.sources.base import Barrier, Memo, Reading, SteadySource, TensorShard
from weightsync.sources.megatron import MegatronBackend
from weightsync.sources.quantize import QuantizingSource


class DictSource:
    """Tensors that a trainer keeps in a dict."""

    def read(self, model: dict[str, torch.Tensor]) -> Reading:
        metas = tuple(TensorMeta(name, tuple(t.shape), "float32") for name, t in model.items())
        return Reading(Manifest(metas), [TensorShard(meta, Box.full(meta.shape), model[meta.name]) for meta in metas])

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        return

    def close(self) -> None:
        return


class SourceOfTwoMethods:
    """The interface of weight sources before `read`."""

    def manifest(self, model: object) -> None: ...
    def shards(self, model: object) -> None: ...
    def gather(self, names: object) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_source_of_ones_own_is_pushed_from(transport: str) -> None:
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    tensors = checkpoint(2)
    with closing(FakeEngine(host)) as engine, WeightSync(DictSource(), transport, engine, timeout_s=30.0) as sync:
        for seed in (2, 3):
            for name, tensor in checkpoint(seed).items():
                tensors[name].copy_(tensor)
            sync.push(tensors)
            assert all(map(torch.equal, host.live.parameters(), cold(checkpoint(seed)).parameters()))


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        (object(), {}, "methods of `weightsync.sources.base.ShardSource`. A object lacks read, gather, close"),
        (SourceOfTwoMethods(), {}, "SourceOfTwoMethods lacks read$"),
        (DictSource(), {"exclude": ("*",)}, "your own weight source, which selects the tensors"),
        (DictSource(), {"buffers": False}, "your own weight source, which selects the tensors"),
    ],
)
def test_open_source_with_what_has_no_effect_raises(backend: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_source(backend, TensorSelection(**options))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)
    return peft.get_peft_model(network(), config)


def quantizing() -> QuantizingSource:
    inner = open_source("fsdp", TensorSelection())
    return QuantizingSource(inner, "int8", TensorSelection(), lambda values: None)


class Export:
    def export_weights(self, chunks: list[nn.Module]) -> Any:
        return iter(chunks[0].state_dict().items())


SOURCES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module]]] = {
    "fsdp": (lambda: open_source("fsdp", TensorSelection()), network),
    "adapted": (lambda: open_source("fsdp", TensorSelection()), adapted),
    "quantised": (quantizing, network),
    "bridge": (lambda: open_source(MegatronBackend(bridge=Export()), TensorSelection()), network),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_reading_of_a_model_that_has_not_moved_is_the_same(kind: str) -> None:
    make, build = SOURCES[kind]
    source, model = SteadySource(make()), build()
    first = source.read(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert source.read(model) is first
    assert {shard.meta for shard in first.shards} <= set(first.manifest)
    assert first.shards


def test_the_reading_of_quantised_weights_that_have_moved_is_the_same() -> None:
    source, model = quantizing(), network()
    first = source.read(model)
    before = first.shards[0].values()
    weight = model.get_parameter("0.weight")
    weight.data = 2 * weight.data.flip(0)
    assert source.read(model) is first
    assert torch.equal(first.shards[0].values(), before.flip(0))


def test_a_reading_of_the_same_shards_with_another_tied_name_is_another() -> None:
    tensors, tied = {"a": torch.ones(2)}, [()]

    class Tied(DictSource):
        def read(self, model: dict[str, torch.Tensor]) -> Reading:
            reading = super().read(model)
            return Reading(Manifest(reading.manifest.tensors, tied[0]), reading.shards)

    source = SteadySource(Tied())
    first = source.read(tensors)
    assert source.read(tensors) is first
    tied[0] = (("b", "a"),)
    assert source.read(tensors).manifest.tied == (("b", "a"),)


class TwoWeights(nn.Module):
    """An engine's model that keeps two tensors apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(5)), nn.Parameter(torch.empty(5))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Tied(TwoWeights):
    """An engine's model with one tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.a


@pytest.mark.parametrize(("kind", "is_told"), [(Tied, True), (TwoWeights, False)])
def test_a_dtype_of_a_tensor_that_the_engine_ties_is_told_to_have_no_effect(
    kind: type[TwoWeights], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    nn.init.ones_(model.a)
    model.b = model.a
    selection = TensorSelection(dtypes={"b": "bfloat16", "?": "float32"})
    with (
        closing(FakeEngine(ModuleHost(kind, {"a": torch.zeros(5), "b": torch.zeros(5)}))) as engine,
        WeightSync("fsdp", "ipc", engine, selection=selection, timeout_s=30.0) as sync,
    ):
        sync.push(model)
    assert ("patterns without effect: b. The trainer's nearest names are a" in caplog.text) is is_told
    assert ("without effect" in caplog.text) is is_told


@pytest.mark.parametrize("kind", ["of the user's own", "fsdp", "computed"])
def test_a_tied_tensor_is_pushed_with_each_names_own_dtype(kind: str) -> None:
    class Tied(DictSource):
        def read(self, model: Any) -> Reading:
            (shard,) = (reading := super().read({"a": model.a.detach()})).shards
            compute = (lambda: self.values) if kind == "computed" else None
            return Reading(Manifest(reading.manifest.tensors, (("b", "a"),)), [replace(shard, compute=compute)])

        def gather(self, names: Sequence[str], barrier: Barrier) -> None:
            self.values = tensor.detach() if list(names) == ["a"] else None

    model = TwoWeights()
    model.a = model.b = tensor = nn.Parameter(torch.linspace(0, 1, 5) / 3)
    host = ModuleHost(TwoWeights, {"a": torch.zeros(5), "b": torch.zeros(5)})
    selection = TensorSelection(dtypes={"b": "bfloat16"})
    source = "fsdp" if kind == "fsdp" else Tied()
    with (
        closing(FakeEngine(host)) as engine,
        WeightSync(source, "broadcast", engine, selection=selection, bucketer="parameter", timeout_s=30.0) as sync,
    ):
        sync.push(model)
    assert torch.equal(host.live.get_parameter("a"), tensor)
    assert torch.equal(host.live.get_parameter("b"), tensor.bfloat16().float())


@pytest.mark.parametrize("kind", ["fsdp", "adapted"])
@pytest.mark.parametrize("change", ["memory", "trains", "selection"])
def test_the_reading_of_a_model_that_has_changed_is_another(kind: str, change: str) -> None:
    make, build = SOURCES[kind]
    inner, model = make(), build()
    source = SteadySource(inner)
    first = source.read(model)
    weight = model.get_parameter("1.weight" if kind == "fsdp" else "base_model.model.0.base_layer.bias")
    if change == "memory":
        weight.data = weight.data.clone()
    elif change == "trains":
        weight.requires_grad_(not weight.requires_grad)
    else:
        inner.selection = TensorSelection(exclude=("0.bias",))
    second = source.read(model)
    assert second is not first
    assert source.read(model) is second


def test_a_model_is_read_anew_after_close() -> None:
    source, model = open_source("fsdp", TensorSelection()), network()
    first = source.read(model)
    assert source.read(model) is first
    source.close()
    assert source.read(model) is not first


def look_twice_at_flat_parameters(rank: int) -> None:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    source = SteadySource(open_source("fsdp", TensorSelection()))
    first = source.read(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert source.read(model) is first
    assert first.shards


def test_the_reading_of_flat_parameters_is_the_same() -> None:
    run_ranks(look_twice_at_flat_parameters, 2)


def test_a_snapshot_is_read_again_when_marks_differ_are_none_or_reading_failed() -> None:
    snapshot: Memo[list[int]] = Memo()
    reads: list[int] = []

    def read() -> list[int]:
        reads.append(len(reads))
        return [reads[-1]]

    def fail() -> list[int]:
        raise LookupError

    found = [snapshot.of(marks, read) for marks in (1, 1, 2, None, None, 2)]
    assert found == [[0], [0], [1], [2], [3], [4]]
    with pytest.raises(LookupError):
        snapshot.of(3, fail)
    assert snapshot.of(3, read) == [5]
    snapshot.clear()
    assert snapshot.of(3, read) == [6]
