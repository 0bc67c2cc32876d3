"""Train with GRPO: rollouts from a live vLLM, a policy that learns from reward alone, and a push after each step.

    python examples/grpo.py                                       # one process, a tiny model, on CPUs in two minutes
    torchrun --nproc-per-node 2 examples/grpo.py                  # the same under FSDP2
    python examples/grpo.py --sync-every 0                        # the control: nothing is pushed, nothing is learnt
    python examples/grpo.py --transport single_copy               # the model's parameters are the engine's
    python examples/grpo.py --transport lora --answer-length 1 --prompts 64 --lora-alpha 64
    python examples/grpo.py --model-name Qwen/Qwen3-0.6B --lr 1e-6 --group-size 8
    python examples/grpo.py --engine http://localhost:8000 --model-name Qwen/Qwen3-0.6B --lr 1e-6    # your own server

The task is to count. The reward of an answer is the share of its tokens that are `--stride` more than the token before.
The engine's policy is rewarded, so the reward can only rise if the pushes arrive. Adapters on random weights get stuck
in a short circle of tokens that is mostly right, unless each answer is a single token.

GRPO is group-relative policy optimisation (Shao et al., DeepSeekMath, 2024). The engine gives several answers to each
prompt. The advantage of an answer is its reward, less the mean of its group, over the group's standard deviation. The
loss is PPO's with a clipped ratio, relative to the probabilities that the engine sampled with. Metrics go to
--output-dir: metrics.csv, metrics.json, and reward.png where matplotlib is installed. `--resume` starts from the last
checkpoint there.

--weight-bridge-mode takes the names that other trainers use: `none` is --transport checkpoint, `shared_vllm` is
single_copy, `lora_only` is lora.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from weightsync import CheckpointTransport, SingleCopyTransport, WeightSync


@dataclass
class Rollouts:
    """Answers to prompts, `group_size` to each.

    prompts: token ids, one row for each answer.
    answers, logprobs: token ids and the log-probabilities that the engine sampled them with, (answers, length).
    rewards: one number for each answer.
    """

    prompts: torch.Tensor
    answers: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor


@dataclass
class Metrics:
    step: int
    reward: float
    loss: float
    kl: float
    rollout_s: float
    train_s: float
    push_s: float  # what a push adds to a step; with single_copy, what `writing()` adds


# --- The engine's side: rollouts


class OwnEngine:
    """An `LLM` of this process."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        from vllm import LLM

        on_gpu = torch.cuda.is_available()
        more: dict[str, Any] = {"gpu_memory_utilization": 0.4} if on_gpu else {"kv_cache_memory_bytes": 1 << 28}
        if options.transport == "single_copy" and not on_gpu:
            more["quantization"] = "weightsync_plain"  # packed weights cannot be shared
        if options.transport == "lora":
            more |= {"enable_lora": True, "max_lora_rank": max(options.lora_r, 8)}
        self.address: Any = LLM(
            model,
            dtype=options.dtype,
            skip_tokenizer_init=True,
            max_model_len=options.prompt_length + options.answer_length + 1,
            max_num_seqs=256,
            enforce_eager=not on_gpu,
            disable_log_stats=True,
            seed=options.seed,
            weight_transfer_config={"backend": "weightsync"},
            **more,
        )

    def sample(self, prompts: list[list[int]], options: argparse.Namespace, adapter: Any) -> tuple[Any, Any]:
        """Return the tokens of `group_size` answers to each prompt, and the log-probability of each token."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(
            n=options.group_size, temperature=1.0, max_tokens=options.answer_length, ignore_eos=True, logprobs=0,
            detokenize=False,
        )  # fmt: skip
        request = LoRARequest(adapter.name, adapter.id, adapter.path) if adapter is not None else None
        inputs = [{"prompt_token_ids": row} for row in prompts]
        outputs = self.address.generate(inputs, sampling, use_tqdm=False, lora_request=request)
        answers = [one for output in outputs for one in output.outputs]
        logprobs = [[at[t].logprob for t, at in zip(one.token_ids, one.logprobs, strict=True)] for one in answers]
        return [list(one.token_ids) for one in answers], logprobs


class ServedEngine:
    """A server, such as `weightsync serve MODEL` runs."""

    def __init__(self, url: str) -> None:
        self.address: Any = url
        with urlopen(f"{url}/v1/models") as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def sample(self, prompts: list[list[int]], options: argparse.Namespace, adapter: Any) -> tuple[Any, Any]:
        """Do as `OwnEngine.sample` does."""
        body = {
            "model": self.model if adapter is None else adapter.name, "prompt": prompts, "n": options.group_size,
            "temperature": 1.0, "max_tokens": options.answer_length, "ignore_eos": True, "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        request = Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request) as answer:
            found = [choice["logprobs"] for choice in json.load(answer)["choices"]]
        tokens = [[int(token.removeprefix("token_id:")) for token in one["tokens"]] for one in found]
        return tokens, [one["token_logprobs"] for one in found]


def roll_out(
    engine: OwnEngine | ServedEngine, adapter: Any, prompts: torch.Tensor, vocabulary: int, options: argparse.Namespace
) -> Rollouts:
    """Return the engine's answers with their rewards."""
    answers, logprobs = engine.sample(prompts.tolist(), options, adapter)
    tokens = torch.tensor(answers)
    repeated = prompts.repeat_interleave(options.group_size, 0)
    before = torch.cat([repeated[:, -1:], tokens[:, :-1]], dim=1)
    rewards = (tokens == (before + options.stride) % vocabulary).float().mean(dim=1)
    return Rollouts(repeated, tokens, torch.tensor(logprobs), rewards)


# --- The trainer's side: GRPO


def advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return each answer's reward relative to its group's, in units of the group's standard deviation."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def answer_logprobs(model: nn.Module, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token of the answers: (answers, length)."""
    logits = model(input_ids=torch.cat([prompts, answers], dim=1)).logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


def train(
    model: nn.Module,
    reference: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    options: argparse.Namespace,
    device: torch.device,
    writing: Callable[[], AbstractContextManager[None]],
) -> tuple[float, float]:
    """Take one optimizer step on this rank's rollouts, in micro-batches. Collective.

    Returns the loss and the KL term. The optimizer writes the weights inside of `writing()`.
    """
    weights = advantages(rollouts.rewards, options.group_size)
    count, losses, divergences = len(weights), [], []
    optimizer.zero_grad()
    for start in range(0, count, options.batch_size):
        part = slice(start, start + options.batch_size)
        prompts, answers, sampled = (
            t[part].to(device) for t in (rollouts.prompts, rollouts.answers, rollouts.logprobs)
        )
        own = answer_logprobs(model, prompts, answers)
        advantage = weights[part, None].to(device)
        ratio = (own - sampled).exp()
        clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        divergence = torch.zeros((), device=device)
        if reference is not None:
            with torch.no_grad():
                theirs = answer_logprobs(reference, prompts, answers)
            divergence = ((theirs - own).exp() - (theirs - own) - 1).mean()
        share = len(answers) / count
        ((loss + options.kl_coefficient * divergence) * share).backward()
        losses.append(loss.item() * share)
        divergences.append(divergence.item() * share)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with writing():
        optimizer.step()
    return sum(losses), sum(divergences)


# --- Setting up


def tiny_model(folder: Path) -> str:
    """Save a Qwen3 with two layers and random weights, small enough to learn on a CPU. Return its folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def build(name: str, device: torch.device, shard: bool, lora_r: int = 0, lora_alpha: int = 0) -> nn.Module:
    """Return the policy in float32: with adapters if `lora_r`, under FSDP2 if `shard`."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    if lora_r:
        from peft import LoraConfig, get_peft_model

        # Every linear layer, the output layer too: with random weights there, no answer could become likely.
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        tied = model.config.tie_word_embeddings
        targets = sorted(linear - {"lm_head"} if tied else linear)
        model = get_peft_model(model, LoraConfig(r=lora_r, lora_alpha=lora_alpha, target_modules=targets))
    if shard:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mp_policy=precision)
        fully_shard(model, mp_policy=precision)
    return model


def build_on_meta(name: str, dtype: str) -> nn.Module:
    """Return the policy without memory, for `WeightSync.attach`."""
    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model


def prompts_of(step: int, vocabulary: int, options: argparse.Namespace) -> torch.Tensor:
    """Return the prompts of a step, the same in a run that is resumed."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    return torch.randint(vocabulary, (options.prompts, options.prompt_length), generator=generator)


def shared(rollouts: Rollouts | None, device: torch.device, options: argparse.Namespace) -> Rollouts:
    """Return this rank's part of rank 0's rollouts. Collective."""
    answers, size = options.prompts * options.group_size, dist.get_world_size()
    if rollouts is None:
        tokens = torch.empty(answers, options.prompt_length + options.answer_length, dtype=torch.long)
        numbers = torch.empty(answers, options.answer_length + 1)
    else:
        tokens = torch.cat([rollouts.prompts, rollouts.answers], dim=1)
        numbers = torch.cat([rollouts.logprobs, rollouts.rewards[:, None]], dim=1)
    tokens, numbers = tokens.to(device), numbers.to(device)
    dist.broadcast(tokens, src=0)
    dist.broadcast(numbers, src=0)
    tokens, numbers = tokens.chunk(size)[dist.get_rank()], numbers.chunk(size)[dist.get_rank()]
    return Rollouts(*tokens.split([options.prompt_length, options.answer_length], 1), numbers[:, :-1], numbers[:, -1])


class Log:
    """The run's metrics.csv, metrics.json and plot."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "metrics.json"
        self.rows: list[dict[str, Any]] = json.loads(known.read_text()) if resume and known.exists() else []

    def add(self, metrics: Metrics) -> None:
        self.rows = [row for row in self.rows if row["step"] < metrics.step] + [asdict(metrics)]
        (self.folder / "metrics.json").write_text(json.dumps(self.rows, indent=1))
        with open(self.folder / "metrics.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)

    def plot(self, title: str) -> Path | None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return None
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="mean reward of the engine's answers", ylim=(0, 1), title=title)
        axes.plot([row["step"] for row in self.rows], [row["reward"] for row in self.rows])
        axes.grid(alpha=0.3)
        figure.savefig(self.folder / "reward.png", dpi=150)
        return self.folder / "reward.png"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-name", help="a Hugging Face model; by default a tiny one is made on the spot")
    parser.add_argument("--transport", choices=("ipc", "broadcast", "checkpoint", "single_copy", "lora"))
    parser.add_argument("--weight-bridge-mode", choices=tuple(MODES), help="another name for some transports")
    parser.add_argument("--engine", metavar="URL", help="a running server; by default a vLLM is started here")
    parser.add_argument("--vllm-port", type=int, help="the same, for one on this host")
    parser.add_argument("--vllm-config-path", type=Path, help="single_copy: the server's vllm_bridge_config.json")
    parser.add_argument("--dtype", default="bfloat16", help="the engine's; with single_copy the trainer's too")
    parser.add_argument("--lora-r", type=int, default=16, help="lora: the adapters' rank")
    parser.add_argument("--lora-alpha", type=int, default=32, help="lora: their scale, times the rank")
    parser.add_argument("--training-steps", type=int, default=45)
    parser.add_argument("--prompts", type=int, default=16, help="in each step")
    parser.add_argument("--group-size", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--batch-size", type=int, default=256, help="answers in a micro-batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.2, help="how far the ratio may be from 1")
    parser.add_argument("--kl-coefficient", type=float, default=0.0, help="0: no reference model")
    parser.add_argument("--stride", type=int, default=1, help="how much each token is to be more than the one before")
    parser.add_argument("--prompt-length", type=int, default=4)
    parser.add_argument("--answer-length", type=int, default=8)
    parser.add_argument("--sync-every", type=int, default=1, help="steps between pushes; 0: never")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in --output-dir")
    parser.add_argument("--output-dir", type=Path, default=Path("grpo-output"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    named = MODES.get(options.weight_bridge_mode)
    if named and options.transport not in (None, named):
        parser.error(f"--weight-bridge-mode {options.weight_bridge_mode} is --transport {named}")
    options.transport = options.transport or named or "ipc"
    if options.vllm_port is not None:
        options.engine = f"http://127.0.0.1:{options.vllm_port}"
    if options.transport == "single_copy" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("this example shares memory with an engine of one worker: run it in one process")
    if options.transport == "single_copy" and options.sync_every != 1:
        parser.error("with single_copy every step is in the engine at once: leave --sync-every out")
    if options.prompts % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error("--prompts must be a multiple of the number of ranks: a group stays together")
    return options


MODES = {"none": "checkpoint", "shared_vllm": "single_copy", "lora_only": "lora"}


def main() -> None:
    options = parse()
    on_gpu = torch.cuda.is_available()
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as scratch:
        # Made before there is a process group: in one, `save_pretrained` would write on rank 0 alone.
        name = options.model_name or tiny_model(Path(scratch) / "model")
        if size > 1:
            dist.init_process_group("nccl" if on_gpu else "gloo")
        run(options, name, device, rank, size)
    if size > 1:
        dist.destroy_process_group()


def run(options: argparse.Namespace, name: str, device: torch.device, rank: int, size: int) -> None:
    engine = None
    if rank == 0:
        of_torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
        launched = {key: os.environ.pop(key) for key in of_torchrun if key in os.environ}
        engine = ServedEngine(options.engine) if options.engine else OwnEngine(name, options)  # it has ranks of its own
        os.environ.update(launched)
    transport: Any = options.transport
    if transport == "checkpoint":  # each push also leaves a checkpoint that vLLM and transformers load
        transport = CheckpointTransport(options.output_dir / "weights", config=AutoConfig.from_pretrained(name))
    if transport == "single_copy":
        transport = SingleCopyTransport(options.vllm_config_path)
    with WeightSync("fsdp", transport, engine.address if engine is not None else None, progress=False) as sync:
        if options.transport == "single_copy":
            model = build_on_meta(name, options.dtype)
            sync.attach(model)
        else:
            torch.manual_seed(options.seed)  # adapters begin with random numbers
            rank_of_adapters = options.lora_r if options.transport == "lora" else 0
            model = build(name, device, size > 1, rank_of_adapters, options.lora_alpha)
        train_and_push(options, name, model, device, rank, size, engine, sync)


def train_and_push(
    options: argparse.Namespace,
    name: str,
    model: nn.Module,
    device: torch.device,
    rank: int,
    size: int,
    engine: OwnEngine | ServedEngine | None,
    sync: WeightSync,
) -> None:
    reference = build(name, device, shard=False).eval() if options.kl_coefficient else None
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
    shared_memory = options.transport == "single_copy"
    writing = sync.writing if shared_memory else nullcontext
    saved, first = options.output_dir / "checkpoint", 0
    if options.resume:
        with writing():
            first = load(model, optimizer, saved)
        if options.sync_every and not shared_memory:
            sync.push(model)  # the engine was started from the weights before all training
    vocabulary = int(model.config.vocab_size)
    log = Log(options.output_dir, options.resume) if rank == 0 else None
    for step in range(first, options.training_steps):
        started = time.perf_counter()
        found = None
        if engine is not None:
            prompts = prompts_of(step, vocabulary, options)
            found = roll_out(engine, sync.adapter, prompts, vocabulary, options)
        rollouts = found if found is not None and size == 1 else shared(found, device, options)
        rolled = time.perf_counter()
        loss, kl = train(model, reference, optimizer, rollouts, options, device, writing)
        report = sync.last_report if shared_memory else None
        if not shared_memory and options.sync_every and (step + 1) % options.sync_every == 0:
            report = sync.push(model)
        ended = time.perf_counter()
        push_s = report.total_s if report is not None else 0.0
        if log is not None and found is not None:
            reward = found.rewards.mean().item()
            log.add(Metrics(step, reward, loss, kl, rolled - started, ended - rolled - push_s, push_s))
            print(
                f"step {step:4}  reward {reward:.3f} {'#' * round(40 * reward):40}  push {push_s * 1e3:.0f} ms",
                flush=True,
            )
        if options.save_every and (step + 1) % options.save_every == 0:
            save(model, optimizer, step + 1, saved)
    if log is not None:
        what = f"{options.transport}, a push every {options.sync_every} steps" if options.sync_every else "never pushed"
        plot = log.plot(f"GRPO over {what}")
        print(f"metrics in {options.output_dir}" + (f", plot in {plot}" if plot else ""))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Write a checkpoint. Collective: every rank writes what it holds."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": torch.tensor(step)}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load the last checkpoint, and return the next step. Collective."""
    weights, states = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": states, "step": torch.tensor(0)}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return int(found["step"])


if __name__ == "__main__":
    main()
