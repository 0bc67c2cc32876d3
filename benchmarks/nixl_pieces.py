"""The speed of one read by NIXL between two processes, by the number of its pieces: GB/s, best of five.

python benchmarks/nixl_pieces.py               # the way that UCX chooses: shared memory on one host
UCX_TLS=tcp python benchmarks/nixl_pieces.py
python benchmarks/nixl_pieces.py cuda:0 cuda:1
"""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import torch

from weightsync.transports.nixl_agent import PIECE_BYTES, Agent

NBYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
PIECES = [1, 4, 16, 64, 256, 1024, 4096]
REPEATS = 5


def use(device: str) -> torch.device:
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def hold(pipe: Connection, device: str, nbytes: int) -> None:
    where = use(device)
    agent = Agent("UCX")
    agent.register([torch.ones(nbytes, dtype=torch.uint8, device=where)])
    pipe.send(agent.address())
    pipe.recv()
    agent.close()


def main(source: str = "cpu", target: str = "cpu") -> None:
    where = use(target)
    nbytes = NBYTES[where.type]
    pipe, other = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=hold, args=(other, source, nbytes), daemon=True).start()
    agent, room, address = Agent("UCX"), torch.zeros(nbytes, dtype=torch.uint8, device=where), pipe.recv()
    agent.register([room])
    agent.add(address)
    for pieces in PIECES:
        PIECE_BYTES[where.type] = nbytes // pieces
        seconds = []
        for _ in range(1 + REPEATS):
            room.zero_()
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            started = time.perf_counter()
            read = agent.read(address, 0, 0, room, 1)
            while not agent.is_read(read, address):
                continue
            seconds.append(time.perf_counter() - started)
            assert bool((room == 1).all())
        size, speed = nbytes // pieces >> 10, nbytes / min(seconds[1:]) / 1e9
        sys.stdout.write(f"{pieces:5} pieces of {size:6} KiB: {speed:.2f} GB/s\n")
        sys.stdout.flush()
    pipe.send(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
