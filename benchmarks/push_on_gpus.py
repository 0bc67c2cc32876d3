"""Push an 8B-shaped model into a live vLLM on GPUs: is it right, and how long does it take beside vLLM's own engines?

    python benchmarks/push_on_gpus.py ipc            # 1 GPU: plain module -> engine on the same GPU
    python benchmarks/push_on_gpus.py fsdp           # 2 GPUs: FSDP2 x2 -> TP=2 on the same GPUs
    python benchmarks/push_on_gpus.py broadcast      # 2 GPUs: plain module on GPU 0 -> engine on GPU 1
    python benchmarks/push_on_gpus.py zero3          # 2 GPUs: DeepSpeed ZeRO-3 x2 -> TP=2 on the same GPUs
    python benchmarks/push_on_gpus.py megatron       # 2 GPUs: Megatron-core TP=2 -> TP=2 on the same GPUs
    python benchmarks/push_on_gpus.py broadcast --engines 3    # 4 GPUs: plain module -> an engine on each of 3 others
    python benchmarks/push_on_gpus.py fsdp-broadcast        # 4 GPUs: FSDP2 x2 -> TP=2 on two other GPUs
    python benchmarks/push_on_gpus.py megatron-broadcast    # 3 GPUs: Megatron-core TP=2 -> engine on another GPU;
                                                            # with 2 GPUs, the engine shares that of trainer rank 1
    python benchmarks/push_on_gpus.py ipc --shape tiny      # a small model, also without a GPU
    python benchmarks/push_on_gpus.py ipc --quantization fp8_per_channel    # the engine quantises

Each case starts an engine cold from a checkpoint of weights A (CUDA graphs on) and notes its token ids and
log-probabilities. Then it pushes A (timed), B and A again from the trainer: the answers must be those of the cold
start after A, and others after B. `--second-engine` also compares with a second engine, started cold in a process of
its own. At last the same weights go through vLLM's own transfer engine. Weights are random, made from each tensor's
name, so that every process makes the same ones.

Memory is what torch's allocator in an engine worker peaks at during the timed pushes after the first, above what it
held before them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the workers are asked for their memory

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 9, 3], list(range(20, 60)), [100, 101, 7, 3, 55, 2]]
NATIVE_BACKEND = {"ipc": "ipc", "fsdp": "ipc", "broadcast": "nccl"}
BACKEND = {"zero3": "deepspeed", "megatron": "megatron", "megatron-broadcast": "megatron"}
ON_ENGINES_GPUS = ("fsdp", "zero3", "megatron")
APART = ("fsdp-broadcast", "megatron-broadcast")
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
SHAPES["0.5B"] = SHAPES["8B"] | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHAPES["small"] = SHAPES["tiny"] | {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
SHAPES["tiny-moe"] = SHAPES["tiny"] | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def config(shape: str) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    kind, name = (Qwen3MoeConfig, "Qwen3Moe") if "num_experts" in SHAPES[shape] else (Qwen3Config, "Qwen3")
    return kind(
        **SHAPES[shape], max_position_embeddings=4096, rope_theta=1_000_000, tie_word_embeddings=False,
        torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, architectures=[f"{name}ForCausalLM"],
    )  # fmt: skip


def empty_model(shape: str, dtype: str = "bfloat16") -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(shape), dtype=getattr(torch, dtype))


def values(name: str, shape: torch.Size, seed: int, device: torch.device) -> torch.Tensor:
    """The weights of one tensor: the same in every process that asks."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return (1 + 0.1 * noise if len(shape) == 1 else 0.04 * noise).to(torch.bfloat16)


class Trainer:
    """What holds the weights: `pushed` is what `push` is given, `fill(seed)` overwrites them."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model = self.pushed = model
        self.device = device

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        # A CPU draws other numbers than a GPU.
        draws = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
        for name, param in self.model.named_parameters():
            full = values(name, param.shape, seed, draws)
            if isinstance(param, DTensor):
                param.to_local().copy_(
                    distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None).to_local()
                )
            else:
                param.copy_(full)


def plain(shape: str, device: torch.device, dtype: str = "bfloat16") -> Trainer:
    model = empty_model(shape, dtype)
    model.to_empty(device=device)
    return Trainer(model, device)


def fsdp(shape: str, device: torch.device, dtype: str) -> Trainer:
    from torch.distributed.fsdp import fully_shard

    model = empty_model(shape, dtype)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    return Trainer(model, device)


class Zero3(Trainer):
    def __init__(self, shape: str, device: torch.device) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16)
        # Plain SGD, because its states take no memory and DeepSpeed's own optimizers need a compiler.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.pushed, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.model, self.device = model, device

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        import deepspeed

        for name, param in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.copy_(values(name, param.shape, seed, self.device))


class Megatron(Trainer):
    def __init__(self, shape: str, device: torch.device, tp: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        hf = config(shape)
        settings = TransformerConfig(
            num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
            num_attention_heads=hf.num_attention_heads, num_query_groups=hf.num_key_value_heads,
            kv_channels=hf.head_dim, qk_layernorm=True, normalization="RMSNorm", gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, add_bias_linear=False, layernorm_epsilon=hf.rms_norm_eps,
            tensor_model_parallel_size=tp, params_dtype=torch.bfloat16, bf16=True, perform_initialization=False,
            use_cpu_initialization=device.type == "cpu",
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        model = GPTModel(
            settings, spec, hf.vocab_size, hf.max_position_embeddings, position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
        super().__init__(model.to(device), device)

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        from weightsync.senders.base import TensorPolicy
        from weightsync.senders.megatron import MegatronSender

        name, full = "", torch.empty(0)
        for piece in MegatronSender(TensorPolicy()).pieces(self.model):
            if piece.meta.name != name:
                name, full = piece.meta.name, values(piece.meta.name, torch.Size(piece.meta.shape), seed, self.device)
            region = zip(piece.box.start, piece.box.size, strict=True)
            piece.tensor.copy_(full[tuple(slice(start, start + size) for start, size in region)])


def make_trainer(case: str, shape: str, device: torch.device, size: int, dtype: str) -> Trainer:
    if case == "zero3":
        return Zero3(shape, device)
    if case.startswith("megatron"):
        return Megatron(shape, device, size)
    return fsdp(shape, device, dtype) if case.startswith("fsdp") else plain(shape, device, dtype)


def trainer_ranks(case: str) -> int:
    return 2 if case in (*ON_ENGINES_GPUS, *APART) else 1


def save_checkpoint(shape: str, seed: int, folder: Path, device: torch.device) -> None:
    from safetensors.torch import save_file

    config(shape).save_pretrained(folder)
    weights: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    model = empty_model(shape)
    for number, (name, param) in enumerate(model.named_parameters()):
        file = f"model-{number * 16 // (len(list(model.parameters())) or 1):05d}.safetensors"
        if index and file != list(index.values())[-1]:
            save_file(weights, folder / list(index.values())[-1], {"format": "pt"})
            weights = {}
        weights[name] = values(name, param.shape, seed, device).cpu()
        index[name] = file
    save_file(weights, folder / list(index.values())[-1], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def start_engine(folder: Path, tp: int, backend: str | None, args: argparse.Namespace, **options: Any) -> Any:
    from vllm import LLM

    if backend == "weightsync" and args.extension:
        options["worker_extension_cls"] = "weightsync.vllm.extension.WeightSyncWorkerExtension"
    elif backend:
        options["weight_transfer_config"] = {"backend": backend}
    if args.no_compile:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    started = time.time()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        gpu_memory_utilization=0.1,  # what must be free at the start
        kv_cache_memory_bytes=1 << 30,
        quantization=args.quantization,
        enforce_eager=args.eager,
        tensor_parallel_size=tp,
        disable_log_stats=True,
        max_num_seqs=16,
        **options,
    )
    say(f"engine {backend or 'cold'} tp={tp} up in {time.time() - started:.0f} s")
    return llm


def answers(llm: Any, adapter: Any = None) -> list[Any]:
    """Greedy tokens and their log-probabilities, with a `LoRARequest` or without. One prompt at a time: what shares a
    batch with what, and so the last bits of a result, would otherwise depend on when the engine's process looks into
    its queue."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)
    found = []
    llm.reset_prefix_cache()
    for prompt in PROMPTS:
        request = {"prompt_token_ids": prompt}
        output = llm.generate([request], sampling, use_tqdm=False, lora_request=adapter)[0].outputs[0]
        steps = [[[token, value.logprob] for token, value in step.items()] for step in output.logprobs]
        found.append([list(output.token_ids), steps])
    return found


def say(text: str) -> None:
    print(text, flush=True)


def compare(pushed: list[Any], cold: list[Any]) -> dict[str, Any]:
    tokens = all(a[0] == b[0] for a, b in zip(pushed, cold, strict=True))
    equal = json.dumps(pushed) == json.dumps(cold)
    if [[len(at) for at in steps] for _, steps in pushed] != [[len(at) for at in steps] for _, steps in cold]:
        return {"tokens_equal": tokens, "logprobs_equal": equal, "max_gap": None}  # other tokens are listed
    gaps = [
        abs(x[1] - y[1])
        for a, b in zip(pushed, cold, strict=True)
        for step_a, step_b in zip(a[1], b[1], strict=True)
        for x, y in zip(step_a, step_b, strict=True)
    ]
    return {"tokens_equal": tokens, "logprobs_equal": equal, "max_gap": max(gaps)}


def second_engine(folder: Path, tp: int, args: argparse.Namespace) -> tuple[subprocess.Popen[str], Path]:
    """Start a cold engine in a process of its own, on other GPUs where there are enough."""
    out = folder.parent / f"cold-tp{tp}-{args.quantization}.json"
    command = [sys.executable, __file__, "cold", "--folder", str(folder), "--tp", str(tp), "--out", str(out)]
    command += ["--eager"] * args.eager + ["--no-compile"] * args.no_compile
    command += ["--quantization", args.quantization] if args.quantization else []
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1" if tp == 2 else "1"}
    return subprocess.Popen(command, env=env, text=True), out


def timed(label: str, repeats: int, function: Any) -> dict[str, Any]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    row = {
        "label": label,
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:] or seconds),
        "all_s": seconds,
    }
    then = f", then median {row['median_s'] * 1e3:.1f} ms of {len(seconds) - 1}" if seconds[1:] else ""
    say(f"{label}: first {seconds[0] * 1e3:.1f} ms{then}")
    return row


def reset_peak(worker: Any) -> int:
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(worker: Any) -> int:
    return torch.cuda.max_memory_allocated()


def device_copy(nbytes: int, device: torch.device) -> float:
    """Milliseconds to copy that many bytes on one GPU, or in a CPU's memory: the limit of a colocated push."""
    a, b = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(6):
        started = time.perf_counter()
        b.copy_(a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) * 1e3


def native_push(llm: Any, model: torch.nn.Module, case: str, packed: bool, group: Any) -> None:
    """The same weights through vLLM's own transfer engine, as its documentation shows it."""
    named = [(name, full(param)) for name, param in model.named_parameters()]
    if case == "broadcast":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        info = {
            "names": [n for n, _ in named], "dtype_names": ["bfloat16"] * len(named),
            "shapes": [list(t.shape) for _, t in named], "packed": packed,
        }  # fmt: skip
        llm.start_weight_update()
        thread = threading.Thread(target=llm.update_weights, args=({"update_info": info},))
        thread.start()
        NCCLWeightTransferEngine.trainer_send_weights(
            iter(named), NCCLTrainerSendWeightsArgs(group=group, packed=packed)
        )
        thread.join()
        llm.finish_weight_update()
        return
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

    def send(update: Any) -> None:
        fields = {k: v for k, v in vars(update).items() if k != "ipc_handles_pickled"}
        if llm is not None:
            llm.update_weights({"update_info": fields})

    if llm is not None:
        llm.start_weight_update()
    IPCWeightTransferEngine.trainer_send_weights(
        iter(named), IPCTrainerSendWeightsArgs(send_mode=send, packed=packed, packed_buffer_size_bytes=2 << 30)
    )
    if llm is not None:
        llm.finish_weight_update()


def full(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param.detach()


def run_trainer(rank: int, size: int, args: argparse.Namespace, folder: Path, results: Path) -> None:
    from weightsync import WeightSync

    cuda = torch.cuda.is_available()
    shape = args.shape
    tp = 2 if args.case in (*ON_ENGINES_GPUS, "fsdp-broadcast") else 1
    # Engines take GPUs from 0 on; a broadcast needs the trainer on others.
    apart = args.case.endswith("broadcast")
    number = (rank + apart * tp * args.engines) % max(1, torch.cuda.device_count())
    device = torch.device("cuda", number) if cuda and not args.on_cpu else CPU
    if cuda:
        torch.cuda.set_device(number)
    if size > 1 or args.case in BACKEND:  # these two want a process group also for one rank
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), RANK=str(rank), WORLD_SIZE=str(size))
        os.environ["LOCAL_RANK"] = str(number)  # DeepSpeed's device
        dist.init_process_group("nccl" if cuda else "gloo")
    trainer = make_trainer(args.case, shape, device, size, args.dtype)
    if not cuda and args.case == "ipc":
        trainer.model.share_memory()
    trainer.fill(1)
    nbytes = sum(p.numel() * 2 for p in empty_model(shape).parameters())
    root = rank == 0
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # the engine has a group of its own
    found: dict[str, Any] = {
        "case": args.case,
        "shape": shape,
        "quantization": args.quantization,
        "trainer_dtype": args.dtype,
        "extension": args.extension,
        "nbytes": nbytes,
        "trainer_ranks": size,
        "rows": [],
    }
    transport = "broadcast" if apart else "ipc"

    llm = second = None
    if root:
        say(f"{args.case}: {shape}, {nbytes / 1e9:.2f} GB, torch {torch.__version__}")
        found["device_copy_ms"] = device_copy(nbytes, device)
        say(f"device copy of the same bytes: {found['device_copy_ms']:.2f} ms")
        if args.second_engine:
            second = second_engine(folder, tp, args)
            if tp == 2:
                second[0].wait()  # two engines that start at once on one GPU count each other's memory as their own
        llm = start_engine(folder, tp, "weightsync", args)
        found["cold"] = cold = answers(llm)
    others: list[Any] = []
    for gpu in range(1, args.engines if root else 1):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # of the engine alone: this process has begun to use its own
        others.append(start_engine(folder, tp, "weightsync", args))
        del os.environ["CUDA_VISIBLE_DEVICES"]
    engines = [llm, *others] if root else None
    with WeightSync(
        BACKEND.get(args.case, "fsdp"), transport, engines, max_bytes=args.max_bytes, timeout_s=120
    ) as sync:
        reports: list[Any] = []
        if size > 1:
            host_barrier(rank, size)
        first = timed("weightsync push, the first", 1, lambda: reports.append(sync.push(trainer.pushed)))
        held = llm.collective_rpc(reset_peak) if root and cuda else []
        row = timed("weightsync push", args.num_iters, lambda: reports.append(sync.push(trainer.pushed)))
        peaks = llm.collective_rpc(peak) if root and cuda else []
        row |= {"first_s": first["first_s"], "extra_bytes": [b - a for a, b in zip(held, peaks, strict=True)]}
        if peaks:
            say(f"extra memory in the workers: {', '.join(f'{n / 2**20:.0f} MiB' for n in row['extra_bytes'])}")
        same = answers(llm) if root else None
        trainer.fill(2)
        sync.push(trainer.pushed)
        changed = answers(llm) if root else None
        trainer.fill(1)
        reports.append(sync.push(trainer.pushed))
        if root:
            pushed = answers(llm)
            row["reports"] = [json.loads(r.to_json()) for r in reports]
            found["rows"].append(row)
            for report in reports[:2] + reports[-1:]:
                say(str(report))
            say(f"roads: {reports[-1].roads}")
            found["after A"], found["after A, B"], found["after A, B, A"] = (
                compare(found_answers, cold) for found_answers in (same, changed, pushed)
            )
            for name in ("after A", "after A, B", "after A, B, A"):
                say(f"{name}, against the cold start: {found[name]}")
            for other in others:
                found["another engine"] = compare(answers(other), cold)
                say(f"another engine, against the first's cold start: {found['another engine']}")
                stop(other)
            results.write_text(json.dumps(found))
    if root and second is not None:
        process, out = second
        if process.wait(timeout=400) != 0:
            raise SystemExit("the second engine failed")
        found["second engine"] = compare(pushed, json.loads(out.read_text()))
        say(f"against a second engine, started cold: {found['second engine']}")
        results.write_text(json.dumps(found))
    stop(llm)
    if args.native and cuda and args.case in NATIVE_BACKEND:
        llm = start_engine(folder, tp, NATIVE_BACKEND[args.case], args) if root else None
        if size > 1:
            host_barrier(rank, size)
        group = None
        if args.case == "broadcast":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            place = {"master_address": "127.0.0.1", "master_port": args.port + 7, "world_size": 2}
            info = {**place, "rank_offset": 1}
            thread = threading.Thread(target=llm.init_weight_transfer_engine, args=({"init_info": info},))
            thread.start()
            group = NCCLWeightTransferEngine.trainer_init(place)
            thread.join()
        for packed in (False, True):
            label = f"vLLM native {NATIVE_BACKEND[args.case]}, {'packed' if packed else 'one tensor at a time'}"
            try:
                row = timed(
                    label, args.num_iters, lambda p=packed: native_push(llm, trainer.model, args.case, p, group)
                )
                found["rows"].append(row)
            except Exception as error:
                say(f"{label}: {type(error).__name__}: {str(error)[:300]}")
                if size > 1:
                    break
        if root:
            found["vLLM native"] = compare(answers(llm), cold)
            say(f"after vLLM's own transfer, against the cold start: {found['vLLM native']}")
        stop(llm)
    if root:
        results.write_text(json.dumps(found))
    if size > 1:
        host_barrier(rank, size)
        time.sleep(rank == 0)  # rank 0 holds the store that the others are still reading
        os._exit(0)  # the default group's tear-down has nothing to do with what is measured


_barriers = 0


def host_barrier(rank: int, size: int) -> None:
    """Wait on the host: a rank that waits inside a device barrier would take time from an engine on its GPU."""
    global _barriers
    _barriers += 1
    store = dist.distributed_c10d._get_default_store()
    store.set(f"arrived-{_barriers}-{rank}", "1")
    for other in range(size):
        store.wait([f"arrived-{_barriers}-{other}"])


def stop(llm: Any) -> None:
    if llm is not None:
        llm.llm_engine.engine_core.shutdown()


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--quantization", help="as vLLM's")
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs, but no torch.compile: starts sooner")
    parser.add_argument("--extension", action="store_true", help="weightsync's worker extension, not its plug-in")
    parser.add_argument("--port", type=int, default=29640)
    parser.add_argument("--folder", type=Path, help="of the checkpoint of weights A; it is made when it is missing")


def made_checkpoint(args: argparse.Namespace) -> Path:
    folder: Path = args.folder or Path(tempfile.mkdtemp(prefix="weightsync-bench-")) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        started = time.time()
        save_checkpoint(args.shape, 1, folder, torch.device("cuda", 0) if torch.cuda.is_available() else CPU)
        say(f"checkpoint written in {time.time() - started:.0f} s")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["ipc", "broadcast", *ON_ENGINES_GPUS, *APART, "cold"])
    add_engine_arguments(parser)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the trainer's weights")
    parser.add_argument("--on-cpu", action="store_true", help="the trainer of `ipc` holds its weights in CPU memory")
    parser.add_argument("--engines", type=int, default=1, help="that `broadcast` goes to, each on a GPU of its own")
    parser.add_argument("--num-iters", type=int, default=6)
    parser.add_argument("--no-native", dest="native", action="store_false", help="leave vLLM's own engine out")
    parser.add_argument("--second-engine", action="store_true", help="compare with a second cold engine as well")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--max-bytes", type=int, help="the size of a bucket")
    parser.add_argument("--tp", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case == "cold":
        llm = start_engine(args.folder, args.tp, None, args)
        args.out.write_text(json.dumps(answers(llm)))
        stop(llm)
        return
    folder = made_checkpoint(args)
    results = folder.parent / f"results-{args.case}-{args.quantization}.json"
    size = trainer_ranks(args.case)
    if size == 1:
        run_trainer(0, 1, args, folder, results)
    else:
        torch.multiprocessing.spawn(run_trainer, (size, args, folder, results), nprocs=size)
    if args.output_json:
        shutil.copy(results, args.output_json)


if __name__ == "__main__":
    main()
