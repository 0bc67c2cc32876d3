"""The speed of one read by NIXL between two processes, by the size of its pieces: GB/s, best of five.

python benchmarks/nixl_pieces.py               # the way that UCX chooses: shared memory on one host
UCX_TLS=tcp python benchmarks/nixl_pieces.py
"""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import torch

from weightsync.transports import nixl_agent
from weightsync.transports.nixl_agent import Agent

NBYTES = 64 << 20
PIECES = [1, 4, 16, 64, 256, 1024, 4096]
REPEATS = 5


def hold(pipe: Connection) -> None:
    agent = Agent("UCX")
    agent.register([torch.ones(NBYTES, dtype=torch.uint8)])
    pipe.send(agent.address())
    pipe.recv()
    agent.close()


def main() -> None:
    pipe, other = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=hold, args=(other,), daemon=True).start()
    agent, room, address = Agent("UCX"), torch.zeros(NBYTES, dtype=torch.uint8), pipe.recv()
    agent.register([room])
    agent.add(address)
    for pieces in PIECES:
        nixl_agent.PIECE_BYTES = NBYTES // pieces
        seconds = []
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            read = agent.read(address, 0, 0, room, 1)
            while not agent.is_read(read, address):
                continue
            seconds.append(time.perf_counter() - started)
        size, speed = NBYTES // pieces >> 10, NBYTES / min(seconds[1:]) / 1e9
        sys.stdout.write(f"{pieces:5} pieces of {size:6} KiB: {speed:.2f} GB/s\n")
    assert bool(room.all())
    pipe.send(None)


if __name__ == "__main__":
    main()
