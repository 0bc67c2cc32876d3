"""Every constant in seconds, beside the `timeout_s` that a user sets.

A wait for one answer ends after `timeout_s`. The participant that knows most about a failure waits least: rank 0 gives
up before a worker, and a worker before the other ranks. `tests/unit/test_timeouts.py` holds the order.
"""

from __future__ import annotations

MAX_TIMEOUT_S = 86400.0
"""Largest `timeout_s`: a day."""

# Patience: how many times `timeout_s` a wait takes that covers several waits of another participant.

WORKERS_DONE_PATIENCE = 7
"""Most times that rank 0 waits for all workers to be done with their chunks."""
WORKER_PATIENCE = 8
"""Times that a worker waits once it is ready or done: other workers may load more, or be served before it."""
RANK_PATIENCE = 8
"""Times that a rank waits for rank 0 between two steps. Rank 0's own waits end before, with the better error."""
NCCL_PATIENCE = 8
"""Times that a member's operation may take before NCCL or gloo gives it up. A deadline of ours ends it before."""

# Grace: how much longer a participant waits than the one whose error says more.

WORKER_GRACE_S = 5.0
"""Added to a worker's wait for the trainer, so that the trainer's error comes first."""
RANK_GRACE_S = 5.0
"""Added, at most, to a wait for a rank that itself waits for workers."""
OTHER_RANK_GRACE_S = 5.0
"""Added to rank 0's wait for an engine in another rank, so that the error of that rank comes first."""

# Connections between ranks and workers.

REACH_S = 5.0
"""Longest that a host may take to accept a connection. Its kernel accepts, however busy its processes are."""
GREETING_S = 10.0
"""Longest that a dialer waits for the listener's greeting. An engine does nothing else meanwhile."""
DIAL_AGAIN_S = 0.3
"""Pause before a dial that a listener has closed is repeated."""
NEWCOMER_S = 5.0
"""Longest that a newcomer may take until its `Hello` has arrived."""
NEWCOMER_LEAST_S = 0.5
"""Shortest time that a newcomer keeps its place in a flood of connections."""
NO_ROOM_S = 0.05
"""Pause of a listener whose process has no file descriptor left."""
LISTENER_POLL_S = 0.5
"""Longest poll of a listener. Timers and changes by other threads are seen this late at most."""
PONG_SENT_S = 1.0
"""Longest that sending a `Ping` or a `Pong` may take."""
HOST_LOST_S = 30.0
"""Longest until a host that has lost power is given up. Such a host closes no connection."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 15, 5, 3
"""TCP keepalive, which gives up a lost host after `HOST_LOST_S`."""
RENDEZVOUS_POLL_S, RENDEZVOUS_LONGEST_POLL_S = 0.01, 0.1
"""First and longest pause between two reads of a rendezvous. A store that serves many ranks is read less often."""

# Ranks.

VERDICT_S = 5.0
"""Longest that rank 0's verdict on a failure may take to reach the other ranks."""
RANK_ANSWER_S = 1.0
"""Longest that a rank that is alive may take to say so."""
RANK_LOOK_S = 0.01
"""Pause between two looks of rank 0 at ranks that were asked."""
RANK_DEATH_S = 0.2
"""Longest until the death of a rank is seen on its connection."""

# A trainer that holds an engine.

LEASE_LOOK_S = 0.5
"""Pause between two looks of a trainer for a worker's `Ping`."""
WORKER_LEASE_LOOK_S = 0.5
"""Pause between two looks of a worker that runs the plan for the trainer's `Ping`."""
HOLDER_ANSWER_S = 10.0
"""Longest that an engine's trainer may take to answer a `Ping`, when another trainer asks for the engine."""
HEALTH_LOOK_S = 1.0
"""Pause between two questions to an engine during a push whether it is alive."""
HEALTH_TIMEOUT_S = 10.0
"""Longest that an engine may take to answer such a question. At most half of `timeout_s`: two silences are a death."""
ENGINE_ANSWER_S = 2.0
"""Longest that an engine may take to show that it is alive, after an error that it may have caused."""
LOST_ENGINE_ANSWER_S = 0.2
"""Longest that a push waits for lost engines that were asked whether they are back. A lost host answers nothing."""

# Calls to engines.

SERVING_S = 3600.0
"""Longest of `init`, `update`, and a reset behind them. Workers return from these when the trainer releases them, and
each wait inside has its own deadline. This one is for an engine that never answers."""
WORKER_ARRIVAL_S = 3.0
"""Longest that a worker may take to connect once its engine says that it was called in."""
DOUBT_S = 3.0
"""Longest that workers may take before another engine of the list may be the same one."""
WORKER_MESSAGE_S = 0.5
"""Longest until a worker's message arrives, once its part of a transfer has broken or its call has failed."""
CALL_POLL_S = 0.1
"""Pause between two looks whether the engine of a call has died."""
CALL_LOOK_S = 0.1
"""Pause between two looks of a wait for an engine at the other ranks."""
NEXT_CALL_S = 1.0
"""Shortest time for the last round of calls, even if earlier calls used up the deadline."""
OTHER_RANK_LOOK_S = 5.0
"""Longest read of a connection to another rank before it is read again. Nothing depends on it."""
RAY_POLL_S, RAY_LONGEST_POLL_S = 0.0005, 0.02
"""First and longest pause between two looks at a call into an `AsyncLLM` inside a Ray actor."""
SERVER_POLL_S = 0.2
"""Pause between two looks at a server that starts or ends."""
SERVER_PORT_S = 20.0
"""Longest that a server's port may stay taken by the server before it."""

# The end of a push, an engine or a process.

FAREWELL_S = 3.0
"""Longest that an engine may take to end its calls after a failure."""
ENGINE_FAREWELL_S = 3.0
"""Longest that a worker's last message may take to be sent."""
WORKER_FAREWELL_S = 1.0
"""Longest that a worker's error may take to be sent to a trainer."""
ADAPTER_FAREWELL_S = 5.0
"""Longest that engines may take to forget adapters."""
EXIT_S = 10.0
"""Longest that a process that exits waits for the calls of pushes that failed."""
CHILD_FAREWELL_S = 20.0
"""Longest that a child process may take to end before it is killed."""
CHILD_LOOK_S = 0.5
"""Pause between two looks of a child at its parent."""
COMMUNICATOR_LEAVE_S = 1.0
"""Longest that leaving a communicator may hold up its process."""
IDLE_THREAD_S = 10.0
"""Longest that an idle thread is kept for the next function."""

# Loading and transports.

CHUNK_LOOK_S = 0.05
"""Pause between two looks of a worker for an error of another worker."""
STREAM_POLL_S = 0.00005
"""Pause between two looks at a GPU stream."""
STAGING_POLL_S, STAGING_LONGEST_POLL_S = 0.00005, 0.001
"""First and longest pause between two looks at the counters of staged chunks."""
NCCL_POLL_S = 0.00002
"""Pause between two looks at an NCCL operation. A chunk takes less than a millisecond."""
GLOO_LOOK_S = 0.01
"""Pause between two looks for an error while gloo works."""
MEMBER_POLL_S = 0.002
"""Pause between two looks whether a communicator's members have met."""
MEMBER_ARRIVAL_POLL_S = 0.01
"""Pause between two reads of the count of members that have arrived."""
