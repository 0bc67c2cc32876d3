# Copyright 2026 The weightsync authors. Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Metadata, dependencies and entry points. What the tools (ruff, mypy, pytest) need is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/weightsync/weightsync"
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "weightsync/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
)

extras = {
    # The receiver works inside these vLLM releases; weightsync/vllm/compat.py holds what differs between them.
    "vllm": ["vllm>=0.25,<0.34"],
    "deepspeed": ["deepspeed>=0.17"],
    "megatron": ["megatron-core>=0.16"],
    "ray": ["ray>=2.9"],
    "hybrid": ["ray>=2.9", "tensordict>=0.10"],
    "nixl": ["nixl>=1.5,<2"],
    "prometheus": ["prometheus-client>=0.20"],
    "otel": ["opentelemetry-api>=1.20"],
    # TRL's own extra names a vLLM that TRL accepts. The last line holds it to one that weightsync accepts.
    "trl": ["trl[vllm]>=1.5.1", "vllm>=0.25,<0.34"],
    "plot": ["matplotlib>=3.8"],
    "docs": ["mkdocs-material>=9.7", "mkdocstrings-python>=2.0", "ruff>=0.9"],
    "dev": [
        "build>=1.2",
        "hypothesis>=6.100",
        "msgpack>=1.0",
        "mypy>=1.13",
        "peft>=0.20",
        "pytest>=9.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
        "setuptools>=77",
    ],
}

setup(
    name="weightsync",
    version=VERSION[1],
    description="Moves updated policy weights from an RL trainer into a running vLLM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords="reinforcement-learning rlhf llm vllm fsdp deepspeed megatron weights",
    author="The weightsync authors",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Source": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    license_expression="Apache-2.0",
    packages=find_packages(include=["weightsync", "weightsync.*"]),
    package_data={"weightsync": ["py.typed"]},
    zip_safe=False,  # type checkers read py.typed from disk
    entry_points={
        "console_scripts": ["weightsync = weightsync.__main__:main"],
        # vLLM loads this group in its front end, its engine core and every worker, so the user installs nothing else.
        "vllm.general_plugins": ["weightsync = weightsync.vllm.plugin:register"],
    },
    python_requires=">=3.10",
    # Only what every user needs: the engine and the trainer frameworks are the user's own, and in the extras.
    install_requires=["msgspec>=0.21", "numpy>=1.24", "rich>=13.0", "torch>=2.8", "tqdm>=4.60"],
    extras_require=extras,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

# CONTRIBUTING.md has the list of what a release takes.
