"""The receiver without vLLM: what it learns from a loader, which road each module takes, and what arrives."""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_engine import HEADS, WIDTH, Attention, EngineModel, FakeEngine, ModuleHost, checkpoint, cold, trainer_model
from torch import nn

from weightsync import ManifestError, TensorPolicy, UnsupportedError, WeightSync, WeightSyncError
from weightsync.deadline import Deadline
from weightsync.errors import DigestError, ProtocolError
from weightsync.kernels.digest import WHOLE
from weightsync.layout import Box, Manifest, Placement, TensorMeta
from weightsync.ranks import RankGroup
from weightsync.receiver.modules import choose_roads, units
from weightsync.receiver.receiver import Receiver
from weightsync.receiver.trace import Trace, trace_loader, uncovered
from weightsync.transports.base import Region, Shipment
from weightsync.transports.ipc import IpcTransport
from weightsync.wire import CLEAN

TIMEOUT_S = 10.0
Start = Callable[..., FakeEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an engine with workers for the given hosts; it is ended with the test."""
    engines: list[FakeEngine] = []

    def make(*hosts: ModuleHost) -> FakeEngine:
        engines.append(FakeEngine(*hosts))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(
        tuple(TensorMeta(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())
    )


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def trace_of(make: Callable[[], nn.Module], tensors: dict[str, torch.Tensor]) -> Trace:
    model = on_meta(make)
    return trace_loader(model, model.load_weights, manifest_of(tensors))


# ---------------------------------------------------------------------------------------------------------------
# The trace


@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_a_trace_that_is_replayed_does_what_the_loader_does(rank: int, tp: int):
    tensors = checkpoint(1)
    trace = trace_of(functools.partial(EngineModel, rank, tp), tensors)
    assert trace.computed == {f"layers.{n}.decay.rate": [f"layers.{n}.decay.log_rate"] for n in (0, 1)}
    assert (trace.refused, trace.unknown) == ({}, [])

    replayed = EngineModel(rank, tp)
    targets = dict(replayed.named_parameters()) | dict(replayed.named_buffers())
    for fill in trace.fills:
        torch.as_strided(targets[fill.param].data, fill.size, fill.stride, fill.offset).fill_(fill.value)
    for copy in trace.copies:
        source = tensors[copy.name][tuple(slice(a, a + n) for a, n in zip(copy.box.start, copy.box.size, strict=True))]
        torch.as_strided(targets[copy.param].data, copy.box.size, copy.stride, copy.offset).copy_(source)

    expected = cold(tensors, rank=rank, tp=tp).state_dict()
    for name, tensor in replayed.state_dict().items():
        if not name.endswith("decay.rate"):
            assert torch.equal(tensor, expected[name]), name


class OneParameter(nn.Module):
    """A 4 x 6 parameter, and a loader made of `write`."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.empty(4, 6, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.write(self.weight.data, tensor)


def through_a_buffer(param: torch.Tensor, w: torch.Tensor) -> None:
    staged = torch.empty_like(param)
    staged[:2] = w[2:]
    staged[2:] = w[:2]
    param.copy_(staged)


COPIES = {
    "whole": ((4, 6), lambda p, w: p.copy_(w)),
    "by index": ((4, 6), lambda p, w: p.__setitem__(slice(None), w)),
    "row by row": ((4, 6), lambda p, w: [p[i].copy_(w[i]) for i in range(4)]),
    "halves swapped": ((4, 6), lambda p, w: (p[:2].copy_(w[2:]), p[2:].copy_(w[:2]))),
    "every second row": ((4, 6), lambda p, w: (p[::2].copy_(w[:2]), p[1::2].copy_(w[2:]))),
    "columns": ((4, 6), lambda p, w: (p[:, 2:].copy_(w.narrow(1, 0, 4)), p[:, :2].copy_(w.narrow(1, 4, 2)))),
    "transposed": ((6, 4), lambda p, w: p.copy_(w.t())),
    "into the transposed": ((6, 4), lambda p, w: p.t().copy_(w)),
    "chunks": ((2, 4, 3), lambda p, w: [a.copy_(b) for a, b in zip(p.chunk(2, 1), w.unbind(0), strict=True)]),
    "reshaped": ((24,), lambda p, w: p.copy_(w.view(4, 6))),
    "interleaved": ((2, 2, 6), lambda p, w: p.view(2, 2, 6).copy_(w.transpose(0, 1))),
    "squeezed in place": ((1, 4, 6), lambda p, w: p.copy_(w.squeeze_(0))),
    "cleared first": ((3, 6), lambda p, w: (p.zero_(), p[:3].copy_(w))),
}
COMPUTATIONS = {
    "negated": ((4, 6), lambda p, w: p.copy_(-torch.exp(w.float()))),
    "cast": ((4, 6), lambda p, w: p.copy_(w.double())),
    "scaled in place": ((4, 6), lambda p, w: (p.copy_(w), p.mul_(2))),
    "scaled before": ((4, 6), lambda p, w: (w.mul_(2), p.copy_(w))),
    "scaled before, one of many": ((4, 6), lambda p, w: (torch._foreach_mul_([w], 2), p.copy_(w))),
    "one row cleared before": ((4, 6), lambda p, w: (w[0].zero_(), p.copy_(w))),
    "into itself": ((4, 6), lambda p, w: (torch.add(w, 1, out=w), p.copy_(w))),
    "one row for all": ((6,), lambda p, w: p.copy_(w)),
    "expanded": ((4, 1), lambda p, w: p.copy_(w.expand(4, 6))),
    "made contiguous": ((6, 4), lambda p, w: p.copy_(w.t().contiguous())),
    "joined": ((2, 6), lambda p, w: p.copy_(torch.cat([w, w.flip(0)]))),
    "scattered": ((4, 6), lambda p, w: p.__setitem__(torch.tensor([3, 1, 0, 2], device=p.device), w)),
    "into out": ((4, 6), lambda p, w: torch.add(w, 1, out=p)),
    "through a buffer": ((4, 6), through_a_buffer),
}


@pytest.mark.parametrize("post_process", ["none", "repacks"])
@pytest.mark.parametrize("kind", [*COPIES, *COMPUTATIONS])
def test_whatever_a_loader_does_arrives(start: Start, kind: str, post_process: str):
    shape, write = (COPIES | COMPUTATIONS)[kind]
    make = functools.partial(OneParameter, write)
    process = {"none": lambda module: None, "repacks": transpose}[post_process]
    a, b = torch.randn(shape), torch.randn(shape)
    host = ModuleHost(make, {"weight": a}, process)
    engine = start(host)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        report = sync.push(trainer_model({"weight": b}))
    road = "loader" if kind in COMPUTATIONS else {"none": "in place", "repacks": "reload"}[post_process]
    assert [name for name, count in report.roads.items() if count] == [road]
    assert torch.equal(host.live.weight, ModuleHost(make, {"weight": b}, process).live.weight)


class ChangesWhatItIsGiven(nn.Module):
    """Two modules, both loaded from one tensor, which is scaled in place on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            tensor.mul_(2)
            self.one.weight.data.copy_(tensor)
            self.other.weight.data.copy_(tensor)


def test_a_loader_that_changes_what_it_is_given_does_so_once(start: Start):
    b = torch.randn(4, 6)
    host = ModuleHost(ChangesWhatItIsGiven, {"weight": torch.randn(4, 6)})
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model({"weight": b}))
    assert torch.equal(host.live.one.weight, 2 * b)
    assert torch.equal(host.live.other.weight, 2 * b)


class MakesItsBias(OneParameter):
    """Its loader makes a parameter anew each time, as vLLM's transformers backend does with the bias of a head."""

    def __init__(self) -> None:
        super().__init__(lambda param, tensor: param.copy_(tensor))
        self.register_parameter("bias", None)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "bias":
                with torch.device("cpu"):
                    self.bias = nn.Parameter(torch.empty(6))
                self.bias.data[:4].copy_(tensor)
                self.bias.data[4:].fill_(0)
            else:
                super().load_weights([(name, tensor)])


@pytest.mark.parametrize("post_process", ["none", "repacks"])
def test_a_parameter_that_the_loader_makes_is_loaded_too(start: Start, post_process: str):
    process = {"none": lambda module: None, "repacks": transpose}[post_process]
    a, b = ({"weight": torch.randn(4, 6), "bias": torch.randn(4)} for _ in "ab")
    host = ModuleHost(MakesItsBias, a, process)
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S) as sync:
        for tensors in (b, a, b):
            sync.push(trainer_model(tensors))
            expected = ModuleHost(MakesItsBias, tensors, process).live.state_dict()
            for name, tensor in host.live.state_dict().items():
                assert torch.equal(tensor, expected[name]), name


def test_a_parameter_that_was_never_made_is_refused(start: Start):
    weight = torch.randn(4, 6)
    host = ModuleHost(MakesItsBias, {"weight": weight})
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S) as sync:
        for _ in range(2):  # the second time its parameter is there in the copy that the engine never loaded
            with pytest.raises(UnsupportedError, match="the running model has no bias"):
                sync.push(trainer_model({"weight": weight + 1, "bias": torch.randn(4)}))
        assert torch.equal(host.live.weight, weight)
        sync.push(trainer_model({"weight": weight + 2}))  # as after TensorPolicy(exclude=["bias"])
    assert torch.equal(host.live.weight, weight + 2)


class Picky(nn.Module):
    """Says no in all the ways that loaders have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "rotary.inv_freq":
                continue
            if name == "lora.weight":
                raise ValueError("There is no module or parameter named 'lora' in Picky")
            if name == "wrong.kind":
                assert tensor.dim() == 2
            if name == "looked.at":
                tensor.sum().item()
            dict(self.named_parameters())[name].data.copy_(tensor)


def test_all_that_is_wrong_with_the_names_is_found_in_one_trace():
    row = torch.zeros(3)
    names = ["lora.weight", "wrong.kind", "weight", "rotary.inv_freq", "looked.at", "typo"]
    trace = trace_of(Picky, dict.fromkeys(names, row))
    assert trace.unknown == ["lora.weight", "typo"]
    assert list(trace.refused) == ["wrong.kind", "looked.at"]
    assert trace.refused["wrong.kind"].startswith("shape (3,): ")
    assert [copy.name for copy in trace.copies] == ["weight"]


def test_a_loader_that_fails_on_its_own_account_is_not_blamed_on_a_tensor():
    class Broken(nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise RuntimeError("no such backend")

    with pytest.raises(RuntimeError, match="no such backend"):
        trace_of(Broken, {"weight": torch.zeros(3)})


def test_what_nothing_fills_and_what_is_filled_twice():
    tensors = checkpoint(1)
    del tensors["layers.0.attn.k.weight"]
    model = on_meta(EngineModel)
    trace = trace_loader(model, model.load_weights, manifest_of(tensors))
    missing, doubled = uncovered(model, trace)
    assert missing == {"layers.0.attn.weight": [Box((HEADS, 0), (HEADS, WIDTH))]}
    assert doubled == {}

    overlapping = on_meta(lambda: OneParameter(lambda p, w: (p[:3].copy_(w), p[1:].copy_(w))))
    trace = trace_loader(overlapping, overlapping.load_weights, manifest_of({"w": torch.zeros(3, 6)}))
    assert uncovered(overlapping, trace) == ({}, {"weight": [Box((1, 0), (2, 6))]})

    # A constant counts where nothing is copied.
    for first, missing in [(0, {}), (1, {"weight": [Box((0, 0), (2, 6))]})]:
        cleared = on_meta(lambda first=first: OneParameter(lambda p, w: (p[first:].zero_(), p[2:].copy_(w))))
        trace = trace_loader(cleared, cleared.load_weights, manifest_of({"w": torch.zeros(2, 6)}))
        assert uncovered(cleared, trace) == (missing, {})


# ---------------------------------------------------------------------------------------------------------------
# Roads


def transpose(module: nn.Module) -> None:
    if isinstance(module, (OneParameter, Attention)):
        module.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)


def scale_beside(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module.scale = module.weight.data.abs().amax(1)
        module.weight.data.div_(module.scale[:, None])


def hide_in_closure(module: nn.Module) -> None:
    if isinstance(module, Attention):
        packed = module.weight.data.clone()
        module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        module.forward = lambda x: x @ packed.t() + module.bias


def remove_and_keep_in_object(module: nn.Module) -> None:
    class Kernel:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight.clone()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    if isinstance(module, Attention):
        module.kernel = Kernel(module.weight.data)
        del module.weight
        module.forward = lambda x: module.kernel(x) + module.bias


def keep_sum(module: nn.Module) -> None:
    """A number that was made from the weights, which only a plain float holds."""
    if isinstance(module, Attention):
        module.register_buffer("total", module.weight.data.sum())


def name_it(module: nn.Module) -> None:
    """Sets nothing that depends on the weights."""
    if isinstance(module, Attention):
        module.kernel_name, module.sizes = "plain", (module.weight.shape, torch.float32)
        module.run = functools.partial(torch.nn.functional.linear, weight=module.weight, bias=module.bias)


REPACKS = [transpose, scale_beside, hide_in_closure, remove_and_keep_in_object, keep_sum]


def road_of_attention(process: Callable[[nn.Module], None]) -> bool:
    """Whether the first attention is loaded in place."""
    host = ModuleHost(EngineModel, checkpoint(1), process)
    before = [(name, list(vars(module))) for name, module in host.pristine().named_modules()]
    found = units(host.live, host.pristine())
    choose_roads(found, host.post_process, host.parts, host.device, None, 0)
    assert all(param.is_meta for param in host.pristine().parameters())
    assert [(name, list(vars(module))) for name, module in host.pristine().named_modules()] == before
    roads = {unit.names[0]: unit.in_place for unit in found}
    assert all(in_place for name, in_place in roads.items() if not name.endswith("attn"))
    return roads["layers.0.attn"]


@pytest.mark.parametrize("process", REPACKS)
def test_what_post_processing_changes_is_reloaded(process: Callable[[nn.Module], None]):
    assert not road_of_attention(process)


@pytest.mark.parametrize("process", [lambda module: None, name_it])
def test_what_post_processing_leaves_alone_is_loaded_in_place(process: Callable[[nn.Module], None]):
    assert road_of_attention(process)


def test_what_post_processing_changes_cannot_be_shared():
    receiver = Receiver(ModuleHost(EngineModel, checkpoint(1), transpose))
    receiver.plan(Manifest(tuple(TensorMeta(n, tuple(t.shape), "float32") for n, t in checkpoint(1).items())))
    with pytest.raises(UnsupportedError, match=r"4 modules keep .* such as layers\.0\.attn.*weightsync_plain"):
        receiver.share()


def test_tied_modules_are_one_unit():
    host = ModuleHost(EngineModel, checkpoint(1))
    found = units(host.live, host.pristine())
    assert found[0].names == ["embed", "head"]
    assert found[0].params == ["embed.weight"]
    assert sorted(name for unit in found for name in unit.params) == sorted(
        name for name, _ in host.pristine().named_parameters()
    )


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """What the engine computes, and every tensor that it keeps in the open."""
    x = torch.linspace(-1, 1, WIDTH)
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    computed = []
    for module in attention:
        if "forward" in vars(module):
            computed.append(module(x))
    return [*computed, *model.state_dict().values(), *(m.scale for m in attention if hasattr(m, "scale"))]


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("options", [{"max_bytes": 1 << 20}, {"bucketer": "parameter"}, {"max_bytes": 1}])
@pytest.mark.parametrize("process", [lambda module: None, *REPACKS])
def test_pushed_equals_cold(start: Start, process: Any, options: dict[str, Any], transport: str):
    a, b = checkpoint(1), checkpoint(2)
    hosts = [ModuleHost(functools.partial(EngineModel, rank, 2), a, process, rank, 2) for rank in (0, 1)]
    engine = start(*hosts)
    places = [[tensor.data_ptr() for tensor in outputs(host.live)] for host in hosts]
    model = trainer_model(b)
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S, **options) as sync:
        for tensors in (b, a, a, b):
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(tensors[name])
            report = sync.push(model)
            assert transport == "ipc" or "bucketer" not in options or report.buckets == len(tensors)
            for rank, host in enumerate(hosts):
                expected = cold(tensors, process, rank=rank, tp=2)
                for one, other in zip(outputs(host.live), outputs(expected), strict=True):
                    assert torch.equal(one, other)
    assert [host.refreshed for host in hosts] == [4, 4]
    if process is not hide_in_closure and process is not remove_and_keep_in_object:
        assert places == [[tensor.data_ptr() for tensor in outputs(host.live)] for host in hosts]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.empty(4))


class CountingModel(EngineModel):
    """Its loader copies all that comes as it is, and makes one parameter out of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()
        for layer in self.layers:
            del layer.decay

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        numbers = self.counting.numbers.data
        numbers.copy_(torch.arange(4.0, device=numbers.device))


@pytest.mark.parametrize("options", [{}, {"policy": TensorPolicy(frozen=("embed*",))}])
def test_a_parameter_that_is_made_of_no_tensor_is_made_in_every_push(start: Start, options: dict[str, Any]):
    tensors = [{n: t for n, t in checkpoint(seed).items() if "decay" not in n} for seed in (1, 2)]
    host = ModuleHost(CountingModel, tensors[0])
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S, **options) as sync:
        model = trainer_model(tensors[1])
        for _ in range(3):
            with torch.no_grad():
                host.live.counting.numbers.zero_()
            assert sync.push(model).roads["loader"] == 1
            assert host.live.counting.numbers.tolist() == [0, 1, 2, 3]


def test_constants_of_the_loader_reach_an_engine_that_started_with_dummy_weights(start: Start):
    host = ModuleHost(EngineModel, checkpoint(1))
    with torch.no_grad():
        for param in host.live.parameters():
            param.fill_(7)  # the padding of the embedding too
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
    expected = cold(checkpoint(2)).state_dict()
    for name, tensor in host.live.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_road_through_the_loader_computes_what_a_cold_start_does_for_tied_and_repacked_modules(start: Start):
    class Scaled(EngineModel):
        """Every parameter is multiplied on the way in, the tied embedding too."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, w if name.endswith("seen") else w.float() * 3) for name, w in weights)

    a, b = checkpoint(1), checkpoint(2)
    host = ModuleHost(Scaled, a, transpose)
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S, bucketer="parameter") as sync:
        report = sync.push(trainer_model(b))
    assert report.roads == {"in place": 0, "straight": 0, "reload": 0, "loader": 7}
    expected = ModuleHost(Scaled, b, transpose).live
    for name, tensor in host.live.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


# ---------------------------------------------------------------------------------------------------------------
# What is refused


def push_must_fail(
    start: Start, kind: type[WeightSyncError], host: ModuleHost, tensors: dict[str, torch.Tensor]
) -> Any:
    engine = start(host)
    before = {name: tensor.clone() for name, tensor in host.live.state_dict().items()}
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync, pytest.raises(kind) as raised:
        sync.push(trainer_model(tensors))
    for name, tensor in host.live.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert engine.log == []  # not even paused
    return raised.value


class Aliased(EngineModel):
    """Knows a second name for the biases of q."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name.replace(".q.b_", ".q.bias"), tensor) for name, tensor in weights)


def test_missing_unexpected_misshapen_and_doubled_tensors_are_one_error(start: Start):
    tensors = checkpoint(1)
    host = ModuleHost(Aliased, tensors)
    del tensors["layers.1.attn.k.weight"]
    del tensors["layers.0.norm.weight"]
    tensors["layers.0.attn.q.b_"] = tensors["layers.0.attn.q.bias"]
    tensors["embed.weight"] = torch.zeros(4, WIDTH)
    tensors["vision.weight"] = torch.zeros(3)
    error = push_must_fail(start, ManifestError, host, tensors)
    assert error.missing == ["layers.0.norm.weight", "layers.1.attn.k.weight"]
    assert error.unexpected == ["vision.weight"]
    assert sorted(error.mismatched) == ["embed.weight", "layers.0.attn.q.b_", "layers.0.attn.q.bias"]
    assert "expected 5 rows, got 4" in error.mismatched["embed.weight"]
    assert "twice" in error.mismatched["layers.0.attn.q.bias"]
    for name in [*error.missing, *error.unexpected, *error.mismatched]:
        assert name in str(error)


def test_a_tensor_that_is_larger_than_its_place_is_refused(start: Start):
    tensors = checkpoint(1)
    host = ModuleHost(functools.partial(EngineModel, 0, 2), tensors, world=1)
    tensors["layers.0.attn.q.weight"] = torch.zeros(HEADS + 4, WIDTH)
    error = push_must_fail(start, ManifestError, host, tensors)
    assert "layers.0.attn.q.weight" in error.mismatched


def test_a_kernel_object_on_a_gpu_is_refused_with_the_names_of_its_modules():
    host = ModuleHost(EngineModel, checkpoint(1), remove_and_keep_in_object)
    found = units(host.live, host.pristine())
    # On a CPU such a kernel is replaced; what a GPU's graphs have captured cannot be.
    choose_roads(found, host.post_process, host.parts, torch.device("cpu"), None, 0)
    assert not found[1].in_place


# ---------------------------------------------------------------------------------------------------------------
# Failures half-way


@pytest.fixture
def failing() -> Callable[[nn.Module], None]:
    """`transpose` that raises, half done, when `calls["left"]` has counted down to nothing."""
    calls = {"left": 0}

    def process(module: nn.Module) -> None:
        if isinstance(module, Attention):
            calls["left"] -= 1
            if calls["left"] == 0:
                module.weight = None
                raise RuntimeError("this kernel does not like these weights")
        transpose(module)

    process.calls = calls  # type: ignore[attr-defined]
    return process


def test_a_failed_post_process_leaves_every_module_old_or_new_and_the_next_push_heals(start: Start, failing: Any):
    a, b = checkpoint(1), checkpoint(2)
    host = ModuleHost(EngineModel, a, failing)
    engine = start(host)
    model = trainer_model(a)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        old = {name: tensor.clone() for name, tensor in host.live.state_dict().items()}
        places = {name: tensor.data_ptr() for name, tensor in host.live.state_dict().items()}
        new = cold(b, transpose).state_dict()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(b[name])

        failing.calls["left"] = 2
        with pytest.raises(WeightSyncError, match="this kernel does not like these weights") as raised:
            sync.push(model)
        assert "worker tp=0" in raised.value.who
        receiver = engine.conversations[0].receiver
        assert (receiver.state, receiver.version) == ("POISONED", 1)
        assert engine.version().startswith("POISONED")
        assert engine.log.count("pause keep") == 2
        assert engine.log.count("resume") == 1  # it stays paused
        live = host.live.state_dict()
        assert {name: tensor.data_ptr() for name, tensor in live.items()} == places
        assert torch.equal(live["layers.0.attn.weight"], new["layers.0.attn.weight"])
        assert torch.equal(live["layers.1.attn.weight"], old["layers.1.attn.weight"])

        failing.calls["left"] = 0
        assert sync.push(model).version == 2
        assert (receiver.state, receiver.version, engine.version()) == ("CLEAN", 2, "2")
        assert engine.log.count("resume") == 2
        for name, tensor in host.live.state_dict().items():
            assert torch.equal(tensor, new[name]), name


def test_a_computed_buffer_is_loaded_or_refused_before_anything_is_written(start: Start):
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.register_buffer("correction", torch.zeros(3))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            tensors = dict(self.named_parameters()) | dict(self.named_buffers())
            for name, tensor in weights:
                tensors[name].data.copy_(tensor.double() if name == "correction" else tensor)

    a = {"weight": torch.zeros(3), "correction": torch.zeros(3)}
    b = {"weight": torch.ones(3), "correction": torch.ones(3)}
    host = ModuleHost(Biased, a)
    error = push_must_fail(start, UnsupportedError, host, b)
    assert "correction" in str(error)


def test_versions_only_grow(start: Start):
    host = ModuleHost(EngineModel, checkpoint(1))
    receiver = Receiver(host)
    assert (receiver.version, receiver.state) == (0, "CLEAN")
    with WeightSync("fsdp", "ipc", start(host), timeout_s=TIMEOUT_S) as sync:
        model = trainer_model(checkpoint(2))
        assert sync.push(model, version=7).version == 7
        with pytest.raises(WeightSyncError, match="versions only grow"):
            sync.push(model, version=7)
        assert sync.push(model).version == 8


# ---------------------------------------------------------------------------------------------------------------
# Digests


def connected_to(
    world: int, rank: int, gpu_uuid: str, others: Sequence[Sequence[int]] = ()
) -> tuple[Receiver, IpcTransport, int]:
    """A worker's receiver, and the trainer's end with the digest of its third sample; the bytes are said to lie on that
    GPU. `others` are spans besides."""
    host = ModuleHost(
        functools.partial(OneParameter, torch.Tensor.copy_), {"weight": torch.zeros(4, 6)}, rank=rank, world=world
    )
    receiver, transport = Receiver(host), IpcTransport("ipc")
    tensor = torch.randn(4, 6)
    manifest = manifest_of({"weight": tensor})
    placement = Placement("weight", Box.full((4, 6)), 0, 1, 0, (6, 1), "float32")
    receiver.plan(manifest)
    shipment = Shipment(manifest, (("weight",),), (placement,), ({"weight": (placement.box,)},), "127.0.0.1")
    offer = transport.prepare(shipment, {placement: Region(tensor)}, RankGroup(None, TIMEOUT_S))
    storages = [[*row[:3], {**row[3], "gpu_uuid": gpu_uuid}] for row in transport.storages(0)]
    spans = [*transport.spans(), *others]
    deadline = Deadline(TIMEOUT_S)
    try:
        receiver.connect("ipc", storages, offer.placements[0], offer.buckets, 0, spans, {}, time.sleep, deadline)
    except ProtocolError:
        transport.abort()
        raise
    (value,) = transport.stage(0, 3, time.sleep, deadline)
    return receiver, transport, value


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_take_samples_of_other_gpus_in_turn(rank: int):
    receiver, transport, right = connected_to(2, rank, "GPU-elsewhere")
    wrong = struct.pack("<Q", right ^ 1)
    checked = []
    for version in (1, 15, 16, 31, 32):  # the sample is the third at each of them
        try:
            receiver.load(version, 0, 3, wrong, time.sleep, Deadline(TIMEOUT_S))
            checked.append(False)
        except DigestError:
            checked.append(True)
    turns = [(3 + version // 16) % 2 == rank for version in (1, 15, 16, 31, 32)]
    assert checked == turns
    transport.abort()


def test_all_bytes_and_what_lies_on_the_own_gpu_are_compared_by_every_worker():
    for world, gpu_uuid, part in ((4, "", 3), (4, "GPU-elsewhere", WHOLE)):
        for rank in range(world):
            receiver, transport, right = connected_to(world, rank, gpu_uuid)
            with pytest.raises(DigestError):
                receiver.load(1, 0, part, struct.pack("<Q", right ^ 1), time.sleep, Deadline(TIMEOUT_S))
            assert receiver.state == CLEAN
            transport.abort()


def test_digests_of_what_is_not_read_are_left_to_others():
    receiver, transport, right = connected_to(1, 0, "", others=[[0, 7, 1, 0, 96]])  # another rank's
    receiver.load(1, 0, 3, struct.pack("<2Q", right, right ^ 1), time.sleep, Deadline(TIMEOUT_S))
    receiver.commit(1)
    transport.abort()


def test_digests_that_do_not_tell_of_every_span_are_refused():
    receiver, transport, right = connected_to(1, 0, "")
    for digests in (b"", struct.pack("<2Q", right, right)):
        with pytest.raises(ProtocolError, match=f"{len(digests)} bytes of digests for 1 spans"):
            receiver.load(1, 0, 3, digests, time.sleep, Deadline(TIMEOUT_S))
    assert receiver.state == CLEAN
    transport.abort()
    with pytest.raises(ProtocolError, match="digests were announced of bucket 1, of 1"):
        connected_to(1, 0, "", others=[[1, 0, 1, 0, 96]])
