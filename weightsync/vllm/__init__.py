"""The only room that imports vllm: the plug-in, the engine that vLLM calls, and what its versions changed."""
