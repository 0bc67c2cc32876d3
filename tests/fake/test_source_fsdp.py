"""The FSDP sender: real FSDP over gloo, its pieces put together again and compared with the full tensors bit by bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.selection import TensorSelection
from weightsync.sources import open_source
from weightsync.sources.deepspeed import DeepSpeedSource
from weightsync.sources.fsdp import Cut, FsdpSource, held_ranges
from weightsync.sources.module_tree import walk

WIDTH = 6


class Block(nn.Module):
    """Rows that do not divide by 2 or 4, a dimension of 1, a frozen parameter, a scalar, both kinds of buffer, and a
    submodule that really is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.module = nn.Linear(7, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(5, WIDTH), requires_grad=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.module(torch.relu(self.up(x))) * self.gain + self.frozen.sum()


class Net(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(tied: bool = True) -> Net:
    torch.manual_seed(7)
    return Net(tied)


def expected_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a push of this unsharded model delivers: its state dict, each storage once."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.detach().clone()
    return state


def source(**selection: object) -> FsdpSource:
    return FsdpSource(TensorSelection(**selection))


def step(model: nn.Module, before_backward: Callable[[], object] = lambda: None) -> None:
    """One forward, backward and optimizer step, on other data on each rank."""
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loss = model(torch.randint(9, (2, 4))).float().square().mean()
    before_backward()
    loss.backward()
    optimizer.step()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def gather_bytes(data: bytes) -> list[bytes]:
    """Collective: the bytes of every rank, without pickling."""
    length = torch.tensor([len(data)])
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    most = max(int(n) for n in lengths)
    padded = torch.zeros(max(most, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    all_padded = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(all_padded, padded)
    return [part[: int(n)].numpy().tobytes() for part, n in zip(all_padded, lengths, strict=True)]


def rebuilt(model: nn.Module, using: FsdpSource | None = None) -> dict[str, torch.Tensor]:
    """Collective: every tensor, put together from all ranks' pieces; checks all that a sender promises."""
    using = using or source()
    manifest, shards = list(using.read(model).manifest), using.read(model).shards
    rows = json.dumps([[t.name, t.shape, t.dtype] for t in manifest]).encode()
    assert len(set(gather_bytes(rows))) == 1, "ranks disagree about the manifest"
    names = [t.name for t in manifest]
    assert len(set(names)) == len(names)
    order = [names.index(piece.meta.name) for piece in shards]
    assert order == sorted(order), "pieces are not in the manifest's order"
    for piece in shards:
        assert piece.meta in manifest
        assert tuple(piece.tensor.shape) == piece.box.size
        assert piece.box.numel > 0
        assert not piece.tensor.requires_grad
        assert str(piece.tensor.dtype) == f"torch.{piece.meta.dtype}"
    heads = json.dumps([[p.meta.name, p.box.start, p.box.size] for p in shards]).encode()
    bodies = b"".join(bits(p.tensor) for p in shards)
    full = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest}
    written = {t.name: torch.zeros(t.shape, dtype=torch.bool) for t in manifest}
    for head, body in zip(gather_bytes(heads), gather_bytes(bodies), strict=True):
        at = 0
        for name, start, size in json.loads(head):
            where = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            region = full[name][where]
            data = body[at : at + region.numel() * region.element_size()]
            at += len(data)
            values = torch.frombuffer(bytearray(data), dtype=region.dtype).view(region.shape)
            assert bits(region[written[name][where]]) == bits(values[written[name][where]]), (
                f"replicas of {name} differ"
            )
            region.copy_(values)
            written[name][where] = True
        assert at == len(body)
    for name, mask in written.items():
        assert bool(mask.all()), f"{name} is not covered"
    return full


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
        assert bits(found[name]) == bits(tensor), name


def assert_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """A step changed what it should have, so comparing with the state after it means something."""
    assert any(bits(before[name]) != bits(after[name]) for name in before)


# --- 2 ranks: FSDP2


def shard2(model: Net, **options: object) -> Net:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def full_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: what torch itself gathers, under the names that the sender should give."""
    state = {}
    for name, tensor in model.state_dict().items():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        state[plain] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if "head.weight" in state and torch.equal(state["head.weight"], state["embed.weight"]):
        del state["head.weight"]
    return state


def fsdp2_as_built() -> None:
    assert_same(rebuilt(shard2(net())), expected_state(net()))
    assert_same(rebuilt(shard2(net(tied=False))), expected_state(net(tied=False)))


def fsdp2_after_a_step() -> None:
    model = shard2(net())
    step(model)
    found = rebuilt(model)
    assert_same(found, full_tensors(model))
    assert_moved(expected_state(net()), found)


def fsdp2_mixed_precision_sends_the_fp32_shards() -> None:
    model = shard2(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert_same(rebuilt(model), expected_state(net()))
    step(model)
    assert_same(rebuilt(model), full_tensors(model))
    assert {t.dtype for t in source().read(model).manifest} == {"float32", "int64"}


def fsdp2_gathered_root_is_stale() -> None:
    """The root stays gathered, in bf16, after a forward; the optimizer then updates the shards only."""
    model = shard2(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    shards = list(model.parameters())
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
        model.unshard()
        assert not isinstance(model.embed.weight, DTensor)
        for shard in shards:
            shard.to_local().mul_(2)
    expected = expected_state(net())
    doubled = {n: t if n.endswith(("steps", "scale")) else t * 2 for n, t in expected.items()}
    assert_same(rebuilt(model), doubled)


def fsdp2_trains_on_after_a_push() -> None:
    """A push between forward and backward, while the root is gathered, changes nothing in the training."""
    model, undisturbed = shard2(net()), shard2(net())
    step(model, before_backward=lambda: assert_same(rebuilt(model), expected_state(net())))
    step(undisturbed)
    assert_same(rebuilt(model), full_tensors(undisturbed))
    assert_moved(expected_state(net()), rebuilt(model))


def fsdp2_resharded_to_a_smaller_mesh() -> None:
    model = shard2(net(), reshard_after_forward=1)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    assert_same(rebuilt(model), expected_state(net()))


def fsdp2_on_another_dimension() -> None:
    model = net()
    by_column = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else Shard(0)  # noqa: E731
    assert_same(rebuilt(shard2(model, shard_placement_fn=by_column)), expected_state(net()))
    assert any(p.tensor.shape == (9, WIDTH // 2) for p in source().read(model).shards)


def fsdp2_empty_shard() -> None:
    model = shard2(net())
    gains = [p for p in source().read(model).shards if p.meta.name.endswith("gain")]
    assert len(gains) == (2 if dist.get_rank() == 0 else 0)


def fsdp2_wrapped() -> None:
    model = net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    shard2(model)
    compiled = torch.compile(model, backend="eager")
    assert_same(rebuilt(compiled), expected_state(net()))


def pieces_are_views() -> None:
    """What the trainer writes later shows in the pieces, and asking again gives the same memory."""
    model = shard2(net())
    piece = next(p for p in source().read(model).shards if p.meta.name == "embed.weight")
    with torch.no_grad():
        model.embed.weight.to_local().fill_(5)
    assert bool((piece.tensor == 5).all())
    again = next(p for p in source().read(model).shards if p.meta.name == "embed.weight")
    assert again.tensor.data_ptr() == piece.tensor.data_ptr()


def policies() -> None:
    model = shard2(net())
    expected = expected_state(net())
    found = rebuilt(model, source(buffers=False))
    assert_same(found, {n: t for n, t in expected.items() if not n.endswith(("steps", "scale"))})
    found = rebuilt(model, source(exclude=("blocks.0.*", "*.up.bias")))
    assert_same(found, {n: t for n, t in expected.items() if not n.startswith("blocks.0.") and "up.bias" not in n})


def what_trains() -> None:
    """Under FSDP1 with `use_orig_params=False` a flat parameter trains as a whole."""
    frozen = {"blocks.0.frozen", "blocks.1.frozen"}
    for model in (shard2(net()), shard1(net(), use_orig_params=True)):
        assert {p.meta.name for p in source().read(model).shards if not p.trains} <= frozen
        assert not {p.meta.name for p in source().read(model).shards if p.trains} & frozen
    model = net().requires_grad_(False)
    model.blocks[0].requires_grad_()
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=False
    )
    found = {p.meta.name for p in source().read(wrapped).shards if p.trains}
    assert all(name.startswith("blocks.0.") or name.endswith(("steps", "scale")) for name in found)
    assert any("up.weight" in name for name in found)


def dtensors_that_share_their_memory_are_tied() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    local = torch.rand(2, 3)
    model.a = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    model.b = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    model.c = nn.Parameter(DTensor.from_local(local, mesh, [Shard(1)]))
    assert list(rebuilt(model)) == ["a", "c"]


def partial_sums_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.rand(2, 2), mesh, [Partial()]))
    with pytest.raises(UnsupportedError, match=r"weight: .*Partial"):
        source().read(model)
    with pytest.raises(UnsupportedError, match=r'weight: it is a DTensor, .* backend="fsdp"'):
        DeepSpeedSource(TensorSelection()).read(model)


def qwen3() -> nn.Module:
    """A tiny bf16 Qwen3 with tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=33,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def transformers_model() -> None:
    expected = expected_state(qwen3())
    assert "lm_head.weight" not in expected
    assert "model.embed_tokens.weight" in expected
    model = qwen3()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert_same(rebuilt(model), expected)
    for use_orig_params in (True, False):
        wrapped = FullyShardedDataParallel(
            qwen3(),
            auto_wrap_policy=ModuleWrapPolicy({type(qwen3().model.layers[0])}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        assert_same(rebuilt(wrapped), expected)
    assert_same(rebuilt(DistributedDataParallel(qwen3())), expected)
    assert_same(rebuilt(AveragedModel(qwen3())), expected)


# --- 2 ranks: FSDP1 and DDP


def shard1(model: nn.Module, **options: object) -> FullyShardedDataParallel:
    """FSDP1, with the frozen parameters outside: `use_orig_params=False` cannot flatten them with the others."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), ignored_states=frozen, **options)


def full1(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: what FSDP1 itself gathers, under the names that the sender should give."""
    state = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for prefix, module in walk(model):
            tensors = {**module._parameters, **module._buffers}
            state |= {prefix + name: t.detach().clone() for name, t in tensors.items() if t is not None}
    return state


def fsdp1_in_every_state(**options: object) -> None:
    model = shard1(net(), **options)
    expected = expected_state(net())
    tokens = torch.zeros(1, 1, dtype=torch.long)

    def checked() -> dict[str, torch.Tensor]:
        found = rebuilt(model)
        full = full1(model)
        assert_same(found, {name: full[name] for name in expected})
        return found

    assert_same(checked(), expected)
    with torch.no_grad():
        model(tokens)
    assert_same(checked(), expected)
    step(model, before_backward=lambda: assert_same(rebuilt(model), expected))  # SHARD_GRAD_OP has it gathered then
    once = checked()
    assert_moved(expected, once)
    step(model)
    assert_moved(once, checked())


def fsdp1_all_in_one_flat_parameter() -> None:
    for use_orig_params in (True, False):
        model = shard1(net(), auto_wrap_policy=None, use_orig_params=use_orig_params)
        assert_same(rebuilt(model), expected_state(net()))


def fsdp1_takes_replaced_storage() -> None:
    """With `use_orig_params=True` a parameter may be given other storage; FSDP1 itself notices at the next forward."""
    model = shard1(net(), use_orig_params=True)
    for param in model.parameters():
        if param.dtype == torch.float32:
            param.data = param.data * 2
    doubled = {n: t if n.endswith(("steps", "scale")) else t * 2 for n, t in expected_state(net()).items()}
    assert_same(rebuilt(model), doubled)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    assert_same(rebuilt(model), doubled)


def fsdp1_gathered_is_refused() -> None:
    for use_orig_params in (True, False):
        model = shard1(net(), use_orig_params=use_orig_params)
        with (
            FullyShardedDataParallel.summon_full_params(model),
            pytest.raises(UnsupportedError, match="summon_full_params") as caught,
        ):
            source().read(model)
        assert "embed.weight" in caught.value.tensors
        assert "blocks.1.up.bias" in caught.value.tensors
        assert_same(rebuilt(model), expected_state(net()))


def fsdp1_around_the_pushed_module_is_refused() -> None:
    """The pushed module has shards, or copies in the compute dtype: its parameters are no weights."""
    options = {"mixed_precision": MixedPrecision(torch.bfloat16), "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    model = shard1(nn.Sequential(net()), use_orig_params=True, **options)

    def check() -> None:
        with pytest.raises(UnsupportedError, match=r"embed\.weight.*push the outermost") as caught:
            source().read(model.module[0])
        assert "blocks.0.up.weight" not in caught.value.tensors
        assert "head.weight" in caught.value.tensors

    check()
    step(model, before_backward=check)
    check()


def ddp_and_other_wrappers() -> None:
    assert_same(rebuilt(DistributedDataParallel(net())), expected_state(net()))
    model = net()
    model.blocks[1] = checkpoint_wrapper(torch.compile(model.blocks[1], backend="eager"))
    model = torch.compile(DistributedDataParallel(model), backend="eager")
    assert_same(rebuilt(model), expected_state(net()))
    model = DistributedDataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    assert list(rebuilt(model)) == ["module.weight", "module.bias"]


# --- 4 ranks: 2-D meshes


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard2(net(), mesh=mesh)
    assert_same(rebuilt(model), expected_state(net()))
    step(model)
    assert_same(rebuilt(model), full_tensors(model))


def fsdp2_over_4() -> None:
    assert_same(rebuilt(shard2(net())), expected_state(net()))


def fsdp_and_tensor_parallel() -> None:
    """7 rows over 2 tensor parallel ranks and then over 2 data parallel ones, and 7 columns the other way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "module": RowwiseParallel()})
    shard2(model, mesh=mesh["dp"])
    placements = model.blocks[0].up.weight.placements
    assert [type(p) for p in placements] == [_StridedShard, Shard]
    assert_same(rebuilt(model), expected_state(net()))
    assert_same(rebuilt(model), full_tensors(model))


def a_strided_shard_alone() -> None:
    """Without the tensor parallel dimension beside it, `_StridedShard` leaves two separate regions on a rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(11.0 * 3).view(11, 3)
    held = torch.cat([block.chunk(2)[mesh.get_coordinate()[0]] for block in full.chunk(2)])
    model = nn.Module()
    model.w = nn.Parameter(
        DTensor.from_local(
            held, mesh, [_StridedShard(0, split_factor=2), Replicate()], shape=full.shape, stride=full.stride()
        )
    )
    assert len(source().read(model).shards) == 2
    assert_same(rebuilt(model), {"w": full})


def sharded_on_both_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(7.0 * 5).view(7, 5)
    model = nn.Module()
    model.both = nn.Parameter(distribute_tensor(full, mesh, [Shard(0), Shard(1)]))
    model.twice = nn.Parameter(distribute_tensor(full, mesh, [Shard(1), Shard(1)]))
    model.scalar = nn.Parameter(distribute_tensor(torch.tensor(2.5), mesh, [Replicate(), Replicate()]))
    assert_same(rebuilt(model), {"both": full, "twice": full, "scalar": torch.tensor(2.5)})


def fsdp1_hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = shard1(net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=False)
    assert_same(rebuilt(model), expected_state(net()))


def a_mesh_of_some_ranks() -> None:
    """The ranks outside of a mesh know the tensor and hold nothing of it."""
    mesh = DeviceMesh("cpu", [1, 2])
    full = torch.arange(6.0).view(3, 2)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    assert len(source().read(model).shards) == (1 if dist.get_rank() in (1, 2) else 0)
    assert_same(rebuilt(model), {"w": full})


FSDP2 = (
    fsdp2_as_built,
    fsdp2_after_a_step,
    fsdp2_mixed_precision_sends_the_fp32_shards,
    fsdp2_gathered_root_is_stale,
    fsdp2_trains_on_after_a_push,
    fsdp2_resharded_to_a_smaller_mesh,
    fsdp2_on_another_dimension,
    fsdp2_empty_shard,
    what_trains,
    fsdp2_wrapped,
    pieces_are_views,
    policies,
    dtensors_that_share_their_memory_are_tied,
    partial_sums_are_refused,
    transformers_model,
)
FSDP1 = (
    *(
        partial(fsdp1_in_every_state, use_orig_params=orig, sharding_strategy=strategy, mixed_precision=precision)
        for orig in (True, False)
        for strategy, precision in (
            (ShardingStrategy.FULL_SHARD, None),
            (ShardingStrategy.FULL_SHARD, MixedPrecision(param_dtype=torch.bfloat16)),
            (ShardingStrategy.SHARD_GRAD_OP, MixedPrecision(param_dtype=torch.bfloat16)),
            (ShardingStrategy.NO_SHARD, MixedPrecision(param_dtype=torch.bfloat16)),
        )
    ),
    fsdp1_all_in_one_flat_parameter,
    fsdp1_takes_replaced_storage,
    fsdp1_gathered_is_refused,
    fsdp1_around_the_pushed_module_is_refused,
    ddp_and_other_wrappers,
)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            moe_intermediate_size=6,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def experts_on_a_mesh_of_their_own() -> None:
    """Experts spread over two ranks, and each expert's rows or columns over two, beside dense layers over all four."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("within", "experts"))
    expected = rebuilt(qwen3_moe())
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in expected
    for dim in (0, 1, 2):
        model = qwen3_moe()
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for name, param in experts.named_parameters():
                spread = distribute_tensor(param.detach(), meshes["experts"], [Shard(0)])
                experts.register_parameter(name, nn.Parameter(spread))
            fully_shard(experts, mesh=meshes["within"], shard_placement_fn=lambda _, at=dim: Shard(at))
            fully_shard(layer)
        fully_shard(model)
        assert_same(rebuilt(model), expected)
        held = {param.to_local().untyped_storage().data_ptr() for param in model.parameters()}
        assert held.issuperset(shard.tensor.untyped_storage().data_ptr() for shard in source().read(model).shards)


MESHES = (
    experts_on_a_mesh_of_their_own,
    hsdp,
    fsdp2_over_4,
    fsdp_and_tensor_parallel,
    a_strided_shard_alone,
    sharded_on_both_dimensions,
    fsdp1_hybrid,
    a_mesh_of_some_ranks,
)


CASES = {"FSDP2": FSDP2, "FSDP1": FSDP1, "MESHES": MESHES}


def run_cases(rank: int, kind: str) -> None:
    warnings.simplefilter("ignore")  # torch announces which parts of FSDP1 will go
    for case in CASES[kind]:
        try:
            case()
        except BaseException as error:
            raise AssertionError(f"in {case}") from error
        dist.barrier()


@pytest.mark.parametrize(("kind", "world_size"), [("FSDP2", 2), ("FSDP1", 2), ("MESHES", 4)])
def test_pieces_of_all_ranks_are_the_model(kind: str, world_size: int) -> None:
    run_ranks(run_cases, world_size, kind)


# --- no process group needed


def test_plain_module() -> None:
    model = net()
    shards = source().read(model).shards
    assert [p.meta for p in shards] == list(source().read(model).manifest)
    assert_same({p.meta.name: p.tensor for p in shards}, expected_state(model))
    assert all(
        p.tensor.untyped_storage().data_ptr() == model.get_parameter(p.meta.name).untyped_storage().data_ptr()
        for p in shards
        if not p.meta.name.endswith(("steps", "scale"))
    )


def test_names_are_those_that_save_pretrained_writes(tmp_path: Path) -> None:
    from safetensors import safe_open

    model = qwen3()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(source().read(model).manifest.names) == set(saved.keys())


def test_wrapper_names_are_stripped_from_wrappers_only() -> None:
    class Block2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(checkpoint_wrapper(torch.compile(nn.Linear(1, 1), backend="eager")))

    model = torch.compile(Block2(), backend="eager")
    assert [prefix for prefix, _ in walk(model)] == ["", "module.", "module.0."]
    assert source().read(model).manifest.names == ("module.0.weight", "module.0.bias")


def test_everything_that_cannot_be_read_is_listed_at_once() -> None:
    model = nn.Module()
    model.fine = nn.Linear(1, 1)
    model.meta = nn.Linear(1, 1, bias=False, device="meta")
    model.lazy = nn.LazyLinear(1, bias=False)
    model.register_buffer("complex", torch.zeros(1, dtype=torch.complex64))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("negative", torch.rand(2, dtype=torch.complex64).conj().imag)
    freed = torch.rand(3)
    freed.untyped_storage().resize_(0)
    model.register_buffer("freed", freed)
    with pytest.raises(UnsupportedError) as caught:
        source().read(model)
    assert set(caught.value.tensors) == {"meta.weight", "lazy.weight", "complex", "sparse", "negative", "freed"}
    assert all(name in str(caught.value) for name in caught.value.tensors)
    rest = source(exclude=("meta.*", "lazy.*", "freed", "complex", "sparse", "negative"))
    assert rest.read(model).manifest.names == ("fine.weight", "fine.bias")


def test_offloaded_weights_can_be_read_after_what_their_refusal_says() -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model = nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight.detach().clone()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="if accelerate offloads it, `remove_hook_from_submodules`"):
        source().read(model)
    remove_hook_from_submodules(model)
    assert torch.equal(source().read(model).shards[0].tensor, weight)


@given(st.data())
def test_a_strided_shard_is_cut_after_the_dimensions_to_its_right(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40))
    dp, ep, tp = (data.draw(st.integers(1, 4)) for _ in range(3))
    for e, by_ep in enumerate(chunks(torch.arange(length), ep)):
        for t, by_tp in enumerate(chunks(by_ep, tp)):
            for d, shard in enumerate(chunks(by_tp, dp)):
                ranges = held_ranges(length, [Cut(dp, d, ep * tp), Cut(ep, e), Cut(tp, t)])
                assert len(ranges) <= 1
                assert elements(ranges) == shard.tolist()


@given(st.integers(0, 40), st.integers(1, 4), st.integers(2, 4))
def test_a_strided_shard_alone_takes_one_chunk_of_every_block(length: int, count: int, split_factor: int) -> None:
    blocks = [chunks(block, count) for block in chunks(torch.arange(length), split_factor)]
    for index in range(count):
        ranges = held_ranges(length, [Cut(count, index, split_factor)])
        assert elements(ranges) == torch.cat([block[index] for block in blocks]).tolist()


def chunks(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """As DTensor cuts: `torch.chunk`, then empty ones."""
    found = list(tensor.chunk(count))
    return found + [tensor[:0]] * (count - len(found))


def elements(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for start, size in ranges for i in range(start, start + size)]


def test_policy() -> None:
    selection = TensorSelection(exclude=("*.bias",), dtypes={"*.gate.weight": "float32", "model.*": "bfloat16"})
    assert selection.excludes("a.b.bias")
    assert not selection.excludes("a.b.biases")
    assert selection.wire_dtype("model.mlp.gate.weight") == "float32"
    assert selection.wire_dtype("model.mlp.up.weight") == "bfloat16"
    assert selection.wire_dtype("lm_head.weight") is None
    with pytest.raises(ConfigError, match="float33"):
        TensorSelection(dtypes={"*": "float33"})


def test_backends() -> None:
    assert isinstance(open_source("fsdp", TensorSelection()), FsdpSource)
    assert isinstance(open_source("deepspeed", TensorSelection()), DeepSpeedSource)
    with pytest.raises(ConfigError, match='"fsdp"'):
        open_source("fdsp", TensorSelection())
