"""The only package that imports vllm: the plug-in, vLLM's engine class, and the differences between versions."""
