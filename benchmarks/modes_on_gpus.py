"""The ways of docs/modes.md that are no copy of each version, on GPUs: is it right, and how long does a step wait?

    python benchmarks/modes_on_gpus.py single_copy             # 1 GPU: the trainer's parameters are the engine's
    python benchmarks/modes_on_gpus.py single_copy --tp 2      # 2 GPUs: two ranks, on the GPUs of the engine's workers
    python benchmarks/modes_on_gpus.py lora                    # 1 GPU: adapters of rank 16 on every linear layer
    python benchmarks/modes_on_gpus.py checkpoint              # 1 GPU: files in between
    python benchmarks/modes_on_gpus.py single_copy --shape tiny --quantization weightsync_plain    # without a GPU

Each starts an engine cold from a checkpoint of weights A, CUDA graphs on, and notes its answers. `single_copy` writes
B and A again, takes a step of SGD, saves what came of it, and compares with an engine that is started from that.
`lora` compares with the same adapter as PEFT saves it. `checkpoint` pushes B, then A. Answers are compared to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import push_on_gpus as shared
import torch
import torch.distributed as dist

from weightsync import CheckpointTransport, WeightSync, save

RANK, ALPHA = 16, 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def used_bytes() -> list[int]:
    """What nvidia-smi says of each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) << 20 for line in subprocess.check_output(command, text=True).split()]


def pushes(sync: WeightSync, model: torch.nn.Module, repeats: int) -> dict[str, Any]:
    """The reports of an untimed push and of these, and the medians in milliseconds."""
    reports = [json.loads(sync.push(model).to_json()) for _ in range(1 + repeats)]
    names = [name for name in reports[0] if name.endswith("_s")]
    medians = {f"{name[:-2]}_ms": statistics.median(r[name] for r in reports[1:]) * 1e3 for name in names}
    if not dist.is_initialized() or dist.get_rank() == 0:
        shared.say(f"first {reports[0]['total_s'] * 1e3:.1f} ms, then of {repeats}: {medians}")
    return {"first_ms": reports[0]["total_s"] * 1e3, "medians": medians, "reports": reports}


def tensor_parallel(model: torch.nn.Module, size: int, device: torch.device) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rows = {f"model.layers.*.{name}": ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
    rows |= {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    columns = {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, init_device_mesh(device.type, (size,)), {**rows, **columns, **ends})


def step(model: torch.nn.Module, sync: WeightSync, device: torch.device, sharded: bool) -> None:
    """A step of SGD, as large as changes the answers. Norms, which tensor parallel ranks hold whole, stay."""
    from torch.distributed.tensor import DTensor

    trained = [p for p in model.parameters() if isinstance(p, DTensor) or not sharded]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    tokens = torch.arange(64, device=device)[None] % 251
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=False)
    with sync.writing():
        optimizer.step()
    optimizer.zero_grad()


def single_copy(rank: int, args: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.tp > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
        os.environ.update(place, RANK=str(rank), WORLD_SIZE=str(args.tp))
        dist.init_process_group("nccl" if cuda else "gloo")
        for name in ("RANK", "WORLD_SIZE", *place):
            os.environ.pop(name, None)  # the engine has a group of its own
    llm = cold = None
    if rank == 0:
        llm = shared.start_engine(folder, args.tp, "weightsync", args)
        found["cold"] = cold = shared.answers(llm)
    model = shared.empty_model(args.shape)
    if args.tp > 1:
        shared.host_barrier(rank, args.tp)
        model = tensor_parallel(model, args.tp, device)
    trainer = shared.Trainer(model, device)
    warm = torch.zeros(1, device=device)  # CUDA's and NCCL's own memory is not what is asked for
    if args.tp > 1:
        dist.all_reduce(warm)
    before = used_bytes() if cuda else []
    with WeightSync("fsdp", "single_copy", llm, timeout_s=120) as sync:
        sync.attach(model)
        found["nbytes"] = sum(p.numel() * 2 for p in shared.empty_model(args.shape).parameters())
        if cuda:
            found["used_before"], found["used_after"] = before, used_bytes()
            found["allocated_by_trainer"] = torch.cuda.memory_allocated()
            if rank == 0:
                more = [(b - a) / 2**20 for a, b in zip(before, found["used_after"], strict=True)]
                shared.say(f"attached: nvidia-smi shows {more} MiB more, the trainer has allocated "
                           f"{found['allocated_by_trainer'] / 2**20:.1f} MiB")  # fmt: skip
        found["push"] = pushes(sync, model, args.num_iters)
        for seed, name in ((2, "B"), (1, "B, A")):
            with sync.writing():
                trainer.fill(seed)
            if llm is not None:
                found[name] = shared.compare(shared.answers(llm), cold)
                shared.say(f"after writing {name}, against the cold start: {found[name]}")
        if not args.train:
            if llm is not None:
                shared.stop(llm)
            return
        step(model, sync, device, args.tp > 1)
        found["step"] = json.loads(sync.last_report.to_json())
        trained = shared.answers(llm) if llm is not None else None
        saved = folder.parent / "trained"
        save(model, saved, config=shared.config(args.shape))
    if rank == 0:
        found["trained"] = shared.compare(trained, cold)
        shared.say(f"after a step of SGD, against the cold start: {found['trained']}")
        shared.stop(llm)
        del llm
        llm = shared.start_engine(saved, args.tp, None, args)
        found["trained, cold"] = shared.compare(trained, shared.answers(llm))
        shared.say(f"after a step of SGD, against a cold start from what was saved: {found['trained, cold']}")
        shared.stop(llm)


def lora(args: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    import peft
    from vllm.lora.request import LoRARequest

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    llm = shared.start_engine(folder, 1, "weightsync", args, enable_lora=True, max_lora_rank=RANK)

    trainer = shared.plain(args.shape, device)
    trainer.fill(1)
    wanted = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, bias="none")
    model = peft.get_peft_model(trainer.model, wanted)
    with torch.no_grad():
        for number, (name, param) in enumerate(model.named_parameters()):
            if "lora_" in name:
                param.copy_(shared.values(name, param.shape, number, device).to(param.dtype))
    base = shared.answers(llm)
    model.save_pretrained(folder.parent / "adapter")
    peft_own = LoRARequest("PEFT's own", 1_000_000, str(folder.parent / "adapter"))
    expected = shared.answers(llm, peft_own)
    # On GPUs vLLM's kernels for adapters may add in any order: then not even this is equal to the bit.
    found["PEFT's own, again"] = shared.compare(shared.answers(llm, peft_own), expected)
    llm.llm_engine.remove_lora(peft_own.lora_int_id)
    with WeightSync("fsdp", "lora", llm, timeout_s=120) as sync:
        found["push"] = pushes(sync, model, args.num_iters)
        pushed = shared.answers(llm, LoRARequest(*sync.adapter))
    found["PEFT's own"] = shared.compare(pushed, expected)
    found["base"] = shared.compare(pushed, base)
    for name in ("PEFT's own", "PEFT's own, again", "base"):
        shared.say(f"with the adapter, against {name}: {found[name]}")
    shared.stop(llm)


def checkpoint(args: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    llm = shared.start_engine(folder, 1, "weightsync", args)
    cold = shared.answers(llm)
    trainer = shared.plain(args.shape, device)
    transport = CheckpointTransport(folder.parent / "pushed", config=shared.config(args.shape), keep_last=1)
    with WeightSync("fsdp", transport, llm, timeout_s=300) as sync:
        for seed, name in ((2, "B"), (1, "B, A")):
            trainer.fill(seed)
            found[f"push of {name}"] = pushes(sync, trainer.model, args.num_iters)
            found[name] = shared.compare(shared.answers(llm), cold)
            shared.say(f"after {name}, against the cold start: {found[name]}")
    shared.stop(llm)


def run(rank: int, args: argparse.Namespace, folder: Path) -> None:
    found: dict[str, Any] = {"case": args.case, "shape": args.shape, "tp": args.tp, "torch": torch.__version__}
    if args.case == "single_copy":
        single_copy(rank, args, folder, found)
    else:
        (lora if args.case == "lora" else checkpoint)(args, folder, found)
    if rank == 0 and args.output_json:
        args.output_json.write_text(json.dumps(found))
    if args.tp > 1:
        shared.host_barrier(rank, args.tp)
        time.sleep(rank == 0)  # rank 0 holds the store that the others are still reading
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["single_copy", "lora", "checkpoint"])
    parser.add_argument("--tp", type=int, default=1, help="of the engine, and ranks of the trainer, for single_copy")
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-train", dest="train", action="store_false", help="no step of SGD, and no second engine")
    parser.add_argument("--output-json", type=Path)
    shared.add_engine_arguments(parser)
    args = parser.parse_args()
    if args.tp > 1 and args.case != "single_copy":
        parser.error("--tp is for single_copy")
    folder = shared.made_checkpoint(args)
    if args.tp == 1:
        run(0, args, folder)
    else:
        torch.multiprocessing.spawn(run, (args, folder), nprocs=args.tp)


if __name__ == "__main__":
    main()
