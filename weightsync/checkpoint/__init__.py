"""Checkpoints in the Hugging Face form: sharded safetensors with an index, a config and a tokenizer."""
