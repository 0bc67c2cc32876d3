"""Write a Qwen3 of 2 layers with random weights and a tokenizer of bytes, to try pushes without a hub.

Then use it as any other model:

    python examples/tiny_model.py tiny
    weightsync serve ./tiny
    torchrun --nproc-per-node 1 examples/push_fsdp.py --model ./tiny

It wants no GPU.
"""

from __future__ import annotations

import argparse

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def write_tiny_model(folder: str, vocab_size: int | None = None) -> None:
    """Write a checkpoint of 360,000 parameters into `folder`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
    end = len(letters)
    tokenizer = Tokenizer(models.BPE({**{letter: i for i, letter in enumerate(letters)}, "<|end|>": end}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=vocab_size or end + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=end,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--vocab-size", type=int, help="default: one token for each byte, and an end")
    options = parser.parse_args()
    write_tiny_model(options.folder, options.vocab_size)
