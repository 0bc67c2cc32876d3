"""One controller, any placement: RL programmed as one process, with workers and engines on Ray.

The controller is an ordinary program. It makes a `WorkerGroup` of each model and a `RolloutGroup` of engines on
`ResourcePool`s, and calls their methods. `register` gives a method its dispatch mode: the split of a call over the
workers, and the joining of their results. `RolloutGroup.follow` returns a `GroupSync`. Its `push` moves the weights.
The pool of a group alone decides its placement: docs/use/controller.md.

Nothing else in weightsync imports this package. It needs the extra "hybrid": Ray and tensordict. Ray pickles all values
between processes, so every process of the Ray cluster must be trusted.
"""

try:
    from weightsync.hybrid.batch import balance, column, concat, pad, split, take, union
    from weightsync.hybrid.dispatch import Call, Dispatch, Layout, Place, register
    from weightsync.hybrid.following import GroupSync
    from weightsync.hybrid.job import SavedJob, newest_job, save_job
    from weightsync.hybrid.pending import CallFuture, WorkerError
    from weightsync.hybrid.pool import ResourcePool
    from weightsync.hybrid.rollout_group import RolloutGroup
    from weightsync.hybrid.rollouts import Rollouts
    from weightsync.hybrid.worker import Worker
    from weightsync.hybrid.worker_group import WorkerGroup
except ModuleNotFoundError as error:
    raise ImportError(
        f"weightsync.hybrid needs Ray and tensordict: pip install 'weightsync[hybrid]' ({error})"
    ) from error

__all__ = [
    "Call",
    "CallFuture",
    "Dispatch",
    "GroupSync",
    "Layout",
    "Place",
    "ResourcePool",
    "RolloutGroup",
    "Rollouts",
    "SavedJob",
    "Worker",
    "WorkerError",
    "WorkerGroup",
    "balance",
    "column",
    "concat",
    "newest_job",
    "pad",
    "register",
    "save_job",
    "split",
    "take",
    "union",
]
