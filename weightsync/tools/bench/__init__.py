"""Starts trainers of models without data and vLLM engines, and times whole pushes on the trainer's clock. One loop
pushes without a break. The other pushes as users do: before each push it generates tokens, takes an optimizer step and
    waits 0.3 s. Every engine gets other weights and then its first weights again. Then its answers must be the first
    ones: same token ids, same log-probabilities. The lower bounds of a push are measured too.

    weightsync bench --transport ipc broadcast checkpoint
        A tiny model, a few minutes, also without a GPU. Peers on the same work are measured beside.

    weightsync bench --shape 8B --client llm extension --quantization none fp8_per_channel
        An LLM in the trainer's process, on one GPU, with CUDA graphs.

    weightsync bench --families benchmarks/families.json --way weightsync --jobs 8
        Whether tiny models of many families answer right, not how long they take.

    weightsync bench --shape 70B --backend fsdp --ranks 8 --tp 1 2 4 --gpus 8 --dry-run
        The cases, each with its lower bound.

    weightsync bench --from results.json --plot results.svg
        A picture of an earlier run, whose --json wrote the file.

Exit status 1 when a push failed or left other answers than a cold start.
"""
