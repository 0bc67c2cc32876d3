"""A trainer's model of `fake_engine.TinyEngineModel` whose layers are modules of torch, for adapters of PEFT's."""

from __future__ import annotations

from typing import Any

import peft
import torch
from fake_engine import HEADS, ROWS, WIDTH
from torch import nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS) for _ in range(3))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.zeros(HEADS))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.decay, self.norm = Attention(), Decay(), Norm()


class LinearTrainer(nn.Module):
    """The trainer's side of `TinyEngineModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])


def with_adapter() -> Any:
    """Return a `PeftModel` whose adapter does something."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["q", "k"], init_lora_weights=False)
    return peft.get_peft_model(LinearTrainer(), config)
