"""A vLLM engine that is started cold from a checkpoint, in a process of its own: what a push is compared with.

Run as `python -m weightsync.vllm.cold`. It imports vLLM, answers {}, and then waits for one line of JSON: the
checkpoint's folder, the options of `vllm.LLM`, the prompts and how many tokens to generate for each.
"""

from __future__ import annotations

import json
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the engine's; read when vllm is imported

from vllm import LLM, SamplingParams

from weightsync.trial import listen_for_orders


def main() -> None:
    orders, answers = listen_for_orders()
    answers.write("{}\n")
    order = json.loads(orders.readline())
    try:
        llm = LLM(order["model"], **order["options"])
        sampling = SamplingParams(
            max_tokens=order["max_tokens"], temperature=0, ignore_eos=True, logprobs=1, detokenize=False
        )
        rows = []
        for prompt in order["prompts"]:
            output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
            logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            rows.append([list(output.token_ids), logprobs])
        answers.write(json.dumps({"answers": rows}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise


if __name__ == "__main__":
    main()
