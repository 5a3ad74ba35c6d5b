"""Work spread over processes, or over the machines of a Dask or Ray cluster: by joblib, not by our own machinery."""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from msgspec import Struct

from whatif.runtime.errors import WhatifError, in_short

T = TypeVar("T")
R = TypeVar("R")
# How long a cluster may take to answer.
PATIENCE_S = 10.0
_SPELLED = re.compile(r"(?P<count>[0-9]{1,5})|(?P<engine>dask|ray)(?::(?P<address>\S+))?")
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
    def of(spelled: str | int) -> Jobs:
        """Return what ``--jobs`` means: ``4``, ``dask``, ``dask:tcp://host:8786``, ``ray``, ``ray:host:6379``."""
        found = _SPELLED.fullmatch(str(spelled))
        if found is None or found["count"] == "0":
            raise WhatifError(f"--jobs: expected a number of processes, dask:ADDRESS or ray:ADDRESS, got {spelled!r}.")
        return Jobs(int(found["count"] or 1), found["engine"], found["address"])

    @property
    def here(self) -> bool:
        """Whether all work runs in this process."""
        return self.engine is None and self.count == 1


def each(work: Callable[..., R], things: Iterable[T], *given: Any, jobs: str | int | Jobs = 1) -> Iterator[R]:
    """Yield ``work(thing, *given)`` for each thing, in their order, as ``jobs`` says (``Jobs.of``).

    Functions and arguments are sent to other processes by pickle. Raises WhatifError where ``jobs`` means nothing, a
    package is missing or no cluster answers, and what ``work`` raises.
    """
    jobs = jobs if isinstance(jobs, Jobs) else Jobs.of(jobs)
    if jobs.here:
        yield from (work(thing, *given) for thing in things)
        return
    joblib = _package("joblib", f"--jobs {jobs.engine or jobs.count}", _INSTALL)
    with ExitStack() as until_done:
        if jobs.engine:
            until_done.enter_context(_cluster(jobs))
        count = -1 if jobs.engine else jobs.count
        until_done.enter_context(joblib.parallel_config(backend=jobs.engine or "loky", n_jobs=count))
        # Results come while later things are under way, where the engine can do that.
        come = "list" if jobs.engine == "ray" else "generator"
        yield from joblib.Parallel(return_as=come)(joblib.delayed(work)(thing, *given) for thing in things)


def _package(name: str, asked: str, how: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise WhatifError(f"{asked} needs the package {package}, which is not installed; {how}.") from None


def _cluster(jobs: Jobs) -> AbstractContextManager[Any]:
    """The connection to an engine's cluster, closed when the work is done."""
    asked = f"--jobs {jobs.engine}"
    stack = ExitStack()
    try:
        if jobs.engine == "dask":
            distributed = _package("distributed", asked, "run `pip install 'dask[distributed]'`")
            # joblib takes the client that was made last.
            stack.enter_context(distributed.Client(jobs.address, timeout=PATIENCE_S))
            return stack
        ray = _package("ray", asked, "run `pip install ray`")
        if not ray.is_initialized():
            _knock(jobs.address or os.environ.get("RAY_ADDRESS", ""))
            ray.init(address=jobs.address, log_to_driver=False, logging_level="error")
            stack.callback(ray.shutdown)
        _package("ray.util.joblib", asked, "run `pip install ray`").register_ray()
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        where = f":{jobs.address}" if jobs.address else ""
        raise WhatifError(
            f"{asked}{where}: expected a cluster that answers, got '{in_short(error)}'; start one, or name its address."
        ) from error
    return stack


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at host:port: Ray itself then waits for minutes and ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal() and int(port) < 2**16:
        socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
