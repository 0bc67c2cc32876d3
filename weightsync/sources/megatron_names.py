"""The checkpoint tensors in each parameter of a Megatron-core `GPTModel`, and their order. Pure.

Megatron keeps several checkpoint tensors in one parameter, stacked along the dimension that tensor parallelism cuts. It
stacks q, k and v by query group, gate above up, and padding below an embedding. A list of `Span`s describes such a
stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """`length` rows of the checkpoint tensor `name` from row `start` on. The whole tensor has `total` rows.

    Rows are counted along the cut dimension. A span without a name is padding, and does not travel.
    """

    name: str | None
    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """This rank's place in a parallel group."""

    rank: int
    size: int


WHOLE = GroupPlace(0, 1)


def whole(name: str, total: int) -> list[Span]:
    return [Span(name, total, 0, total)]


def share(stack: Sequence[Span], shard: GroupPlace) -> list[Span]:
    """Return one rank's part of a stack that is cut into equal parts.

    A span outside of the part stays with length 0, so that every rank knows every tensor.
    """
    each = sum(span.length for span in stack) // shard.size
    low, high = shard.rank * each, (shard.rank + 1) * each
    mine = []
    at = 0
    for span in stack:
        end = at + span.length
        first, last = min(max(low, at), end), min(max(high, at), end)
        mine.append(Span(span.name, span.total, span.start + first - at, last - first))
        at = end
    return mine


def by_query_group(names: tuple[str, str, str], heads: int, groups: int, head_dim: int) -> list[Span]:
    """Return the stack of q, k and v: for each query group its query heads, its key head, its value head."""
    q, k, v = names
    rows = heads // groups * head_dim
    return [
        span
        for group in range(groups)
        for span in (
            Span(q, groups * rows, group * rows, rows),
            Span(k, groups * head_dim, group * head_dim, head_dim),
            Span(v, groups * head_dim, group * head_dim, head_dim),
        )
    ]


def side_by_side(names: Sequence[str], local: int, shard: GroupPlace) -> list[Span]:
    """Return a rank's stack of `local` rows: its share of each tensor (gate and up). All tensors are equally large."""
    each = local // len(names)
    return [Span(name, each * shard.size, each * shard.rank, each) for name in names]


def padded(name: str, total: int, padded_total: int) -> list[Span]:
    """Return the stack of an embedding with `total` rows of values, and padding up to `padded_total` rows."""
    return [*whole(name, total), Span(None, 0, 0, padded_total - total)]


@dataclass(frozen=True)
class Family:
    """A family's checkpoint names for the parts of a mixture of experts. All other names are common to all families."""

    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_USUAL = Family()
FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"), _USUAL
    ),
    "mixtral": Family(moe="block_sparse_moe", gate="w1", up="w3", down="w2"),
}
"""Families by `model_type` of the Hugging Face configuration."""


def family_of(name: str | None) -> Family:
    """Return the names of a family, or the usual ones for None. Raise `ConfigError` for an unknown family."""
    if name is None:
        return _USUAL
    if name not in FAMILIES:
        raise ConfigError(f"bridge={name!r}; choose one of the families {', '.join(FAMILIES)}")
    return FAMILIES[name]


# Modules of a transformer layer, and their names in checkpoints.

NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
}
"""Norms, including the norms that Transformer Engine fuses into the next linear."""

LATENT_NORMS = {
    **NORMS,
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj.layer_norm": "self_attn.q_a_layernorm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj.layer_norm": "self_attn.kv_a_layernorm",
}
"""Norms of a layer with multi-latent attention."""

MTP_NORMS = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
"""Norms around a layer of multi-token prediction."""

LATENT_BY_HEAD = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}
"""Linears that are cut by rows. Their rotary part is interleaved, as in checkpoints."""

LATENT_DOWN = {
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
}
"""Linears that are cut by rows in local layer specs, and whole on every rank in Transformer Engine's."""
