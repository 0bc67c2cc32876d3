"""What a rank of a TRL trainer does in the tests: three steps of a tiny model, then answers of its engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tiny_models
import torch
from engines import NOT_COMPILED, PROMPTS, Answer, answer_of, note
from ranks import FORKSERVER
from torch.nn.functional import scaled_dot_product_attention

STEPS = 3
ZERO = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def preload() -> None:
    """Let ranks begin with all that they need imported, which takes longer than three steps. Not on GPUs, which no
    process may use before it forks."""
    if torch.cuda.is_available():
        return
    os.environ |= NOT_COMPILED | {"DS_ACCELERATOR": "cpu"}
    FORKSERVER.set_forkserver_preload(["pytest", "deepspeed", "peft", "vllm.v1.worker.cpu_worker", "trl_imports"])


def save(folder: Path, **sizes: int) -> Path:
    """Leave the checkpoint of a model of 251 words, and its tokenizer, in `folder`."""
    return tiny_models.save(build(**sizes), save_tokenizer(folder, 251))


def save_tokenizer(folder: Path, count: int) -> Path:
    """Leave a tokenizer of so many words in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, count)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)
    return folder


def build(weights: str = "A", **sizes: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = tiny_models.CONFIGS["qwen3"]()
    config.update(sizes)
    if "num_hidden_layers" in sizes:
        config.layer_types = ["full_attention"] * sizes["num_hidden_layers"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tiny_models.fill(model, weights)
    return model


def save_trained(trainer: Any, like: Path, folder: Path, merged: bool = True) -> None:
    """Leave what a trainer's model has become, whole and with its adapters merged unless not `merged`. Every rank calls
    this."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    model = trainer.accelerator.unwrap_model(trainer.model)
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "full_tensor"):
            state[name] = tensor.full_tensor().detach()
        elif hasattr(tensor, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([tensor]):
                state[name] = tensor.detach().clone()
        else:
            state[name] = tensor.detach()
    if trainer.accelerator.is_main_process:
        if isinstance(model, PeftModel) and merged:
            unset_hf_deepspeed_config()  # or ZeRO-3 partitions the next model too, which takes all ranks
            whole = AutoModelForCausalLM.from_pretrained(like, dtype=next(iter(state.values())).dtype)
            whole = get_peft_model(whole, LoraConfig(**LORA))
            whole.load_state_dict(state)
            whole.merge_and_unload().save_pretrained(folder)
        else:
            model.save_pretrained(folder, state_dict=state)
    torch.distributed.barrier()


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(word < "t2" for word in text.split())) for text in completions]


def place(rank: int, size: int, port: int) -> None:
    """Set what accelerate and vLLM's external launcher read, and what the engines of all tests have. Ranks on GPUs are
    left to meet over NCCL."""
    if torch.cuda.is_available():
        torch.distributed.destroy_process_group()
        torch.cuda.set_device(rank)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | NOT_COMPILED | {"VLLM_LOGGING_LEVEL": "ERROR"}


def shard_on_cpus() -> None:
    """Let accelerate shard a model over ranks on CPUs. It has FSDP and DeepSpeed for accelerators alone, so CPUs
    pass for some."""
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def arguments(checkpoint: Path, **options: Any) -> dict[str, Any]:
    """What all trainers are given, which train on a CPU and report nothing."""
    sharded = "fsdp" in options or "deepspeed" in options
    on_gpu = torch.cuda.is_available()
    if sharded and not on_gpu:
        shard_on_cpus()
    return {
        "output_dir": str(checkpoint.parent / "out"),
        "use_cpu": not sharded and not on_gpu,
        "bf16": False,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }


def make(method: str, checkpoint: Path, **options: Any) -> Any:
    """Return TRL's trainer of this method."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast

    lora = LoraConfig(**LORA) if options.pop("adapters", False) else None
    if method == "Distillation":
        given: dict[str, Any] = {"teacher_model": build("B")}
    else:
        options["num_generations"] = 4
        given = {"reward_funcs": reward}
    model = options.pop("model", str(checkpoint))
    if not isinstance(model, str):  # transformers would choose its tokenizer by the model's type, not by the file
        given["processing_class"] = PreTrainedTokenizerFast.from_pretrained(checkpoint, padding_side="left")
    options = arguments(checkpoint, use_vllm=True, max_completion_length=8, **options)
    return getattr(trl, f"{method}Trainer")(
        model=model,
        args=getattr(trl, f"{method}Config")(**options),
        train_dataset=Dataset.from_dict({"prompt": [f"t{3 + i} t{7 + i} t9" for i in range(32)]}),
        peft_config=lora,
        **given,
    )


def ask(llm: Any) -> Answer:
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=4, temperature=0, logprobs=5, ignore_eos=True, detokenize=False)
    return [answer_of(llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]) for prompt in PROMPTS]


def clear_shared_memory() -> None:
    """Unlink what engines of several ranks on CPUs leave, under one name for all that an external launcher starts."""
    for left in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
        left.unlink()


def start_engines(**changed: Any) -> None:
    """Change the options with which TRL starts an engine in this process."""
    from trl.generation import vllm_generation

    kind = vllm_generation.LLM
    vllm_generation.LLM = lambda **options: kind(**options | changed)


def colocate(rank: int, size: int, port: int, method: str, checkpoint: Path, options: dict[str, Any]) -> None:
    """Train with an engine of TRL's in each rank. Leave its answers and the trained model beside the checkpoint."""
    place(rank, size, port)
    start_engines(enable_sleep_mode=False)  # a CPU cannot give memory away, but the engine can be told to sleep
    trainer = make(method, checkpoint, vllm_mode="colocate", vllm_max_model_length=256, **options)
    llm = trainer.vllm_generation.llm

    def asked() -> Answer:
        llm.wake_up()  # after a push that is the cache alone
        return ask(llm)

    train(trainer, "ipc", checkpoint, asked)
    if "fsdp" in options or "deepspeed" in options:
        assert all(hasattr(each, "full_tensor") or hasattr(each, "ds_id") for each in trainer.model.parameters())


def serve(
    rank: int, size: int, port: int, method: str, checkpoint: Path, url: str, transport: str, options: dict[str, Any]
) -> None:
    """Train with a server, as `colocate`."""
    from weightsync.integrations.trl import no_communicator

    place(rank, size, port)
    with no_communicator():
        trainer = make(method, checkpoint, vllm_mode="server", vllm_server_base_url=url, **options)
    train(trainer, transport, checkpoint, lambda: [] if rank else ask_server(trainer.vllm_generation.vllm_client))


def fine_tune(rank: int, port: int, checkpoint: Path, options: dict[str, Any]) -> None:
    """Train without a method that generates. A callback pushes to an engine of the user's, which `options` start."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from vllm import LLM

    from weightsync import WeightSync
    from weightsync.integrations.trl import PushCallback

    place(rank, 1, port)
    llm = LLM(str(checkpoint), weight_transfer_config={"backend": "weightsync"}, **options)
    given = {"use_cpu": True, "bf16": False, "max_steps": STEPS, "learning_rate": 0.01, "report_to": []}
    config = SFTConfig(output_dir=str(checkpoint.parent / "out"), save_strategy="no", disable_tqdm=True, **given)
    texts = Dataset.from_dict({"text": [f"t{3 + i} t{7 + i} t9" for i in range(32)]})
    with WeightSync("fsdp", "ipc", llm) as sync:
        trainer = SFTTrainer(str(checkpoint), args=config, train_dataset=texts, callbacks=[PushCallback(sync, every=3)])
        trainer.train()
        assert sync.last_report is not None
        assert sync.last_report.version == 2
        note(ask(llm), checkpoint.parent / "pushed-0.json")
    trainer.model.save_pretrained(checkpoint.parent / "trained")


def asynchronous(rank: int, port: int, checkpoint: Path, url: str) -> None:
    """Train TRL's asynchronous trainer on samples that are no server's. Its attention and the name of its
    device are all that it wants of a GPU."""
    import numpy as np
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    from trl.generation.vllm_client import VLLMClient

    from weightsync import WeightSync
    from weightsync.integrations.trl import Transfer

    class Worker:
        """Has another sample whenever the trainer wants one."""

        model_version, made = 0, 0
        metrics_queue: Queue[Any] = Queue()

        @property
        def rollout_buffer(self) -> Any:
            return self

        def qsize(self) -> int:
            return 1

        def get(self, timeout: float) -> Any:
            self.made += 1
            ids = np.arange(self.made, self.made + 8)
            completed, logprobs = np.ones(8, dtype=np.int64), np.full(8, -5.0, dtype=np.float32)
            advantage = float(self.made % 2) - 0.5
            return RolloutSample([], [], ids, completed, logprobs, advantage, self.model_version, self.made, {})

        def start(self) -> None: ...

        def stop(self) -> None: ...

        def check_health(self, stale_after_s: float) -> None: ...

        def update_model_version(self, model_version: int) -> None:
            self.model_version = model_version

    place(rank, 1, port)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    config = AsyncGRPOConfig(
        **arguments(checkpoint, gradient_accumulation_steps=1, token_budget=32, vllm_server_base_url=url)
    )
    sync = WeightSync("stream", "ipc", url, ranks="alone")
    with mock.patch.object(torch.cuda, "get_device_name", return_value="a CPU"):
        trainer = AsyncGRPOTrainer(
            str(checkpoint),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["t3"] * 32}),
            reward_funcs=reward,
            rollout_worker=Worker(),
            weight_transfer=Transfer(sync),
        )
    trainer.train()
    assert sync.last_report is not None
    note(ask_server(VLLMClient(url)), checkpoint.parent / "pushed-0.json")
    save_trained(trainer, checkpoint, checkpoint.parent / "trained")


def attend(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """Compute what FlashAttention does for sequences behind each other, each of which ends with its queries."""
    attended = []
    for (a, b), (c, d) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        rows = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        out = scaled_dot_product_attention(*rows, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        attended.append(out.transpose(0, 1))
    return torch.cat(attended)


def train(trainer: Any, transport: str, checkpoint: Path, asked: Callable[[], Answer]) -> None:
    from weightsync.integrations.trl import attach

    rank, folder = torch.distributed.get_rank(), checkpoint.parent
    note(asked(), folder / f"untrained-{rank}.json")
    with attach(trainer, transport) as sync:
        trainer.train()
        assert sync.last_report is not None
        trained = sync.last_report.version
        assert any("weightsync/total_s" in logged for logged in trainer.state.log_history)
        trainer.vllm_generation.sync_weights()
        assert sync.last_report.version == trained + 1
        note(asked(), folder / f"pushed-{rank}.json")
        torch.distributed.barrier()  # none closes while another looks
    save_trained(trainer, checkpoint, folder / "trained", merged=transport != "lora")


def ask_server(client: Any) -> Answer:
    """Return what `ask` does of an engine that TRL calls over HTTP."""
    answers: Answer = []
    for prompt in PROMPTS:
        said = client.generate([prompt], max_tokens=4, temperature=0.0, logprobs=5, generation_kwargs=KEPT)
        (tokens,), (logprobs,), (ids,) = said["completion_ids"], said["logprobs"], said["logprob_token_ids"]
        answers.append((tokens, [dict(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]))
    return answers


KEPT = {"ignore_eos": True}
