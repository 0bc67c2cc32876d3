"""Transports of packages that may be missing, as parameters of tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"))
