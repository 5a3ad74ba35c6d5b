"""The vocabulary of the task graph: kinds of tasks, dependencies, phases and execution threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Bool = npt.NDArray[np.bool_]
Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


class TaskKind(IntEnum):
    """The kind of a task. A gap is a separate task on its CPU thread; a wait is time that no work explains."""

    CPU_OP = 0
    RUNTIME = 1
    GAP = 2
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    COMMUNICATION = 6
    DATA_LOADING = 7
    WAIT = 8


# Names of tasks without an event.
SYNC_NAME = "(waits for the GPU)"
HANDOFF_NAME = "(waits for another thread)"
UNEXPLAINED_NAME = "(unexplained wait)"
BEFORE_NAME = "(before the first task)"
IDLE_NAME = "(idle)"
# In a graph of several ranks: a rank arrives at a collective, all have arrived, a rank's recording begins later.
ARRIVAL_NAME = "(arrives)"
HUB_NAME = "(all have arrived)"
BEGIN_NAME = "(its recording begins)"

GPU_KINDS = (TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.MEMSET, TaskKind.COMMUNICATION)
# Time in which a CPU thread works; a wait is not work.
CPU_WORK_KINDS = (TaskKind.CPU_OP, TaskKind.RUNTIME, TaskKind.GAP, TaskKind.DATA_LOADING)


class Phase(IntEnum):
    """The part of a training step that a task belongs to."""

    UNKNOWN = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4


# Names of the phases in answers, by code.
PHASE_NAMES = tuple(phase.name.lower() for phase in Phase)


class DependencyKind(IntEnum):
    """The reason for a dependency. The order of tasks on one execution thread follows from their ids."""

    LAUNCH = 0  # a CPU call starts a GPU task
    SYNC = 1  # a CPU thread waits for GPU work
    EVENT = 2  # a stream waits for another stream
    HANDOFF = 3  # a CPU thread waits for another CPU thread
    COMMUNICATION = 4  # a collective or transfer and its successors
    QUEUE = 5  # derived: the launch queue is full
    THREAD = 6  # derived: the order of one execution thread
    USER = 7  # added by a transform


class Change(Enum):
    """A change of the steps by a transform, for later transforms that depend on it."""

    ENCODES = "encodes feature maps"
    RECOMPUTES = "recomputes the forward pass"
    UPDATES_IN_BACKWARD = "updates in the backward pass"
    IN_STAGES = "runs in the stages of a pipeline"
    ON_SEVERAL_PROCESSORS = "runs on several processors"
    ON_ANOTHER_DEVICE = "runs on another device"


class Severity(IntEnum):
    """The severity of a finding about a recording for answers from it."""

    NOTE = 0  # true, and taken into account
    DOUBT = 1  # answers may be off
    VOIDS = 2  # answers describe another program than the one that ran


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check: the number of cases, one sentence, and the remedy."""

    check: str
    severity: Severity
    count: int
    sentence: str
    remedy: str


class Anchor(IntEnum):
    """The moment of the source task from which a dependency counts."""

    END = 0
    START = 1


class ThreadKind(IntEnum):
    """The kind of an execution thread: a CPU thread, a GPU stream or a communication channel."""

    CPU = 0
    STREAM = 1
    CHANNEL = 2


def among(codes: Array, members: Iterable[int]) -> Bool:
    """Return a mask of the ``codes`` that are among a few ``members``."""
    mask = np.zeros(codes.shape, dtype=np.bool_)
    for member in members:  # comparing bytes is ten times faster in numpy than a table look-up
        mask |= codes == int(member)
    return mask


@dataclass(frozen=True, slots=True)
class Thread:
    """An execution thread: it runs one task at a time.

    ``lag_ns`` is the time between the end of a task and the start of the next one that is already waiting.
    ``ordered`` threads run their tasks in the order of their ids; on the others the schedule chooses.
    """

    name: str
    kind: ThreadKind
    device: int = -1
    stream: int = -1
    lag_ns: int = 0
    ordered: bool = True
    rank: int = 0  # its rank in a graph of several ranks


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies as columns of shape (n_dependencies,): the target starts ``lag_ns`` after the source's anchor."""

    source: Int32
    target: Int32
    kind: Int8
    lag_ns: Int64
    anchor: Int8

    def __len__(self) -> int:
        return len(self.source)

    @staticmethod
    def of(
        source: npt.ArrayLike,
        target: npt.ArrayLike,
        kind: DependencyKind,
        lag_ns: npt.ArrayLike = 0,
        anchor: Anchor = Anchor.END,
    ) -> Dependencies:
        """Dependencies of one kind; ``lag_ns`` is one number or one per dependency."""
        sources = np.asarray(source, dtype=np.int32)
        n = len(sources)
        return Dependencies(
            source=sources,
            target=np.asarray(target, dtype=np.int32),
            kind=np.full(n, kind, dtype=np.int8),
            lag_ns=np.broadcast_to(np.asarray(lag_ns, dtype=np.int64), (n,)).copy(),
            anchor=np.full(n, anchor, dtype=np.int8),
        )

    @staticmethod
    def concatenate(parts: list[Dependencies]) -> Dependencies:
        """All dependencies of several tables, in their order."""
        if not parts:
            return Dependencies.of([], [], DependencyKind.USER)
        return Dependencies(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in Dependencies.__slots__)
        )

    def take(self, index: Array) -> Dependencies:
        """The dependencies at ``index`` (a mask or positions)."""
        rows = np.flatnonzero(index) if index.dtype == np.bool_ else index
        return Dependencies(*(getattr(self, name)[rows] for name in Dependencies.__slots__))


# The scope of waits for all streams of the machine.
ALL_STREAMS = -1


@dataclass(frozen=True, slots=True)
class Waits:
    """CPU waits for "all that was launched before", as columns of shape (n_waits,).

    They are positional: their predecessors are recomputed in every edited graph. ``scope`` is a thread (one stream) or
    ``ALL_STREAMS``; ``lag_ns`` is the time from the end of GPU work to the return of the call.
    """

    task: Int32
    scope: Int32
    lag_ns: Int64


class ProcessGroup(Struct, frozen=True):
    """Ranks that communicate: name and ranks as recorded, and the number of ranks (-1: unknown)."""

    name: str
    ranks: str
    size: int
