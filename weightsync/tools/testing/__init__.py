"""One conformance suite for every weight source, transport and engine client, weightsync's own and plug-ins'.

Each check makes the same calls to one implementation as the rest of weightsync. It raises `AssertionError` with the
broken promise. The promises are in the docstrings of `weightsync.sources.base`, `weightsync.transports.base` and
`weightsync.engines`. docs/extend/conformance.md shows how to call the checks. They need neither pytest nor vLLM.
"""

from weightsync.tools.testing.engines import check_dead_engine, check_engine
from weightsync.tools.testing.sources import check_source
from weightsync.tools.testing.transports import check_transport

__all__ = ["check_dead_engine", "check_engine", "check_source", "check_transport"]
