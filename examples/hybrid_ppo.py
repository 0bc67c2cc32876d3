"""Train with PPO under one controller: actor, critic, reference and reward as roles of workers, vLLM for rollouts.

    python examples/hybrid_ppo.py                       # engines on the workers' places, a tiny model, on CPUs
    python examples/hybrid_ppo.py --placement split     # engines on places of their own
    python examples/hybrid_ppo.py --sync-every 0        # the control: nothing is pushed, nothing is learnt

`step` is the loop of the HybridFlow guide. Actor, critic, reference and reward are roles in the same processes. The
controller estimates advantages (GAE; Schulman et al., 2016). It lowers a reward by how much likelier the actor finds a
token than the reference does. The task is that of grpo.py: to count.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from hybrid_grpo import answer_logprobs, engine_options, pools_of, prompts_of, tiny_model
from tensordict import TensorDict
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from weightsync.hybrid import Dispatch, RolloutGroup, Worker, WorkerGroup, register, union

CLIP, VALUE_CLIP, DISCOUNT, LAMBDA, EPOCHS = 0.2, 0.5, 1.0, 0.95, 2


# --- Computation: models, and one step of each on a batch. The workers below add nothing but processes.


class CriticModel(nn.Module):
    """A transformer with one number for each token in place of logits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = AutoModel.from_pretrained(name, dtype=torch.float32)
        self.value = nn.Linear(self.trunk.config.hidden_size, 1)

    def forward(self, batch: TensorDict) -> torch.Tensor:
        """Return the value of the state before each token of the answers."""
        ids = torch.cat([batch["prompts"], batch["answers"]], dim=1)
        hidden = self.trunk(input_ids=ids).last_hidden_state[:, batch["prompts"].shape[1] - 1 : -1]
        return self.value(hidden).squeeze(-1)


def actor_model(name: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def actor_loss(model: nn.Module, batch: TensorDict) -> torch.Tensor:
    """Return the sum of PPO's clipped loss over the tokens of the answers."""
    ratio = (answer_logprobs(model, batch) - batch["logprobs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    return -(gain * batch["answer_mask"]).sum()


def critic_loss(model: nn.Module, batch: TensorDict) -> torch.Tensor:
    """Return the sum of the clipped squared error over the tokens of the answers."""
    values = model(batch)
    near = batch["values"] + (values - batch["values"]).clamp(-VALUE_CLIP, VALUE_CLIP)
    error = torch.maximum((values - batch["returns"]) ** 2, (near - batch["returns"]) ** 2)
    return (error * batch["answer_mask"]).sum() / 2


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


class Trained(Worker):
    """A model that is trained by DDP, with a loss that is the mean over the tokens of all ranks."""

    def train(self, model: nn.Module, lr: float) -> None:
        torch.set_num_threads(1)
        self.model = model.to(self.device)
        self.parallel = DistributedDataParallel(self.model) if self.world_size > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    def mean_step(self, loss: torch.Tensor, batch: TensorDict) -> TensorDict:
        """Take a step, and return this rank's part of the loss, as a column of one number for each row."""
        # DDP takes the mean of the ranks' gradients, so each counts as often as there are ranks.
        tokens = int(batch["tokens"][0])
        share = take_step(self.parallel, self.optimizer, loss * self.world_size / tokens) / self.world_size
        rows = batch.batch_size[0]
        return TensorDict({"loss": torch.full((rows,), share / rows, dtype=torch.float64)}, batch.batch_size)


class Actor(Trained):
    def init_model(self, name: str, lr: float) -> None:
        self.train(actor_model(name), lr)

    @register(Dispatch.DP_PADDED)
    def logprobs(self, batch: TensorDict) -> TensorDict:
        with torch.no_grad():
            found = answer_logprobs(self.model, batch.to(self.device)).cpu()
        return TensorDict({"logprobs": found}, batch.batch_size)

    @register(Dispatch.DP)
    def update(self, batch: TensorDict) -> TensorDict:
        batch = batch.to(self.device)
        return self.mean_step(actor_loss(self.parallel, batch), batch)


class Reference(Worker):
    """The policy before all training."""

    def init_model(self, name: str) -> None:
        self.model = actor_model(name).to(self.device).eval()

    @register(Dispatch.DP_PADDED)
    def logprobs(self, batch: TensorDict) -> TensorDict:
        with torch.no_grad():
            found = answer_logprobs(self.model, batch.to(self.device)).cpu()
        return TensorDict({"reference_logprobs": found}, batch.batch_size)


class Critic(Trained):
    def init_model(self, name: str, lr: float) -> None:
        self.train(CriticModel(name), lr)

    @register(Dispatch.DP_PADDED)
    def values(self, batch: TensorDict) -> TensorDict:
        with torch.no_grad():
            return TensorDict({"values": self.model(batch.to(self.device)).cpu()}, batch.batch_size)

    @register(Dispatch.DP)
    def update(self, batch: TensorDict) -> TensorDict:
        batch = batch.to(self.device)
        return self.mean_step(critic_loss(self.parallel, batch), batch)


class Reward(Worker):
    def init_model(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    @register(Dispatch.DP_PADDED)
    def score(self, batch: TensorDict) -> TensorDict:
        return score(batch, self.vocabulary)


def score(batch: TensorDict, vocabulary: int) -> TensorDict:
    """Return the reward of each token: 1 where it is one more than the token before."""
    before = torch.cat([batch["prompts"][:, -1:], batch["answers"][:, :-1]], dim=1)
    right = (batch["answers"] == (before + 1) % vocabulary) & batch["answer_mask"]
    return TensorDict({"scores": right.float()}, batch.batch_size)


# --- The algorithm: runs in this process alone


def advantages(batch: TensorDict, kl_coefficient: float) -> TensorDict:
    """Return advantages, returns and the number of tokens, by GAE over the rewards of tokens."""
    mask = batch["answer_mask"].float()
    reward = (batch["scores"] - kl_coefficient * (batch["logprobs"] - batch["reference_logprobs"])) * mask
    values = batch["values"] * mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = reward + DISCOUNT * following - values
    estimate = torch.zeros_like(delta)
    carried = torch.zeros_like(delta[:, 0])
    for at in reversed(range(delta.shape[1])):
        carried = estimate[:, at] = delta[:, at] + DISCOUNT * LAMBDA * carried * mask[:, at]
    own = estimate[mask.bool()]
    scaled = (estimate - own.mean()) / (own.std() + 1e-6) * mask
    tokens = torch.full((len(mask),), int(mask.sum()))
    return TensorDict({"advantages": scaled, "returns": estimate + values, "tokens": tokens}, batch.batch_size)


def step(
    batch: TensorDict, actor: Actor, reference: Reference, critic: Critic, reward: Reward, kl: float
) -> TensorDict:
    """Take one step of PPO on a batch of answers, by groups of workers or by workers alike.

    Return the batch with all columns, and the losses of the last epoch.
    """
    batch = union(batch, actor.logprobs(batch), reference.logprobs(batch), critic.values(batch), reward.score(batch))
    batch = union(batch, advantages(batch, kl))
    for _ in range(EPOCHS):
        actor_losses, critic_losses = actor.update(batch), critic.update(batch)
    losses = {"actor_loss": actor_losses["loss"], "critic_loss": critic_losses["loss"]}
    return union(batch, TensorDict(losses, batch.batch_size))


def main(arguments: list[str] | None = None) -> list[float]:
    options = parse(arguments)
    if not ray.is_initialized():
        cpus = None if torch.cuda.is_available() else options.workers + options.engines
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    found: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        name = options.model_name or tiny_model(Path(scratch) / "model")
        vocabulary = AutoConfig.from_pretrained(name).vocab_size
        pools = pools_of(options.placement, options.workers, options.engines)
        actor = WorkerGroup(pools["train"], Actor, name, options.lr)
        reference = WorkerGroup(actor, Reference, name)
        critic = WorkerGroup(actor, Critic, name, options.critic_lr)
        reward = WorkerGroup(actor, Reward, vocabulary)
        engine = RolloutGroup(pools["rollout"], model=name, tensor_parallel_size=options.tp, **engine_options(options))
        sampling = {"temperature": 1.0, "max_tokens": options.answer_length, "ignore_eos": True}
        with actor, engine, engine.follow(actor, progress=False) as sync:
            print(f"pushes go over {sync.transport}: {sync.reason}", flush=True)
            for number in range(options.training_steps):
                started = time.perf_counter()
                batch = engine.generate(prompts_of(number, vocabulary, options), **sampling)
                pushes = bool(options.sync_every) and (number + 1) % options.sync_every == 0
                sync.sleep(level=2 if pushes else 1)  # where the workers need the engines' memory
                batch = step(batch, actor, reference, critic, reward, options.kl_coefficient)
                if pushes:
                    sync.push()
                else:
                    engine.wake_up()
                found.append((batch["scores"].sum() / batch["answer_mask"].sum()).item())
                losses = f"actor {batch['actor_loss'].sum():+.3f} critic {batch['critic_loss'].sum():.3f}"
                took = time.perf_counter() - started
                bar = "#" * round(40 * found[-1])
                print(f"step {number:3}  reward {found[-1]:.3f} {bar:40}  {losses}  {took:.2f} s", flush=True)
        for pool in set(pools.values()):
            pool.close()
    if options.output is not None:
        options.output.write_text(json.dumps(found))
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-name", help="a Hugging Face model; by default a tiny one is made on the spot")
    parser.add_argument("--placement", choices=("colocated", "split"), default="colocated")
    parser.add_argument("--workers", type=int, default=2, help="ranks of the trainer")
    parser.add_argument("--engines", type=int, default=1, help="places of engines, where they have their own")
    parser.add_argument("--tp", type=int, default=1, help="places of one engine")
    parser.add_argument("--training-steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=256, help="in each step")
    parser.add_argument("--prompt-length", type=int, default=4)
    parser.add_argument("--answer-length", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--critic-lr", type=float, default=3e-3)
    parser.add_argument("--kl-coefficient", type=float, default=0.01)
    parser.add_argument("--sync-every", type=int, default=1, help="steps between pushes; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the mean reward of each step, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
    ray.shutdown()
