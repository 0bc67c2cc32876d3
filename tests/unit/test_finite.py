"""What is not finite is found, in any dtype and layout, and cleared in a KV cache."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.kernels import finite
from weightsync.kernels.finite import find_non_finite
from weightsync.kernels.runs import storage_of
from weightsync.vllm import kv_cache
from weightsync.vllm.kv_cache import begin_search, last_layers

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
BAD = [float("nan"), float("inf"), float("-inf")]


def with_value(dtype: torch.dtype, value: float, shape: tuple[int, ...] = (3, 70)) -> torch.Tensor:
    tensor = torch.linspace(-1, 1, 210, dtype=torch.float32).reshape(shape)
    tensor[1, 5] = value
    return tensor.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", BAD)
def test_one_bad_value_of_a_tensor_is_found(dtype: torch.dtype, value: float):
    bad = with_value(dtype, value)
    if dtype is torch.float8_e4m3fn:  # which has no infinity, and torch makes one its largest number
        bad = torch.where(bad.float().abs() > 400, torch.nan, bad.float()).to(dtype)
    assert find_non_finite([with_value(dtype, 0.5), bad]) == [1]


def test_strides_integers_and_empty_tensors():
    both = torch.stack([with_value(torch.bfloat16, 0.5), with_value(torch.bfloat16, float("nan"))], dim=-1)
    assert find_non_finite([both[..., 0], torch.full((9,), 2**62), torch.empty(0), both[..., 1], both.mT]) == [3, 4]
    assert find_non_finite([]) == []
    infinities = torch.tensor([float("inf"), float("-inf")])
    assert find_non_finite([infinities, nn.Parameter(infinities[:1])]) == [0, 1]


class NewTensors(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returns in memory of its own."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(each) for each in args if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and storage_of(result) not in given:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("value", [0.5, *BAD])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_a_tensor_is_copied_into_a_wider_dtype_in_parts(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(finite, "_PART_ELEMENTS", 64, raising=False)
    tensor = with_value(dtype, value)
    with NewTensors() as made:
        assert bool(finite.sum_of(tensor).isfinite()) == finite._is_finite(tensor) == (value == 0.5)
    assert 0 < made.largest <= 64
    assert find_non_finite([tensor, tensor.t()]) == ([] if value == 0.5 else [0, 1])


@pytest.mark.parametrize("search", [finite.sum_of, finite._is_finite])
def test_one_widened_part_is_in_memory_at_a_time(search: Any, monkeypatch: pytest.MonkeyPatch):
    alive: set[int] = set()
    most = 0
    widen = torch.Tensor.float

    def widened(part: torch.Tensor) -> torch.Tensor:
        nonlocal most
        made = widen(part)
        alive.add(id(made))
        most = max(most, len(alive))
        weakref.finalize(made, alive.discard, id(made))
        return made

    monkeypatch.setattr(finite, "_PART_ELEMENTS", 64)
    monkeypatch.setattr(torch.Tensor, "float", widened)
    search(torch.zeros(256).to(torch.float8_e5m2))
    assert most == 1


def test_a_sum_that_overflows_is_no_bad_value():
    assert find_non_finite([torch.full((4096,), 6e4, dtype=torch.float16), torch.full((99,), 3e38)]) == []


# ---------------------------------------------------------------------------------------------------------------
# A KV cache


class Layer(nn.Module):
    def __init__(self, cache: Any, shares: str | None = None) -> None:
        super().__init__()
        self.kv_cache = cache
        self.kv_sharing_target_layer_name = shares


def model_of(layers: dict[str, Any]) -> nn.Module:
    return nn.ModuleList(layer for layer in layers.values() if isinstance(layer, nn.Module))


def blocks(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(4, 2, 8, dtype=dtype)


def holds(layers: dict[str, Any]) -> dict[str, float]:
    """The largest value of each layer's first tensor; NaN where there is one."""
    found = {}
    for name, layer in layers.items():
        first = layer.kv_cache if isinstance(layer.kv_cache, torch.Tensor) else layer.kv_cache[0]
        found[name] = float(first.float().max())
    return found


def test_a_cache_is_cleared_where_the_last_layer_shows_nan():
    with torch.inference_mode():  # as vLLM makes it
        layers: dict[str, Any] = {f"model.layers.{i}.attn": Layer(blocks()) for i in range(12)}
    models = [model_of(layers)]
    layers["model.layers.0.mlp"] = nn.Linear(2, 2)  # not every layer has a cache
    assert not begin_search(layers, last_layers(layers, models))()
    assert set(holds({k: v for k, v in layers.items() if "attn" in k}).values()) == {1.0}
    with torch.inference_mode():
        layers["model.layers.11.attn"].kv_cache[2, 1, 3] = float("nan")
    assert begin_search(layers, last_layers(layers, models))()
    assert set(holds({k: v for k, v in layers.items() if "attn" in k}).values()) == {0.0}


@pytest.mark.parametrize("bad", ["model.layers.1.self_attn", "model.layers.1.encoder_attn", "drafter.layers.0.attn"])
def test_all_that_the_last_layers_cache_is_looked_at(bad: str):
    names = ["model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.1.encoder_attn"]
    own: dict[str, Any] = {name: Layer(blocks()) for name in names}
    drafter: dict[str, Any] = {"drafter.layers.0.attn": Layer([blocks()])}
    layers = own | drafter
    cache = layers[bad].kv_cache
    (cache if isinstance(cache, torch.Tensor) else cache[0])[0, 0, 0] = float("inf")
    assert begin_search(layers, last_layers(layers, [model_of(own), model_of(drafter)]))()
    assert set(holds(layers).values()) == {0.0}


def test_state_of_recurrent_layers_and_shared_memory_are_cleared():
    raw = torch.ones(512, dtype=torch.bfloat16)
    layers: dict[str, Any] = {
        "layers.0.attn": Layer(raw[:256].view(4, 64)),
        "layers.1.mixer": Layer((blocks(torch.float32), blocks())),
        "layers.2.attn": Layer(raw[256:].view(4, 64), shares="layers.0.attn"),  # it stores nothing
    }
    layers["layers.1.mixer"].kv_cache[1][0] = float("nan")
    assert begin_search(layers, last_layers(layers, [model_of(layers)]))()
    assert set(holds(layers).values()) == {0.0}
    assert not raw.any()


def test_attention_that_shares_memory_with_states_is_not_searched():
    """As vLLM lays out Qwen3-Next: a block has keys and values in bfloat16, or a state in float32."""
    raw = torch.full((64,), 1.0 + 2**-7 - 2**-16)  # 0x3f80ff80: its lower half is -inf as bfloat16
    layers: dict[str, Any] = {
        "layers.0.mixer": Layer([raw[:32].view(4, 8)]),
        "layers.1.attn": Layer(raw.view(torch.bfloat16).view(4, 32)),
    }
    assert not layers["layers.1.attn"].kv_cache.isfinite().all()
    assert not begin_search(layers, last_layers(layers, [model_of(layers)]))()
    assert raw.all()


@pytest.mark.parametrize(
    ("byte", "is_cleared"), [(0x01, False), (0x7B, False), (0xFB, False), (0x7F, True), (0xFF, True)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_cache_of_8_bits(dtype: torch.dtype, byte: int, is_cleared: bool):
    cache = torch.full((4, 8), byte, dtype=torch.uint8)
    layers: dict[str, Any] = {"layers.0.attn": Layer(cache.view(dtype))}
    assert begin_search(layers, last_layers(layers, [model_of(layers)]))() is is_cleared
    assert bool(cache.any()) is not is_cleared


@pytest.mark.parametrize("shape", [(2, 64, 4), (64, 2, 4), (4, 2, 64)])
def test_a_cache_of_8_bits_is_searched_in_parts(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_cache, "_AT_ONCE_BYTES", 32)
    layers: dict[str, Any] = {"layers.0.attn": Layer(torch.zeros(shape, dtype=torch.uint8))}
    clear = begin_search(layers, last_layers(layers, [model_of(layers)]))
    with NewTensors() as made:
        assert not clear()
    assert 0 < made.largest <= 32


def test_an_engine_without_a_cache():
    layers: dict[str, Any] = {"layers.0.attn": Layer(torch.empty(0)), "layers.1.attn": Layer(None)}
    assert not begin_search(layers, last_layers(layers, [model_of(layers)]))()
