"""A KV connector that keeps keys and values in files, and forgets them, or does not, as `answer` says."""

from __future__ import annotations

import shutil
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ResettableStore(ExampleConnector):
    answer: Any = True

    def reset_cache(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            shutil.rmtree(self._storage_path, ignore_errors=True)
        return self.answer


class SaysNothing(ExampleConnector):
    def reset_cache(self) -> None:
        shutil.rmtree(self._storage_path, ignore_errors=True)


class CannotYet(ExampleConnector):
    def reset_cache(self) -> bool:
        raise NotImplementedError
