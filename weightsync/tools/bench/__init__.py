"""Starts trainers of models without data and vLLM engines, and times whole pushes on the trainer's clock: one after the
other, and as users push, with tokens generated, an optimizer step and 0.3 s of waiting before each. Every engine is
pushed other weights and then those that it was started from, and must answer as it did then: same token ids, same
log-probabilities. What a push cannot be faster than is measured too.

    weightsync bench --transport ipc broadcast checkpoint
        A tiny model, a few minutes, also without a GPU. Peers on the same work are measured beside.

    weightsync bench --shape 8B --client llm extension --quantization none fp8_per_channel
        An LLM in the trainer's process, on one GPU, with CUDA graphs.

    weightsync bench --families benchmarks/families.json --no-peers --jobs 8
        Whether tiny models of many families answer right, not how long they take.

    weightsync bench --shape 70B --backend fsdp --ranks 8 --tp 1 2 4 --gpus 8 --dry-run
        What would be measured, and what a push takes at least.

Exit status 1 when a push failed or left other answers than a cold start.
"""
