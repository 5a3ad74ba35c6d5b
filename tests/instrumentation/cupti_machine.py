"""A machine with a GPU, as CUPTI reports it: the binding's real record classes and enumerations, filled in by hand.

What needs a driver is stood in for: `Library` keeps what is enabled, and `Gpu` runs every operator of a real model on
the CPU and files the records that a GPU would have caused.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from whatif.instrumentation.gpu import GPU

if os.environ.get("WHATIF_STRICT") == "1":
    from cupti import cupti
else:
    cupti = pytest.importorskip("cupti.cupti")

KIND = cupti.ActivityKind
STREAM, CONTEXT = 7, 1
NO_STREAM = 2**32 - 1
RUNTIME, DRIVER = cupti.Runtime_api_trace_cbid, cupti.Driver_api_trace_cbid
LAUNCH = int(RUNTIME.cudaLaunchKernel_v7000)
COPY = int(RUNTIME.cudaMemcpyAsync_v3020)
RECORD_EVENT = int(RUNTIME.cudaEventRecord_v3020)
SYNC_STREAM = int(RUNTIME.cudaStreamSynchronize_v3020)

# How long the machine takes, ns.
KERNEL_NS, LAG_NS = 10_000, 2_000


def fill(record: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def kernel(name: str, start_ns: int, end_ns: int, correlation: int, stream: int = STREAM, **more: Any) -> Any:
    return fill(
        cupti.ActivityKernel11(), kind=int(KIND.CONCURRENT_KERNEL), name=name, start=start_ns, end=end_ns,
        correlation_id=correlation, stream_id=stream, context_id=CONTEXT, device_id=0, **more,
    )  # fmt: skip


def memcpy(kind: Any, source: Any, target: Any, start_ns: int, end_ns: int, correlation: int, size: int) -> Any:
    return fill(
        cupti.ActivityMemcpy6(), kind=int(KIND.MEMCPY), copy_kind=int(kind), src_kind=int(source),
        dst_kind=int(target), start=start_ns, end=end_ns, correlation_id=correlation, stream_id=STREAM,
        context_id=CONTEXT, device_id=0, bytes=size,
    )  # fmt: skip


def memset(start_ns: int, end_ns: int, correlation: int, size: int) -> Any:
    return fill(
        cupti.ActivityMemset4(), kind=int(KIND.MEMSET), memory_kind=int(cupti.ActivityMemoryKind.DEVICE),
        start=start_ns, end=end_ns, correlation_id=correlation, stream_id=STREAM, context_id=CONTEXT, device_id=0,
        bytes=size,
    )  # fmt: skip


def call(cbid: int, start_ns: int, end_ns: int, correlation: int, thread: int = 1, *, driver: bool = False) -> Any:
    return fill(
        cupti.ActivityAPI(), kind=int(KIND.DRIVER if driver else KIND.RUNTIME), cbid=cbid, start=start_ns, end=end_ns,
        correlation_id=correlation, thread_id=thread, process_id=1,
    )  # fmt: skip


def sync(kind: Any, start_ns: int, end_ns: int, correlation: int, *, stream: int, event: int = NO_STREAM) -> Any:
    return fill(
        cupti.ActivitySynchronization2(), kind=int(KIND.SYNCHRONIZATION), type=int(kind), start=start_ns, end=end_ns,
        correlation_id=correlation, stream_id=stream, cuda_event_id=event, context_id=CONTEXT,
    )  # fmt: skip


def event_record(event: int, correlation: int, stream: int = STREAM) -> Any:
    return fill(
        cupti.ActivityCudaEvent2(), kind=int(KIND.CUDA_EVENT), event_id=event, correlation_id=correlation,
        stream_id=stream, context_id=CONTEXT,
    )  # fmt: skip


def overhead(kind: Any, start_ns: int, end_ns: int) -> Any:
    return fill(cupti.ActivityOverhead3(), kind=int(KIND.OVERHEAD), overhead_kind=int(kind), start=start_ns, end=end_ns)


def external(correlation: int, identifier: int, kind: Any = cupti.ExternalCorrelationKind.CUSTOM2) -> Any:
    return fill(
        cupti.ActivityExternalCorrelation(), kind=int(KIND.EXTERNAL_CORRELATION), external_kind=int(kind),
        correlation_id=correlation, external_id=identifier,
    )  # fmt: skip


def callback_name(is_driver: bool, cbid: int) -> str:
    """What `get_callback_name` says, by the binding's own tables."""
    return str((DRIVER if is_driver else RUNTIME)(cbid).name)


class Library:
    """The module `cupti.cupti` with a driver beneath it; everything that needs none is the real one."""

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.enabled: set[int] = set()
        self.subscribed_by_other = False
        self.dropped = 0
        self.shuffles = False  # buffers that arrive late and out of order
        self.loses = 0  # of so many kernels' records one is dropped
        self.refuses: dict[str, str] = {}  # the name of CUPTI's error by the call that gives it
        self._local = threading.local()

    def __getattribute__(self, name: str) -> Any:
        """A call that is refused raises the binding's own error."""
        refused = object.__getattribute__(self, "__dict__").get("refuses", {}).get(name)
        if refused is None:
            return object.__getattribute__(self, name)

        def refuse(*arguments: Any) -> None:
            raise cupti.cuptiError(int(cupti.Result[refused]))

        return refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(cupti, name)

    def get_timestamp(self) -> int:
        return time.time_ns()

    def set_thread_id_type(self, kind: Any) -> None:
        assert kind == cupti.ActivityThreadIdType.SYSTEM

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        size_bytes, most = requested()
        assert size_bytes >= 8 << 20
        assert most == 0
        self._completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_flush_all(self, flag: int) -> None:
        assert flag == 1
        records, self.pending = self.pending, []
        if self.loses:
            kernels = [place for place, record in enumerate(records) if record.kind == KIND.CONCURRENT_KERNEL]
            lost = set(kernels[:: self.loses])
            self.dropped += len(lost)
            records = [record for place, record in enumerate(records) if place not in lost]
        if self.shuffles:  # Buffers of several threads and streams, delivered as they happen to fill up.
            random.Random(0).shuffle(records)
            for start in range(0, len(records), 100):
                self._completed(records[start : start + 100])
            return
        self._completed(records)

    def activity_get_num_dropped_records(self, context: int, stream: int, pointer: int) -> None:
        import ctypes

        ctypes.c_size_t.from_address(pointer).value = self.dropped

    def get_callback_name(self, domain: Any, cbid: int) -> str:
        return callback_name(domain == cupti.CallbackDomain.DRIVER_API, cbid)

    def subscribe(self, callback: Any, userdata: Any) -> int:
        if self.subscribed_by_other:
            raise cupti.cuptiError(int(cupti.Result.ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED))
        return 1

    def unsubscribe(self, subscriber: int) -> None:
        assert subscriber == 1

    def activity_push_external_correlation_id(self, kind: Any, identifier: int) -> None:
        self._pushed().append(identifier)

    def activity_pop_external_correlation_id(self, kind: Any) -> int:
        return int(self._pushed().pop())

    def _pushed(self) -> list[int]:
        if not hasattr(self._local, "pushed"):
            self._local.pushed = []
        pushed: list[int] = self._local.pushed
        return pushed

    def file(self, *records: Any) -> None:
        """Take the records of the kinds that are enabled; a call inside a push has its external id ahead of it."""
        for record in records:
            if record.kind in (KIND.RUNTIME, KIND.DRIVER) and self._pushed():
                self.file(external(record.correlation_id, self._pushed()[-1]))
            if record.kind in self.enabled:
                self.pending.append(record)


class Gpu(TorchDispatchMode):
    """Runs each operator on the CPU and files a launch and a kernel of its name, as if it had run on a GPU."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library
        self._correlation = 0
        self._free_ns = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin_ns = time.time_ns()
        result = function(*args, **(kwargs or {}))
        end_ns = time.time_ns()
        self._correlation += 1
        start_ns = max(end_ns + LAG_NS, self._free_ns)
        self._free_ns = start_ns + KERNEL_NS
        self._library.file(
            call(LAUNCH, begin_ns, end_ns, self._correlation, threading.get_native_id()),
            kernel(str(function), start_ns, self._free_ns, self._correlation),
        )
        return result


def no_gpu_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPU, "synchronize", lambda device=None: None)
