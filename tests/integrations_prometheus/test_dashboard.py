"""Each query of docs/operate/grafana.json in a real Prometheus that scrapes a trainer's exporter and an engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import NOT_COMPILED
from faults import FaultyTransport
from prometheus_client import start_http_server

from weightsync import DigestError, WeightSync
from weightsync.engines.server import VllmServer
from weightsync.net.child import free_port

pytestmark = pytest.mark.engine

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/operate/grafana.json"
SCRAPE_S = 1
WINDOW = "1m"
"""What Grafana puts in the place of $window."""


@contextmanager
def prometheus(folder: Path, **targets: str) -> Iterator[str]:
    """Run Prometheus, which scrapes targets and takes their names for instances. Gives its address."""
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    assert program, "no prometheus: install it (Debian has it), or name the program with PROMETHEUS=..."
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [target], "labels": {"instance": name}}]}
        for name, target in targets.items()
    ]
    (folder / "prometheus.yml").write_text(
        json.dumps({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs})
    )
    address = f"127.0.0.1:{free_port()}"
    files = f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([program, *files, f"--web.listen-address={address}"], stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(lambda: "success" in get(f"http://{address}/api/v1/status/buildinfo"), folder / "log")
            yield address
        finally:
            process.terminate()


def get(url: str) -> str:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.read().decode()
    except OSError as error:
        return str(error)


def wait_until(done: Any, what: object) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, f"not within a minute: {what}"
        time.sleep(0.3)


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """Return the series that a query finds now, with a number for each as "value"."""
    asked = urllib.parse.urlencode({"query": query.replace("$window", WINDOW)})
    answer = json.loads(get(f"http://{address}/api/v1/query?{asked}"))
    assert answer["status"] == "success", answer
    return [{**series["metric"], "value": float(series["value"][1])} for series in answer["data"]["result"]]


def found(address: str) -> dict[str, list[list[dict[str, Any]]]]:
    """Return what each query of each panel finds, with the labels that its legend names."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            target["found"] = ask(address, target["expr"])
            labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
            missing = [(series, label) for series in target["found"] for label in labels if label not in series]
            assert not missing, f"{panel['title']}: the legend names what no series has: {missing}"
    return {panel["title"]: [target["found"] for target in panel["targets"]] for panel in panels}


def scraped_pushes(address: str) -> list[float]:
    """Return how many pushes Prometheus has scraped from the trainer and from the worker."""
    return values([ask(address, 'weightsync_push_version or weightsync_engine_seconds_count{phase="load"}')])


def values(queries: list[list[dict[str, Any]]]) -> list[float]:
    return [series["value"] for found in queries for series in found]


def the(series: list[dict[str, Any]]) -> float:
    (only,) = series
    return float(only["value"])


def test_queries_of_the_dashboard_find_what_happened(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3", "A")
    checkpoint = tiny_models.save(model, tmp_path / "A")
    trainer = free_port()
    exporter, thread = start_http_server(trainer, "127.0.0.1")
    options = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=64", "--dtype=bfloat16")
    transport = FaultyTransport("ipc")
    with VllmServer(checkpoint, *options, environment=NOT_COMPILED, log=tmp_path / "engine") as server:
        engine = server.url.removeprefix("http://")
        with (
            prometheus(tmp_path, trainer=f"127.0.0.1:{trainer}", engine=engine) as address,
            WeightSync("fsdp", transport, server.url, verify="full") as sync,
        ):
            wait_until(lambda: len(ask(address, "up == 1")) == 2, "Prometheus scrapes both")
            sync.push(model)
            # A series begins with its first push, and has a rate from the second one on.
            wait_until(lambda: scraped_pushes(address) == [1, 1], "the first push")
            sync.push(model)
            wait_until(lambda: scraped_pushes(address) == [2, 2], "the second push")
            panels = found(address)
            assert values(panels["Version of trainer and engines"]) == [2, 2]
            assert [the(panels[title][0]) for title in ("POISONED workers", "Engines left out")] == [0, 0]
            assert the(panels["Failures in an hour"][0]) == 0
            assert panels["Failures by class"] == [[], []]
            for title in ("Seconds of a push by phase, mean", "Seconds on the workers by phase, mean"):
                (phases,) = panels[title]
                assert {"transfer", "verify", "load"} <= {series["phase"] for series in phases}
                assert all(0 <= series["value"] < sync.last_report.total_s for series in phases if "worker" in series)
            assert all(the(series) > 0 for series in panels["Seconds of a push"])
            pushed, sent, written = map(the, panels["Bytes in a second"])
            assert pushed > 0
            assert sent == 0, "the worker reads the trainer's memory itself"
            assert written > 0

            transport.flip_a_byte_of = 0
            with pytest.raises(DigestError):
                sync.push(model)
            wait_until(lambda: the(found(address)["POISONED workers"][0]) == 1, "POISONED")
            wait_until(lambda: the(found(address)["Failures in an hour"][0]) == 1, "the failure on the trainer")
            of_trainer, of_engine = found(address)["Failures by class"]
            assert [(each["error"], each["phase"], each["value"]) for each in of_trainer] == [
                ("DigestError", "update", 1)
            ]
            assert [(each["error"], each["value"]) for each in of_engine] == [("DigestError", 1)]
            sync.push(model)
            wait_until(lambda: the(found(address)["POISONED workers"][0]) == 0, "healed")
    exporter.shutdown()
    exporter.server_close()
    thread.join()
