"""A rank that has its engine in its own process, an `LLM` or an `AsyncLLM`, whose core is a process beside it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import tiny_models
from engines import PROMPTS, Remote, answer_of
from looks import KNOWN, UNSEEN, Look
from servers import children
from trainer import Rank

from weightsync.control.wire import POISONED

OWN = ("LLM", "AsyncLLM")
_START_S = 240.0
_ASK_S = 30.0


class RankWithEngine(Rank):
    """Lives in a process of its own, alone."""

    def __init__(self, client: str, checkpoint: Path) -> None:
        super().__init__(0, 1, checkpoint)
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        import vllm

        self._vllm = vllm
        options: dict[str, Any] = {
            "model": str(checkpoint),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 64 * 2**20,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": "weightsync"},
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        if client == "LLM":
            self._engine = vllm.LLM(**options)
        else:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
            self._engine = self._on_loop(self._make(options), _START_S)

    def connect(self, client: str, transport: str, engine: Any, timeout_s: float, folder: Path) -> None:
        super().connect(client, transport, self._engine, timeout_s, folder)

    def version(self) -> str:
        if self._loop is None:
            return str(self._engine.get_weight_version())
        return str(self._on_loop(self._engine.get_weight_version(), _ASK_S))

    def ask(self) -> Any:
        sampling = self._vllm.SamplingParams(max_tokens=4, temperature=0, logprobs=5, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        if self._loop is None:
            return [answer_of(self._engine.generate([each], sampling, use_tqdm=False)[0]) for each in prompts]
        return [answer_of(self._on_loop(self._last(each, sampling), _ASK_S)) for each in prompts]

    async def _make(self, options: dict[str, Any]) -> Any:
        return self._vllm.AsyncLLMEngine.from_engine_args(self._vllm.AsyncEngineArgs(**options))

    async def _last(self, prompt: Any, sampling: Any) -> Any:
        async for output in self._engine.generate(prompt, sampling, os.urandom(8).hex()):
            last = output
        return last

    def _on_loop(self, coroutine: Any, timeout_s: float) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


class OwnEngineSide:
    """What the driver knows of such an engine. What it answers at first is what a cold one answers."""

    victims = ("core",)
    address = None

    def __init__(self, folder: Path, client: str) -> None:
        self._client = client
        self._checkpoint = tiny_models.save(tiny_models.build("qwen3", "A"), folder / "A")
        self.answers: dict[str, Any] = {}
        self.trainer: Remote | None = None
        self.weights, self.version = "", 0
        self.start()

    def start(self) -> None:
        self.close()
        self.trainer = Remote(RankWithEngine, self._client, self._checkpoint)
        self.weights, self.version = "A", 0
        cold = self.trainer.call(RankWithEngine.ask, timeout_s=_START_S)
        assert self.answers.setdefault("A", cold) == cold

    def pids(self) -> dict[str, int]:
        assert self.trainer is not None
        found = children(self.trainer._process.pid)
        cores = [each for each in found if b"EngineCore" in Path(f"/proc/{each}/cmdline").read_bytes()]
        return dict(zip(self.victims, cores, strict=False))

    def unknown(self) -> list[str]:
        return [weights for weights in KNOWN if weights not in self.answers]

    def learn(self, weights: str) -> None:
        if weights not in self.answers:
            assert self.trainer is not None
            self.answers[weights] = self.trainer.call(RankWithEngine.ask)

    def look(self) -> Look | None:
        """Ask nothing of an engine that is POISONED: it would end. An `LLM` cannot be paused, and is guarded alone."""
        assert self.trainer is not None
        try:
            version = self.trainer.call(RankWithEngine.version, timeout_s=60)
            if version.startswith(POISONED):
                return Look(UNSEEN, True, True, version)
            found = self.trainer.call(RankWithEngine.ask, timeout_s=120)
        except Exception:
            return None
        return Look(next((each for each, answer in self.answers.items() if answer == found), ""), False, False, version)

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer._process.kill()
            self.trainer._process.join(10)
            self.trainer = None
