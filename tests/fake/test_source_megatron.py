"""The Megatron sender: real Megatron-core over gloo, with the weights of Hugging Face models, which must come back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from engines import Trainers
from hypothesis import given
from hypothesis import strategies as st
from megatron_models import FAMILIES, Mesh, build, checkpoint, hf_config, load, logits, on_cpu, rename_mtp, with_mtp
from ranks import no_barrier, run_ranks
from torch import nn

from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.selection import TensorSelection
from weightsync.sources import open_source
from weightsync.sources.megatron import MegatronBackend, MegatronSource
from weightsync.sources.megatron_names import GroupPlace, Span, by_query_group, padded, share
from weightsync.sources.rename import renamed
from weightsync.tools.testing import check_source

pytest_plugins = ["engine_fixtures"]


def source(selection: TensorSelection | None = None, **options: Any) -> MegatronSource:
    return MegatronSource(selection or TensorSelection(), **options)


def pretrained(folder: Path, config: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Collective: every trainer rank calls this. A Hugging Face model and its checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tiny_models.fill(model, "A")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    return model, checkpoint(model, folder)


def loaded(
    folder: Path, family: str, mesh: Mesh, dtype: torch.dtype = torch.float32, padding: int = 0, **more: Any
) -> tuple[list[nn.Module], dict[str, torch.Tensor]]:
    """Collective: every trainer rank calls this. This rank's chunks, and the checkpoint whose weights they have."""
    config = hf_config(family, **more)
    _, state = pretrained(folder, config, dtype)
    chunks = build(config, mesh, dtype, padding)
    load(chunks, config, state)
    return chunks, state


# --- What the names mean


def check_forward(_: object, folder: Path) -> None:
    for family in FAMILIES:
        config = hf_config(family)
        model, state = pretrained(folder, config, torch.float32)
        (chunk,) = build(config, Mesh())
        load([chunk], config, state)
        tokens = torch.arange(34).view(2, 17) * 7 % config.vocab_size
        expected = model(tokens).logits
        torch.testing.assert_close(logits(chunk, tokens), expected, atol=2e-5, rtol=0, msg=lambda m: f"{family}: {m}")  # noqa: B023
        bridge = "mixtral" if family == "mixtral" else None
        check_source(partial(MegatronSource, bridge=bridge), chunk, state)
        if bridge is None:
            check_source(partial(MegatronSource, bridge=family), [chunk], state)


def test_megatrons_forward_with_what_is_exported_is_that_of_hugging_face(trainers: Trainers, tmp_path: Path) -> None:
    trainers.call(check_forward, tmp_path)


# --- Where shards lie

BF16 = {"dtype": torch.bfloat16}
TWO_RANKS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    "data parallel": ("qwen3", Mesh(), {}),
    "TP": ("qwen3", Mesh(tp=2), {"padding": 5, **BF16}),
    "TP, biases": ("qwen2", Mesh(tp=2), {"padding": 1}),
    "TP, tied, a rank with padding alone": ("qwen3", Mesh(tp=2), {"padding": 261, "tie_word_embeddings": True}),
    "TP, more ranks than query groups": ("llama", Mesh(tp=2), {"padding": 5, "num_key_value_heads": 1}),
    "PP": ("llama", Mesh(pp=2), BF16),
    "PP, tied": ("qwen3", Mesh(pp=2), {"tie_word_embeddings": True}),
    "interleaved PP": ("qwen3", Mesh(pp=2, vpp=2), {}),
    "interleaved PP, tied": ("llama", Mesh(pp=2, vpp=2), {"tie_word_embeddings": True}),
    "EP": ("qwen3_moe", Mesh(ep=2), BF16),
    "EP, Mixtral": ("mixtral", Mesh(ep=2), {}),
    "TP of experts": ("qwen3_moe", Mesh(tp=2, etp=2), {"padding": 5}),
    "TP, EP": ("qwen2_moe", Mesh(tp=2, ep=2), {"padding": 5}),
    "latent attention, TP": ("deepseek_v3", Mesh(tp=2, etp=2), {"padding": 5}),
    "latent attention, PP": ("deepseek_v2", Mesh(pp=2), {}),
}
FOUR_RANKS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    "TP, PP": ("qwen3", Mesh(tp=2, pp=2), {"padding": 5, **BF16}),
    "TP, interleaved PP, tied": ("qwen3", Mesh(tp=2, pp=2, vpp=2), {"padding": 5, "tie_word_embeddings": True}),
    "TP, more ranks than query groups": ("qwen2", Mesh(tp=4), {"padding": 5}),
    "TP, EP, TP of experts": ("qwen3_moe", Mesh(tp=2, ep=2, etp=2), {"padding": 5}),
    "EP, PP": ("deepseek_v3", Mesh(pp=2, ep=2), {}),
}


MORE_TOKENS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    "one more token, TP": ("deepseek_v3", Mesh(tp=2, etp=2), {"padding": 5}),
    "one more token, PP": ("qwen3", Mesh(pp=2), {}),
    "one more token, PP, tied": ("qwen3", Mesh(pp=2), {"tie_word_embeddings": True}),
    "one more token, EP": ("qwen3_moe", Mesh(ep=2), BF16),
}


def check_more_tokens(_: object, folder: Path, as_in_0_17: bool) -> None:
    for what, (family, mesh, options) in MORE_TOKENS.items():
        options = dict(options)
        padding, dtype = options.pop("padding", 0), options.pop("dtype", torch.float32)
        config = hf_config(family, **options)
        torch.manual_seed(1)
        state = with_mtp(pretrained(folder, config, dtype)[1], config)
        chunks = build(config, mesh, dtype, padding, mtp_num_layers=1)
        if as_in_0_17:
            rename_mtp(chunks)
        load(chunks, config, state)
        try:
            check_source(partial(MegatronSource, vocab_size=config.vocab_size), chunks, state)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize("as_in_0_17", [False, True])
def test_layers_that_predict_more_tokens_have_the_names_of_checkpoints(
    trainers: Trainers, tmp_path: Path, as_in_0_17: bool
) -> None:
    trainers.call(check_more_tokens, tmp_path, as_in_0_17)


def check_dtypes_of_ties(rank: int, folder: Path) -> None:
    chunks, _ = loaded(folder, "qwen3", Mesh(pp=2), tie_word_embeddings=True)
    chosen = TensorSelection(dtypes={"lm_head.*": "bfloat16"})
    reading = renamed(source(chosen), chosen).read(chunks)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    held = {shard.meta.name: shard.values() for shard in reading.shards if shard.meta.name in names}
    assert [name for name in reading.manifest.names if name in names] == (names if chunks[0].pre_process else [])
    assert not reading.manifest.tied
    assert not held or torch.equal(*held.values())
    excluding = TensorSelection(exclude=names)
    source(excluding).read(chunks)
    assert "lm_head.weight" not in excluding.unmatched()


def test_a_tied_output_layer_with_a_dtype_of_its_own_travels(trainers: Trainers, tmp_path: Path) -> None:
    trainers.call(check_dtypes_of_ties, tmp_path)


def check_cases(_: object, folder: Path, cases: dict[str, tuple[str, Mesh, dict[str, Any]]]) -> None:
    for what, (family, mesh, options) in cases.items():
        chunks, state = loaded(folder, family, mesh, **options)
        bridge = "mixtral" if family == "mixtral" else None
        make = partial(MegatronSource, bridge=bridge, vocab_size=hf_config(family).vocab_size)
        try:
            check_source(make, chunks, state)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None


def test_two_ranks_hold_the_checkpoint_bit_by_bit(trainers: Trainers, tmp_path: Path) -> None:
    trainers.call(check_cases, tmp_path, TWO_RANKS)


def test_four_ranks_hold_the_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    run_ranks(check_cases, 4, tmp_path, FOUR_RANKS, timeout_s=240)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_query_groups_are_cut_wherever_a_rank_begins(groups: int, heads_each: int, head_dim: int, data: Any) -> None:
    stack = by_query_group(("q", "k", "v"), groups * heads_each, groups, head_dim)
    total = sum(span.length for span in stack)
    size = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    rows = {name: iter(range(span.total)) for name in "qkv" for span in stack if span.name == name}
    expected = [(span.name, next(rows[span.name])) for span in stack for _ in range(span.length)]
    found = [
        (span.name, span.start + row)
        for rank in range(size)
        for span in share(stack, GroupPlace(rank, size))
        for row in range(span.length)
    ]
    assert found == expected


def test_a_rank_of_padding_alone_still_knows_the_tensor() -> None:
    assert share(padded("embedding", 3, 8), GroupPlace(1, 2)) == [Span("embedding", 3, 3, 0), Span(None, 0, 1, 4)]


# --- Other layer specifications than the local one. Those of Transformer Engine do not run on CPUs: what they call
# --- their parameters is put on the local modules.


def fuse_norms(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        if hasattr(attention, "linear_qkv"):
            attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
            layer.input_layernorm = nn.Identity()
        else:  # with latent attention the inner norms are the fused ones
            attention.linear_kv_up_proj.layer_norm_weight = attention.kv_layernorm.weight
            attention.linear_q_up_proj.layer_norm_weight = attention.q_layernorm.weight
            attention.kv_layernorm = attention.q_layernorm = nn.Identity()
        if hasattr(layer.mlp, "linear_fc1"):
            layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            layer.pre_mlp_layernorm = nn.Identity()


def group_experts(chunk: Any) -> None:
    """As `TEGroupedMLP` keeps them: `linear_fc1.weight0`, `linear_fc1.weight1`, ..."""
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "experts"):
            grouped = nn.Module()
            for linear in ("linear_fc1", "linear_fc2"):
                weights = nn.Module()
                for number, expert in enumerate(layer.mlp.experts.local_experts):
                    weights.register_parameter(f"weight{number}", getattr(expert, linear).weight)
                grouped.add_module(linear, weights)
            layer.mlp.experts = grouped


def group_experts_as_of_old(chunk: Any) -> None:
    """As `GroupedMLP` keeps them: two parameters, in which the experts' transposed weights follow each other."""
    for layer in chunk.decoder.layers:
        experts = layer.mlp.experts.local_experts
        grouped = nn.Module()
        first = torch.stack([expert.linear_fc1.weight.detach().t() for expert in experts])
        second = torch.stack([expert.linear_fc2.weight.detach().t() for expert in experts])
        hidden = layer.config.hidden_size
        grouped.weight1 = nn.Parameter(first.contiguous().view(hidden, -1))
        grouped.weight2 = nn.Parameter(second.contiguous().view(-1, hidden))
        layer.mlp.experts = grouped


def replicate_latent_down(chunk: Any, state: dict[str, torch.Tensor]) -> None:
    for layer in chunk.decoder.layers:
        at = f"model.layers.{layer.layer_number - 1}.self_attn."
        layer.self_attention.linear_q_down_proj.weight = nn.Parameter(state[f"{at}q_a_proj.weight"])
        layer.self_attention.linear_kv_down_proj.weight = nn.Parameter(state[f"{at}kv_a_proj_with_mqa.weight"])


def check_specifications(_: object, folder: Path) -> None:
    make = partial(MegatronSource, vocab_size=251)
    (chunk,), state = loaded(folder, "qwen3", Mesh(tp=2), padding=5)
    fuse_norms(chunk)
    check_source(make, chunk, state)

    (chunk,), state = loaded(folder, "qwen3_moe", Mesh(tp=2, etp=2), padding=5)
    fuse_norms(chunk)
    group_experts_as_of_old(chunk)
    check_source(make, chunk, state)

    (chunk,), state = loaded(folder, "deepseek_v3", Mesh(tp=2, ep=2), padding=5)
    fuse_norms(chunk)
    group_experts(chunk)
    replicate_latent_down(chunk, state)
    check_source(make, chunk, state)


def test_what_other_layer_specifications_call_their_parameters(trainers: Trainers, tmp_path: Path) -> None:
    trainers.call(check_specifications, tmp_path)


# --- Wrappers and the distributed optimizer


def trained(_: object, folder: Path) -> None:
    """Megatron's own wrappers and distributed optimizer, in bf16 with fp32 masters: what travels is the parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    chunks, state = loaded(folder, "qwen3", Mesh(), torch.bfloat16)
    (chunk,) = chunks
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
        wrapped = DistributedDataParallel(chunk.config, options, Float16Module(chunk.config, chunk))
    for wrapper in (wrapped, wrapped.module, chunk):
        with pytest.raises(UnsupportedError, match="disable_forward_pre_hook"):
            source().read(wrapper)
    bridge = open_source(MegatronBackend(SimpleNamespace(export_weights=iter)), TensorSelection())
    with pytest.raises(UnsupportedError, match="disable_forward_pre_hook"):
        bridge.read([chunk])
    wrapped.disable_forward_pre_hook(param_sync=False)
    check_source(MegatronSource, wrapped, state)
    wrapped.enable_forward_pre_hook()
    with pytest.raises(UnsupportedError, match="are stale until the next forward"):
        source().read([wrapped])


def test_wrapped_by_megatron(trainers: Trainers, tmp_path: Path) -> None:
    trainers.call(trained, tmp_path)


# --- What is refused


def refused(_: object, folder: Path) -> None:
    chunks, _ = loaded(folder, "qwen3", Mesh(pp=2, vpp=2))
    for wrong in (chunks[0], chunks[1:], [chunks[0], chunks[0]]):
        with pytest.raises(ConfigError, match="pass each chunk of this rank once"):
            source().read(wrong)
    with pytest.raises(ConfigError, match="empty list"):
        source().read([])
    with pytest.raises(ConfigError, match=r"Linear.* has no decoder, config"):
        source().read(nn.Linear(2, 2))

    (chunk,), state = loaded(folder, "qwen3", Mesh(tp=2), padding=5)
    for size in (257, 0):
        with pytest.raises(ConfigError, match=f"vocab_size={size}, but the model's embedding has 256 rows"):
            source(vocab_size=size).read(chunk)
    assert source().read(chunk).manifest["lm_head.weight"].shape[0] == 256

    # Names are those of the checkpoint; Megatron's are not looked at where there are others.
    selection = TensorSelection(exclude=("lm_head.*", "model.layers.0.mlp.*", "decoder.*"))
    excluded = source(selection, vocab_size=251).read(chunk).manifest
    left_out = {"lm_head.weight", *(name for name in state if name.startswith("model.layers.0.mlp."))}
    assert set(excluded.names) == set(state) - left_out

    # All that is unknown or unreadable, at once; such a policy may leave it out under Megatron's name.
    chunk.decoder.layers[1].post_norm = nn.LayerNorm(3)
    chunk.decoder.register_buffer("statistics", torch.zeros(2))
    chunk.decoder.layers[2].mlp.linear_fc1.weight.data.untyped_storage().resize_(0)
    chunk.decoder.layers[3].self_attention.linear_qkv.weight = nn.Parameter(torch.zeros(7, 64))
    unknown = {
        "decoder.layers.1.post_norm.weight",
        "decoder.layers.1.post_norm.bias",
        "decoder.statistics",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.layers.3.self_attention.linear_qkv.weight",
    }
    with pytest.raises(UnsupportedError) as caught:
        source().read(chunk)
    assert set(caught.value.tensors) == unknown
    assert all(name in str(caught.value) for name in unknown)
    source(TensorSelection(exclude=tuple(unknown))).read(chunk)

    # The layout follows the groups that the model was built with.
    chunk.config.tensor_model_parallel_size = 4
    with pytest.raises(ConfigError, match=r"size=4, but pg_collection.tp has a process group of 2"):
        source().read(chunk)
    chunk.pg_collection.tp = None
    with pytest.raises(ConfigError, match=r"has no process group; .*initialize_model_parallel"):
        source().read(chunk)

    for option in ("layernorm_zero_centered_gamma", "attention_output_gate", "rotary_interleaved"):
        (chunk,), _ = loaded(folder, "llama", Mesh())
        setattr(chunk.config, option, True)
        with pytest.raises(UnsupportedError, match=f"{option}=True"):
            source().read(chunk)


def test_what_cannot_be_right_is_refused(trainers: Trainers, tmp_path: Path) -> None:
    trainers.call(refused, tmp_path)


def test_options_of_the_backend() -> None:
    option = MegatronBackend(bridge="qwen3_moe", vocab_size=5)
    assert isinstance(open_source(option, TensorSelection()), MegatronSource)
    with pytest.raises(ConfigError, match="bridge='gpt7'; choose one of the families"):
        open_source(MegatronBackend(bridge="gpt7"), TensorSelection())
    for rows in (0, True, "5"):
        with pytest.raises(ConfigError, match=f"vocab_size={rows!r}; it must be a whole number"):
            MegatronBackend(vocab_size=rows)


class Export:
    """A bridge of one process."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = list(tensors.items())

    def export_weights(self, models: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors


def test_an_export_gives_one_bucket_after_the_other() -> None:
    a, b, c = torch.rand(2), torch.rand(3, 4), torch.rand(2)
    bridge = Export(a=a, b=b, c=c, left_out=a)
    model = nn.Module()
    source = open_source(MegatronBackend(bridge), TensorSelection(exclude=("left_out",)))
    for _ in range(2):
        assert source.read(model).manifest.names == ("a", "b", "c")
        shards = {piece.meta.name: piece for piece in source.read(model).shards}
        assert shards["b"].tensor.shape == (3, 4)
        assert shards["b"].tensor.untyped_storage().nbytes() == 4  # a stand-in
        source.gather(["a", "c"], no_barrier)
        assert shards["c"].compute() is not None
        assert torch.equal(shards["a"].compute(), a)
        source.gather(["b"], no_barrier)
        assert torch.equal(shards["b"].compute(), b)
        with pytest.raises(KeyError):  # it was let go
            shards["c"].compute()

    bridge.tensors = [("a", a), ("b", b)]
    source.read(model)
    with pytest.raises(ManifestError, match="gives nothing more, expected c"):
        source.gather(["a", "c"], no_barrier)
    bridge.tensors = [("a", a), ("b", b.t())]
    source.read(model)
    with pytest.raises(ManifestError, match=r"gives b as \(4, 3\)"):
        source.gather(["b"], no_barrier)
    bridge.tensors = [("a", a), ("a", a)]
    with pytest.raises(ManifestError, match="gives a twice"):
        open_source(MegatronBackend(bridge), TensorSelection()).read(model)


def test_a_bridge_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the name of a family, or an object with `export_hf_weights`"):
        open_source(MegatronBackend(object()), TensorSelection())
    with pytest.raises(ConfigError, match="leave vocab_size out"):
        open_source(MegatronBackend(Export(), vocab_size=5), TensorSelection())
    with pytest.raises(ConfigError, match="no effect with a stream"):
        open_source(MegatronBackend(Export()), TensorSelection(only_trained=True))
