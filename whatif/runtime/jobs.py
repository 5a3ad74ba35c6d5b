"""Distributes work over processes, or over the machines of a Dask or Ray cluster, with joblib."""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from whatif.runtime.errors import WhatifError, in_short

T = TypeVar("T")
R = TypeVar("R")
# Timeout for a cluster's answer.
TIMEOUT_S = 10.0
_OPTION = re.compile(r"(?P<count>[0-9]{1,5})|(?P<engine>dask|ray)(?::(?P<address>\S+))?")
_INSTALL = "run `pip install 'whatif-profiler[cluster]'`"


class Jobs(Struct, frozen=True):
    """Where work runs: in ``count`` processes of this machine, or on the cluster of an ``engine``.

    ``address`` is that of Dask's scheduler (``tcp://host:8786``) or of Ray's head node (``host:6379``). Without one,
    ``DASK_SCHEDULER_ADDRESS`` or ``RAY_ADDRESS`` names it; without that, the engine starts on this machine.
    """

    count: int = 1
    engine: str | None = None
    address: str | None = None

    @staticmethod
    def of(option: str | int) -> Jobs:
        """Parse ``--jobs``: ``4``, ``dask``, ``dask:tcp://host:8786``, ``ray``, ``ray:host:6379``."""
        found = _OPTION.fullmatch(str(option))
        if found is None or found["count"] == "0":
            raise WhatifError(f"--jobs: expected a number of processes, dask:ADDRESS or ray:ADDRESS, got {option!r}.")
        return Jobs(int(found["count"] or 1), found["engine"], found["address"])

    @property
    def here(self) -> bool:
        """Whether all work runs in this process."""
        return self.engine is None and self.count == 1


def each(work: Callable[..., R], items: Iterable[T], *args: Any, jobs: str | int | Jobs = 1) -> Iterator[R]:
    """Yield ``work(item, *args)`` for each item, in order, run where ``jobs`` says (see ``Jobs.of``).

    Functions and arguments are sent to other processes by pickle. Raises WhatifError if ``jobs`` is invalid, a package
    is missing or no cluster answers, and any error of ``work``.
    """
    jobs = jobs if isinstance(jobs, Jobs) else Jobs.of(jobs)
    if jobs.here:
        yield from (work(item, *args) for item in items)
        return
    joblib = _package("joblib", f"--jobs {jobs.engine or jobs.count}", _INSTALL)
    with ExitStack() as until_done:
        if jobs.engine:
            until_done.enter_context(_cluster(jobs))
        count = -1 if jobs.engine else jobs.count
        until_done.enter_context(joblib.parallel_config(backend=jobs.engine or "loky", n_jobs=count))
        # Return results while later items are running, if the engine supports it.
        return_as = "list" if jobs.engine == "ray" else "generator"
        here = joblib.delayed(partial(_in_folder, _current_folder(), work))
        yield from joblib.Parallel(return_as=return_as)(here(item, *args) for item in items)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _in_folder(folder: str, work: Callable[..., R], *args: Any) -> R:
    """Run ``work`` in the caller's folder, for relative paths: processes that were started elsewhere are used again."""
    with suppress(OSError):  # another machine may have no such folder
        os.chdir(folder)
    return work(*args)


def _package(name: str, option: str, advice: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise WhatifError(f"{option} needs the package {package}, which is not installed; {advice}.") from None


def _cluster(jobs: Jobs) -> AbstractContextManager[Any]:
    """Return the connection to an engine's cluster, closed when the work is done."""
    option, advice = f"--jobs {jobs.engine}", "start one, or name its address"
    stack = ExitStack()
    try:
        if jobs.engine == "dask":
            distributed = _package("distributed", option, "run `pip install 'dask[distributed]'`")
            # joblib uses the client created last.
            stack.enter_context(distributed.Client(jobs.address, timeout=TIMEOUT_S))
            return stack
        ray = _package("ray", option, "run `pip install ray`")
        if not ray.is_initialized():
            _check_reachable(jobs.address or os.environ.get("RAY_ADDRESS", ""))
            advice += ", or set RAY_AUTH_MODE=token if it asks for one"
            ray.init(address=jobs.address, log_to_driver=False, logging_level="error")
            stack.callback(ray.shutdown)
        _package("ray.util.joblib", option, "run `pip install ray`").register_ray()
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        at = f":{jobs.address}" if jobs.address else ""
        raise WhatifError(
            f"{option}{at}: expected a cluster that answers, got '{in_short(error)}'; {advice}."
        ) from error
    return stack


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at host:port: Ray itself would wait for minutes and end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal() and int(port) < 2**16:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
