"""What vLLM is asked for an adapter with."""

from __future__ import annotations

from vllm.lora.request import LoRARequest


def request(name: str, number: int, path: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
