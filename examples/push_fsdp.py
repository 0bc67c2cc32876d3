"""Push a model that trains under FSDP2 into a running vLLM server.

The server, in one terminal:

    weightsync serve Qwen/Qwen3-0.6B --gpu-memory-utilization 0.4

The trainer, in another, on as many GPUs as you like, or on none:

    torchrun --nproc-per-node 1 examples/push_fsdp.py --model Qwen/Qwen3-0.6B

On a GPU the two share it, because the transport is ipc. For a server on GPUs of its own use `--transport broadcast`. A
server on another host is started with `--host 0.0.0.0`, and the trainer with its address, `--engine http://...:8000`.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from weightsync import WeightSync, WeightSyncError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face model: its name, or its folder")
    parser.add_argument("--engine", default="http://localhost:8000")
    parser.add_argument("--transport", default="ipc", choices=("ipc", "broadcast"))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    # torchrun starts one process for each GPU. On CPUs the ranks talk over gloo.
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        logging.basicConfig(level=logging.INFO)  # one line for each push

    # FSDP2 keeps float32 shards and computes in bfloat16. Weights travel in the engine's dtype, bfloat16.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    # Make it once: the first push negotiates with the engine, and later ones use the same plan.
    with WeightSync(backend="fsdp", transport=options.transport, engine=options.engine) as sync:
        for step in range(options.steps):
            # Your training step on your rollouts goes here. This one uses random tokens.
            tokens = torch.randint(model.config.vocab_size, (2, 64), device=device)
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # Every rank calls this. When it returns, the server answers from these weights. When it raises, it raises
            # on every rank. The server then keeps the old weights, or stays paused until a push succeeds.
            try:
                report = sync.push(model)
            except WeightSyncError as error:
                raise SystemExit(f"step {step}: the push failed: {error}") from error
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.2f}, the engine serves version {report.version}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
