"""How the receiver loads what a kernel keeps in a form of its own: real engines that repack, and modules by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tiny_models
from engine_state import differing, state_of
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import UnsupportedError, WeightSync, WeightSyncError

pytest_plugins = ["engine_fixtures"]

# ---------------------------------------------------------------------------------------------------------------
# Real engines. These functions run in the engines' process.


def serve(engines: Engines, model: str, quantization: str) -> dict[str, Answer]:
    import repack_plugin  # noqa: F401  (it registers the quantisations)

    return engines.serve(model, quantization=quantization)


def connect(engines: Engines, model: str, transport: str, options: dict[str, Any]) -> None:
    engines.release()
    engines.model = tiny_models.build(model, "A")
    engines.sync = WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S, **options)


def push(engines: Engines, weights: str) -> dict[str, int]:
    tiny_models.fill(engines.model, weights)
    return engines.sync.push(engines.model).load_paths


def addresses(engines: Engines) -> dict[str, int]:
    """Where the tensors lie that the linear layers work with."""
    found = {}
    for name, module in engines.live_model().named_modules():
        if hasattr(module, "row_scale"):
            found[f"{name}.weight"] = module.weight.data_ptr()
            found[f"{name}.row_scale"] = module.row_scale.data_ptr()
    return found


# Seven linear layers fused to four, in each of two decoder layers.
LINEARS = 8


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("qwen2", "test-transposed"),
        ("qwen3-tied", "test-transposed"),
        ("qwen2", "test-in-closure"),
        ("qwen3-tied", "test-in-method"),
    ],
)
def test_pushed_equals_cold_where_the_engine_repacks(engines: Remote, model: str, quantization: str):
    cold = engines.call(serve, model, quantization, timeout_s=240)
    assert cold["A"] != cold["B"]
    before = engines.call(addresses)
    # With a bucket for each parameter q, k and v arrive apart from each other, as do gate and up.
    for transport, options in [("ipc", {"bucketer": "parameter"}), ("broadcast", {"max_bytes": 1 << 30})]:
        engines.call(connect, model, transport, options)
        for weights in ("B", "B", "A"):
            load_paths = engines.call(push, weights)
            assert load_paths["reload"] >= LINEARS
            assert_same(engines.call(Engines.ask), cold[weights], f"push of {weights} by {transport}")
    assert engines.call(addresses) == before
    assert len(before) == (2 * LINEARS if quantization == "test-transposed" else 0)


def serve_in_half(engines: Engines, model: str) -> dict[str, Answer]:
    return engines.serve(model, dtype="float16")


def copied_sinks(engines: Engines) -> int:
    kernels = [getattr(module, "impl", None) for module in engines.live_model().modules()]
    params = {param.data_ptr() for param in engines.live_model().parameters()}
    return sum(kernel is not None and kernel.sinks.data_ptr() not in params for kernel in kernels)


@pytest.mark.engine
def test_sinks_that_a_kernel_has_copied_are_the_pushed_ones(engines: Remote):
    cold = engines.call(serve_in_half, "gpt-oss", timeout_s=240)
    assert cold["A"] != cold["B"]
    engines.call(connect, "gpt-oss", "ipc", {})
    for weights in "BA":
        assert engines.call(copied_sinks) == 2, "one for each layer; a CPU's kernel takes no float16"
        engines.call(push, weights)
        assert_same(engines.call(Engines.ask), cold[weights], f"push of {weights}")


def keep_experts_for(engines: Engines, backend: str) -> None:
    """Let engines keep experts in the format of a GPU's kernels. They cannot run these kernels here."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    chosen = (UnquantizedMoeBackend[backend], TritonExperts)
    engines.patch = mock.patch.object(method, "select_unquantized_moe_backend", return_value=chosen)
    engines.patch.start()


def stop_patch(engines: Engines) -> None:
    engines.end()
    engines.patch.stop()


def start(engines: Engines, weights: str) -> None:
    engines.start(engines.checkpoint("qwen2-moe", weights), quantization="weightsync_plain")


def note_state(engines: Engines) -> None:
    engines.noted = state_of(engines.live_model())


def changed_state(engines: Engines) -> list[str]:
    return differing(state_of(engines.live_model()), engines.noted)


ROUTERS = 12
"""Linear layers of the six routers and shared experts' gates, which this quantisation does not keep plain."""


@pytest.mark.engine
@pytest.mark.parametrize("backend", ["TRITON", "FLASHINFER_CUTLASS"])
def test_experts_as_loaded_or_with_swapped_halves_are_loaded_in_place(engines: Remote, backend: str):
    engines.call(keep_experts_for, backend)
    engines.call(start, "B", timeout_s=240)
    engines.call(note_state)
    engines.call(start, "A", timeout_s=240)
    assert any("w13_weight" in name for name in engines.call(changed_state))
    for transport, options in [("ipc", {}), ("broadcast", {"max_bytes": 1 << 14})]:
        engines.call(connect, "qwen2-moe", transport, options)
        for weights in "AB":
            load_paths = engines.call(push, weights)
            assert load_paths["in_place"] >= 45
            assert load_paths["reload"] <= ROUTERS
        assert engines.call(changed_state) == []
    engines.call(stop_patch)


def change_kernels(engines: Engines, backend: str) -> None:
    """Let the running experts have another kernel from now on, as if the engine had chosen anew after a sleep."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    for module in engines.live_model().modules():
        if hasattr(method := getattr(module, "quant_method", None), "unquantized_backend"):
            method.unquantized_backend = UnquantizedMoeBackend[backend]


@pytest.mark.engine
def test_a_kernel_that_changes_between_two_pushes_is_refused_and_nothing_is_written(engines: Remote):
    engines.call(keep_experts_for, "TRITON")
    engines.call(start, "A", timeout_s=240)
    engines.call(note_state)
    engines.call(connect, "qwen2-moe", "ipc", {})
    engines.call(push, "A")
    engines.call(change_kernels, "FLASHINFER_CUTLASS")
    for _ in range(2):
        assert "6 kernels of the engine have changed" in str(engines.call(push_refused))
        assert engines.call(changed_state) == []
        assert engines.call(Engines.refusal) == ""
    engines.call(change_kernels, "TRITON")
    engines.call(push, "B")
    assert engines.call(changed_state) != []
    engines.call(stop_patch)


def push_and_fail(engines: Engines, weights: str, calls: int) -> WeightSyncError | None:
    from repack_plugin import Failing

    Failing.calls_to_failure = calls
    try:
        push(engines, weights)
    except WeightSyncError as error:
        return error
    finally:
        Failing.calls_to_failure = None
    return None


def version(engines: Engines) -> str:
    return engines.llm.get_weight_version()


def linears(engines: Engines) -> dict[str, bytes]:
    """What each linear layer works with."""
    return {
        name: module.weight.detach().float().numpy().tobytes() + module.row_scale.float().numpy().tobytes()
        for name, module in engines.live_model().named_modules()
        if hasattr(module, "row_scale")
    }


@pytest.mark.engine
def test_a_module_that_cannot_be_post_processed_is_put_back_and_the_next_push_heals(engines: Remote):
    cold = engines.call(serve, "qwen2", "test-failing", timeout_s=240)
    before = engines.call(addresses)
    old = engines.call(linears)
    engines.call(connect, "qwen2", "ipc", {})
    engines.call(push, "B")
    new = engines.call(linears)
    for nth in (1, 5, LINEARS):
        engines.call(push, "A")
        error = engines.call(push_and_fail, "B", nth)
        assert "this kernel does not like these weights" in str(error)
        assert error.who == "engine 0 worker tp=0 pp=0 dp=0"
        assert engines.call(version).startswith("POISONED")

        # Each layer is wholly new or wholly old, in its old place.
        assert engines.call(addresses) == before
        mixture = engines.call(linears)
        assert sum(mixture[name] == new[name] for name in new) == nth - 1
        assert sum(mixture[name] == old[name] for name in old) == LINEARS - nth + 1
        assert "does not answer: it is POISONED" in engines.call(Engines.refusal)

        assert engines.call(push, "B")["reload"] >= LINEARS
        assert_same(engines.call(Engines.ask), cold["B"], f"the push after failure {nth}")
        assert not engines.call(version).startswith("POISONED")


def push_refused(engines: Engines) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as raised:
        push(engines, "B")
    return raised.value


@pytest.mark.engine
def test_a_quantisation_that_does_not_say_it_reloads_is_refused_and_untouched(engines: Remote):
    cold = engines.call(serve, "qwen2", "test-undeclared", timeout_s=240)
    engines.call(connect, "qwen2", "ipc", {})
    assert "weightsync_reloads" in str(engines.call(push_refused))
    assert_same(engines.call(Engines.ask), cold["A"], "after the refusal")
    assert engines.call(version) == "default"
