"""Converts CUPTI's rows and the layers' spans to a Chrome trace in Kineto's format: both backends share a reader."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .layers import Span
from .names import api_name, demangle
from .records import CallRow, CopyRow, KernelRow, Records, SyncRow

Event = dict[str, Any]

# Calls that Kineto omits as well (CuptiActivityProfiler): thousands per step, each shorter than its recording.
_OMITTED_CALLS = frozenset(
    {
        "cudaGetDevice",
        "cudaSetDevice",
        "cudaGetLastError",
        "cudaEventCreate",
        "cudaEventCreateWithFlags",
        "cudaEventDestroy",
    }
)

_OVERHEAD_PROCESS = -1  # Kineto's process for events without a thread.


class Window(NamedTuple):
    """The time of the recorded steps, ns."""

    begin_ns: int
    end_ns: int

    def holds(self, time_ns: int) -> bool:
        """Whether a time lies in [begin, end)."""
        return self.begin_ns <= time_ns < self.end_ns


class TraceBuilder:
    """Makes the events of the records and spans of a process that belong to a window.

    `callback_name(is_driver, callback)` returns CUPTI's name of an API. Work launched in the window is kept however
    late it ran on the GPU, and work that ran in the window is kept even if it was launched before.
    """

    def __init__(
        self,
        records: Records,
        spans: list[Span],
        process: int,
        callback_name: Callable[[bool, int], str],
        window: Window,
    ) -> None:
        self._records, self._process, self._window = records, process, window
        self._spans = [span for span in spans if window.holds(span.start_ns)]
        self._names: dict[tuple[bool, int], str] = {}
        self._callback_name = callback_name
        self._gpu = self._gpu_rows()
        self._syncs = [row for row in records.syncs if window.holds(row.start_ns)]
        self._calls = self._kept_calls()

    def trace(self, devices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the trace in Kineto's format: `ts` in µs from `baseTimeNanoseconds`, which is in ns since 1970.

        Its key `cupti` counts faults, all 0 in a sound recording.
        """
        events = [event for part in self._parts() for event in part]
        events.sort(key=lambda event: event["ts"])
        return {
            "schemaVersion": 1,
            "deviceProperties": devices,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._window.begin_ns,
            "cupti": self._check(),
            "traceEvents": [*self._titles(), *events],
        }

    def _parts(self) -> Iterator[Iterator[Event]]:
        yield (self._call(row) for row in self._calls)
        yield (self._kernel(row) if isinstance(row, KernelRow) else self._copy(row) for row in self._gpu)
        yield self._sync_events()
        yield self._overhead_events()
        yield (self._span(span) for span in self._spans)
        yield self._arrows()

    def _check(self) -> dict[str, int]:
        launched = {row.correlation for row in self._gpu}
        called = {row.correlation for row in self._records.calls}
        # A host function is launched as well, but is not GPU work.
        launches = [row for row in self._calls if "Launch" in self._api(row) and "HostFunc" not in self._api(row)]
        return {
            "launches_without_gpu_task": sum(row.correlation not in launched for row in launches),
            "gpu_tasks_without_call": sum(row.correlation not in called for row in self._gpu),
        }

    def _gpu_rows(self) -> list[KernelRow | CopyRow]:
        records, window = self._records, self._window
        called_ns = {row.correlation: row.start_ns for row in records.calls}
        rows: list[KernelRow | CopyRow] = [*records.kernels, *records.copies]
        return [
            row
            for row in rows
            if row.start_ns >= window.begin_ns and called_ns.get(row.correlation, row.start_ns) < window.end_ns
        ]

    def _kept_calls(self) -> list[CallRow]:
        """Omit bookkeeping calls; of the driver, which libraries call by the hundred, all those without GPU work."""
        correlations = {row.correlation for row in self._gpu} | {row.correlation for row in self._syncs}
        return [
            row
            for row in self._records.calls
            if self._window.holds(row.start_ns)
            and (row.correlation in correlations if row.is_driver else self._api(row) not in _OMITTED_CALLS)
        ]

    def _api(self, row: CallRow) -> str:
        key = row.is_driver, row.callback
        if key not in self._names:
            self._names[key] = api_name(self._callback_name(*key))
        return self._names[key]

    def _event(
        self, category: str, name: str, process: int, thread: int, start_ns: int, end_ns: int, args: Event
    ) -> Event:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": self._us(start_ns),
            "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }

    def _us(self, time_ns: int) -> float:
        # JSON writes a quotient by 1000 with up to three decimals, so no nanosecond is lost.
        return (time_ns - self._window.begin_ns) / 1000

    def _correlated(self, correlation: int, args: Event) -> Event:
        identifier = self._records.external_ids.get(correlation)
        return args | {"correlation": correlation} | ({} if identifier is None else {"External id": identifier})

    def _call(self, row: CallRow) -> Event:
        category = "cuda_driver" if row.is_driver else "cuda_runtime"
        args = self._correlated(row.correlation, {"cbid": row.callback})
        return self._event(category, self._api(row), self._process, row.thread, row.start_ns, row.end_ns, args)

    def _kernel(self, row: KernelRow) -> Event:
        args: Event = {
            **_place(row),
            "registers per thread": row.registers,
            "shared memory": row.shared_bytes,
            "grid": list(row.grid),
            "block": list(row.block),
        }
        if row.graph_node:
            args["graph node id"] = row.graph_node
        args = self._correlated(row.correlation, args)
        return self._event("kernel", demangle(row.name), row.device, row.stream, row.start_ns, row.end_ns, args)

    def _copy(self, row: CopyRow) -> Event:
        args = self._correlated(row.correlation, {**_place(row), "bytes": row.size_bytes})
        category = "gpu_memset" if row.is_memset else "gpu_memcpy"
        return self._event(category, row.name, row.device, row.stream, row.start_ns, row.end_ns, args)

    def _sync_events(self) -> Iterator[Event]:
        device_of = {row.context: row.device for row in self._records.kernels}
        recorded = _EventRecords(self._records)
        for row in self._syncs:
            device = device_of.get(row.context, 0)
            args: Event = {"cuda_sync_kind": row.name, "stream": row.stream, "device": device, "context": row.context}
            args |= recorded.awaited(row)
            args = self._correlated(row.correlation, args)
            yield self._event("cuda_sync", row.name, device, row.stream, row.start_ns, row.end_ns, args)

    def _overhead_events(self) -> Iterator[Event]:
        for row in self._records.overheads:
            if self._window.holds(row.start_ns):
                yield self._event("overhead", row.name, _OVERHEAD_PROCESS, 0, row.start_ns, row.end_ns, {})

    def _span(self, span: Span) -> Event:
        args = {"External id": span.identifier} if span.identifier else {}
        return self._event(span.category, span.name, self._process, span.thread, span.start_ns, span.end_ns, args)

    def _arrows(self) -> Iterator[Event]:
        """Yield arrows from a layer's forward call to its backward nodes, by which readers find a node's layer."""
        number = 0
        for span in self._spans:
            if span.made_in is None or not self._window.holds(span.made_in.time_ns):
                continue
            number += 1
            arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": self._process}
            yield arrow | {"ph": "s", "tid": span.made_in.thread, "ts": self._us(span.made_in.time_ns)}
            yield arrow | {"ph": "f", "tid": span.thread, "ts": self._us(span.start_ns), "bp": "e"}

    def _titles(self) -> Iterator[Event]:
        """Yield the names of the rows in a viewer."""
        streams = sorted({(row.device, row.stream) for row in self._gpu})
        yield _title("process_labels", self._process, 0, labels="CPU")
        for device in sorted({device for device, _ in streams}):
            yield _title("process_labels", device, 0, labels=f"GPU {device}")
        for device, stream in streams:
            yield _title("thread_name", device, stream, name=f"stream {stream}")


class _EventRecords:
    """Finds the recording of a CUDA event that a synchronization waits for: the last one before it.

    Correlation ids number the calls of a process in order.
    """

    def __init__(self, records: Records) -> None:
        self._recorded: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row in sorted(records.events, key=lambda row: row.correlation):
            self._recorded.setdefault((row.context, row.event), []).append((row.correlation, row.stream))

    def awaited(self, row: SyncRow) -> Event:
        """Return Kineto's fields on the event of a synchronization; empty if it has no event."""
        recorded = self._recorded.get((row.context, row.event), [])
        at = bisect_left(recorded, (row.correlation, -1)) - 1
        if row.event < 0 or at < 0:
            return {}
        correlation, stream = recorded[at]
        return {
            "wait_on_stream": stream,
            "wait_on_cuda_event_record_corr_id": correlation,
            "wait_on_cuda_event_id": row.event,
        }


def _place(row: KernelRow | CopyRow) -> Event:
    return {"device": row.device, "context": row.context, "stream": row.stream}


def _title(kind: str, process: int, thread: int, **args: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
