"""Every constant in seconds, beside the user's `timeout_s`.

A wait for one answer ends after `timeout_s`. The participant with the best error waits least: rank 0 gives up before a
worker, and a worker before the other ranks. `tests/unit/test_timeouts.py` checks the order.
"""

from __future__ import annotations

MAX_TIMEOUT_S = 86400.0
"""Largest `timeout_s`: a day."""

# Patience: the factor of `timeout_s` in a wait for a participant with several waits of its own.

WORKERS_DONE_PATIENCE = 7
"""Largest factor of rank 0's wait for all workers' `Done`."""
WORKER_PATIENCE = 8
"""Factor of a worker's wait after `Ready` or `Done`: other workers may load more, or be served first."""
RANK_PATIENCE = 8
"""Factor of a rank's wait for rank 0 between two steps. Rank 0's own waits end before, with the better error."""

# Grace: the time that a participant waits longer than another one with the better error.

WORKER_GRACE_S = 5.0
"""Added to a worker's wait for the trainer. The trainer's error then comes first."""
RANK_GRACE_S = 5.0
"""Most time added to a rank's wait for workers. A worker's error, with the late rank's name, then comes first."""
OTHER_RANK_GRACE_S = 5.0
"""Added to rank 0's wait for an engine in another rank's process. The error of the other rank then comes first."""

# Connections between ranks and workers.

REACH_S = 5.0
"""Longest wait for a host to accept a connection. Its kernel accepts, however busy its processes are."""
GREETING_S = 10.0
"""Longest wait of a dialer for the listener's greeting, and of a worker for a trainer that dials it.

An engine does nothing else meanwhile.
"""
DIAL_AGAIN_S = 0.3
"""Pause before a dialer repeats a dial, after the listener has closed the connection."""
NEWCOMER_S = 5.0
"""Longest time from a newcomer's connection to its `Hello`."""
NEWCOMER_LEAST_S = 0.5
"""Shortest time until another connection may replace a newcomer."""
NO_ROOM_S = 0.05
"""Pause of a listener without a free file descriptor."""
LISTENER_POLL_S = 0.5
"""Longest poll of a listener. Timers and other threads' changes are checked this often."""
PONG_SENT_S = 1.0
"""Longest time to send a `Ping` or a `Pong`."""
HOST_LOST_S = 30.0
"""Longest time to notice a host that has lost power. Such a host closes no connection."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 15, 5, 3
"""TCP keepalive. The kernel gives up a silent host after `HOST_LOST_S`."""
RENDEZVOUS_POLL_S, RENDEZVOUS_LONGEST_POLL_S = 0.01, 0.1
"""First and longest pause between two reads of a rendezvous. The pause grows, since one store serves many ranks."""

# Ranks.

VERDICT_S = 5.0
"""Longest time for rank 0's verdict on a failure to reach the other ranks."""
RANK_ANSWER_S = 1.0
"""Longest time for a live rank to answer rank 0 after a failure."""
RANK_LOOK_S = 0.01
"""Pause between two reads by rank 0 of such answers."""
RANK_DEATH_S = 0.2
"""Longest time from the death of a rank to the EOF of its connection."""

# The trainer's hold on an engine.

LEASE_LOOK_S = 0.5
"""Pause between two reads by a trainer for a worker's `Ping`."""
WORKER_LEASE_LOOK_S = 0.5
"""Pause between two reads by a worker for the trainer's `Ping`, while the worker runs the plan."""
ENGINE_USE_LOOK_S = 0.5
"""Pause between two checks whether an engine in the trainer's process is still in use."""
HOLDER_ANSWER_S = 10.0
"""Longest time for an engine's trainer to answer a `Ping`, when another trainer asks for the engine."""
HEALTH_LOOK_S = 1.0
"""Pause between two health checks of an engine during a push."""
HEALTH_TIMEOUT_S = 10.0
"""Longest time for an engine to answer a health check. At most half of `timeout_s`: two failed checks are a death."""
ENGINE_ANSWER_S = 2.0
"""Longest time for an engine to answer a health check after an error, before the error blames the engine."""
LOST_ENGINE_ANSWER_S = 0.2
"""Longest time for which a push waits for lost engines' health checks. A lost host answers nothing."""

# Calls to engines.

SERVING_S = 3600.0
"""Longest time of `init`, `update`, and a cache reset queued behind them, for an engine that never answers. Workers
return when the trainer releases them, and each wait inside has its own deadline."""
WORKER_ARRIVAL_S = 3.0
"""Longest time for a worker to connect after its engine's `init` has returned."""
DOUBT_S = 3.0
"""Longest wait for an engine's workers before other engines are released: two names of the list may be one engine."""
WORKER_MESSAGE_S = 0.5
"""Longest time for a worker's `Failure` to arrive after its transfer broke or its engine call failed."""
CALL_POLL_S = 0.1
"""Pause between two checks whether the engine of a call has died."""
CALL_LOOK_S = 0.1
"""Pause between two checks of the other ranks, during a wait for an engine call."""
NEXT_CALL_S = 1.0
"""Shortest time for the last round of calls, even if earlier calls used up the deadline."""
OTHER_RANK_LOOK_S = 5.0
"""Longest read of a connection to another rank before it is read again. Nothing depends on it."""
RAY_POLL_S, RAY_LONGEST_POLL_S = 0.0005, 0.02
"""First and longest pause between two polls of a call into an `AsyncLLM` inside a Ray actor."""
SERVER_POLL_S = 0.2
"""Pause between two checks of a server that starts or ends."""
SERVER_PORT_S = 20.0
"""Longest wait for the port of a server that has ended."""

# The end of a push, an engine or a process.

FAREWELL_S = 3.0
"""Longest time for an engine to end its calls after a failure, and for a closing NIXL agent to end its reads."""
ENGINE_FAREWELL_S = 3.0
"""Longest time for all workers to unmap a closing trainer's memory."""
WORKER_FAREWELL_S = 1.0
"""Longest time for a worker to send its error to a trainer."""
ADAPTER_FAREWELL_S = 5.0
"""Longest time for engines to forget adapters."""
CLOSING_S = 6.0
"""Longest wait of a `__del__` for the closing of its connections. The closing then goes on without it."""
EXIT_S = 10.0
"""Longest wait of an exiting process for the calls of failed pushes."""
CHILD_FAREWELL_S = 20.0
"""Longest time for a child process to end before it is killed."""
CHILD_LOOK_S = 0.5
"""Pause between two checks by a child of its parent."""
IDLE_THREAD_S = 10.0
"""Longest time for which an idle thread is kept."""

# Loading and transports.

CHUNK_LOOK_S = 0.05
"""Pause between two checks by a worker for another worker's error."""
STREAM_POLL_S = 0.00005
"""Pause between two queries of a GPU stream."""
STAGING_POLL_S, STAGING_LONGEST_POLL_S = 0.00005, 0.001
"""First and longest pause between two reads of the counters of staged chunks."""
NCCL_POLL_S = 0.00002
"""Pause between two queries of an NCCL operation. A chunk takes less than a millisecond."""
READ_POLL_S = 0.0001
"""Longest pause between two looks at reads by NIXL. On GPUs of one host a chunk takes less than a millisecond."""
LINK_LOOK_S = 0.01
"""Pause between two checks for an error while bytes travel between CPUs."""
MEMBER_POLL_S = 0.002
"""Pause between two checks whether a communicator's members have met."""
MEMBER_ARRIVAL_POLL_S = 0.01
"""Pause between two reads of the count of arrived members."""
EXPIRED_LEASE_S = 60.0
"""Longest time from the expiry of a request's blocks, in a pause of vLLM, to the push. A lease of vLLM lasts 30 s."""
