"""The only CUPTI client of a process: checks that CUPTI can work, then collects activity records.

Buffer callbacks, enabled kinds and the subscription are global in a process: this client and torch.profiler would
take records from each other, so a process may use one of the two, once.
"""

import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from whatif.runtime.errors import WhatifError

from ..gpu import GPU
from ..gpu_events import loaded_cupti_libraries
from .records import Records
from .refusals import TAKEN, refused

# A step of 1,500 kernels and 5,000 calls fills 0.6 MB. CUPTI delivers a full buffer on its own thread while holding its
# lock, and that thread then waits for Python's lock: no buffer should fill up before the flush.
BUFFER_BYTES = 32 << 20

INSTALL = (
    "install it with `pip install cupti-python`, beside torch 2.11 with `pip install --no-deps cupti-python==13.2.0`,"
    " or record with the backend kineto."
)

_FORCED_FLUSH = 1


def load_cupti() -> Any:
    """Return the module `cupti.cupti`, or raise WhatifError if it is missing or too old."""
    try:
        cupti = importlib.import_module("cupti.cupti")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "cuda":
            raise WhatifError(
                "the backend cupti: expected the package cuda-bindings, which cupti-python needs, got none; install it"
                " with `pip install cuda-bindings`."
            ) from error
        raise WhatifError(
            f"the backend cupti: expected the package cupti-python, got {type(error).__name__} ({error}); {INSTALL}"
        ) from error
    if not hasattr(cupti.ActivityKind, "RUNTIME"):
        raise WhatifError(
            f"the backend cupti: expected cupti-python 13.0 or newer, which records runtime calls, got"
            f" {cupti_version()}; {INSTALL}"
        )
    return cupti


def cupti_version() -> str:
    """Return the version of the package cupti-python."""
    try:
        return importlib.metadata.version("cupti-python")
    except importlib.metadata.PackageNotFoundError:
        return "an unknown version"


class CuptiSession:
    """Collects CUPTI's records of this process between `start` and `stop` into `records`.

    The constructor raises WhatifError without cupti-python or a driver, if two copies of CUPTI are loaded, or if
    torch.profiler or another profiler has used CUPTI before. `make_tracer` checks what does not need CUPTI: a running
    profiler, an earlier session, a missing GPU.
    """

    def __init__(self) -> None:
        self.cupti = cupti = load_cupti()
        self.records = Records(cupti)
        self.dropped_records = 0
        self._failure: BaseException | None = None
        # The clock of the records: ns since 1970.
        self.clock: Callable[[], int] = cupti.get_timestamp
        try:
            self.clock()
        except Exception as error:  # The binding raises a private class if it finds no library.
            raise WhatifError(
                f"the backend cupti: expected the CUDA driver and CUPTI, got {type(error).__name__}"
                f" ({' '.join(str(error).split())}); install NVIDIA's driver and `pip install nvidia-cuda-cupti`."
            ) from error
        refuse_two_libraries(loaded_cupti_libraries())
        self._refuse_other_subscriber()

    def start(self) -> None:
        """Start collecting; raises WhatifError if CUPTI refuses."""
        # Thread ids of the operating system, as in `threading.get_native_id`.
        self._call_cupti("set_thread_id_type", self.cupti.ActivityThreadIdType.SYSTEM)
        self._call_cupti("activity_register_callbacks", self._requested, self._completed)
        for kind in self.records.kinds:
            self._call_cupti("activity_enable", kind)

    def push(self, identifier: int) -> None:
        """Give the calls of this thread an external correlation id until `pop`."""
        self._call_cupti("activity_push_external_correlation_id", self._external_kind, identifier)

    def pop(self) -> None:
        """End the innermost `push` of this thread."""
        self._call_cupti("activity_pop_external_correlation_id", self._external_kind)

    def stop(self) -> None:
        """Synchronize the GPU, flush CUPTI's buffers and stop collecting.

        Raises WhatifError if CUPTI refuses, or if a record could not be read.
        """
        GPU.synchronize()
        # Flushing does not wait for GPU work: incomplete records would be lost.
        self._call_cupti("activity_flush_all", _FORCED_FLUSH)
        for kind in self.records.kinds:
            self._call_cupti("activity_disable", kind)
        self.dropped_records = self._count_dropped()
        if self._failure is not None:
            raise WhatifError(
                f"the backend cupti: expected records of cupti-python 13.0 or newer, got {cupti_version()}, where"
                f" reading one raised {type(self._failure).__name__} ({self._failure}); {INSTALL}"
            ) from self._failure

    def callback_name(self, is_driver: bool, callback: int) -> str:
        """Return the name of a CUDA call; a name with its number if this CUPTI does not know it."""
        domain = self.cupti.CallbackDomain.DRIVER_API if is_driver else self.cupti.CallbackDomain.RUNTIME_API
        try:
            return str(self.cupti.get_callback_name(domain, callback))
        except self.cupti.cuptiError:
            return f"{'cu' if is_driver else 'cuda'}Call{callback}"

    @property
    def _external_kind(self) -> Any:
        return self.cupti.ExternalCorrelationKind.CUSTOM2  # The first two are Kineto's.

    def _requested(self) -> tuple[int, int]:
        return BUFFER_BYTES, 0  # 0: no limit on the number of records

    def _completed(self, records: list[Any]) -> None:
        # CUPTI calls this from C, perhaps on its own thread: nothing could catch an exception.
        try:
            self.records.add(records)
        except Exception as error:
            self._failure = self._failure or error

    def _count_dropped(self) -> int:
        dropped = ctypes.c_size_t()
        self._call_cupti("activity_get_num_dropped_records", 0, 0, ctypes.addressof(dropped))
        return int(dropped.value)

    def _refuse_other_subscriber(self) -> None:
        """Raise if CUPTI has a subscriber: Kineto stays one after the first use of torch.profiler with CUDA."""
        cupti = self.cupti
        try:
            cupti.unsubscribe(cupti.subscribe(_ignore, None))
        except cupti.cuptiError as error:
            # Any other error proves nothing: what matters is whether `start` can enable the activities.
            if error.status in [int(cupti.Result[name]) for name in TAKEN]:
                raise refused(cupti, "subscribe", error) from error

    def _call_cupti(self, call: str, *arguments: Any) -> Any:
        """Call a function of CUPTI; raises WhatifError with a remedy if CUPTI refuses."""
        try:
            return getattr(self.cupti, call)(*arguments)
        except self.cupti.cuptiError as error:
            raise refused(self.cupti, call, error) from error


def _ignore(*arguments: Any) -> None:
    """Placeholder for the subscriber's callback; no callback is ever enabled."""


def refuse_two_libraries(libraries: set[str]) -> None:
    """Raise WhatifError if the process has more than one copy of CUPTI: only the first could subscribe."""
    if len(libraries) > 1:
        raise WhatifError(
            f"the backend cupti: expected one copy of libcupti in this process, got {len(libraries)}"
            f" ({', '.join(sorted(libraries))}); keep only the nvidia-cuda-cupti that torch came with and install"
            " cupti-python with --no-deps."
        )
