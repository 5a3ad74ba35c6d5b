"""Names in the trace for CUPTI's numbers and mangled symbols, the same as Kineto's."""

import functools
import re

import torch

# From Kineto's traces, as is the spelling of a copy's kind: `HtoD` for `HTOD`.
SYNC_KINDS = {
    "EVENT_SYNCHRONIZE": "Event Sync",
    "STREAM_WAIT_EVENT": "Stream Wait Event",
    "STREAM_SYNCHRONIZE": "Stream Sync",
    "CONTEXT_SYNCHRONIZE": "Context Sync",
}

_COPY_KIND = re.compile(r"([HDAP])TO([HDAP])")
# An API's name ends in the CUDA version that introduced it; `_v2` and `_ptsz` belong to the name.
_API_VERSION = re.compile(r"_v\d{4,5}$")


def api_name(callback_name: str) -> str:
    """Return `cudaLaunchKernel` for `cudaLaunchKernel_v7000`."""
    return _API_VERSION.sub("", callback_name)


def copy_name(copy_kind: str, source_kind: str, target_kind: str) -> str:
    """Return `Memcpy HtoD (Pageable -> Device)` for the names of CUPTI's copy kind and its two memory kinds."""
    kind = "to".join(match.groups()) if (match := _COPY_KIND.fullmatch(copy_kind)) else "Unknown"
    return f"Memcpy {kind} ({_words(source_kind)} -> {_words(target_kind)})"


def memset_name(memory_kind: str) -> str:
    """Return `Memset (Device)` for the name of CUPTI's memory kind."""
    return f"Memset ({_words(memory_kind)})"


def sync_name(kind: str) -> str:
    """Return `Event Sync` for the name of CUPTI's synchronisation type."""
    return SYNC_KINDS.get(kind, "Unknown Sync")


def overhead_name(kind: str) -> str:
    """Return `Buffer Flush` for the name of CUPTI's overhead kind."""
    return _words(kind.removeprefix("CUPTI_"))


def _words(name: str) -> str:
    return name.replace("_", " ").title()


@functools.cache
def demangle(symbol: str) -> str:
    """Return the demangled name of a C++ symbol; other names are returned unchanged.

    Uses the C++ runtime that torch has loaded, as Kineto does, so that both give the same name of a kernel.
    """
    return torch._C._demangle(symbol) if symbol.startswith("_Z") else symbol
