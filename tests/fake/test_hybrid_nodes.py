"""Calls of actors on another node of a real Ray than the controller's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import ray_workers
from ray.cluster_utils import Cluster

from weightsync.hybrid.pending import Pending, WorkerError

pytestmark = [pytest.mark.forks, pytest.mark.filterwarnings("ignore")]
INLINE_BYTES = 100 * 2**10
"""Ray keeps larger results, and larger exceptions, on the node of their actor."""


class Actor:
    """An actor with calls like those of a `Process`: each returns a value, and a sign of success."""

    def fail(self, count: int) -> tuple[None, None]:
        raise ValueError("x" * count)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        root = Path(__file__).parents[2]
        paths = (root, root / "tests" / "support", root / "tests" / "fake")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        with ray_workers.started_here():
            options = {"num_cpus": 1, "object_store_memory": 100 * 10**6}
            cluster = Cluster(True, head_node_args={**options, "include_dashboard": False})
            cluster.add_node(**options, resources={"other": 1})
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.parametrize("count", [10, 2 * INLINE_BYTES])
def test_failure_of_any_size_on_another_node_is_found(cluster: Cluster, count: int):
    actor = ray.remote(num_cpus=0, resources={"other": 0.1})(Actor).remote()
    value, sign = actor.fail.options(num_returns=2).remote(count)
    call = Pending("fail", {value: "rank 0"}, 60.0, signs={sign: "rank 0"})
    call.settle()
    assert call.has_failed()
    assert call.has_ended()
    failure = call.unasked()
    assert isinstance(failure, WorkerError)
    assert failure.who == "rank 0"
