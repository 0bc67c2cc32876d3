"""Lets each process that Ray and vLLM start import the framework that FRAMEWORK names."""

import os

if "FRAMEWORK" in os.environ:
    from sources import importable

    importable(os.environ["FRAMEWORK"])
