"""Clients of a running vLLM: one `Engine` for an `LLM`, an `AsyncLLM`, a Ray actor or a server.

For every method of an engine:

- It blocks until vLLM has answered, for at most `calls.limit_s`: `timeout_s`, or longer for some calls.
- It raises only `weightsync.errors`.
- `pause` and `start` are called at the same time, from two threads. `reset_caches` may be called while `update` runs.
  `finish` is called after `update` has returned. A `QueueingEngine` gets such calls at once, by methods of its own.
- It never repeats a call, since none of vLLM's weight calls may run twice. A broken connection is an error.

vLLM is imported only for its `LoRARequest`, and Ray only for a Ray actor. This package knows nothing about weights or
transports.
"""

from __future__ import annotations

from weightsync.engines.base import AdapterEngine, Engine, LoraAdapter
from weightsync.engines.http import HttpEngine
from weightsync.engines.server import VllmServer

__all__ = ["AdapterEngine", "Engine", "HttpEngine", "LoraAdapter", "VllmServer"]
