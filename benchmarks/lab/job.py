"""One job of the lab: run a Python worker on every host, collect the results, and leave no process behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whatif.instrumentation.kept_memory import KEEP_FREED_MEMORY

from whatif.runtime.errors import WhatifError

from .hosts import INTERFACE, Host

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_S = 0.02
# Every lab has its own network, so no other program uses this port.
PORT = 29_555


@dataclass(frozen=True)
class Worker:
    """One process: the module that it runs, its request, host and core."""

    host: Host
    module: str  # `python -m` runs it; its main reads the request
    request: dict[str, Any]
    core: int


def spread(hosts: Sequence[Host], module: str, request: dict[str, Any]) -> list[Worker]:
    """Return a worker for every host, assigned round-robin to the cores available to this process."""
    cores = sorted(os.sched_getaffinity(0))
    return [Worker(host, module, request, cores[place % len(cores)]) for place, host in enumerate(hosts)]


def run_job(workers: Sequence[Worker], *, timeout_s: float = 120.0) -> list[dict[str, Any]]:
    """Run all workers concurrently and return their results, in order.

    The first is rank 0, whose host the others connect to. A worker gets its request, `rank` and
    `workers`, as JSON in its only argument, and writes its result as JSON to the file named by `result`. Raises
    WhatifError if one fails or they take too long; then all of them are killed.
    """
    with tempfile.TemporaryDirectory(prefix="whatif-lab-") as folder:
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, worker in enumerate(workers):
                running.append(_start(worker, rank, workers, Path(folder)))
            _wait(running, Path(folder), time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in running:
                _end(process)
        return [json.loads(_result(Path(folder), rank).read_text()) for rank in range(len(workers))]


def _start(worker: Worker, rank: int, workers: Sequence[Worker], folder: Path) -> "subprocess.Popen[bytes]":
    request = {**worker.request, "rank": rank, "workers": len(workers), "result": str(_result(folder, rank))}
    environment = {
        **os.environ, **KEEP_FREED_MEMORY,
        "RANK": str(rank), "WORLD_SIZE": str(len(workers)),
        "MASTER_ADDR": workers[0].host.address, "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "LAB_CORE": str(worker.core),
        "LAB_ADDRESS": worker.host.address,
    }  # fmt: skip
    command = worker.host.command(sys.executable, "-m", worker.module, json.dumps(request))
    with _log(folder, rank).open("w") as stream:
        # A separate session: the lab handles interrupts at the terminal. ROOT holds `benchmarks`.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip


def _wait(running: list["subprocess.Popen[bytes]"], folder: Path, end_s: float, timeout_s: float) -> None:
    while any(process.poll() is None for process in running):
        failed = [rank for rank, process in enumerate(running) if process.poll()]
        if failed:
            raise WhatifError(f"lab: expected every worker to finish, got {_why(running, folder, failed[0])}.")
        if time.monotonic() > end_s:
            raise WhatifError(f"lab: expected the workers to finish within {timeout_s:g} s, got a timeout; allow more.")
        time.sleep(POLL_S)
    failed = [rank for rank, process in enumerate(running) if process.returncode or not _result(folder, rank).is_file()]
    if failed:
        raise WhatifError(f"lab: expected every worker to finish, got {_why(running, folder, failed[0])}.")


def _why(running: list["subprocess.Popen[bytes]"], folder: Path, rank: int) -> str:
    lines = _log(folder, rank).read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")
    return f"worker {rank} with exit status {running[rank].returncode}: {last[:300]}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result{rank}.json"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log{rank}.txt"
