"""Explains GPU traces without kernels: CUPTI refused to start, and torch continued silently."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whatif.runtime.errors import WhatifError

from .gpu import GPU

_PARAMETERS = Path("/proc/driver/nvidia/params")
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

# linux/capability.h: with either a process may profile where NVIDIA's driver restricts profiling to administrators.
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38}

# Variables and libraries with which Nsight Systems and Compute inject their CUPTI client into a process.
_INJECTING_VARIABLES = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
_INJECTED_LIBRARIES = ("libToolsInjection64", "libTreeLauncherTargetInjection")


class NoGpuEventsError(WhatifError):
    """The trace of a model on a GPU contains no kernel: nothing can be recorded on this machine until that is fixed."""


@dataclass(frozen=True)
class Machine:
    """The possible reasons for CUPTI's refusal that this process can detect."""

    admin_only: bool = False  # NVreg_RestrictProfilingToAdminUsers
    privileged: bool = True
    in_container: bool = False
    others: tuple[str, ...] = ()  # other clients of CUPTI
    libraries: frozenset[str] = field(default_factory=frozenset)  # copies of libcupti
    mig: bool = False
    is_nvidia: bool = True


def require_gpu_events(events: list[dict[str, Any]], path: Path, machine: Machine | None = None) -> None:
    """Raise NoGpuEventsError if no event is a kernel, with each cause that this process can detect and its remedy."""
    if any(event.get("cat") == "kernel" for event in events):
        return
    launches = sum(
        str(event.get("name", "")).startswith(
            ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "hipLaunch", "hipExtLaunch")
        )
        for event in events
    )
    counts = f"{launches:,} launches and no kernel" if launches else "no kernel"
    causes = causes_of(this_machine() if machine is None else machine)
    raise NoGpuEventsError(
        f"{path}: expected kernels in the trace of a model on a GPU, got {counts}; nothing was written."
        f" {' '.join(causes)}"
    )


def causes_of(machine: Machine) -> list[str]:
    """Return a sentence with a remedy for each cause that applies to the machine; if none does, what to check."""
    if not machine.is_nvidia:
        return ["Check that this torch was built with roctracer, and that the program may open /dev/kfd."]
    found = []
    if machine.admin_only and not machine.privileged:
        remedy = (
            "start the container with --cap-add=SYS_ADMIN, or let the host's administrator"
            if machine.in_container
            else "run as root, or"
        )
        found.append(
            "The driver limits profiling to administrators (NVreg_RestrictProfilingToAdminUsers=1) and this process"
            f" {'in a container ' if machine.in_container else ''}lacks CAP_SYS_ADMIN and CAP_PERFMON: {remedy} set"
            " `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d and reload the driver."
        )
    if machine.others:
        found.append(
            f"Another profiler ({', '.join(machine.others)}) is in this process and CUPTI allows one: run without it."
        )
    if len(machine.libraries) > 1:
        found.append(
            f"This process has {len(machine.libraries)} copies of libcupti ({', '.join(sorted(machine.libraries))}) and"
            " only the first can subscribe: keep the nvidia-cuda-cupti that torch came with."
        )
    if machine.mig:
        found.append(
            "The GPU is a MIG instance, whose activity drivers or containers may hide: record on a whole GPU"
            " (`nvidia-smi -mig 0` by its administrator)."
        )
    if not found and machine.in_container and not machine.privileged:
        found.append(
            "This process is in a container without CAP_SYS_ADMIN, in which CUPTI may be refused: start the container"
            " with --cap-add=SYS_ADMIN."
        )
    return found or [
        "No known cause applies: look for CUPTI_ERROR in what torch printed above, stop other profilers"
        " (nsys, ncu, DCGM's), and check that torch's CUDA is not newer than the driver's (nvidia-smi)."
    ]


def this_machine() -> Machine:
    """Return the state of this machine that the process can read; what it cannot read counts as no cause."""
    return Machine(
        admin_only="RmProfilingAdminOnly: 1" in _text(_PARAMETERS),
        privileged=_privileged(_text(_STATUS)),
        in_container=any(mark.exists() for mark in _CONTAINER_MARKS),
        others=_other_clients(_text(_MAPS), os.environ),
        libraries=frozenset(loaded_cupti_libraries(_MAPS)),
        mig=_is_mig(os.environ),
        is_nvidia=GPU.is_nvidia(),
    )


def loaded_cupti_libraries(maps: Path = _MAPS) -> set[str]:
    """Return the paths of the copies of libcupti that this process has loaded."""
    paths = {line.split(maxsplit=5)[-1] for line in _text(maps).splitlines() if "/libcupti.so" in line}
    return {str(Path(path).resolve()) for path in paths}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # Not Linux, or no driver.
        return ""


def _privileged(status: str) -> bool:
    """Whether a process with this /proc status may profile if only administrators may; True if that is unknown."""
    words = next((line.split() for line in status.splitlines() if line.startswith("CapEff:")), None)
    return words is None or any(int(words[1], 16) >> bit & 1 for bit in _CAPABILITIES.values())


def _other_clients(maps: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    libraries = [name for name in _INJECTED_LIBRARIES if name in maps]
    return (*(name for name in _INJECTING_VARIABLES if environment.get(name)), *libraries)


def _is_mig(environment: Mapping[str, str]) -> bool:
    if environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return True
    return GPU.in_use() and " MIG " in f"{GPU.properties().name} "
