"""Meaning and remedy of CUPTI's errors while recording."""

from typing import Any

from whatif.runtime.errors import WhatifError

from ..gpu_events import causes_of, this_machine

# CUPTI allows one subscriber per process: the codes of versions before and since 12.
TAKEN = frozenset({"ERROR_MAX_LIMIT_REACHED", "ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"})
_DENIED = frozenset({"ERROR_INSUFFICIENT_PRIVILEGES", "ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES"})
_SESSION_OF_OTHERS = "end the other profiler (nsys, ncu, DCGM's counters) and record again"
# The others, from cupti_result.h: cause and remedy.
_REMEDIES = {
    "ERROR_NOT_INITIALIZED": "the driver could not be initialised; check nvidia-smi, and that the program sees a GPU",
    "ERROR_INVALID_DEVICE": "CUPTI does not know the device; use a driver that is as new as torch's CUDA",
    "ERROR_NOT_COMPATIBLE": "another profiler's settings are in force; " + _SESSION_OF_OTHERS,
    "ERROR_INVALID_OPERATION": "another profiler's session is under way; " + _SESSION_OF_OTHERS,
    "ERROR_HARDWARE_BUSY": "another profiler holds the device; " + _SESSION_OF_OTHERS,
    "ERROR_OLD_PROFILER_API_INITIALIZED": "nvprof's interface is in use; " + _SESSION_OF_OTHERS,
    "ERROR_OUT_OF_MEMORY": "there is no memory for CUPTI's buffers; leave some of the host's and the GPU's free",
    "ERROR_INVALID_KIND": "this libcupti is older than the binding; install the cupti-python of torch's CUDA",
    "ERROR_API_NOT_IMPLEMENTED": "this libcupti is older than the binding; install the cupti-python of torch's CUDA",
    "ERROR_NOT_SUPPORTED": "the device or its driver cannot trace; use a newer driver or another GPU",
    "ERROR_LEGACY_PROFILER_NOT_SUPPORTED": "the device or its driver cannot trace; use a newer driver or another GPU",
    "ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED": "the GPU is virtual; its host's administrator allows profiling per vGPU",
    "ERROR_MIG_DEVICE_NOT_SUPPORTED": "the GPU is a MIG instance; record on a whole GPU",
    "ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED": "the GPU is in confidential mode; record on one that is not",
    "ERROR_CMP_DEVICE_NOT_SUPPORTED": "mining GPUs cannot be traced; record on another GPU",
    "ERROR_SLI_DEVICE_NOT_SUPPORTED": "the GPU is in SLI mode; switch that off",
    "ERROR_WSL_DEVICE_NOT_SUPPORTED": "this GPU cannot be traced in WSL; record on Linux",
}
NAMED = (*sorted(TAKEN | _DENIED), *_REMEDIES)


def refused(cupti: Any, call: str, error: Any) -> WhatifError:
    """Return the WhatifError, with cause and remedy, for an ``error`` raised by CUPTI's function ``call``."""
    names = {int(result): str(result.name) for result in cupti.Result}
    name = names.get(int(error.status), "an unknown error")
    if name in TAKEN:
        why = (
            "torch.profiler or another profiler has used CUPTI in this process; record in a fresh process that does not"
            " call torch.profiler"
        )
    elif name in _DENIED:
        why = " ".join(causes_of(this_machine())).rstrip(".")
    else:
        why = _REMEDIES.get(name, "look it up in cupti_result.h, or record with the backend kineto")
    return WhatifError(f"the backend cupti: expected {call} to work, got CUPTI_{name}: {why}.")
