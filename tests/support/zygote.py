"""A process that has vLLM imported, from which tests fork the Python processes that they start.

Most of what a vLLM server computes until it serves are imports: the server imports vLLM, the engine's core that it
spawns does, and each worker does. A zygote imports vLLM once. To its parent, a forked process is what a fresh one is: a
child of its own, with its own arguments, environment, working directory, files, session and exit code.

    pytest
     |-- zygote
     `-- server              forked from the zygote above
          |-- zygote         forked from the server before the server had threads
          `-- engine's core  forked from the zygote above

Which processes: `python -m` with a module of weightsync or vLLM, the scripts in this folder, Ray's workers
(`ray_workers.py`), the children of multiprocessing's "spawn", and the workers of pytest-xdist. A zygote forks while it
has one thread. It ends when its parent has closed the socket between them.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import logging.config
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from typing import Any
from unittest import mock

import gloo_loop

IMPORTED = (
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "weightsync.tools.bench.trainer",
    "weightsync.tools.cli",
    "weightsync.tools.demo_trainer",
    "weightsync.vllm.engine",
    "weightsync.vllm.extension",
    "weightsync.vllm.fence",
    "weightsync.vllm.pauses",
    "weightsync.vllm.shutdown",
)
READ_BY_IMPORTS = ("CUDA_", "HF_", "OMP_", "TRANSFORMERS_")
"""Beginnings of environment variables. A process with other values of these than the zygote has is started afresh."""
FLAGS = ("-B", "-u")  # of Python
PROGRAMS = ("from multiprocessing.spawn import spawn_main", "import sys;exec(eval(sys.stdin.readline()))")
"""Beginnings of what `python -c` gets from multiprocessing's "spawn" and from execnet, which starts xdist's workers."""
RAY_WORKER = "ray._private.workers.default_worker"
IN_RAY = "vllm.v1.executor.ray_utils"
"""The module by which vLLM decides whether its workers are Ray's."""
FIRST_FREE_FD = 512

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MADV_COLLAPSE = 25
_prctl, _madvise = ctypes.CDLL(None).prctl, ctypes.CDLL(None).madvise
_fork_exec = _posixsubprocess.fork_exec
freeze = gc.freeze  # `main` replaces it


class _Zygote:
    """A parent's way to its zygote."""

    def __init__(self, requests: socket.socket) -> None:
        self.owner = os.getpid()
        self.requests = requests
        self.environment = dict(os.environ)
        self._one_at_a_time = threading.Lock()

    def fork(self, task: dict[str, Any], files: Sequence[int]) -> int:
        """Return the process id of a new child of this process that runs `task`."""
        with self._one_at_a_time:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the zygote's grandchild becomes this process's child
            try:
                socket.send_fds(self.requests, [json.dumps(task).encode()], files)
                return int(self.requests.recv(32))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)


_zygote: _Zygote | None = None


@contextmanager
def forking(forks: bool = True) -> Iterator[None]:
    """Meanwhile subprocess and multiprocessing fork from the zygote. The first process that they start starts it.

    forks: False to start processes afresh inside of a block that forks.
    """
    start = _start if forks else _fork_exec
    with ExitStack() as patches:
        if sys.version_info >= (3, 11):  # before, the function has other arguments, and processes start afresh
            patches.enter_context(mock.patch.object(_posixsubprocess, "fork_exec", start))
            patches.enter_context(mock.patch.object(subprocess, "_fork_exec", start))
        yield


def _start(*arguments: Any) -> int:
    """Stand in for `_posixsubprocess.fork_exec`, whose arguments these are."""
    global _zygote
    command, _, _, kept, folder, variables, *rest = arguments
    files, error_pipe, in_new_session, group, before_exec = rest[:6], rest[7], rest[9], rest[10], rest[15]
    argv = [os.fsdecode(word) for word in command]
    environment = dict(os.environ) if variables is None else dict(os.fsdecode(each).split("=", 1) for each in variables)
    if not _can_fork(argv) or group != -1 or before_exec is not None:
        return _fork_exec(*arguments)
    if _zygote is None:
        _zygote = _Zygote(_start_zygote())
        atexit.register(_zygote.requests.close)  # or Python warns of it as the process ends
    is_of_parent = _zygote.owner != os.getpid()  # in a process that this one's parent has forked otherwise
    if is_of_parent or _read_by_imports(environment) != _read_by_imports(_zygote.environment):
        return _fork_exec(*arguments)
    standard = {0: files[0], 1: files[3], 2: files[5]}
    places = {at: at if fd == -1 else fd for at, fd in standard.items()}
    places |= {fd: fd for fd in kept if fd > 2 and fd != error_pipe}
    task = {
        "argv": argv,
        "environment": environment,
        "folder": os.fsdecode(folder or os.getcwd()),
        "in_new_session": bool(in_new_session),
        "places": list(places),
    }
    return _zygote.fork(task, list(places.values()))


def _can_fork(argv: Sequence[str]) -> bool:
    if argv[0] != sys.executable:
        return False
    way, what, *_ = (word for word in (*argv[1:], "", "") if word not in FLAGS)
    if way == "-m":
        return what == RAY_WORKER or what.partition(".")[0] in ("weightsync", "vllm")
    if way == "-c":
        return what.startswith(PROGRAMS)
    return os.path.dirname(way) == os.path.dirname(__file__)


def _read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}


def _start_zygote() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = [each for each in map(os.path.abspath, sys.path) if os.path.exists(each)]
    program = f"import sys; path, sys.path = sys.path, {path}; import zygote; "
    program += f"zygote.main({theirs.fileno()}, path[1:], {IMPORTED})"
    with theirs:
        spawnv_passfds(os.fsencode(sys.executable), [sys.executable, "-c", program], [theirs.fileno()])
    if ours.recv(32) != b"ready":
        raise RuntimeError("the zygote has ended; what it wrote to stderr says why")
    return ours


# ---------------------------------------------------------------------------------------------------------------
# In the zygote


def main(requests: int, path: list[str], imported: Sequence[str]) -> None:
    """Import, and then fork a process for each message of the socket `requests`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is the zygote's
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or each engine compiles, for itself, what ranks its log-probabilities
    gc.disable()
    if imported:
        _import(imported)
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM thaws as an engine ends, and would look through all that is imported
    gc.set_threshold(50_000)  # or collecting takes a tenth of an engine's start
    gc.enable()
    _use_huge_pages()
    connection = socket.socket(fileno=requests)
    connection.send(b"ready")
    with forking():
        _serve(connection, path)


def _use_huge_pages() -> None:
    """Have this process's memory in pages of 2 MiB, as far as Linux can. A fork copies the table of its pages."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def _import(names: Sequence[str]) -> None:
    """Import vLLM's modules, and take from them what costs each process seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules["ray"] = None  # type: ignore[assignment]  # it reads its worker's environment as it is imported
        # An engine's start collects garbage five times, which takes longer than to make a tiny model.
        importlib.import_module("vllm.utils.gc_utils").freeze_gc_heap = lambda: None
        # Each server would import Ray to ask it whether it runs. Where nobody has imported it, it does not.
        ray_utils = importlib.import_module("vllm.ray.lazy_utils")
        for name in ("is_ray_initialized", "is_in_ray_actor"):
            setattr(ray_utils, name, functools.partial(_ask_ray, getattr(ray_utils, name)))
        base_loader = importlib.import_module("vllm.model_executor.model_loader.base_loader")
        base_loader.gc = types.SimpleNamespace(collect=lambda: 0)
        for name in names:
            importlib.import_module(name)
        del sys.modules["ray"]
        from prometheus_client import values
        from vllm.distributed.device_communicators import shm_broadcast
        from vllm.platforms import current_platform as platform

        # The first `/server_info` of a server asks pip, conda and a dozen programs what is installed.
        found = types.SimpleNamespace(_asdict=dict)
        importlib.import_module("vllm.collect_env").get_env_info = lambda: found
        if find_spec(name := "vllm.utils.cpu_resource_utils"):  # of the versions that run `lscpu` several times a start
            cores = importlib.import_module(name)
            cores._get_cpu_list = functools.cache(cores._get_cpu_list)
        # Of the GiB of keys and values in VLLM_CPU_KVCACHE_SPACE, which takes longer to clear than all else to start.
        importlib.import_module("vllm.platforms.cpu").GiB_bytes = 64 * 2**20
        # It looks through all that is imported, which takes longer than the rest of an engine's start.
        if callable(getattr(platform, "register_triton_kernel_overrides", None)):  # vLLM 0.31 and later
            platform.register_triton_kernel_overrides = functools.cache(platform.register_triton_kernel_overrides)
            platform.register_triton_kernel_overrides()
        # Or a process spins for a second where it waits for a message, and takes the time of those that it waits for.
        shm_broadcast.sched_yield = functools.partial(time.sleep, 0.002)
        # A server sets the variable that this class depends on after it was forked.
        value_class = functools.cache(values.get_value_class)
        values.ValueClass = lambda *words, **options: value_class()(*words, **options)
        # Each engine's process configures its loggers, and for each logger Python looks through all of them.
        importlib.import_module("vllm.logger").dictConfig = _configure_loggers
        for end in weakref.finalize._registry:  # type: ignore[attr-defined]
            end.atexit = False  # torch takes its operators apart
        gloo_loop.share_loop()


def _configure_loggers(config: dict[str, Any]) -> None:
    with mock.patch.object(logging.Manager, "_clear_cache", return_value=None):
        logging.config.dictConfig(config)
    logging.root.setLevel(logging.root.level)  # clears the cache


def _ask_ray(question: Callable[[], bool]) -> bool:
    return "ray" in sys.modules and question()


def _serve(requests: socket.socket, path: list[str]) -> None:
    global _zygote
    while True:
        with open(os.devnull, "r+b") as nothing:
            for at in (0, 1, 2):  # a reader of the parent's output waits until nobody has it open
                os.dup2(nothing.fileno(), at)
        task = _wait_for_task(requests)
        if task["in_new_session"]:
            os.setsid()  # before the fork below: who ends this process's group ends its children too
        _take_files(task)
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() != 0:
            break
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        requests.close()
        requests = theirs  # and this process is the zygote of its parent
        for at in task["places"]:
            if at > 2:
                os.close(at)
    theirs.close()
    _become(task, path)
    _zygote = _Zygote(requests)
    code = _exit_code(task["argv"])
    for end in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking the interpreter apart would take a second, and report what is frozen as leaked


def _wait_for_task(requests: socket.socket) -> dict[str, Any]:
    """Fork at each message, and return the message in the forked process. Exit at EOF."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 250)
        if not message:
            os._exit(0)
        pids, pid = os.pipe()
        if (between := os.fork()) == 0:
            here = os.getpid()
            if (child := os.fork()) == 0:
                while os.getppid() == here:  # until this process is a child of the zygote's parent
                    time.sleep(0.001)
                requests.detach()  # `_take_files` closes it
                return {**json.loads(message), "files": files}
            os.write(pid, str(child).encode())
            os._exit(0)
        os.close(pid)
        os.waitpid(between, 0)
        requests.send(os.read(pids, 32))
        for fd in (pids, *files):
            os.close(fd)


def _take_files(task: dict[str, Any]) -> None:
    """Put the files that came with a task where it has them, and close all others."""
    taken = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE_FD) for fd in task["files"]]
    os.closerange(3, FIRST_FREE_FD)
    for at, fd in zip(task["places"], taken, strict=True):
        os.dup2(fd, at)
        os.close(fd)


def _become(task: dict[str, Any], path: list[str]) -> None:
    """Give this process what a fresh one has."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(task["folder"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(task["environment"])
    now = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = ["", *filter(None, now), *(each for each in path if each not in before)]


def _exit_code(argv: list[str]) -> int:
    try:
        _run(argv)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run(argv: list[str]) -> None:
    """Do what `argv` asks Python for."""
    way, *arguments = (word for word in argv[1:] if word not in FLAGS)
    sys.orig_argv = argv
    sys.argv = [way, *(arguments[1:] if way in ("-m", "-c") else arguments)]
    if way == "-m":
        sys.path[0] = os.getcwd()
        if arguments[0] == RAY_WORKER:
            importlib.reload(sys.modules[IN_RAY])
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif way == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[0], sys.modules["__main__"].__dict__)  # noqa: S102  as `python -c` does
    else:
        sys.path[0] = os.path.dirname(way)
        runpy.run_path(way, run_name="__main__")
