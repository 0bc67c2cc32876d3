"""One conformance suite for every sender, transport and engine client, ours and those of plug-ins.

Each check drives one implementation through what the rest of weightsync does with it, and raises `AssertionError` that
says in plain words which promise was broken. The promises are in the docstrings of `weightsync.senders.base`,
`weightsync.transports.base` and `weightsync.engines`. docs/conformance.md shows how to call the checks; they need
neither pytest nor vLLM.
"""

from weightsync.testing.engines import check_dead_engine, check_engine
from weightsync.testing.senders import check_sender
from weightsync.testing.transports import check_transport

__all__ = ["check_dead_engine", "check_engine", "check_sender", "check_transport"]
