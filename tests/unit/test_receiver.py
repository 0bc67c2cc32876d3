"""The receiver without vLLM or a transport: what it learns from a loader, how each module loads, and what arrives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import HEADS, WIDTH, Attention, ModuleHost, TinyEngineModel, checkpoint, cold
from memory_trainer import MemoryTrainer, manifest_of
from msgspec.structs import replace
from torch import nn

from weightsync.errors import (
    ConfigError,
    DigestError,
    ManifestError,
    PeerError,
    PlacementError,
    ProtocolError,
    SyncTimeoutError,
    UnsupportedError,
)
from weightsync.kernels.copies import BatchedCopy
from weightsync.net.runtime import Deadline
from weightsync.net.wire import CLEAN, POISONED, Go
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.planning.wire_types import ChunkLayout
from weightsync.worker import loader
from weightsync.worker import trace as trace_module
from weightsync.worker.engine_model import WorkerIdentity
from weightsync.worker.load_planner import IN_PLACE, NATIVE_LOADER, RELOAD
from weightsync.worker.loader import Receiver, await_stream
from weightsync.worker.module_groups import find_groups
from weightsync.worker.probe_load_paths import probe_groups
from weightsync.worker.trace import Trace, trace_loader, uncovered

ONE_ROW = WIDTH * 4
"""Bytes: with chunks of this size, every matrix is cut into its rows."""


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
    trace = trace_of(functools.partial(TinyEngineModel, rank, tp), tensors)
    assert trace.computed == {f"layers.{n}.decay.rate": [f"layers.{n}.decay.log_rate"] for n in (0, 1)}
    assert (trace.refused, trace.unknown) == ({}, [])

    replayed = TinyEngineModel(rank, tp)
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
    "scaled in place, one of many": ((4, 6), lambda p, w: (p.copy_(w), torch._foreach_mul_([p], 2))),
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


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("post_process", ["none", "repacks"])
@pytest.mark.parametrize("kind", [*COPIES, *COMPUTATIONS])
def test_whatever_a_loader_does_arrives(kind: str, post_process: str, cut: bool):
    shape, write = (COPIES | COMPUTATIONS)[kind]
    make = functools.partial(OneParameter, write)
    process = {"none": lambda module: None, "repacks": repack}[post_process]
    a, b = torch.randn(shape), torch.randn(shape)
    host = ModuleHost(make, {"weight": a}, process)
    trainer = MemoryTrainer(host, tensors={"weight": b}, max_bytes=8 if cut else None)
    trainer.push()
    path = NATIVE_LOADER if kind in COMPUTATIONS else {"none": IN_PLACE, "repacks": RELOAD}[post_process]
    assert trainer.load_paths == {path: 1}
    assert (len(trainer.chunks) > 1) == cut
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


@pytest.mark.parametrize("in_place", [(), ("weight",)])
def test_a_loader_that_changes_what_it_is_given_does_so_once(in_place: tuple[str, ...]):
    b = torch.randn(4, 6)
    sent = b.clone()
    host = ModuleHost(ChangesWhatItIsGiven, {"weight": torch.randn(4, 6)})
    MemoryTrainer(host, tensors={"weight": b}, in_place=in_place, max_bytes=ONE_ROW).push()
    assert torch.equal(b, sent)
    assert torch.equal(host.live.one.weight, 2 * b)
    assert torch.equal(host.live.other.weight, 2 * b)


class KeepsAView(nn.Module):
    """As a Mamba 2: the mixer has a view of the weights of its convolution, which a kernel packs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = OneParameter(lambda param, tensor: param.copy_(tensor))
        self.register_buffer("view", self.conv.weight.data.view(4, 2, 3), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.conv.load_weights(weights)


def pack(module: nn.Module) -> None:
    if isinstance(module, OneParameter):
        module.weight.data = module.weight.data.flip(0).clone()


@pytest.mark.parametrize("post_process", [lambda module: None, pack], ids=["none", "packs"])
def test_a_view_of_what_a_kernel_packs_is_loaded_too(post_process: Callable[[nn.Module], None]):
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    host = ModuleHost(KeepsAView, {"conv.weight": a}, post_process)
    trainer = MemoryTrainer(host, tensors={"conv.weight": a})
    for weight in (b, a, b):
        trainer.tensors = {"conv.weight": weight}
        trainer.push()
        assert torch.equal(host.live.view, weight.view(4, 2, 3))
        expected = ModuleHost(KeepsAView, {"conv.weight": weight}, post_process).live.conv.weight
        assert torch.equal(host.live.conv.weight, expected)


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
def test_a_parameter_that_the_loader_makes_is_loaded_too(post_process: str):
    process = {"none": lambda module: None, "repacks": repack}[post_process]
    a, b = ({"weight": torch.randn(4, 6), "bias": torch.randn(4)} for _ in "ab")
    host = ModuleHost(MakesItsBias, a, process)
    trainer = MemoryTrainer(host, tensors=b)
    for tensors in (b, a, b):
        trainer.tensors = tensors
        trainer.push()
        assert_same(host.live, ModuleHost(MakesItsBias, tensors, process).live)


class KeepsItsBias(MakesItsBias):
    """Its loader makes a parameter of the tensor itself, in the dtype of the weight, as vLLM's classifiers do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "bias":
                self.bias = nn.Parameter(tensor.to(self.weight.device).to(self.weight.dtype))
            else:
                OneParameter.load_weights(self, [(name, tensor)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_the_loader_makes_of_the_tensor_itself_is_loaded_too(dtype: torch.dtype):
    a, b = ({"weight": torch.randn(4, 6), "bias": torch.randn(4).to(dtype)} for _ in "ab")
    host = ModuleHost(KeepsItsBias, a)
    trainer = MemoryTrainer(host, tensors=b)
    for tensors in (b, a, b):
        trainer.tensors = tensors
        trainer.push()
        assert_same(host.live, ModuleHost(KeepsItsBias, tensors).live)


class ReadsBack(nn.Module):
    """Its loader computes a parameter from one that it has loaded before, as vLLM does for rerankers."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.score = nn.Linear(3, 8, bias=False), nn.Linear(3, 1, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for _, tensor in weights:
                self.head.weight.copy_(tensor)
            rows = self.head.weight.data
            self.score.weight.copy_(rows[[5]].float() - rows[[3]].float())


class MakesAHead(nn.Module):
    """Its loader makes what it reads, and removes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.head = nn.Linear(3, 8, bias=False)
        ReadsBack.load_weights(self, weights)  # type: ignore[arg-type]
        del self.head


@pytest.mark.parametrize("make", [ReadsBack, MakesAHead])
def test_a_parameter_computed_from_a_loaded_one_is_computed_from_its_tensors(make: type[nn.Module]):
    first, second = ({"head.weight": torch.randn(8, 3)} for _ in range(2))
    host = ModuleHost(make, first)
    trainer = MemoryTrainer(host, tensors=second)
    for tensors in (second, first, second):
        trainer.tensors = tensors
        trainer.push()
        assert_same(host.live, ModuleHost(make, tensors).live)


def test_a_parameter_computed_from_one_without_tensors_is_refused():
    """It would read memory of the never loaded copy, half-way through a push."""
    model = on_meta(ReadsBack)
    with pytest.raises(UnsupportedError, match=r"from head\.weight, for which the trainer has no tensor"):
        trace_loader(model, model.load_weights, manifest_of({}))


class InterleavesRows(nn.Module):
    """Its loader writes every second row of a weight."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10_000, columns))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weight.data["ab".index(name) :: 2].copy_(tensor)


def test_thousands_of_blocks_of_a_parameter_are_counted_only_if_they_are_small():
    for columns in (2, 14):
        model = on_meta(lambda columns=columns: InterleavesRows(columns))
        tensors = {name: torch.empty(5_000, columns, device="meta") for name in "ab"}
        trace = trace_loader(model, model.load_weights, manifest_of(tensors))
        if columns == 2:
            assert uncovered(model, trace) == ({}, {})
        else:
            with pytest.raises(UnsupportedError, match=r"70000 elements of a .* \(10000, 14\) in over 4096 blocks"):
                uncovered(model, trace)


def test_a_parameter_that_was_never_made_is_refused():
    weight = torch.randn(4, 6)
    host = ModuleHost(MakesItsBias, {"weight": weight})
    receiver = Receiver(host)
    for _ in range(2):  # the second time its parameter is there in the copy that the engine never loaded
        with pytest.raises(UnsupportedError, match="the running model lacks bias"):
            receiver.make_plan(manifest_of({"weight": weight, "bias": torch.randn(4)}))
    MemoryTrainer(receivers=[receiver], tensors={"weight": weight + 2}).push()  # as without "bias" in the selection
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
            if name == "wrong.shape":
                tensor.view(2, 2)
            dict(self.named_parameters())[name].data.copy_(tensor)


def test_all_that_is_wrong_with_the_names_is_found_in_one_trace():
    row = torch.zeros(3)
    names = ["lora.weight", "wrong.kind", "weight", "rotary.inv_freq", "wrong.shape", "typo"]
    trace = trace_of(Picky, dict.fromkeys(names, row))
    assert trace.unknown == ["lora.weight", "typo"]
    assert list(trace.refused) == ["wrong.kind", "wrong.shape"]
    assert trace.refused["wrong.kind"].startswith("shape (3,): ")
    assert [copy.name for copy in trace.copies] == ["weight"]


class Squeezes(Picky):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            assert tensor.shape == (1, 3)
            super().load_weights([(name, tensor.squeeze_(0))])


def test_a_trace_that_begins_anew_makes_again_only_what_was_read(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    offer = trace_module._offer
    monkeypatch.setattr(trace_module, "_offer", lambda meta: made.append(meta.name) or offer(meta))
    names = ["typo", "weight", "lora.weight", "rotary.inv_freq"]
    trace = trace_of(Squeezes, dict.fromkeys(names, torch.zeros(1, 3)))
    assert trace.unknown == ["typo", "lora.weight"]
    assert [copy.name for copy in trace.copies] == ["weight"]
    assert made == [*names, "weight"]


def test_a_loader_that_fails_on_its_own_account_is_not_blamed_on_a_tensor():
    class Broken(nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise RuntimeError("no such backend")

    with pytest.raises(
        UnsupportedError, match=r"Broken fails before it looks at a tensor in load_weights: .*no such b"
    ):
        trace_of(Broken, {"weight": torch.zeros(3)})


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.sum().item(),
        lambda w: bool(w[0] > 0),
        lambda w: w.tolist(),
        lambda w: w.cpu(),
        lambda w: w.numpy(),
        lambda w: torch.equal(w, w + 1),
    ],
)
def test_a_loader_that_reads_values_is_refused_with_the_tensor_and_the_operation(read: Callable[[torch.Tensor], Any]):
    model = on_meta(lambda: OneParameter(lambda param, weight: read(weight)))
    with pytest.raises(UnsupportedError, match="OneParameter reads the values of w in <lambda>: lambda w"):
        trace_loader(model, model.load_weights, manifest_of({"w": torch.zeros(3)}))


def test_what_nothing_fills_and_what_is_filled_twice():
    tensors = checkpoint(1)
    del tensors["layers.0.attn.k.weight"]
    model = on_meta(TinyEngineModel)
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
# Load paths


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def repack(module: nn.Module) -> None:
    """A rearrangement that has no placement."""
    if isinstance(module, (OneParameter, Attention)):
        module.weight = nn.Parameter(module.weight.data.t().flip(0).contiguous(), requires_grad=False)


def transpose(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)


def swap_halves(module: nn.Module) -> None:
    """In the parameter itself, as a kernel may that wants gate after up."""
    if isinstance(module, Attention):
        module.weight.data.copy_(torch.cat([*reversed(module.weight.data.chunk(2))]))


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


def register_again(module: nn.Module) -> None:
    """As vLLM's `replace_parameter` does, also where a kernel's format is the checkpoint's."""
    if isinstance(module, Attention):
        module.weight = nn.Parameter(module.weight.data, requires_grad=False)
        module.run = functools.partial(torch.nn.functional.linear, weight=module.weight, bias=module.bias)


def register_a_copy(module: nn.Module) -> None:
    if isinstance(module, Attention):
        module.weight = nn.Parameter(module.weight.data.clone(), requires_grad=False)


def register_a_copy_and_keep_the_first(module: nn.Module) -> None:
    """The kernel reads memory into which nobody would copy."""
    if isinstance(module, Attention):
        module.run = functools.partial(torch.nn.functional.linear, weight=module.weight, bias=module.bias)
        register_a_copy(module)


REPACKS = [
    repack,
    scale_beside,
    hide_in_closure,
    remove_and_keep_in_object,
    keep_sum,
    register_a_copy_and_keep_the_first,
]


def attention_is_in_place(process: Callable[[nn.Module], None]) -> bool:
    """Whether the first attention is loaded in place."""
    host = ModuleHost(TinyEngineModel, checkpoint(1), process)
    before = [(name, list(vars(module))) for name, module in host.pristine().named_modules()]
    found = find_groups(host.live, host.pristine())
    probe_groups(found, host)
    assert all(param.is_meta for param in host.pristine().parameters())
    assert [(name, list(vars(module))) for name, module in host.pristine().named_modules()] == before
    in_place = {group.names[0]: group.in_place for group in found}
    assert all(own for name, own in in_place.items() if not name.endswith("attn"))
    return in_place["layers.0.attn"]


@pytest.mark.parametrize("process", REPACKS)
def test_what_post_processing_changes_is_reloaded(process: Callable[[nn.Module], None]):
    assert not attention_is_in_place(process)


def make_strides(module: nn.Module) -> None:
    """A kernel's constants, which lie in the memory of the weights."""
    if isinstance(module, Attention):
        module.strides = torch.tensor([6.0, 1.0])


def test_what_sleep_discards_is_made_anew():
    a, b = checkpoint(1), checkpoint(2)
    assert attention_is_in_place(make_strides)
    host = ModuleHost(TinyEngineModel, a, make_strides)
    host.may_discard = True
    trainer = MemoryTrainer(host, tensors=b)
    trainer.push()
    strides = [module.strides for module in host.live.modules() if isinstance(module, Attention)]
    places = [each.data_ptr() for each in strides]
    for each in strides:
        each.zero_()  # the engine has slept
    trainer.push()
    assert all(each.tolist() == [6.0, 1.0] for each in strides)
    assert [each.data_ptr() for each in strides] == places
    assert_same(host.live, cold(b, make_strides))


UNTOUCHED = [lambda module: None, name_it, register_again, register_a_copy]


@pytest.mark.parametrize("process", [*UNTOUCHED, transpose, swap_halves])
def test_what_post_processing_leaves_or_only_moves_is_loaded_in_place(process: Callable[[nn.Module], None]):
    assert attention_is_in_place(process)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("process", [transpose, swap_halves])
def test_what_post_processing_moves_is_written_where_it_lies(process: Callable[[nn.Module], None], cut: bool):
    a, b = checkpoint(1), checkpoint(2)
    host = ModuleHost(TinyEngineModel, a, process)
    trainer = MemoryTrainer(host, tensors=b, max_bytes=ONE_ROW if cut else None)
    for tensors in (b, a, b):
        trainer.tensors = tensors
        trainer.push()
        assert RELOAD not in trainer.load_paths
        assert_same(host.live, cold(tensors, process))


def test_what_post_processing_changes_cannot_be_exported():
    receiver = Receiver(ModuleHost(TinyEngineModel, checkpoint(1), repack))
    receiver.make_plan(manifest_of(checkpoint(1)))
    with pytest.raises(UnsupportedError, match=r"4 modules keep .* such as layers\.0\.attn.*weightsync_plain"):
        receiver.export(0)


def test_exported_parameters_are_written_in_place_and_mixed_until_the_commit():
    tensors = {name: tensor for name, tensor in checkpoint(2).items() if "decay" not in name}
    host = ModuleHost(CopyingModel, {name: t for name, t in checkpoint(1).items() if "decay" not in name})
    receiver = Receiver(host)
    receiver.make_plan(manifest_of(tensors))
    storages, locations = receiver.export(0)
    assert receiver.state == CLEAN
    done = receiver.run(Go(1, None, -1, []), lambda seconds: None, None)
    assert (receiver.state, done.nbytes) == (POISONED, 0)
    of = dict(host.live.named_parameters()) | dict(host.live.named_buffers())
    written = {tensor.untyped_storage()._cdata: tensor for tensor in of.values()}
    assert len(storages) == len(written)
    copies = receiver._planner.traced.trace.copies
    by_number = list(dict.fromkeys(of[copy.param].untyped_storage()._cdata for copy in copies))
    for at in locations:
        source = tensors[at.name][tuple(slice(a, a + n) for a, n in zip(at.box.start, at.box.size, strict=True))]
        target = written[by_number[at.storage]].data
        torch.as_strided(target, at.box.size, at.stride, at.offset).copy_(source)
    receiver.commit(1)
    assert (receiver.state, receiver.version) == (CLEAN, 1)
    assert_same(host.live, ModuleHost(CopyingModel, tensors).live)


class CopyingModel(TinyEngineModel):
    """Its loader copies all that comes as it is."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            del layer.decay


def test_tied_modules_are_one_group():
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    found = find_groups(host.live, host.pristine())
    assert found[0].names == ["embed", "head"]
    assert found[0].params == ["embed.weight"]
    assert sorted(name for group in found for name in group.params) == sorted(
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


ATTENTION = [[f"layers.{n}.attn.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")] for n in (0, 1)]
CHUNKS = {
    "one chunk": {},
    "a chunk each": {"max_bytes": 1 << 9},
    "rows": {"max_bytes": ONE_ROW},
    "elements": {"max_bytes": 1},
    "in place": {"in_place": list(checkpoint(1))},
    "some in place": {"in_place": ["embed.weight", *ATTENTION[0]], "max_bytes": ONE_ROW},
    "rows, by modules": {
        "buckets": [*ATTENTION, [n for n in checkpoint(1) if ".attn." not in n]],
        "max_bytes": ONE_ROW,
    },
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("process", [lambda module: None, *REPACKS])
def test_pushed_equals_cold(process: Any, chunks: str):
    a, b = checkpoint(1), checkpoint(2)
    hosts = [ModuleHost(functools.partial(TinyEngineModel, rank, 2), a, process, rank, 2) for rank in (0, 1)]
    places = [[tensor.data_ptr() for tensor in outputs(host.live)] for host in hosts]
    trainer = MemoryTrainer(*hosts, tensors={name: t.clone() for name, t in b.items()}, **CHUNKS[chunks])
    for tensors in (b, a, a, b):
        for name, tensor in trainer.tensors.items():
            tensor.copy_(tensors[name])
        trainer.push()
        for rank, host in enumerate(hosts):
            expected = cold(tensors, process, rank=rank, tp=2)
            for one, other in zip(outputs(host.live), outputs(expected), strict=True):
                assert torch.equal(one, other)
    assert [host.refreshed for host in hosts] == [4, 4]
    if process is not hide_in_closure and process is not remove_and_keep_in_object:
        assert places == [[tensor.data_ptr() for tensor in outputs(host.live)] for host in hosts]


class ReleasingHost(ModuleHost):
    """A model whose attention's weight is released once a tensor was derived from it, as by MLA on CPUs with AMX."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(TinyEngineModel, weights)
        self.refresh_derived_state()

    def refresh_derived_state(self) -> bool:
        attention = [module for module in self.live.modules() if isinstance(module, Attention)]
        self.derived = [module.weight.t().contiguous() for module in attention]
        self.released = [weakref.ref(module.weight) for module in attention]
        for module in attention:
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return True


def test_a_weight_that_another_module_releases_is_loaded_for_that_module():
    a, b = checkpoint(1), checkpoint(2)
    host = ReleasingHost(a)
    trainer = MemoryTrainer(host, tensors={name: tensor.clone() for name, tensor in b.items()})
    for tensors in (b, a, a, b):
        for name, tensor in trainer.tensors.items():
            tensor.copy_(tensors[name])
        trainer.push()
        expected = ReleasingHost(tensors)
        assert all(map(torch.equal, host.derived, expected.derived))
        assert all(map(torch.equal, outputs(host.live), outputs(expected.live)))
        assert [each() for each in host.released] == [None, None], "no memory is kept"


def test_the_bytes_of_a_push_are_those_that_were_read():
    tensors = checkpoint(1)
    (done,) = MemoryTrainer(ModuleHost(TinyEngineModel, tensors, repack), tensors=tensors, max_bytes=ONE_ROW).push()
    assert done.nbytes == sum(tensor.nbytes for tensor in tensors.values())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.empty(4))


class CountingModel(TinyEngineModel):
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


@pytest.mark.parametrize("frozen", [(), ("embed.weight",)])
def test_a_parameter_that_is_made_of_no_tensor_is_made_in_every_push(frozen: tuple[str, ...]):
    tensors = [{n: t for n, t in checkpoint(seed).items() if "decay" not in n} for seed in (1, 2)]
    host = ModuleHost(CountingModel, tensors[0])
    trainer = MemoryTrainer(host, tensors=tensors[1], frozen=frozen, max_bytes=ONE_ROW)
    assert trainer.load_paths[NATIVE_LOADER] == 1
    for _ in range(3):
        with torch.no_grad():
            host.live.counting.numbers.zero_()
        trainer.push()
        assert host.live.counting.numbers.tolist() == [0, 1, 2, 3]


class ScalesOnce(TinyEngineModel):
    """As LongCat-Flash of vLLM 0.31: the loader notes that it has scaled."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        if not getattr(self, "is_scaled", False):
            self.embed.weight.data *= 2
            self.is_scaled = True


class DropsItsFactor(TinyEngineModel):
    """As MuseSpark of vLLM 0.33: the loader folds a factor into a weight, and drops the factor."""

    factor: float | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.factor = 2.0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        if self.factor is not None:
            self.embed.weight.data *= self.factor
        self.factor = None


class Sums(TinyEngineModel):
    """As DeepSeek-V4 of vLLM 0.28: the loader keeps a sum for the forward."""

    sums: torch.Tensor | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sums = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.sums = self.embed.weight.detach().sum(1)


@pytest.mark.parametrize(("kind", "what"), [(ScalesOnce, "is_scaled"), (DropsItsFactor, "factor"), (Sums, "sums")])
def test_a_loader_with_a_memory_of_its_own_is_refused_each_time(kind: type[TinyEngineModel], what: str):
    host = ModuleHost(kind, checkpoint(1))
    before = {name: tensor.clone() for name, tensor in host.live.state_dict().items()}
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=rf"loader sets {kind.__name__}\.{what}, apart from the parameters"):
            MemoryTrainer(host, tensors=checkpoint(2)).push()
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.live.state_dict().items())


class WithEmpty(nn.Module):
    """A parameter without elements, whose tensor never travels, decides with another one what a third becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.weight = nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.empty(4, 6))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        self.empty.data.copy_(given["empty"])
        self.weight.data.copy_(torch.cat([given["weight"], given["empty"]]))


def test_a_tensor_without_elements_counts_as_arrived():
    a, b = ({"weight": torch.randn(4, 6), "empty": torch.randn(0, 6)} for _ in "ab")
    host = ModuleHost(WithEmpty, a)
    trainer = MemoryTrainer(host, tensors=b, max_bytes=ONE_ROW)
    trainer.push()
    assert trainer.load_paths == {NATIVE_LOADER: 1}
    assert torch.equal(host.live.weight, b["weight"])


def test_constants_of_the_loader_reach_an_engine_that_started_with_dummy_weights():
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with torch.no_grad():
        for param in host.live.parameters():
            param.fill_(7)  # the padding of the embedding too
    MemoryTrainer(host, tensors=checkpoint(2)).push()
    assert_same(host.live, cold(checkpoint(2)))


@pytest.mark.parametrize("max_bytes", [None, ONE_ROW])
def test_the_native_loader_computes_tied_and_repacked_modules_as_a_cold_start(max_bytes: int | None):
    class Scaled(TinyEngineModel):
        """Every parameter is multiplied on the way in, the tied embedding too."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, w if name.endswith("seen") else w.float() * 3) for name, w in weights)

    a, b = checkpoint(1), checkpoint(2)
    host = ModuleHost(Scaled, a, repack)
    trainer = MemoryTrainer(host, tensors=b, max_bytes=max_bytes)
    trainer.push()
    assert trainer.load_paths == {NATIVE_LOADER: 7}
    assert_same(host.live, ModuleHost(Scaled, b, repack).live)


def test_a_tensor_that_the_native_loader_copies_travels_as_the_regions_read():
    class Mixed(nn.Module):
        """Half of `bias` is copied, all of `weight` goes into arithmetic."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(2, 3))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            given = dict(weights)
            self.weight.data.copy_(given["weight"] * 2)
            self.bias.data.copy_(given["bias"][2:])

    b = {"weight": torch.randn(4), "bias": torch.randn(4, 3)}
    host = ModuleHost(Mixed, {"weight": torch.randn(4), "bias": torch.randn(4, 3)})
    trainer = MemoryTrainer(host, tensors=b, max_bytes=12)
    assert trainer.plans[0].partial == {"bias": (Box((2, 0), (2, 3)),)}
    message = trainer.message
    chunks = [
        ChunkLayout(tuple(p for p in chunk.locations if not (p.name == "bias" and p.box.start[0] < 2)), chunk.runs)
        for chunk in message.chunks
    ]
    trainer.connect(replace(message, chunks=chunks))
    trainer.push()
    assert torch.equal(host.live.weight, b["weight"] * 2)
    assert torch.equal(host.live.bias, b["bias"][2:])


# ---------------------------------------------------------------------------------------------------------------
# What is refused


class Aliased(TinyEngineModel):
    """Knows a second name for the biases of q."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name.replace(".q.b_", ".q.bias"), tensor) for name, tensor in weights)


def test_missing_unexpected_misshapen_and_doubled_tensors_are_in_one_plan():
    tensors = checkpoint(1)
    host = ModuleHost(Aliased, tensors)
    before = host.live.state()
    del tensors["layers.1.attn.k.weight"]
    del tensors["layers.0.norm.weight"]
    tensors["layers.0.attn.q.b_"] = tensors["layers.0.attn.q.bias"]
    tensors["embed.weight"] = torch.zeros(4, WIDTH)
    tensors["vision.weight"] = torch.zeros(3)
    plan = Receiver(host).make_plan(manifest_of(tensors))
    assert sorted(plan.hints) == ["layers.0.norm.weight", "layers.1.attn.k.weight"]
    assert plan.missing == [
        "embed.weight",
        "layers.0.norm.weight",
        f"layers.1.attn.weight rows {HEADS}..{2 * HEADS} of {3 * HEADS}",
    ]
    assert tensors.keys() - plan.used.keys() - plan.refused.keys() == {"vision.weight"}
    assert sorted(plan.refused) == ["embed.weight", "layers.0.attn.q.b_", "layers.0.attn.q.bias"]
    assert "expected 5 rows, got 4" in plan.refused["embed.weight"]
    assert "twice" in plan.refused["layers.0.attn.q.bias"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.live.state_dict().items())


def test_a_plan_is_remembered_until_other_tensors_are_asked_for():
    receiver = Receiver(ModuleHost(TinyEngineModel, checkpoint(1)))
    plan = receiver.make_plan(manifest_of(checkpoint(1)))
    assert receiver.make_plan(manifest_of(checkpoint(2))) is plan
    other = checkpoint(1) | {"vision.weight": torch.zeros(3)}
    assert receiver.make_plan(manifest_of(other)) is not plan


def test_a_worker_says_which_regions_it_reads():
    tensors = checkpoint(1)
    host = ModuleHost(functools.partial(TinyEngineModel, 0, 2), tensors, world=1)
    tensors["layers.0.attn.q.weight"] = torch.zeros(HEADS + 4, WIDTH)
    partial = Receiver(host).make_plan(manifest_of(tensors)).partial
    assert partial["layers.0.attn.q.weight"] == partial["layers.0.attn.k.weight"] == (Box((0, 0), (HEADS // 2, WIDTH)),)
    assert "embed.weight" not in partial


def test_a_kernel_object_is_reloaded_on_a_cpu():
    host = ModuleHost(TinyEngineModel, checkpoint(1), remove_and_keep_in_object)
    found = find_groups(host.live, host.pristine())
    probe_groups(found, host)  # on a GPU it is refused: graphs have captured what the object holds
    assert not found[1].in_place


def test_a_computed_buffer_is_refused_before_anything_is_written():
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.register_buffer("correction", torch.zeros(3))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            tensors = dict(self.named_parameters()) | dict(self.named_buffers())
            for name, tensor in weights:
                tensors[name].data.copy_(tensor.double() if name == "correction" else tensor)

    host = ModuleHost(Biased, {"weight": torch.zeros(3), "correction": torch.zeros(3)})
    with pytest.raises(UnsupportedError, match=r"computes 1 buffers.*correction"):
        Receiver(host).make_plan(manifest_of({"weight": torch.ones(3), "correction": torch.ones(3)}))
    assert host.live.weight.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (TensorMeta("weight", (3,), "float99"), "dtype 'float99' is not covered"),
        (TensorMeta("weight", (2**40, 2**40), "float32"), "no address space has as many bytes"),
        (TensorMeta("weight", (0, 2**62, 2**62), "float32"), "no address space has as many bytes"),
    ],
)
def test_a_plan_of_what_torch_cannot_hold_is_refused(meta: TensorMeta, words: str):
    with pytest.raises((ConfigError, ManifestError), match=words):
        Receiver(ModuleHost(TinyEngineModel, checkpoint(1))).make_plan(Manifest((meta,)))


def drop_last(chunks: list[Any]) -> list[Any]:
    return chunks[:-1]


def repeat_first(chunks: list[Any]) -> list[Any]:
    return [*chunks, chunks[0]]


@pytest.mark.parametrize("process", [lambda module: None, *REPACKS])
@pytest.mark.parametrize(("change", "words"), [(drop_last, "is held by no rank"), (repeat_first, "is held twice")])
def test_chunks_that_do_not_bring_every_region_once_are_refused(process: Any, change: Any, words: str):
    host = ModuleHost(TinyEngineModel, checkpoint(1), process)
    before = host.live.state()
    trainer = MemoryTrainer(host, tensors=checkpoint(2), max_bytes=ONE_ROW)
    message = trainer.message
    with pytest.raises(PlacementError, match=words):
        trainer.connect(replace(message, chunks=change(message.chunks)))
    assert trainer.receivers[0].state == CLEAN
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.live.state_dict().items())
    with pytest.raises(ProtocolError, match="Go came before Connect"):
        trainer.run(1)


def test_a_step_before_its_turn_is_refused():
    trainer = MemoryTrainer(ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2))
    with pytest.raises(ProtocolError, match="Go came before Connect"):
        trainer.run(1)
    fresh = Receiver(ModuleHost(TinyEngineModel, checkpoint(1)))
    with pytest.raises(ProtocolError, match="ExportParameters came before PlanRequest"):
        fresh.export(0)
    with pytest.raises(ProtocolError, match="Connect came before PlanRequest"):
        fresh.connect(trainer.message, lambda seconds: None, None)
    trainer.connect()
    with pytest.raises(ProtocolError, match="Commit of version 1 before all of its chunks were loaded"):
        trainer.receivers[0].commit(1)
    trainer.run(1)
    with pytest.raises(ProtocolError, match="Commit of version 2 before"):
        trainer.receivers[0].commit(2)
    assert trainer.receivers[0].state == POISONED


# ---------------------------------------------------------------------------------------------------------------
# Frozen chunks


def test_frozen_chunks_are_loaded_in_the_first_push_of_each_connection():
    a, b = checkpoint(1), checkpoint(2)
    host = ModuleHost(TinyEngineModel, a, repack)
    frozen = [n for n in a if n.startswith("layers.1.attn")]
    trainer = MemoryTrainer(host, tensors=b, max_bytes=ONE_ROW, frozen=frozen)
    counts = []
    for _ in range(3):
        trainer.push()
        counts.append(len(trainer.written))
    late = sum(chunk.frozen for chunk in trainer.chunks)
    assert late > 2
    assert counts == [len(trainer.chunks), len(trainer.chunks) - late, len(trainer.chunks) - late]
    trainer.connect()
    trainer.push()
    assert len(trainer.written) == len(trainer.chunks)
    assert_same(host.live, cold(b, repack))


def test_a_push_that_was_not_committed_makes_the_next_one_whole():
    trainer = MemoryTrainer(
        ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2), frozen=["embed.weight"], max_bytes=ONE_ROW
    )
    trainer.connect()
    for version in (1, 2):
        trainer.run(version)
        assert len(trainer.written) == len(trainer.chunks)
    trainer.receivers[0].commit(2)
    trainer.run(3)
    assert len(trainer.written) < len(trainer.chunks)
    trainer.run(4)
    assert len(trainer.written) == len(trainer.chunks)


@pytest.mark.parametrize("process", REPACKS)
def test_frozen_chunks_must_not_tear_a_module_apart(process: Any):
    trainer = MemoryTrainer(
        ModuleHost(TinyEngineModel, checkpoint(1), process),
        tensors=checkpoint(2),
        frozen=["layers.0.attn.k.weight"],
    )
    with pytest.raises(ProtocolError, match=r"layers\.0\.attn\.k\.weight come only in the first push"):
        trainer.connect()


def test_frozen_chunks_may_have_a_part_of_what_is_loaded_in_place():
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    trainer = MemoryTrainer(host, tensors=checkpoint(2), frozen=["layers.0.attn.k.weight"], max_bytes=ONE_ROW)
    for _ in range(2):
        trainer.push()
    assert len(trainer.written) == len(trainer.chunks) - HEADS
    assert_same(host.live, cold(checkpoint(2)))


@pytest.mark.parametrize("frozen", [-1, 1, 2])
def test_one_chunk_is_in_every_push(frozen: int):
    trainer = MemoryTrainer(ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2), max_bytes=1 << 20)
    assert len(trainer.chunks) == 1
    with pytest.raises(ProtocolError, match="one must be in every push"):
        trainer.connect(replace(trainer.message, frozen=frozen))


# ---------------------------------------------------------------------------------------------------------------
# Failures half-way


@pytest.fixture
def failing() -> Callable[[nn.Module], None]:
    """`repack` that raises, half done, when `calls["left"]` has counted down to nothing."""
    calls = {"left": 0}

    def process(module: nn.Module) -> None:
        if isinstance(module, Attention):
            calls["left"] -= 1
            if calls["left"] == 0:
                module.weight = None
                raise RuntimeError("this kernel does not like these weights")
        repack(module)

    process.calls = calls  # type: ignore[attr-defined]
    return process


@pytest.mark.parametrize("max_bytes", [None, ONE_ROW])
def test_a_failed_post_process_leaves_modules_whole_and_the_next_push_heals(failing: Any, max_bytes: int | None):
    a, b = checkpoint(1), checkpoint(2)
    host = ModuleHost(TinyEngineModel, a, failing)
    trainer = MemoryTrainer(host, tensors=a, max_bytes=max_bytes)
    (receiver,) = trainer.receivers
    trainer.push()
    old = host.live.state()
    places = {name: tensor.data_ptr() for name, tensor in host.live.state_dict().items()}
    new = cold(b, repack).state_dict()
    trainer.tensors = b

    failing.calls["left"] = 2
    with pytest.raises(RuntimeError, match="this kernel does not like these weights"):
        trainer.push()
    assert (receiver.state, receiver.version) == (POISONED, 1)
    with pytest.raises(ProtocolError, match="Commit of version 2 before"):
        receiver.commit(2)
    live = host.live.state_dict()
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == places
    assert torch.equal(live["layers.0.attn.weight"], new["layers.0.attn.weight"])
    assert torch.equal(live["layers.1.attn.weight"], old["layers.1.attn.weight"])

    failing.calls["left"] = 0
    trainer.push(2)
    assert (receiver.state, receiver.version) == (CLEAN, 2)
    assert {name: tensor.data_ptr() for name, tensor in host.live.state_dict().items()} == places
    assert_same(host.live, cold(b, repack))


def test_a_transport_that_stops_early_leaves_the_model_poisoned(monkeypatch: pytest.MonkeyPatch):
    trainer = MemoryTrainer(ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2), max_bytes=ONE_ROW)
    trainer.connect()
    (receiver,) = trainer.receivers
    whole = receiver._source.chunks
    monkeypatch.setattr(receiver._source, "chunks", lambda numbers, *rest: whole(numbers[:-1], *rest))
    with pytest.raises(ProtocolError, match=r"(\d+) of \d+ chunks of version 1 came"):
        trainer.run(1)
    assert receiver.state == POISONED


def test_versions_only_grow():
    trainer = MemoryTrainer(ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2))
    (receiver,) = trainer.receivers
    assert (receiver.version, receiver.state) == (0, CLEAN)
    trainer.push(7)
    assert receiver.version == 7
    with pytest.raises(ProtocolError, match="versions only grow"):
        trainer.push(7)
    assert receiver.state == CLEAN
    trainer.push()
    assert (receiver.version, receiver.state) == (8, CLEAN)


def test_what_was_connected_is_given_back():
    trainer = MemoryTrainer(ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2))
    trainer.push()
    (receiver,) = trainer.receivers
    source = receiver._source
    trainer.connect()
    assert receiver._source is source  # the transport is the same
    trainer.connect(replace(trainer.message, transport="another"))
    assert source.closed
    assert receiver._source is not source
    source = receiver._source
    receiver.disconnect()
    assert source.closed
    with pytest.raises(ProtocolError, match="Go came before Connect"):
        trainer.run(2)
    assert receiver.state == CLEAN


# ---------------------------------------------------------------------------------------------------------------
# Digests


@pytest.mark.parametrize("corrupt", [0, 3])
def test_a_chunk_that_changed_on_its_way_is_not_loaded(corrupt: int):
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    trainer = MemoryTrainer(host, tensors=checkpoint(2), max_bytes=ONE_ROW)
    trainer.corrupt = corrupt
    before = host.live.state()
    with pytest.raises(DigestError, match=f"chunk {corrupt} from trainer rank 0 arrived with another digest"):
        trainer.push(sample=3)  # the tensors are small, so every sample has all of their bytes
    assert trainer.receivers[0].state == POISONED
    assert trainer.written == list(range(corrupt + 1))
    changed = [name for name, tensor in host.live.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == (["embed.weight", "head.weight"] if corrupt else [])  # which are one
    trainer.corrupt = None
    trainer.push()
    assert trainer.receivers[0].state == CLEAN
    assert_same(host.live, cold(checkpoint(2)))


def test_nothing_is_compared_where_nothing_is_to_be_verified():
    trainer = MemoryTrainer(
        ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2), in_place=["embed.weight"]
    )
    trainer.connect(replace(trainer.message, proof=[]))
    trainer.corrupt = len(trainer.chunks) - 1
    trainer.push(sample=None)
    assert trainer.receivers[0].state == CLEAN


@pytest.mark.parametrize("corrupt_late", [False, True])
def test_another_memory_than_the_trainers_is_found_when_it_is_mapped(corrupt_late: bool):
    tensors = {"weight": torch.randn(300, 6), "other": torch.randn(4, 6)}

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.empty(300, 6)), nn.Parameter(torch.empty(4, 6))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    host = ModuleHost(Two, tensors)
    trainer = MemoryTrainer(host, tensors=tensors, in_place=["weight", "other"])
    number = next(iter(trainer.memory))
    if not corrupt_late:
        trainer.memory[number] = torch.randn(300, 6)
        with pytest.raises(DigestError, match="mapped other memory than that of trainer rank 0"):
            trainer.connect()
        assert trainer.receivers[0].state == CLEAN
        return
    # The trainer has freed a tensor and allocated another one: the worker still has the old one mapped.
    trainer.push()
    trainer.tensors["weight"] = torch.randn(300, 6)
    with pytest.raises(DigestError, match="must have freed a tensor and allocated another one"):
        trainer.push(sample=2)
    assert trainer.receivers[0].state == POISONED


@pytest.mark.parametrize("proof", [[1], [1, 2]])
def test_memory_of_a_rank_without_digests_is_refused(proof: list[int]):
    trainer = MemoryTrainer(
        ModuleHost(TinyEngineModel, checkpoint(1)), tensors=checkpoint(2), in_place=["embed.weight"]
    )
    message = trainer.message
    runs = [replace(run, rank=2) for run in message.in_place]
    with pytest.raises(ProtocolError, match=f"rank 2 is read in place, but digests came from {len(proof)} ranks"):
        trainer.connect(replace(message, in_place=runs, proof=proof))


class Stream:
    """A GPU's stream that has something to do until it is asked for the `last` time."""

    def __init__(self, last: int) -> None:
        self.left = last

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_chunk_on_a_gpu_is_waited_for_with_a_deadline_and_an_ear_for_bad_news(monkeypatch: pytest.MonkeyPatch):
    gpu, stream = torch.device("cuda"), Stream(3)
    calls: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    await_stream(gpu, 7, [], calls.append, Deadline(30))
    assert len(calls) == 3
    stream.left = 10**9
    with pytest.raises(SyncTimeoutError, match=r"chunk 7 did not arrive on cuda within 0\.05 s") as caught:
        await_stream(gpu, 7, ["engine 0 worker 1"], lambda seconds: None, Deadline(0.05))
    assert caught.value.waiting_for == ["engine 0 worker 1"]

    def bad_news(seconds: float) -> None:
        raise PeerError("trainer rank 0 has died")

    with pytest.raises(PeerError, match="has died"):
        await_stream(gpu, 7, [], bad_news, Deadline(30))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_first_push_waits_before_each_chunk_that_may_load_a_kernel(monkeypatch: pytest.MonkeyPatch, is_loaded: bool):
    awaited: list[int] = []
    monkeypatch.setattr(loader, "await_stream", lambda device, number, *rest: awaited.append(number))
    monkeypatch.setattr(BatchedCopy, "is_loaded", is_loaded)
    make, tensors = functools.partial(OneParameter, COPIES["whole"][1]), {"weight": torch.ones(4, 6)}
    trainer = MemoryTrainer(ModuleHost(make, tensors), tensors=tensors, max_bytes=24)
    assert len(trainer.chunks) == 4
    trainer.push()
    assert awaited == ([0, 1] if is_loaded else [0, 1, 2, 3])
    awaited.clear()
    trainer.push()
    assert awaited == []


def test_transport_is_left_before_a_gpu_is_waited_for_that_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    source: Any = SimpleNamespace(close=lambda: calls.append("close"))
    receiver = Receiver(ModuleHost(TinyEngineModel, checkpoint(1)))
    receiver.model.device = torch.device("cuda")
    receiver._source = source
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: calls.append("wait"))
    receiver.disconnect()
    assert calls == ["close"]


@pytest.mark.parametrize(
    ("core", "cores", "place"),
    [
        (None, 4, (1, 2)),  # one core, whatever its engine says of others
        (0, 1, (1, 2)),
        (3, 1, (1, 2)),  # core 3 behind an address of its own
        (0, 2, (1, 4)),
        (1, 2, (3, 4)),
        (5, 2, (3, 4)),
    ],
)
def test_workers_are_counted_over_all_cores(core: int | None, cores: int, place: tuple[int, int]):
    found = WorkerIdentity(rank=1, world=2, name="tp=1", core=core).in_engine(cores)
    assert (found.rank, found.world) == place
