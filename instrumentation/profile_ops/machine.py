"""The measured device in the database's terms: its name, the environment of its times, and the method."""

from __future__ import annotations

import datetime
import platform
from typing import NamedTuple

import whatif
from whatif.opdb.devices import cpu_called, device_called
from whatif.opdb.provenance import Environment, Method, Origin, Source
from whatif.runtime.errors import WhatifError

from ..gpu import GPU
from ..gpu_clocks import describe_clocks, power_limit_watt
from ..metadata import describe_environment


class Way(NamedTuple):
    """How operators are measured: torch's device, number of CPU threads, state of the caches, and method.

    ``ranks`` is the number of processes of a collective; 0 for operators of one device.
    """

    device: str
    threads: int
    cache: str
    method: str
    ranks: int = 0


def origin_of(way: Way, *, author: str | None = None, licence: str | None = None) -> Origin:
    """Return the origin of times measured this way on this machine. Raises WhatifError without such a device."""
    source = Source(
        author=author, licence=licence, date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        tool="whatif opdb profile", tool_version=whatif.__version__,
    )  # fmt: skip
    is_cuda = way.device == "cuda"
    if is_cuda and not GPU.available():
        raise WhatifError("opdb profile: expected a CUDA device, got none; use --device cpu or a machine with one.")
    described = describe_environment(is_cuda)
    environment = Environment(
        framework="pytorch", framework_version=str(described["torch"]), os=platform.system(), cpu=described["cpu"],
        threads=None if is_cuda else way.threads, cuda=described["cuda"],
        cudnn=None if described["cudnn"] is None else str(described["cudnn"]),
        driver=describe_clocks()[1] if is_cuda else None, power_limit_watt=power_limit_watt() if is_cuda else None,
    )  # fmt: skip
    # On a GPU launches are queued in advance; on a CPU the call from Python is part of each time.
    method = Method(name=way.method, includes_launch=not is_cuda, cache=way.cache)
    if is_cuda:
        device = device_called(described["gpu"], memory_bytes=GPU.properties().total_memory)
    else:
        device = cpu_called(str(described["cpu"]), way.threads)
    return Origin(device=device, environment=environment, method=method, source=source)


def clocks_note() -> str | None:
    """Return a note on the GPU's current clocks and power, None if not reported. They are not part of a key."""
    clocks, _ = describe_clocks()
    if clocks is None:
        return None
    units = {"sm_mhz": "MHz SM", "memory_mhz": "MHz memory", "power_w": "W", "temperature_c": "C"}
    readings = [f"{value:g} {units[name]}" for name, value in clocks.items() if value is not None]
    return f"after the last operator: {', '.join(readings)}" if readings else None
