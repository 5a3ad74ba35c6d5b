"""Names of devices: what a source calls its device, as the one name under which the database keeps it."""

from __future__ import annotations

import re

from whatif.hardware.gpu import Gpu, find_gpu, load_gpu
from whatif.opdb.provenance import Device
from whatif.runtime.errors import WhatifError

CPU_PREFIX = "cpu:"


def device_called(told: str, *, memory_bytes: int | None = None) -> Device:
    """Return the device that a source calls ``told``; one without known facts keeps that name."""
    told = " ".join(told.split())
    if not told:
        raise WhatifError("opdb: expected the name of the device that was measured, got none; name it with --device.")
    gpu = None if told.startswith(CPU_PREFIX) else find_gpu(told, memory_bytes) or _by_name(told)
    return Device(name=gpu.name if gpu else told[:120], told=told[:120])


def cpu_called(name: str, threads: object) -> Device:
    """Return the device that a CPU is with so many threads: with others the same operator takes another time.

    A number of threads that is none, or implausible, is left out.
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
    """Return the name of a device as the name of a folder that every system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "device"
