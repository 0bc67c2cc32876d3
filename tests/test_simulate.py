"""Predictions of how long a push takes: by hand, and against what was measured on one host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightsync.errors import ConfigError
from weightsync.simulate import Topology, bfloat16_bytes, predict

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

ONE_GPU = "gpus_per_host=1,ranks=1,tp=1"
TWO_GPUS = "gpus_per_host=2,ranks=2,tp=2"
ONE_TO_ANOTHER = "gpus_per_host=2,ranks=1,tp=1"
THREE_GPUS = "gpus_per_host=3,ranks=2,tp=1"
ONE_TO_THREE = "gpus_per_host=4,ranks=1,engines=3,tp=1"
# `fixed_s` and `fixed_ranks_s` were chosen between these.
MEASURED = [
    ("2026-11-23-h200-ipc-first-bucket-ahead", "ipc", ONE_GPU),
    ("2026-11-23-h200-ipc-0.5B-first-bucket-ahead", "ipc", ONE_GPU),
    ("2026-11-23-h200-ipc-last", "ipc", ONE_GPU),
    ("2026-11-23-h200-ipc-beside-native", "ipc", ONE_GPU),
    ("2026-11-23-h200-ipc-0.5B-last", "ipc", ONE_GPU),
    ("2026-11-23-h200-fsdp-last", "ipc", TWO_GPUS),
    ("2026-11-23-h200-zero3-last", "ipc", TWO_GPUS),
    ("2026-11-23-h200-megatron-last", "ipc", TWO_GPUS),
    ("2026-11-23-h200-broadcast-last", "broadcast", f"{ONE_TO_ANOTHER},bucket_mib=1187"),
    ("2026-11-23-h200-broadcast-beside-native", "broadcast", f"{ONE_TO_ANOTHER},bucket_mib=1187"),
    ("2026-11-22-h200-megatron-to-another-gpu", "broadcast", f"{THREE_GPUS},bucket_mib=1187"),
    ("2026-11-22-h200-broadcast-three-engines", "broadcast", f"{ONE_TO_THREE},bucket_mib=1187"),
]


def prediction(nbytes: int, transport: str, topology: str):
    return next(p for p in predict(nbytes, Topology.parse(topology)) if p.transport == transport)


@pytest.mark.parametrize(("name", "transport", "topology"), MEASURED)
def test_predictions_lie_within_a_quarter_of_what_was_measured(name, transport, topology):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    measured_s = next(row["median_s"] for row in found["rows"] if row["label"] == "weightsync push")
    predicted_s = prediction(found["nbytes"], transport, topology).seconds
    assert abs(predicted_s / measured_s - 1) < 0.25


def test_ipc_reads_its_own_gpus_part_fast_and_the_rest_over_the_link():
    speeds = "device_copy=1000,peer_copy=100,fixed_ranks_s=0.5,message_s=0.001"
    parts = prediction(8 * 10**9, "ipc", f"ranks=4,tp=4,{speeds}").parts
    # 2 GB a worker, of which three quarters are near, and copied meanwhile; copies reach 93 % of the speed.
    fixed = {"messages": 2 * 7 * 0.001, "calls into vLLM and plan": 0.5}
    assert parts == pytest.approx({"peer copy": 0.005 / 0.93, **fixed})
    # Eight ranks hold an eighth each of what a worker reads, and of that each lies somewhere else.
    parts = prediction(8 * 10**9, "ipc", f"ranks=8,tp=4,{speeds}").parts
    assert parts["peer copy"] == pytest.approx(0.0175 / 0.93)
    assert prediction(8 * 10**9, "ipc", f"ranks=1,tp=1,{speeds}").parts["device copy"] == pytest.approx(0.008 / 0.93)


def test_a_broadcast_between_hosts_goes_through_one_network_card():
    text = "hosts=2,ranks=2,engines=3,tp=1,network=50,fixed_ranks_s=0.5,message_s=1e-9"
    parts = prediction(10**10, "broadcast", text).parts
    assert parts == pytest.approx(
        {
            "gathering to rank 0": 0.1,
            "broadcast": 0.2,
            "messages": 38 * 2 * 4e-9,
            "calls into vLLM and plan": 0.5,
        }
    )


def test_what_each_worker_reads_goes_through_the_network_cards_of_all_hosts():
    text = "hosts=4,ranks=16,engines=2,tp=8,network=50,fixed_ranks_s=0.5,message_s=1e-9"
    parts = prediction(10**10, "broadcast", text).parts
    # A rank sends an eighth, a host 8 of these; as much as its workers receive.
    assert parts == pytest.approx(
        {"sending to each worker": 0.2, "messages": 5 * 2 * 31e-9, "calls into vLLM and plan": 0.5}
    )


def test_time_grows_with_bytes_and_rank_0_s_messages_with_buckets_and_peers():
    at_256 = prediction(bfloat16_bytes("70B"), "broadcast", "hosts=32,ranks=128,engines=16").parts["messages"]
    assert at_256 == pytest.approx(66 * 2 * (127 + 128) * 80e-6)  # 66 buckets of 256 MiB of a worker's eighth
    larger = prediction(bfloat16_bytes("70B"), "broadcast", "hosts=32,ranks=128,engines=16,bucket_mib=4096")
    assert larger.parts["messages"] < at_256 / 13
    assert larger.limit == "sending to each worker"


@pytest.mark.parametrize(
    ("transport", "size", "topology", "why"),
    [
        ("ipc", "70B", "hosts=2", "trainer and engine on one host"),
        ("broadcast", "70B", "", "8 ranks and 8 workers do not find a place on 8 GPUs"),
        ("ipc", "1T", "", "500 GB of weights on a GPU of 141 GB"),
        ("broadcast", "1T", "hosts=2", "250 GB of weights"),
    ],
)
def test_what_cannot_be_says_why(transport, size, topology, why):
    found = prediction(bfloat16_bytes(size), transport, topology)
    assert why in found.impossible
    assert not found.parts


@pytest.mark.parametrize("text", ["hosts", "hosts=many", "hosts=0", "network=-1", "gpu=8"])
def test_a_topology_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError):
        Topology.parse(text)


def test_sizes_of_models():
    assert (bfloat16_bytes("70B"), bfloat16_bytes("0.5b"), bfloat16_bytes("1T")) == (140 * 10**9, 10**9, 2 * 10**12)
    for text in ("", "70", "B", "a lot"):
        with pytest.raises(ConfigError):
            bfloat16_bytes(text)
