"""Device names: map the name that a source gives a device to the database's name for it."""

from __future__ import annotations

import re

from whatif.hardware.gpu import Gpu, find_gpu, load_gpu
from whatif.opdb.provenance import Device
from whatif.runtime.errors import WhatifError

CPU_PREFIX = "cpu:"


def device_called(reported: str, *, memory_bytes: int | None = None) -> Device:
    """Return the device that a source calls ``reported``; a device without known facts keeps that name."""
    reported = " ".join(reported.split())
    if not reported:
        raise WhatifError("opdb: expected the name of the device that was measured, got none; name it with --device.")
    gpu = None if reported.startswith(CPU_PREFIX) else find_gpu(reported, memory_bytes) or _by_name(reported)
    return Device(name=gpu.name if gpu else reported[:120], reported_as=reported[:120])


def cpu_called(name: str, threads: object) -> Device:
    """Return the device of a CPU with ``threads`` threads: their number changes the time of an operator.

    A missing or implausible number of threads is left out.
    """
    count = threads if type(threads) is int and 0 < threads < 10_000 else None
    return device_called(f"{CPU_PREFIX}{name}" + (f" x{count}" if count else ""))


def facts(name: str) -> Gpu | None:
    """Return the data sheet of a device of the database; None for a CPU or an unknown GPU."""
    return _by_name(name) if not name.startswith(CPU_PREFIX) else None


def _by_name(name: str) -> Gpu | None:
    try:
        return load_gpu(name)
    except WhatifError:
        return None


def folder_name(name: str) -> str:
    """Return a folder name for a device that is valid on every operating system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "device"
