"""Certificates for tests: an authority, and a certificate of its."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from weightsync.net import tls


def make_certificates(folder: Path) -> Path:
    """Make an authority, and a certificate of its."""
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "9",
    ]
    authority = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    folder.mkdir()
    for name, more in ("ca", []), ("node", authority):
        command = [*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", *more]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def use_certificates(folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in zip(tls.VARIABLES, ("node.pem", "node.key", "ca.pem"), strict=True):
        monkeypatch.setenv(name, str(folder / file)) if folder else monkeypatch.delenv(name, raising=False)
