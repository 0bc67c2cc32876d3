"""Predictions of how long a push takes: by hand, and against what was measured on one host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightsync.errors import ConfigError
from weightsync.tools import first_push
from weightsync.tools.simulate import Topology, bfloat16_bytes, predict

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

ONE_GPU = "gpus_per_host=1,ranks=1,tp=1"
TWO_GPUS = "gpus_per_host=2,ranks=2,tp=2"
ONE_TO_ANOTHER = "gpus_per_host=2,ranks=1,tp=1"
THREE_GPUS = "gpus_per_host=3,ranks=2,tp=1"
# `fixed_s` and `fixed_ranks_s` were chosen between these.
MEASURED = [
    ("2026-11-23-h200-ipc-last", "ipc", ONE_GPU),
    ("2026-11-23-h200-ipc-beside-native", "ipc", ONE_GPU),
    ("2026-11-23-h200-ipc-0.5B-last", "ipc", ONE_GPU),
    ("2026-11-23-h200-fsdp-last", "ipc", TWO_GPUS),
    ("2026-11-23-h200-zero3-last", "ipc", TWO_GPUS),
    ("2026-11-23-h200-megatron-last", "ipc", TWO_GPUS),
    ("2026-11-23-h200-broadcast-last", "broadcast", f"{ONE_TO_ANOTHER}"),
    ("2026-11-23-h200-broadcast-beside-native", "broadcast", f"{ONE_TO_ANOTHER}"),
    ("2026-11-22-h200-megatron-to-another-gpu", "broadcast", f"{THREE_GPUS}"),
]


def prediction(nbytes: int, transport: str, topology: str):
    return next(p for p in predict(nbytes, Topology.parse(topology)) if p.transport == transport)


@pytest.mark.parametrize(("name", "transport", "topology"), MEASURED)
def test_predictions_lie_within_a_quarter_of_what_was_measured(name, transport, topology):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    measured_s = next(row["median_s"] for row in found["rows"] if row["label"] == "weightsync push")
    predicted_s = prediction(found["nbytes"], transport, topology).seconds
    assert abs(predicted_s / measured_s - 1) < 0.25


def test_prediction_of_reads_lies_within_a_quarter_of_what_was_measured():
    rows = json.loads((RESULTS / "2026-11-29-h200-nixl.json").read_text())
    for row in rows:
        predicted_s = prediction(row["nbytes"], row["case"]["transport"], ONE_TO_ANOTHER).seconds
        assert abs(predicted_s / row["seconds"]["back_to_back"]["total_s"]["median"] - 1) < 0.25


def test_prediction_of_changes_lies_within_a_quarter_of_what_was_measured():
    found = json.loads((RESULTS / "2026-11-28-h200-deltas-beside.json").read_text())
    compared = 0
    for row in found["rows"]:
        if (row["encoding"], row["encoding_base"], row["quantization"]) == ("delta", None, "none") and row["changed"]:
            topology = f"{ONE_TO_ANOTHER},changed={row['changed']}"
            predicted_s = prediction(found["nbytes"], "changes", topology).seconds
            assert abs(predicted_s / row["median_s"] - 1) < 0.25
            compared += 1
    assert compared == 3


def parts(nbytes: int, transport: str, topology: str):
    """The parts of a prediction without messages and calls, which other tests look at."""
    quiet = "fixed_s=1e-12,fixed_ranks_s=1e-12,engine_s=1e-12,message_s=1e-12"
    found = prediction(nbytes, transport, f"{topology},{quiet}").parts
    assert found.pop("control") < 1e-6
    return found


def test_ipc_reads_its_own_gpus_part_fast_and_the_rest_over_the_link():
    speeds = "device_copy=1000,peer_copy=100"
    # 2 GB a worker, of which three quarters are near, and copied meanwhile; copies reach 93 % of the speed.
    assert parts(8 * 10**9, "ipc", f"ranks=4,tp=4,{speeds}") == pytest.approx({"peer copy": 0.005 / 0.93})
    # Eight ranks hold an eighth each of what a worker reads, and of that each lies somewhere else.
    assert parts(8 * 10**9, "ipc", f"ranks=8,tp=4,{speeds}") == pytest.approx({"peer copy": 0.0175 / 0.93})
    assert parts(8 * 10**9, "ipc", f"ranks=1,tp=1,{speeds}") == pytest.approx({"device copy": 0.008 / 0.93})


FIRST = "passing on the first chunk"


def test_ranks_send_their_parts_once_however_many_engines_there_are():
    one = parts(10**10, "broadcast", "hosts=2,ranks=1,engines=1,tp=1,network=50")
    assert one == pytest.approx({"sending along chains": 0.2, FIRST: 0.0})
    three = parts(10**10, "broadcast", "hosts=4,ranks=1,engines=3,tp=1,network=50")
    # The third engine waits for the first of 64 chunks until it has been passed on twice.
    assert three == pytest.approx({"sending along chains": 0.2, FIRST: 2 * 0.2 / 64})
    least = parts(10**10, "broadcast", "hosts=4,ranks=1,engines=3,tp=1,network=50,least_mib=200")
    assert least[FIRST] == pytest.approx(2 * (200 << 20) / 50e9)


def test_one_sided_reads_pack_the_first_chunk_and_notice_each():
    found = parts(10**10, "nixl", "hosts=4,ranks=1,engines=3,tp=1,read=40,device_copy=1000,notice_s=0.0002")
    reading = {"reading along chains": 0.25, FIRST: 2 * 0.25 / 64}
    assert found == pytest.approx({**reading, "notices of chunks": 64 * 0.0002, "packing the first chunk": 0.01 / 64})
    one_host = parts(10**10, "nixl", "gpus_per_host=2,ranks=1,engines=1,tp=1,peer_copy=400")
    assert one_host["reading along chains"] == pytest.approx(0.025)


def test_engines_on_the_ranks_gpus_are_possible_over_nixl():
    predictions = {each.transport: each.impossible for each in predict(10**9, Topology.parse("ranks=8,tp=8"))}
    assert predictions["nixl"] is None
    assert "do not find a place" in str(predictions["broadcast"])


def test_deltas_take_the_longest_of_link_encoding_and_decoding():
    topology = "hosts=2,gpus_per_host=1,ranks=1,engines=1,tp=1,network=0.025,chunk_mib=1"
    assert "deltas" not in [each.transport for each in predict(10**9, Topology.parse(topology))]
    # One value in a hundred: 1.25 bits for 0.0808 of entropy, and 1.04 for each change, of 16.
    sending_s = 40 * (1.25 * 0.0808 + 0.0104) / 16
    found = parts(10**9, "deltas", f"{topology},changed=0.01")
    assert found["encoding"] == pytest.approx(0.9 + 0.155)
    assert found["the first and the last chunk"] == pytest.approx((sending_s + 0.22) * 2**20 / 1e9, rel=0.01)
    slow = parts(10**9, "deltas", f"{topology.replace('0.025', '0.0025')},changed=0.01")
    assert slow["sending differences"] == pytest.approx(10 * sending_s, rel=0.01)


def test_what_each_worker_reads_goes_over_a_network_card_for_each_gpu():
    found = parts(10**10, "broadcast", "hosts=4,ranks=16,engines=2,tp=8,network=50")
    # A worker receives an eighth, and passes it on in the same time. A rank sends a sixteenth.
    assert found == pytest.approx({"sending along chains": 0.025, FIRST: 0.025 / 32})


def test_gpus_of_one_host_pass_on_more_slowly_than_they_receive():
    found = parts(10**10, "broadcast", "gpus_per_host=4,ranks=1,engines=3,tp=1,broadcast=100,relaying=0.5")
    assert found["sending along chains"] == pytest.approx(0.2)


@pytest.mark.parametrize(("cards", "factor"), [("cards=1", 8), ("cards=4", 2), ("cards=8", 1), ("cards=16", 1)])
def test_gpus_share_the_network_cards_of_their_host(cards, factor):
    topology = "hosts=4,ranks=16,engines=2,tp=8,network=50"
    found = parts(10**10, "broadcast", f"{topology},{cards}")
    assert found["sending along chains"] == pytest.approx(0.025 * factor)
    four_gpus = parts(10**10, "broadcast", f"{topology.replace('hosts=4', 'hosts=8')},gpus_per_host=4")
    assert four_gpus["sending along chains"] == pytest.approx(0.025 * 4)  # one card, where nothing else is said


def test_control_grows_with_participants_and_not_with_bytes_or_chunks():
    topology = "hosts=32,ranks=128,engines=16"
    control = prediction(bfloat16_bytes("70B"), "broadcast", topology).parts["control"]
    assert control == pytest.approx(0.006 + 15 * 0.0033 + 4 * (127 + 128) * 30e-6)
    for size, chunk in (("405B", "chunk_mib=64"), ("70B", "chunk_mib=1")):
        assert prediction(bfloat16_bytes(size), "broadcast", f"{topology},{chunk}").parts["control"] == control


def test_1t_on_1024_gpus_takes_two_seconds_of_which_control_is_a_tenth():
    found = prediction(bfloat16_bytes("1T"), "broadcast", "hosts=128,ranks=512,engines=16,tp=32")
    assert found.seconds <= 2
    assert found.parts["control"] <= 0.2


# 70,000 tensors in 2 TB, as Kimi K2's.
TRILLION = first_push.Model(2 * 10**12, 70_000, 69_000, 1_900 * 10**9, 47.0)


def first(topology: str, expert_parallel: bool = False):
    return first_push.predict(TRILLION, Topology.parse(topology), expert_parallel)


def test_a_first_push_costs_rank_0_what_every_participant_is_told():
    topology = "hosts=128,ranks=512,engines=16,tp=32,shards=8"
    found, doubled = first(topology), first(topology.replace("engines=16", "engines=32"))
    more_s = 512 * (3.5e-9 * (found.messages["PlanRequest"] + found.messages["Connect"]) + 5e-9 * 10_500)
    assert doubled.rank_0_s - found.rank_0_s == pytest.approx(more_s, rel=0.01)
    assert doubled.worker_s == pytest.approx(found.worker_s, rel=0.01)
    assert found.seconds == found.rank_0_s + found.worker_s


def test_fewer_ranks_with_a_shard_and_whole_experts_make_messages_smaller():
    topology = "hosts=128,ranks=512,engines=16,tp=32"
    everywhere, few, experts = first(topology), first(f"{topology},shards=8"), first(f"{topology},shards=8", True)
    assert few.messages["PackedPlan"] < everywhere.messages["PackedPlan"] / 3
    assert few.messages["Inventory"] < everywhere.messages["Inventory"]
    # Of experts a worker is told a 32nd part.
    assert few.messages["Connect"] - experts.messages["Connect"] == pytest.approx(69_000 * 31 / 32 * 80)


def test_a_message_that_fits_no_frame_is_marked():
    topology = Topology.parse("hosts=4096,ranks=16384,engines=16,tp=32")
    *_, together = first_push.rows(TRILLION, [topology], True)
    assert together[-1].endswith("over the 268.44 MB of a frame")


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


@pytest.mark.parametrize("text", ["hosts", "hosts=many", "hosts=0", "cards=0", "network=-1", "changed=1.1", "gpu=8"])
def test_a_topology_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError):
        Topology.parse(text)


def test_sizes_of_models():
    assert (bfloat16_bytes("70B"), bfloat16_bytes("0.5b"), bfloat16_bytes("1T")) == (140 * 10**9, 10**9, 2 * 10**12)
    for text in ("", "70", "B", "a lot"):
        with pytest.raises(ConfigError):
            bfloat16_bytes(text)
