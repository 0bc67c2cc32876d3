"""The clients of vLLM, on real engines: an `LLM` in this process, an `AsyncLLM`, a server without the plug-in."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from engines import IN_CORE, has_plug_ins
from test_engines import http_engine, loop_in_a_thread, push_once

from weightsync import WeightSync
from weightsync.engines import HttpEngine, LoraAdapter, calls
from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.llm import LlmEngine
from weightsync.errors import EngineError, EngineUnreachableError, ManifestError, UnsupportedError
from weightsync.fleet import connect

pytestmark = pytest.mark.engine


TRIES = 10
"""A request of 240 tokens may be over before a busy machine has told the engine what is to happen in its middle."""


class Recorder:
    """A worker extension with the methods of weightsync's, that only records what reaches the worker."""

    def weightsync_init(self, init_info):
        self.weightsync_seen = [("init", init_info)]

    def weightsync_update(self, update_info):
        self.weightsync_seen.append(("update", update_info))
        if update_info.get("refuse"):
            raise ManifestError("one tensor is missing", missing=["q"])
        time.sleep(update_info.get("sleep_s", 0))

    def weightsync_report(self):
        return self.weightsync_seen

    def weightsync_adapter_modules(self, path, number):
        from weightsync.vllm.adapters import adapter_modules

        return adapter_modules(self, path, number)


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    """A tiny Qwen3 without weights, and the environment that vLLM needs on a small CPU machine."""
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]),
        **IN_CORE,
    }.items():
        monkeypatch.setenv(name, value)
    return str(tmp_path)


def save_adapter(folder: Path, name: str, number: int) -> LoraAdapter:
    """An adapter of the model in `model_dir`, in PEFT's files."""
    import torch
    from safetensors.torch import save_file

    path = folder / name
    path.mkdir()
    draw = torch.Generator().manual_seed(number)
    prefix = "base_model.model.model.layers.0.self_attn.o_proj"
    shapes = {f"{prefix}.lora_A.weight": (2, 128), f"{prefix}.lora_B.weight": (128, 2)}
    save_file(
        {key: torch.randn(shape, generator=draw) for key, shape in shapes.items()}, path / "adapter_model.safetensors"
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return LoraAdapter(name, number, str(path))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


ENGINE_ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "worker_extension_cls": f"{Recorder.__module__}.{Recorder.__qualname__}",
}


@pytest.mark.filterwarnings("ignore")
def test_a_vllm_that_never_ran_is_told_from_the_others(monkeypatch):
    from weightsync.vllm import compat

    assert compat.has_run()
    for version, has_run in (("0.34.0", False), ("0.20.2", True), ("0.19.1", False), ("1.0.dev3+g1", False)):
        monkeypatch.setattr(compat.vllm, "__version__", version)
        assert compat.has_run() == has_run


@pytest.mark.parametrize("given", [{}, {"uva": {"cpu_offload_gb": 1}}, {"prefetch": {"offload_group_size": 2}}])
@pytest.mark.parametrize("tables", [None, False, True])
def test_weights_on_the_host_are_found(given: dict[str, Any], tables: bool | None):
    from vllm.config.offload import OffloadConfig

    from weightsync.vllm import compat

    engrams = None if tables is None else SimpleNamespace(cpu_offload=tables)
    vllm_config: Any = SimpleNamespace(offload_config=OffloadConfig(**given), engram_config=engrams)
    assert compat.offloads_weights(vllm_config) == bool(given or tables)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_scales_of_a_cache_that_a_forward_computes_are_found(dtype: str):
    from weightsync.vllm import compat

    for cache, found in (({"calculate_kv_scales": True}, "fp8" in dtype), ({"calculate_kv_scales": False}, False)):
        vllm_config: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype, **cache))
        assert compat.computes_cache_scales(vllm_config) == found
    newer: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype))
    assert not compat.computes_cache_scales(newer)


def test_a_plug_in_refuses_a_vllm_that_has_no_place_for_it():
    from weightsync.vllm.engine import WeightSyncEngine

    for given in ((), ("model",)):  # by vLLM 0.20, and from 0.22 on
        with pytest.raises(UnsupportedError, match=r"before 0\.25.*worker_extension_cls"):
            WeightSyncEngine("config", "parallel_config", *given)


def test_a_real_llm_in_this_process(model_dir):
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = vllm.LLM(model_dir, **ENGINE_ARGUMENTS)
    try:
        (engine,) = connect(llm, 60.0)
        assert isinstance(engine, LlmEngine)
        assert engine.is_alive()
        assert engine.version() == "default"
        push_once(engine)
        assert llm.collective_rpc("weightsync_report") == [[("init", {"a": 1}), ("update", {"b": 2})]]
        assert engine.version() == "5"
        with pytest.raises(ManifestError) as raised:
            engine.update({"refuse": True})
        assert raised.value.missing == ["q"]
        sampling = vllm.SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    finally:
        del llm
        cleanup_dist_env_and_memory()


@pytest.mark.filterwarnings("ignore")
def test_an_llm_with_a_core_process_answers_from_no_cache_of_older_weights(model_dir, monkeypatch):
    import torch
    import transformers
    import vllm

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model_dir), dtype=torch.bfloat16
    )
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extension = "weightsync.vllm.extension.WeightSyncWorkerExtension"
    options = {**ENGINE_ARGUMENTS, "worker_extension_cls": extension, "kv_cache_memory_bytes": 1 << 24}
    llm = vllm.LLM(model_dir, **options)
    prompt = {"prompt_token_ids": [*range(3, 203)]}
    answers = vllm.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)

    def ask() -> tuple[list[float], int]:
        (output,) = llm.generate(prompt, answers, use_tqdm=False)
        (best,) = output.outputs
        chances = [entry[token].logprob for token, entry in zip(best.token_ids, best.logprobs, strict=True)]
        return chances, output.num_cached_tokens

    try:
        with WeightSync("fsdp", "ipc", llm, timeout_s=60.0) as sync:
            found = {}
            for scale in (1.0, 2.0, 1.0):
                model.load_state_dict({name: scale * tensor for name, tensor in weights.items()})
                sync.push(model)
                answer, cached = ask()
                assert (found.setdefault(scale, answer), cached) == (answer, 0)
                assert ask()[1] > 0
            assert found[1.0] != found[2.0]
            sync.close()  # the next push waits for each call's answer again, as the first one did
            model.load_state_dict({name: 2.0 * tensor for name, tensor in weights.items()})
            sync.push(model)
            assert ask() == (found[2.0], 0)
            model.load_state_dict(weights)
            sync.push(model)
            llm.llm_engine.add_request("under way", prompt, vllm.SamplingParams(max_tokens=40, detokenize=False))
            llm.llm_engine.step()
            model.load_state_dict({name: 2.0 * tensor for name, tensor in weights.items()})
            sync.push(model)
            llm.llm_engine.abort_request(["under way"])
            assert ask()[0] == found[2.0]
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_real_async_llm_with_a_request_in_flight(model_dir):
    import vllm
    from vllm.lora.request import LoRARequest

    seen: dict[str, list[int]] = {}
    ended: dict[str, str | None] = {}

    async def make() -> Any:
        return vllm.AsyncLLMEngine.from_engine_args(
            vllm.AsyncEngineArgs(model=model_dir, disable_log_stats=True, enable_lora=True, **ENGINE_ARGUMENTS)
        )

    async def generate(name: str, lora_request: Any) -> None:
        sampling = vllm.SamplingParams(max_tokens=240, ignore_eos=True, detokenize=False)
        async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling, name, lora_request=lora_request):
            seen[name] = output.outputs[0].token_ids
            ended[name] = output.outputs[0].finish_reason

    def in_flight(name: str, lora_request: Any = None) -> Any:
        request = asyncio.run_coroutine_threadsafe(generate(name, lora_request), loop)
        deadline = time.monotonic() + 30
        while not seen.get(name):
            assert time.monotonic() < deadline
            assert not request.done()
            time.sleep(0.005)
        return request

    def settled(name: str) -> int:
        """How many tokens have been seen, once no more come."""
        count = -1
        while count != len(seen[name]):
            count = len(seen[name])
            time.sleep(0.3)
        return count

    with loop_in_a_thread() as loop:
        others = multiprocessing.active_children()  # engines that other tests of this run keep
        llm = asyncio.run_coroutine_threadsafe(make(), loop).result(120)
        (core,) = [child for child in multiprocessing.active_children() if child not in others]
        try:
            (engine,) = connect(llm, 60.0)
            assert isinstance(engine, AsyncEngine)

            # Frozen in the middle, pushed to, and then finished to its last token.
            for number in range(TRIES):
                kept = f"kept {number}"
                request = in_flight(kept)
                engine.pause("keep")
                frozen = settled(kept)  # what had been computed is still on its way
                if frozen < 240:
                    break
                engine.resume()
            assert frozen < 240
            engine.init({"a": 1, "bytes": b"\x00\xff", "list": [1.5, None, True]})
            engine.start()
            engine.update({"b": 2})
            engine.finish("5")
            engine.reset_caches()
            assert settled(kept) == frozen
            assert engine.version() in ("5", None)  # None before vLLM 0.27
            engine.resume()
            request.result(60)
            assert (len(seen[kept]), ended[kept]) == (240, "length")
            (report,) = asyncio.run_coroutine_threadsafe(llm.collective_rpc("weightsync_report"), loop).result(60)
            assert report == [
                ["init", {"a": 1, "bytes": b"\x00\xff", "list": [1.5, None, True]}],
                ["update", {"b": 2}],
            ]

            # Aborted, and finished first.
            for number in range(TRIES):
                aborted = f"aborted {number}"
                request = in_flight(aborted)
                engine.pause("abort")
                request.result(60)
                engine.resume()
                if ended[aborted] == "abort":
                    break
            assert ended[aborted] == "abort"
            request = in_flight("waited")
            engine.pause("wait")
            request.result(60)
            assert (len(seen["waited"]), ended["waited"]) == (240, "length")
            engine.resume()

            # An adapter that is in use stays in use when another takes its place: there is room for one.
            one, other = (save_adapter(Path(model_dir), name, n) for n, name in enumerate(("one", "other"), start=1))
            engine.load_adapter(one)
            for number in range(TRIES):
                adapted = f"with an adapter {number}"
                request = in_flight(adapted, LoRARequest(*one))
                if in_use := engine.adapters_in_use():
                    break
            assert in_use == {"one"}
            engine.load_adapter(other)
            engine.unload_adapter(one)
            request.result(60)
            assert len(seen[adapted]) == 240
            assert engine.adapters_in_use() == set()
            engine.unload_adapter(one)
            assert not engine.has_adapter(one)

            with pytest.raises(EngineError, match="one tensor is missing"):
                engine.update({"refuse": True})
            with pytest.raises(EngineError, match="Invalid pause mode"):
                engine.pause("never")
            assert engine.is_alive()

            # Its process dies in the middle of a call.
            begin = time.monotonic()
            threading.Timer(0.5, core.kill).start()
            with pytest.raises(EngineUnreachableError, match="weightsync_update"):
                engine.update({"sleep_s": 50})
            assert time.monotonic() - begin < 20
            assert not engine.is_alive()
            with pytest.raises(EngineUnreachableError):
                engine.resume()
        finally:
            core.kill()
            core.join(10)
            loop.call_soon_threadsafe(llm.shutdown)


def complete(url: str, model: str, max_tokens: int) -> list[float]:
    """The log-probabilities of the tokens that `model` generates."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['VLLM_API_KEY']}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        found: list[float] = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
        return found


def change_adapters_of_a_server(engine: HttpEngine, url: str, folder: Path) -> None:
    one, other = (save_adapter(folder, name, n) for n, name in enumerate(("one", "other"), start=1))
    (base,) = engine._adapters()
    assert engine.max_lora_rank() == 8
    assert engine.adapters_in_use() == set()
    engine.load_adapter(one)
    assert complete(url, "one", 8) != complete(url, base, 8)
    # Its last request is over when it is no longer in use, and another in its place does not change that request.
    expected = complete(url, "one", 240)
    with ThreadPoolExecutor(1) as pool:
        requests = [pool.submit(complete, url, "one", 240) for _ in range(20)]  # one after the other
        wait_until(lambda: engine.adapters_in_use() == {"one"})
        begun = [request for request in requests if not request.cancel()]
        engine.load_adapter(other)
        engine.unload_adapter(one)
        assert engine.adapters_in_use() == {"one"} or begun[-1].done()
        assert all(request.result(60) == expected for request in begun)
    wait_until(lambda: engine.adapters_in_use() == set())
    with pytest.raises(urllib.error.HTTPError, match="404"):
        complete(url, "one", 1)
    with pytest.raises(EngineError, match="nowhere"):
        engine.load_adapter(LoraAdapter("nowhere", 3, str(folder / "nowhere")))
    assert complete(url, "other", 8)
    assert engine.has_adapter(other)


def push_by_the_extension(url: str) -> None:
    """As into a server whose vLLM has no plug-ins: other weights, and then those that it was started cold from."""
    cold = complete(url, "base", 8)
    trained = tiny_models.build("qwen3", "A")
    with WeightSync("fsdp", "ipc", url, timeout_s=60.0) as sync:
        tiny_models.fill(trained, "B")
        sync.push(trained)
        assert complete(url, "base", 8) != cold
        tiny_models.fill(trained, "A")
        assert sync.push(trained).version == 2
        assert complete(url, "base", 8) == cold


@contextmanager
def server_with_the_extension(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Iterator[str]:
    """Start a server of the weights "A" by vLLM's own command, and yield its address. End it afterwards."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "sk-of-this-test")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
    checkpoint = tiny_models.save(tiny_models.build("qwen3", "A"), folder / "A")  # dummy weights answer nothing
    command += [f"--model={checkpoint}", "--served-model-name=base", "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--max-model-len=256", *options]
    command += ["--worker-extension-cls=weightsync.vllm.extension.WeightSyncWorkerExtension"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://localhost:{port}"
        engine = http_engine(url)
        deadline = time.monotonic() + 400
        while not engine.is_alive():
            text = (folder / "log").read_text()
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.3)
        yield url
        assert engine.is_alive()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def test_a_real_server_without_the_plug_in(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    with server_with_the_extension(tmp_path, monkeypatch, "--enable-lora", "--max-lora-rank=8") as url:
        engine = http_engine(url, timeout_s=30.0)
        for mode in ("keep", "wait", "abort"):
            engine.pause(mode)
            engine.reset_caches()
            engine.resume()
        with pytest.raises(EngineError, match=r"sleep.*(400|500)"):
            engine.pause("never")
        assert engine.version() == "default"
        engine.set_version("6")
        assert engine.version() == "6"
        with pytest.raises(EngineError, match=r"no weightsync plug-in.*Weight transfer not configured"):
            engine.init({"a": 1})
        with monkeypatch.context() as older:
            older.setattr(calls, "PLUG_INS_SINCE", (99, 0))
            push_by_the_extension(url)
        with monkeypatch.context() as without:
            without.delenv("VLLM_API_KEY")
            with pytest.raises(EngineError, match="VLLM_API_KEY of this process is not set"):
                http_engine(url).call("GET", "/v1/models")
        change_adapters_of_a_server(engine, url, tmp_path)
    assert not engine.is_alive()
    with pytest.raises(EngineUnreachableError):
        engine.start()


def test_a_server_of_a_vllm_that_has_no_plug_ins(model_dir, tmp_path, monkeypatch):
    if has_plug_ins():
        pytest.skip("this vLLM has plug-ins, and the test above pushes by the worker extension")
    with server_with_the_extension(tmp_path, monkeypatch) as url:
        push_by_the_extension(url)
