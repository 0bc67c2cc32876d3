"""Megatron-core models with the weights of a Hugging Face model, on CPUs.

The weights are put in by formulas on whole tensors, which are then cut as Megatron's own parameter attributes say.
Nothing here knows of the sender, so that a mistake is not made twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import not_compiled
from torch import nn

HfState = Mapping[str, torch.Tensor]

_SIZES: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80, "norm_topk_prob": False},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 32, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": 20, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
}
FAMILIES = tuple(_CONFIGS)


def hf_config(family: str, **more: Any) -> Any:
    """A tiny Hugging Face configuration of `family`, its `model_type`."""
    import transformers

    kind, fields = _CONFIGS[family]
    return getattr(transformers, kind)(**{**_SIZES, **fields, **more})


def checkpoint(hf: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Collective: every trainer rank calls this, with an equal model. Its tensors as they are on disk in a new folder
    in `folder`, where experts have names of their own."""
    from safetensors.torch import load_file

    at = folder / str(len(list(folder.iterdir())))
    dist.barrier()
    hf.save_pretrained(at)  # type: ignore[operator]
    dist.barrier()
    return load_file(at / "model.safetensors")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the parallel groups."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1

    def initialize(self) -> None:
        """Collective: every trainer rank calls this. The groups of the mesh before are gone afterwards: a mesh has
        dozens, each with threads of its own, and Megatron only forgets them."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        known = dist.distributed_c10d._world.pg_map
        for group in [group for group in _groups if group in known]:  # some it does end
            dist.destroy_process_group(group)
        others = set(known)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
        )
        _groups[:] = [group for group in known if group not in others]


_groups: list[dist.ProcessGroup] = []
"""Those of the mesh that was initialised last."""


def transformer_config(hf: Any, mesh: Mesh, dtype: torch.dtype, **more: Any) -> Any:
    """Megatron's configuration of the model that `hf`, a Hugging Face configuration, describes."""
    import megatron.core.transformer.transformer_config as configs

    kind = hf.model_type
    latent = hasattr(hf, "kv_lora_rank")
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind in ("qwen3", "qwen3_moe") or latent,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": mesh.vpp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "masked_softmax_fusion": False,
    }
    if latent:
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            "rope_type": "rope",
            "rotary_base": hf.rope_parameters["rope_theta"],
        }
    else:
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        fields |= {"num_query_groups": hf.num_key_value_heads, "kv_channels": head_dim}
    experts = expert_count(hf)
    if experts is not None:
        fields |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    if kind == "qwen2_moe":
        fields |= {
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
            "add_qkv_bias": True,
        }
    if kind.startswith("deepseek"):
        dense = hf.first_k_dense_replace
        fields |= {
            "moe_layer_freq": [0] * dense + [1] * (hf.num_hidden_layers - dense),
            "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }
    if kind == "deepseek_v2":
        fields |= {"moe_router_pre_softmax": True}
    if kind == "deepseek_v3":
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_pre_softmax": True,
        }
    kind_of_config = configs.MLATransformerConfig if latent else configs.TransformerConfig
    return kind_of_config(**{**fields, **more})


def expert_count(hf: Any) -> int | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((getattr(hf, name) for name in names if hasattr(hf, name)), None)


def build(hf: Any, mesh: Mesh, dtype: torch.dtype = torch.float32, padding: int = 0, **more: Any) -> list[nn.Module]:
    """Collective: every trainer rank calls this. This rank's chunks, on local layer specs, with random weights."""
    with not_compiled():
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

    mesh.initialize()
    config = transformer_config(hf, mesh, dtype, **more)
    pp = parallel_state.get_pipeline_model_parallel_rank()
    chunks: list[nn.Module] = []
    # Tied copies are moved with `.cuda()`, routers to the current device: a CPU will do.
    with warnings.catch_warnings(), on_cpu():
        warnings.simplefilter("ignore")
        # Without Transformer Engine, some of Megatron's modules believe that they have it.
        multi_latent_attention.HAVE_TE = False
        moe_utils.te_general_gemm = None
        for stage in range(mesh.vpp or 1):
            spec = get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=False,
                normalization="RMSNorm",
                vp_stage=stage if mesh.vpp else None,
            )
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = PlainAttention
            is_last = pp == mesh.pp - 1 and stage == (mesh.vpp or 1) - 1
            more_tokens = {"use_transformer_engine": False, "vp_stage": stage if mesh.vpp else None}
            chunks.append(
                GPTModel(
                    config,
                    spec,
                    vocab_size=hf.vocab_size + padding,
                    max_sequence_length=hf.max_position_embeddings,
                    pre_process=pp == 0 and stage == 0,
                    post_process=is_last,
                    mtp_block_spec=get_gpt_mtp_block_spec(config, spec, **more_tokens) if is_last else None,
                    share_embeddings_and_output_weights=hf.tie_word_embeddings,
                    position_embedding_type="rope",
                    rotary_base=hf.rope_parameters["rope_theta"],
                    vp_stage=stage if mesh.vpp else None,
                )
            )
    return [chunk.to(dtype) for chunk in chunks]  # as `Float16Module` does


class PlainAttention(nn.Module):
    """Softmax attention. Megatron's own wants random states of a GPU, and keys as wide as values."""

    def __init__(self, softmax_scale: float | None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def on_cpu() -> mock._patch:
    """Megatron asks for the current CUDA device, and moves tensors there."""
    cpu = mock.patch.multiple(
        torch.cuda, current_device=mock.Mock(return_value=torch.device("cpu")), is_available=lambda: False
    )
    cpu.additional_patchers.append(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
    return cpu


def rename_mtp(chunks: list[nn.Module]) -> None:
    """Give what is in layers of multi-token prediction the name and the number that megatron-core 0.17 gives it."""
    for layer in (layer for chunk in chunks if hasattr(chunk, "mtp") for layer in chunk.mtp.layers):
        layer.mtp_model_layer = layer._modules.pop("transformer_layer", None) or layer.mtp_model_layer
        layer.mtp_model_layer.layer_number = layer.layer_number


@torch.no_grad()
def load(chunks: list[nn.Module], hf: Any, state: HfState) -> None:
    """Give the chunks the weights of the checkpoint `state` of a model with the configuration `hf`."""
    from megatron.core import parallel_state

    for chunk in chunks:
        named = dict(chunk.named_parameters())
        named |= {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")}
        for name, param in named.items():
            expert = ".experts." in name
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                layer = chunk.decoder.layers[int(local)]
                whole = layer_tensor(rest, layer.layer_number - 1, hf, state, layer)
            elif name.startswith("mtp.layers."):
                _, _, local, rest = name.split(".", 3)
                whole = mtp_tensor(rest, int(local), hf, state, chunk.mtp.layers[int(local)])
            else:
                whole = outer_tensor(name, chunk, hf, state)
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if expert
                else parallel_state.get_tensor_model_parallel_group()
            )
            param.copy_(cut(whole, param, group.rank(), group.size(), gated="linear_fc1" in name))


def cut(whole: torch.Tensor, param: torch.Tensor, rank: int, size: int, gated: bool) -> torch.Tensor:
    """A rank's part of a whole Megatron tensor, as the parameter's attributes say."""
    if not getattr(param, "tensor_model_parallel", False):
        return whole
    if gated:
        return torch.cat([half.chunk(size, 0)[rank] for half in whole.chunk(2, 0)])
    return whole.chunk(size, param.partition_dim)[rank]


def outer_tensor(name: str, chunk: Any, hf: Any, state: HfState) -> torch.Tensor:
    if name == "decoder.final_layernorm.weight":
        return state["model.norm.weight"]
    tied = name == "embedding.word_embeddings.weight" or hf.tie_word_embeddings
    rows = state["model.embed_tokens.weight" if tied else "lm_head.weight"]
    padding = torch.full((chunk.vocab_size - len(rows), rows.shape[1]), float("nan"), dtype=rows.dtype)
    return torch.cat([rows, padding])


def with_mtp(state: HfState, hf: Any) -> dict[str, torch.Tensor]:
    """A checkpoint with a layer more, which predicts the token after the next one."""
    last, new = (f"model.layers.{hf.num_hidden_layers - 1 + n}." for n in (0, 1))
    state = {**state, **{new + name.removeprefix(last): t + 1 for name, t in state.items() if name.startswith(last)}}
    width = hf.hidden_size
    shapes = {"enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,), "eh_proj": (width, 2 * width)}
    like = state["model.norm.weight"]
    return state | {f"{new}{name}.weight": torch.randn(shape).to(like) for name, shape in shapes.items()}


def mtp_tensor(name: str, number: int, hf: Any, state: HfState, layer: Any) -> torch.Tensor:
    """The whole Megatron tensor `name` of layer `number` of those that predict more tokens."""
    at = hf.num_hidden_layers + number
    child, _, inside = name.partition(".")
    if child in ("transformer_layer", "mtp_model_layer"):
        return layer_tensor(inside, at, hf, state, getattr(layer, child))
    kind = name.removesuffix(".weight").replace("final_layernorm", "shared_head.norm")
    return state[f"model.layers.{at}.{kind}.weight"]


def layer_tensor(name: str, number: int, hf: Any, state: HfState, layer: Any) -> torch.Tensor:
    """The whole Megatron tensor `name` of layer `number`."""
    at = f"model.layers.{number}."
    attention = at + "self_attn."
    if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        q, k, v = (state[f"{attention}{kind}_proj.{name.split('.')[-1]}"] for kind in "qkv")
        groups = hf.num_key_value_heads
        by_group = [t.reshape(groups, t.shape[0] // groups, *t.shape[1:]) for t in (q, k, v)]
        return torch.cat(by_group, dim=1).reshape(-1, *q.shape[1:])
    plain = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    }
    if hasattr(hf, "q_lora_rank"):
        plain["self_attention.q_layernorm.weight"] = "self_attn.q_a_layernorm.weight"
    if name in plain:
        return state[at + plain[name]]
    mixtral = hf.model_type == "mixtral"
    moe = at + ("block_sparse_moe" if mixtral else "mlp")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    if name == "mlp.router.weight":
        return state[f"{moe}.gate.weight"]
    if name == "mlp.linear_fc1.weight":
        return torch.cat([state[f"{at}mlp.gate_proj.weight"], state[f"{at}mlp.up_proj.weight"]])
    if name.startswith("mlp.shared_experts."):
        shared = moe + (".shared_expert." if hf.model_type == "qwen2_moe" else ".shared_experts.")
        if name.endswith("linear_fc1.weight"):
            return torch.cat([state[f"{shared}gate_proj.weight"], state[f"{shared}up_proj.weight"]])
        return state[f"{shared}down_proj.weight"]
    assert name.startswith("mlp.experts.local_experts."), name
    from megatron.core import parallel_state

    each = expert_count(hf) // parallel_state.get_expert_model_parallel_world_size()
    number = each * parallel_state.get_expert_model_parallel_rank() + int(name.split(".")[3])
    expert = f"{moe}.experts.{number}."
    if name.endswith("linear_fc1.weight"):
        return torch.cat([state[f"{expert}{gate}.weight"], state[f"{expert}{up}.weight"]])
    return state[f"{expert}{down}.weight"]


def logits(chunk: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Megatron's own forward of a model that is whole."""
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad(), on_cpu():
        return chunk(tokens, torch.arange(length)[None].expand_as(tokens), mask)
