"""The only importer of vllm: the plug-in, vLLM's engine class, and the differences between vLLM versions."""
