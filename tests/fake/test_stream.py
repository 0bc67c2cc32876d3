"""Pushes of streams: pairs of a name and a tensor, once for each push."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from ranks import assert_in_step, no_barrier, run_ranks
from recorders import RecordedEngine
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync import ConfigError, ManifestError, TensorSelection, UnsupportedError, WeightSync, WeightSyncError, save
from weightsync.errors import EngineUnreachableError
from weightsync.kernels.quantize import int8_per_channel, row_maxima
from weightsync.net.ranks import Ranks
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo, Value
from weightsync.planning.layout import Box, Manifest, ShardLocation
from weightsync.sources import open_source
from weightsync.sources.megatron import MegatronBackend
from weightsync.sources.quantize import QuantizingSource
from weightsync.sources.stream import StreamBackend, StreamSource
from weightsync.strategies.inventory import Inventory, machines
from weightsync.transports.base import RouteRequest
from weightsync.transports.ipc import IpcTransport

TENSORS = {name: tensor.to("meta") for name, tensor in checkpoint(1).items()}
KINDS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "dict": lambda tensors: tensors,
    "list": lambda tensors: list(tensors.items()),
    "function": lambda tensors: lambda: iter(tensors.items()),
    "iterator": lambda tensors: iter(tensors.items()),
}


def serves(engine: FakeEngine, seed: int) -> bool:
    return all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(seed)).parameters()))


def is_poisoned(engine: FakeEngine) -> bool:
    return engine.version().startswith("POISONED")


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [None, TENSORS], ids=["learnt", "given"])
def test_a_stream_of_any_kind_is_pushed(transport: str, kind: str, given: Any) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with closing(engine), WeightSync(StreamBackend(given), transport, engine, timeout_s=30.0) as sync:
        for seed in (2, 3, 4):
            sync.push(KINDS[kind](checkpoint(seed)))
            assert serves(engine, seed)


def test_a_tensor_lives_until_its_bucket_has_been_sent() -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    alive: list[int] = []

    def stream(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        refs: list[StorageWeakRef] = []
        for name, tensor in checkpoint(seed).items():
            copy = tensor.clone()
            refs.append(StorageWeakRef(copy.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in refs))
            yield name, copy

    with closing(engine), WeightSync(StreamBackend(TENSORS), "ipc", engine, max_bytes=256, timeout_s=30.0) as sync:
        for seed in (2, 3):
            report = sync.push(stream(seed))
    assert serves(engine, 3)
    assert report.chunks > 3
    assert 1 < max(alive) < len(TENSORS) / 2


def test_an_iterator_whose_names_are_not_known_is_kept_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with closing(engine), WeightSync("stream", "ipc", engine, timeout_s=30.0) as sync:
        for words in ("in CPU memory", ""):
            with caplog.at_level(logging.WARNING):
                sync.push(iter(checkpoint(2).items()))
            assert words in caplog.text
            assert bool(words) is bool(caplog.text)
            caplog.clear()


def changed(change: str) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = list(checkpoint(3).items())
    name, tensor = tensors[-1]
    first, value = tensors[0]
    return iter(
        {
            "another shape first": [(first, value[:-1]), *tensors[1:]],
            "nothing": [],
            "another name at the end": [*tensors[:-1], ("another", tensor)],
            "another dtype at the end": [*tensors[:-1], (name, tensor.double())],
            "one too few": tensors[:-1],
            "one too many": [*tensors, ("another", tensor)],
        }[change]
    )


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(
    ("change", "is_written"),
    [
        ("another shape first", False),
        ("nothing", False),
        ("another name at the end", True),
        ("another dtype at the end", True),
        ("one too few", True),
        ("one too many", True),
    ],
)
def test_a_stream_that_differs_is_a_manifest_error(transport: str, change: str, is_written: bool) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    stream = StreamBackend(TENSORS)
    with closing(engine), WeightSync(stream, transport, engine, max_bytes=256, timeout_s=30.0) as sync:
        sync.push(iter(checkpoint(2).items()))
        with pytest.raises(ManifestError, match="the stream"):
            sync.push(changed(change))
        assert is_poisoned(engine) is is_written
        assert serves(engine, 2) or is_written
        sync.push(iter(checkpoint(4).items()))
        assert not is_poisoned(engine)
        assert serves(engine, 4)


def test_a_dict_that_differs_is_negotiated_anew() -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with closing(engine), WeightSync("stream", "ipc", engine, timeout_s=30.0) as sync:
        sync.push(checkpoint(2))
        sync.push(dict(reversed(checkpoint(3).items())))
        assert serves(engine, 3)
        short = checkpoint(4)
        del short["layers.1.norm.weight"]
        with pytest.raises(ManifestError, match=r"Missing 1: layers\.1\.norm\.weight"):
            sync.push(short)
        assert serves(engine, 3)
        assert not is_poisoned(engine)


@pytest.mark.parametrize("kind", ["dict", "list", "source", "source of shards"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": torch.zeros(3)}, r"gives b as \(3,\) float32, expected b as \(2,\) float32"),
        ({"b": None}, r"gives nothing more, expected b as \(2,\) float32"),
        ({"c": torch.zeros(2)}, r"gives c as \(2,\) float32, expected nothing more"),
        ({}, ""),
    ],
)
def test_all_at_once_must_be_what_the_backend_was_told(kind: str, change: dict[str, Any], words: str) -> None:
    told = {name: torch.zeros(2) for name in ("a", "b", "excluded")}
    tensors = {name: tensor for name, tensor in (told | change).items() if tensor is not None}
    metas = [
        SimpleNamespace(name=name, shape=each.shape, dtype=each.dtype, owners=None, mesh_shape=None, placements=None)
        for name, each in tensors.items()
    ]
    members: dict[str, Any] = {"metadata": metas, "iter_full": lambda _: iter(tensors.items())}
    if kind == "source of shards":
        members |= {"iter_local": members["iter_full"], "implements_iter_local": lambda _: True}
    given = type("Given", (), members)() if kind.startswith("source") else KINDS[kind](tensors)
    source = StreamBackend(told).open(TensorSelection(exclude=["excluded"]), None)
    with pytest.raises(ManifestError, match=words) if words else nullcontext():
        assert source.read(given).manifest.names == ("a", "b")


@pytest.mark.parametrize("between", ["a list", "close"])
def test_the_first_stream_binds_no_list_and_no_stream_behind_a_close(between: str) -> None:
    source = StreamSource(TensorSelection())
    assert source.read(lambda: [("a", torch.zeros(2))]).manifest.names == ("a",)
    if between == "a list":
        assert source.read([("b", torch.zeros(2))]).manifest.names == ("b",)
    source.close()
    assert source.read(lambda: [("c", torch.zeros(3))]).manifest.names == ("c",)


def test_what_a_stream_raises_is_raised_by_push() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(checkpoint(3).items())[:-1]
        raise MemoryError("no memory left")

    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with closing(engine), WeightSync(StreamBackend(TENSORS), "ipc", engine, timeout_s=30.0) as sync:
        with pytest.raises(WeightSyncError, match="MemoryError: no memory left"):
            sync.push(broken())
        sync.push(iter(checkpoint(4).items()))
        assert serves(engine, 4)


def test_a_stream_is_quantised_as_it_comes() -> None:
    matrices = {name: tensor for name, tensor in checkpoint(2).items() if name.endswith("q.weight")}
    selection = TensorSelection()
    inner = open_source("stream", selection)
    source = QuantizingSource(inner, "int8", selection, lambda values: None)
    for _ in range(2):
        shards = {shard.meta.name: shard for shard in source.read(lambda: iter(matrices.items())).shards}
        assert len(source.read(lambda: iter(matrices.items())).manifest) == 2 * len(matrices)
        for name, matrix in matrices.items():
            source.gather([name, f"{name}_scale"], no_barrier)
            scale = int8_per_channel.scale(row_maxima(matrix.bfloat16()))
            assert torch.equal(shards[f"{name}_scale"].values(), scale)
            assert torch.equal(shards[name].values(), int8_per_channel.values(matrix.bfloat16(), scale))
        source.gather((), no_barrier)


@pytest.mark.parametrize("kind", ["function", "iterator"])
def test_a_push_without_a_lost_engine_reads_the_stream_again_where_that_can_be(kind: str) -> None:
    engines = [RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2)]
    engines[0].name, engines[1].name = "first", "second"
    options: dict[str, Any] = {"on_engine_failure": "drop", "timeout_s": 5.0}
    with WeightSync(StreamBackend(TENSORS), "ipc", list(engines), **options) as sync:
        sync.push(KINDS[kind](checkpoint(2)))
        engines[0].start_error = EngineUnreachableError("it is gone", who="first")
        engines[0].is_alive = lambda: False  # type: ignore[method-assign]
        if kind == "iterator":
            with pytest.raises(EngineUnreachableError):
                sync.push(KINDS[kind](checkpoint(3)))
            sync.leave_out_lost()
        report = sync.push(KINDS[kind](checkpoint(3)))
    assert report.left_out == ("first",)
    assert serves(engines[1], 3)
    for engine in engines:
        engine.close()


def test_no_rank_pushes_again_where_rank_0_cannot_read_its_stream_again() -> None:
    run_ranks(_spent, 2)


def _spent(rank: int) -> None:
    engines = [RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2)] if rank == 0 else None
    for name, engine in zip(("first", "second"), engines or (), strict=False):
        engine.name = name
    options: dict[str, Any] = {"on_engine_failure": "drop", "timeout_s": 30.0}
    with WeightSync(StreamBackend(TENSORS), "ipc", engines, **options) as sync:
        sync.push(KINDS["iterator" if rank == 0 else "function"](checkpoint(2)))
        if engines is not None:
            engines[0].start_error = EngineUnreachableError("it is gone", who="first")
            engines[0].is_alive = lambda: False  # type: ignore[method-assign]
        started = time.monotonic()
        with pytest.raises(EngineUnreachableError, match="it is gone"):
            sync.push(KINDS["iterator" if rank == 0 else "function"](checkpoint(3)))
        assert time.monotonic() - started < 20.0
        sync.leave_out_lost()
        assert sync.push(KINDS["function"](checkpoint(3))).left_out == ("first",)
    for engine in engines or ():
        engine.close()


class Bridge:
    """What exports a Megatron model, whose state this is."""

    def export_weights(self, chunks: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(chunks[0].state_dict().items())


@pytest.mark.parametrize("backend", ["stream", "megatron"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_an_engine_that_joins_gets_what_the_others_get(backend: str, transport: str) -> None:
    engines = [FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2)]
    option: Any = MegatronBackend(Bridge()) if backend == "megatron" else backend

    def pushed(seed: int) -> Any:
        return checkpoint(seed) if option == "stream" else trainer_model(checkpoint(seed))

    with WeightSync(option, transport, [engines[0]], timeout_s=30.0) as sync:
        sync.push(pushed(2))
        sync.engines.add(engines[1])
        with pytest.raises(ConfigError, match="push it to all engines"):
            sync.catch_up(pushed(2))
        for seed in (3, 4):
            sync.push(pushed(seed))
            assert all(serves(engine, seed) for engine in engines)
    for engine in engines:
        engine.close()


def gathered(weights: dict[str, torch.Tensor]) -> Any:
    """Return a stream of whole tensors, each of which takes a collective, as those of a sharded model do."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            part = tensor / 2
            dist.all_reduce(part)
            yield name, part

    return stream


def push_of_two_ranks(rank: int, transport: str, kind: str) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    stream = StreamBackend(TENSORS if kind == "iterator" else None)
    with WeightSync(stream, transport, engine, max_bytes=256, timeout_s=30.0) as sync:
        for seed in (2, 3):
            if kind == "rank 0 alone":
                stream = iter(checkpoint(seed).items()) if rank == 0 else None
            else:
                stream = gathered(checkpoint(seed))
            report = sync.push(stream() if kind == "iterator" else stream)
            assert report.chunks > 3
            assert engine is None or serves(engine, seed)
    if engine is not None:
        engine.close()


@pytest.mark.parametrize(
    ("transport", "kind"), [("ipc", "function"), ("broadcast", "iterator"), ("ipc", "rank 0 alone")]
)
def test_ranks_give_the_same_stream_or_none(transport: str, kind: str) -> None:
    run_ranks(push_of_two_ranks, 2, transport, kind)


def test_ranks_without_tensors_take_the_kind_of_device_of_the_others() -> None:
    """Their process group says so where nobody's tensors do. A CPU's engine is not refused for their GPUs."""

    def rank(device: str, *names: str) -> Inventory:
        machine = MachineInfo("rank", device, "GPU-1" if device == "cuda" else "", "boot")
        locations = [ShardLocation(name, Box((0,), (2,)), 0, 1, 0, (1,), "float32") for name in names]
        return Inventory(Value.of(Manifest(())).value, locations, [], [], machine)

    worker, on_gpu = MachineInfo("worker", "cpu", "", "boot"), rank("cuda").machine
    on_cpu = machines([rank("cpu", "a"), rank("cuda"), rank("cpu")])
    assert on_cpu == [MachineInfo("rank", "cpu", "", "boot")] * 3
    assert IpcTransport().route(RouteRequest(on_cpu, [worker], Manifest(()), [], [])) == ()
    assert machines([rank("cuda"), rank("cuda", "a")]) == [on_gpu, on_gpu]


def fail_between_the_collectives_of_a_stream(rank: int) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    with WeightSync("stream", "ipc", engine, max_bytes=256, timeout_s=30.0) as sync:
        # Rank 0 alone fills chunks. Meanwhile the other one would go on with the stream.
        broken = mock.patch.object(StreamSource, "_value", side_effect=lambda _: time.sleep(0.3) or 1 / 0)
        with broken, pytest.raises(WeightSyncError, match="division by zero"):
            sync.push(gathered(checkpoint(3)))
        assert_in_step()
        sync.push(gathered(checkpoint(4)))
        assert engine is None or serves(engine, 4)
    if engine is not None:
        engine.close()


def test_a_rank_that_fails_leaves_no_other_in_a_collective_of_the_stream() -> None:
    run_ranks(fail_between_the_collectives_of_a_stream, 2)


def test_two_syncs_share_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a push the source meets the ranks of that push, whichever `WeightSync` was made or has pushed last."""
    met: list[Ranks] = []
    monkeypatch.setattr(Update, "meet", lambda update: met.append(update.ranks))
    engines = [FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2)]
    source = StreamSource(TensorSelection())
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        syncs = [stack.enter_context(WeightSync(source, "ipc", one, timeout_s=30.0)) for one in engines]
        for seed, number in ((2, 0), (3, 1), (4, 0)):
            syncs[number].push(checkpoint(seed))
            assert serves(engines[number], seed)
            assert {*met} == {syncs[number]._ranks}
            met.clear()


def test_a_stream_is_saved(tmp_path: Path) -> None:
    save(iter(checkpoint(2).items()), tmp_path / "saved", "stream")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in checkpoint(2).items())


def fail_before_the_end_of_a_stream(rank: int, folder: str) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from gathered(checkpoint(2))()
        dist.all_reduce(torch.zeros(1))

    # Rank 0 alone writes. Meanwhile the other one would run the stream to its end.
    broken = mock.patch("weightsync.checkpoint.shard_files.write", side_effect=lambda *_: time.sleep(0.3) or 1 / 0)
    with broken if rank == 0 else nullcontext(), pytest.raises(WeightSyncError, match="division by zero"):
        save(stream, Path(folder, "saved"), "stream", timeout_s=30.0)
    assert_in_step()


def test_a_rank_that_cannot_save_leaves_no_other_at_the_end_of_the_stream(tmp_path: Path) -> None:
    run_ranks(fail_before_the_end_of_a_stream, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("stream", "error", "words"),
    [
        (nn.Linear(2, 2), ConfigError, "takes .name, tensor. pairs, got a module"),
        ([torch.zeros(2)], ConfigError, "the stream gives a Tensor, expected pairs of name and tensor"),
        (["ab"], ConfigError, "the stream gives a str"),
        ({"a": torch.zeros(2, device="meta")}, UnsupportedError, "the stream gives a: it is on the meta device"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], ManifestError, "gives a twice"),
    ],
)
def test_what_is_no_stream_is_refused(stream: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_source("stream", TensorSelection()).read(stream)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("stream", {"selection": TensorSelection(only_trained=True)}, "no effect with a stream"),
        ("stream", {"selection": TensorSelection(buffers=False)}, "no effect with a stream"),
        ("stream", {"transport": "single_copy"}, 'backend="fsdp"'),
        ("stream", {"transport": "lora"}, "adapters need PEFT"),
    ],
)
def test_options_without_effect_are_refused(backend: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WeightSync(backend, **options)


def push_from_rank_0(rank: int) -> None:
    """`get_model_state_dict` gives the other ranks an empty dict."""
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    sync = WeightSync(StreamBackend(TENSORS), "ipc", engine, timeout_s=30.0)
    with nullcontext() if engine is None else closing(engine), sync:
        for seed in (2, 3):
            sync.push(checkpoint(seed) if rank == 0 else {})
            assert engine is None or serves(engine, seed)


def test_other_ranks_may_give_an_empty_dict() -> None:
    run_ranks(push_from_rank_0, 2)


def test_a_stream_that_ends_early_lacks_the_tensors_left() -> None:
    last = list(TENSORS)[-2:]
    with (
        closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine,
        WeightSync("stream", "ipc", engine, timeout_s=30.0) as sync,
    ):
        sync.push(iter(checkpoint(2).items()))
        with pytest.raises(ManifestError, match=f"gives nothing more, expected {last[0]}") as raised:
            sync.push(iter(list(checkpoint(3).items())[:-2]))
    assert raised.value.missing == last
    assert raised.value.mismatched == {}


def test_a_list_that_is_shorter_than_described_lacks_the_tensors_left() -> None:
    last = list(TENSORS)[-2:]
    with pytest.raises(ManifestError, match=f"gives nothing more, expected {last[0]}") as raised:
        open_source(StreamBackend(TENSORS), TensorSelection()).read(list(checkpoint(2).items())[:-2])
    assert raised.value.missing == last
