"""The one CUPTI client of a process: refuses what cannot work, then collects activity records from start to stop.

Buffer callbacks, enabled kinds and the subscription are the process's, not ours: torch.profiler in the same process
would lose records to this one and the other way round, so each process has one of the two, once.
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

# A step of 1,500 kernels and 5,000 calls fills 0.6 MB. CUPTI delivers a full buffer on a thread of its own while it
# holds its lock, and that thread then waits for Python's: no buffer should fill up before the flush.
BUFFER_BYTES = 32 << 20

INSTALL = (
    "install it with `pip install cupti-python`, beside torch 2.11 with `pip install --no-deps cupti-python==13.2.0`,"
    " or record with the backend kineto."
)

_FORCED_FLUSH = 1


def load_cupti() -> Any:
    """Return the module `cupti.cupti`, or raise WhatifError where it is missing or too old."""
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

    Raises WhatifError, when it is made, where there is no cupti-python or no driver, where two copies of CUPTI are
    loaded, or where torch.profiler or another profiler has used CUPTI before. `make_tracer` refuses what is known
    without CUPTI: a profiler that runs, an earlier session, and no GPU.
    """

    def __init__(self) -> None:
        self.cupti = cupti = load_cupti()
        self.records = Records(cupti)
        self.dropped_records = 0
        self._failure: BaseException | None = None
        # The records' own clock: ns since 1970.
        self.clock: Callable[[], int] = cupti.get_timestamp
        try:
            self.clock()
        except Exception as error:  # The binding raises a private class where it finds no library.
            raise WhatifError(
                f"the backend cupti: expected the CUDA driver and CUPTI, got {type(error).__name__}"
                f" ({' '.join(str(error).split())}); install NVIDIA's driver and `pip install nvidia-cuda-cupti`."
            ) from error
        refuse_two_libraries(loaded_cupti_libraries())
        self._refuse_other_subscriber()

    def start(self) -> None:
        """Begin to collect; raises WhatifError where CUPTI refuses."""
        # Then a record's thread is the operating system's, as `threading.get_native_id` has it.
        self._ask("set_thread_id_type", self.cupti.ActivityThreadIdType.SYSTEM)
        self._ask("activity_register_callbacks", self._requested, self._completed)
        for kind in self.records.kinds:
            self._ask("activity_enable", kind)

    def push(self, identifier: int) -> None:
        """Return the calls of this thread an external correlation id until `pop`."""
        self._ask("activity_push_external_correlation_id", self._external_kind, identifier)

    def pop(self) -> None:
        """End the innermost `push` of this thread."""
        self._ask("activity_pop_external_correlation_id", self._external_kind)

    def stop(self) -> None:
        """Wait for the GPU, take what CUPTI still holds, and collect no more.

        Raises WhatifError where CUPTI refuses, or a record could not be read.
        """
        GPU.synchronize()
        # Flushing waits for no GPU work: a record that is not complete would be lost.
        self._ask("activity_flush_all", _FORCED_FLUSH)
        for kind in self.records.kinds:
            self._ask("activity_disable", kind)
        self.dropped_records = self._count_dropped()
        if self._failure is not None:
            raise WhatifError(
                f"the backend cupti: expected records of cupti-python 13.0 or newer, got {cupti_version()}, where"
                f" reading one raised {type(self._failure).__name__} ({self._failure}); {INSTALL}"
            ) from self._failure

    def callback_name(self, is_driver: bool, callback: int) -> str:
        """Return the name of a CUDA call; one that this CUPTI does not know is called by its number."""
        domain = self.cupti.CallbackDomain.DRIVER_API if is_driver else self.cupti.CallbackDomain.RUNTIME_API
        try:
            return str(self.cupti.get_callback_name(domain, callback))
        except self.cupti.cuptiError:
            return f"{'cu' if is_driver else 'cuda'}Call{callback}"

    @property
    def _external_kind(self) -> Any:
        return self.cupti.ExternalCorrelationKind.CUSTOM2  # The first two are Kineto's.

    def _requested(self) -> tuple[int, int]:
        return BUFFER_BYTES, 0  # 0: as many records as fit.

    def _completed(self, records: list[Any]) -> None:
        # CUPTI calls this from C and perhaps on a thread of its own: nothing could catch what it raises.
        try:
            self.records.add(records)
        except Exception as error:
            self._failure = self._failure or error

    def _count_dropped(self) -> int:
        dropped = ctypes.c_size_t()
        self._ask("activity_get_num_dropped_records", 0, 0, ctypes.addressof(dropped))
        return int(dropped.value)

    def _refuse_other_subscriber(self) -> None:
        """Kineto subscribes at the first use of torch.profiler with CUDA and keeps that until the process ends."""
        cupti = self.cupti
        try:
            cupti.unsubscribe(cupti.subscribe(_ignore, None))
        except cupti.cuptiError as error:
            # Any other failure is no evidence: what matters is whether activities can be enabled, which `start` shows.
            if error.status in [int(cupti.Result[name]) for name in TAKEN]:
                raise refused(cupti, "subscribe", error) from error

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Call a function of CUPTI; raises WhatifError, which says what to do, where CUPTI refuses."""
        try:
            return getattr(self.cupti, call)(*arguments)
        except self.cupti.cuptiError as error:
            raise refused(self.cupti, call, error) from error


def _ignore(*arguments: Any) -> None:
    """Stand in for a callback; no callback is ever enabled."""


def refuse_two_libraries(libraries: set[str]) -> None:
    """Raise WhatifError where a process has more than one copy of CUPTI: only the first could subscribe."""
    if len(libraries) > 1:
        raise WhatifError(
            f"the backend cupti: expected one copy of libcupti in this process, got {len(libraries)}"
            f" ({', '.join(sorted(libraries))}); keep only the nvidia-cuda-cupti that torch came with and install"
            " cupti-python with --no-deps."
        )
