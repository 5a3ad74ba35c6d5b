"""The task graph: columns of tasks, and the dependencies between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from whatif.graph import edit
from whatif.graph.columns import COLUMNS, TASK_COLUMNS, Column
from whatif.graph.edit import as_ids, as_index, as_ns
from whatif.graph.info import GraphInfo
from whatif.graph.insert import Inserted, NewTasks, insert, synchronize
from whatif.graph.order import derived_dependencies, grouped, loops, outgoing, thread_dependencies
from whatif.graph.remove import remove
from whatif.graph.selection import Selection, TaskOrder, Tasks
from whatif.graph.structure_cache import changed, freeze, share, shared_property, unread
from whatif.graph.types import (
    ALL_STREAMS,
    CPU_WORK_KINDS,
    GPU_KINDS,
    Anchor,
    Array,
    Bool,
    Change,
    Dependencies,
    DependencyKind,
    Int8,
    Int32,
    Int64,
    Phase,
    TaskKind,
    Thread,
    ThreadKind,
    Waits,
    among,
)
from whatif.runtime.errors import WhatifError
from whatif.runtime.notebook_view import notebook_view

if TYPE_CHECKING:
    import networkx
    import pandas

_ARRAYS = {*TASK_COLUMNS, "dependencies", "waits"}
# The fields that cached properties depend on: dependencies, and step boundaries.
_STRUCTURE = {"kind", "thread", "step", "dependencies", "waits", "threads"}


@dataclass(frozen=True)
class TaskGraph:
    """Tasks as columns of shape (n_tasks,), ids in recorded-time order, and their dependencies.

    Immutable: every edit returns a new graph that shares the untouched columns, whose arrays are read-only. Times are
    nanoseconds. ``start_ns`` is the measured start (-1 for a task that a transform inserted). ``low_ns`` and
    ``high_ns`` bound a duration that a transform or the recording leaves uncertain. ``name``, ``layer``, ``thread`` and
    ``dtype`` index their tables.
    """

    name: Int32
    kind: Int8
    thread: Int32
    duration_ns: Int64
    low_ns: Int64
    high_ns: Int64
    start_ns: Int64
    layer: Int32
    phase: Int8
    step: Int32
    correlation_id: Int64
    family: Int8
    dtype: Int8
    size_bytes: Int64
    flops: Int64
    warps: Int64  # of all thread blocks that a kernel starts; -1 if unknown
    registers: Int32  # of each thread of a kernel; -1 if unknown
    operator: Int32  # tasks of one call of an operator share a number; -1 if unknown
    in_optimizer: Bool  # inside an optimizer's mark, if a trace has such marks
    recomputed: Bool  # forward work that the backward pass runs again (activation checkpointing)
    measured: Int32  # row of its operator among those measured alone (`OperatorTimes`); -1 if none
    called: Int32  # row of its operator in `info.operators`; -1 if unknown
    group: Int32  # of a collective: row of its process group in `info.groups`; -1 if unknown
    profiler_ns: Int32  # estimated cost of the profiler that the duration still includes
    profiler_events: Int32  # events recorded by the profiler inside the task, whose cost the duration still includes

    dependencies: Dependencies
    waits: Waits
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    # layers[0] is "": the task is in no layer, or in an unknown one; "(root)" is the model itself, outside all of its
    # layers.
    layers: tuple[str, ...]
    info: GraphInfo = field(default_factory=GraphInfo)
    # Columns that a transform attached for its schedule, by name: priority, prefetch distance, ...
    attached: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    # Notes of transforms for the user, and those of them that state that a transform changed nothing.
    notes: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    # Shared by graphs in which a task id means the same task: what a ``Selection`` belongs to.
    order: TaskOrder = field(default_factory=TaskOrder, init=False, compare=False)

    def __post_init__(self) -> None:
        freeze(*(getattr(self, name) for name in _ARRAYS), *self.attached.values())

    def __len__(self) -> int:
        return len(self.duration_ns)

    if not TYPE_CHECKING:  # type checkers know the columns

        def __getattr__(self, name: str) -> Array:
            """Compute a column that an edit left for later."""
            if name not in unread(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            column = self.__dict__[name] = unread(self)[name].read()
            return column

        def __getstate__(self) -> dict[str, Any]:
            columns = {name: getattr(self, name) for name in unread(self)}
            return {**self.__dict__, **columns, "_unread": {}, "_of_graph": {}}

    # -- selection ---------------------------------------------------------------------------------------------

    @shared_property
    def on_gpu(self) -> Selection:
        """The tasks of GPU streams: kernels, copies, memsets and collectives.

        Transfers on a network channel are not included; a step on a CPU has them as well.
        """
        streams = np.array([thread.kind != ThreadKind.CHANNEL for thread in self.threads], dtype=np.bool_)
        on_gpu = among(self.kind, GPU_KINDS)
        return Selection(on_gpu if streams.all() else on_gpu & streams.take(self.thread), self.order)

    @shared_property
    def gpu_work(self) -> Selection:
        """The tasks of GPU streams that compute or copy: all but collectives."""
        return Selection(self.on_gpu.mask & (self.kind != TaskKind.COMMUNICATION), self.order)

    @shared_property
    def has_gpu(self) -> bool:
        """Whether GPU streams run any task; a step on a CPU has none."""
        return bool(self.on_gpu.any())

    @shared_property
    def on_cpu(self) -> Selection:
        """The tasks in which a CPU thread works (waits are not work)."""
        return Selection(among(self.kind, CPU_WORK_KINDS), self.order)

    @property
    def on_device(self) -> Selection:
        """The tasks that compute the step: those of GPU streams, or of CPU threads without a GPU."""
        return self.on_gpu if self.has_gpu else self.on_cpu

    @property
    def kernel_kind(self) -> TaskKind:
        """The kind of the tasks that compute the step: kernels, or operators without a GPU."""
        return TaskKind.KERNEL if self.has_gpu else TaskKind.CPU_OP

    def select(
        self,
        *,
        kind: TaskKind | Iterable[TaskKind] | None = None,
        name: str | None = None,
        layer: str | None = None,
        phase: Phase | None = None,
        thread: int | None = None,
        step: int | None = None,
    ) -> Selection:
        """Return the selection of the tasks that meet every given criterion; it composes with ``& | ~``.

        ``name`` and ``layer`` are regular expressions that may match anywhere. An edit that changes ids makes the
        selection stale: the edited graph refuses it (see ``Selection``). Raises WhatifError if an expression is not
        a valid regular expression, or if a criterion has another type, such as a text for a phase.
        """
        mask = np.ones(len(self), dtype=np.bool_)
        wanted: Any = kind
        kinds = list(wanted) if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
        for expected, values, fits in (
            ("TaskKind, as in TaskKind.KERNEL", kinds, partial(_is_code_of, TaskKind)),
            ("phase as in Phase.BACKWARD", [phase], partial(_is_code_of, Phase)),
            ("thread's number", [thread], _is_whole),
            ("step's number", [step], _is_whole),
            ("regular expression for name", [name], _is_text),
            ("regular expression for layer", [layer], _is_text),
        ):
            for each in values:
                if each is not None and not fits(each):
                    raise WhatifError(f"select: expected a {expected}, got {each!r}.")
        if kind is not None:
            mask &= among(self.kind, kinds)
        if name is not None:
            mask &= matching(self.names, name).take(self.name)
        if layer is not None:
            mask &= matching(self.layers, layer).take(self.layer)
        if phase is not None:
            mask &= self.phase == phase
        if thread is not None:
            mask &= self.thread == thread
        if step is not None:
            mask &= self.step == step
        return Selection(mask, self.order)

    @shared_property
    def of_clock(self) -> Selection:
        """The tasks of the first rank, whose steps are reported."""
        first = self.threads[0].rank if self.threads else 0
        chosen = np.array([thread.rank == first for thread in self.threads], dtype=np.bool_)
        return Selection(np.ones(len(self), dtype=np.bool_) if chosen.all() else chosen.take(self.thread), self.order)

    @property
    def thread_lag_ns(self) -> Int64:
        """The minimum time between a task and the next one on its thread, ns, shape (n_threads,)."""
        return np.array([thread.lag_ns for thread in self.threads], dtype=np.int64)

    @shared_property
    def launch_of(self) -> Int32:
        """The CPU task that launched each GPU task, shape (n_tasks,); -1 if unknown."""
        launch = np.full(len(self), -1, dtype=np.int32)
        links = np.flatnonzero(self.dependencies.kind == DependencyKind.LAUNCH)
        launch[self.dependencies.target[links]] = self.dependencies.source[links]
        return launch

    @shared_property
    def grouped_by_thread(self) -> tuple[Int64, Int64]:
        """Where each thread's tasks begin in ``by_thread``, shape (n_threads + 1,), and ``by_thread``."""
        return grouped(len(self.threads), self.thread)

    @property
    def by_thread(self) -> Int64:
        """All tasks, thread by thread and each thread's in order, shape (n_tasks,)."""
        return self.grouped_by_thread[1]

    @shared_property
    def neighbours(self) -> tuple[Int32, Int32]:
        """The task before and the task after each one on its thread, shape (n_tasks,) each; -1 if none."""
        order, thread = self.by_thread, self.thread[self.by_thread]
        boundary = thread[1:] != thread[:-1]
        previous, following = (np.full(len(self), -1, dtype=np.int32) for _ in range(2))
        previous[order[1:]], following[order[:-1]] = order[:-1], order[1:]
        previous[order[1:][boundary]] = following[order[:-1][boundary]] = -1
        return previous, following

    # -- dependencies ------------------------------------------------------------------------------------------

    @shared_property
    def derived(self) -> Dependencies:
        """The positional dependencies (waits for earlier launches, launch-queue back-pressure) of this graph."""
        return derived_dependencies(self)

    @shared_property
    def by_target(self) -> tuple[Int32, Int32, Int64, bool]:
        """Dependencies by target, as ``incoming``; and whether all of them point forward."""
        derived = self.derived
        dependencies = Dependencies.concatenate([self.dependencies, derived]) if len(derived) else self.dependencies
        offsets = np.zeros(len(self) + 1, dtype=np.int32)
        points = np.empty(len(dependencies), dtype=np.int32)
        lags_ns = np.zeros(len(dependencies), dtype=np.int64)
        forward = loops.group_by_target(
            len(self), dependencies.source, dependencies.target, dependencies.lag_ns,
            np.ascontiguousarray(dependencies.anchor), offsets, points, lags_ns,
        )  # fmt: skip
        return offsets, points, lags_ns, bool(forward)

    @property
    def incoming(self) -> tuple[Int32, Int32, Int64]:
        """Dependencies by target: offsets (n_tasks + 1,), indices into (starts, ends) and lags, ns."""
        offsets, points, lags_ns, forward = self.by_target
        if not forward:
            raise WhatifError("simulate: a dependency points backward in id order, or in a cycle; see graph.check().")
        return offsets, points, lags_ns

    @shared_property
    def outgoing(self) -> tuple[Int64, Dependencies]:
        """Dependencies by source: the offsets of each task, shape (n_tasks + 1,), and the rows in that order."""
        dependencies = Dependencies.concatenate([self.dependencies, self.derived])
        offsets, rows = outgoing(len(self), dependencies)
        return offsets, dependencies.take(rows)

    @shared_property
    def waits_for(self) -> tuple[Int32, Int32]:
        """The next task on each one's thread, -1 if its order is free, and the number of tasks that each waits for."""
        ordered = np.array([thread.ordered for thread in self.threads], dtype=np.bool_).take(self.thread)
        previous, following = self.neighbours
        n_before = np.bincount(self.outgoing[1].target, minlength=len(self)) + (ordered & (previous >= 0))
        return np.where(ordered, following, np.int32(-1)), n_before.astype(np.int32)

    def all_dependencies(self) -> Dependencies:
        """Every dependency as a row: the stored ones, the derived ones and the order of each thread."""
        return Dependencies.concatenate([self.dependencies, self.derived, thread_dependencies(self)])

    # -- edits (each returns a new graph) ----------------------------------------------------------------------

    def replace(self, **columns: Any) -> TaskGraph:
        """Return this graph with some columns or tables replaced.

        Ids stay, unless all columns are replaced or their length changes: then the tasks are new, in a new order.
        """
        columns = {
            name: as_index(self, column) if isinstance(column, Selection) else column
            for name, column in columns.items()
        }
        new_ids = columns.keys() >= set(TASK_COLUMNS) or len(columns.get("duration_ns", self.duration_ns)) != len(self)
        edited = changed(self, {**columns, "order": TaskOrder() if new_ids else self.order})
        freeze(*(columns[name] for name in _ARRAYS & columns.keys()), *columns.get("attached", {}).values())
        if new_ids:
            return edited
        info = columns.get("info", self.info)
        if not _STRUCTURE & columns.keys() and info.queue_depth == self.info.queue_depth:
            # Cached structure is valid for both: most edits change durations alone.
            share(self, edited)
        return edited

    def scale(
        self, tasks: Tasks, factor: npt.ArrayLike, *, low: npt.ArrayLike | None = None,
        high: npt.ArrayLike | None = None,
    ) -> TaskGraph:  # fmt: skip
        """Multiply the durations of ``tasks`` by ``factor``, one number or one per task; ``low`` and ``high`` bound it.

        The bounds are factors too; without them the factor counts as exact. ``tasks`` is, in this and the
        other edits, a selection of this graph, a mask of shape (n_tasks,) or ids. Raises WhatifError, as they do, on
        tasks that are not of this graph, on values that are negative or not finite, and on too many or too few.
        """
        return edit.scale(self, tasks, factor, low=low, high=high)

    def with_duration(
        self,
        tasks: Tasks,
        duration_ns: npt.ArrayLike,
        *,
        low_ns: npt.ArrayLike | None = None,
        high_ns: npt.ArrayLike | None = None,
    ) -> TaskGraph:
        """Set the durations of ``tasks`` to one number or one per task, with their bounds if known."""
        return edit.with_duration(self, tasks, duration_ns, low_ns=low_ns, high_ns=high_ns)

    def remove(self, tasks: Tasks) -> TaskGraph:
        """Remove ``tasks``, with the gap after a CPU task and the launch of a GPU task."""
        return remove(self, tasks)

    def insert(self, tasks: NewTasks) -> Inserted:
        """Insert new tasks, each after a given task on its thread.

        A GPU task brings the CPU call that launches it (``launched_after``). Raises WhatifError if ids or durations
        are out of range, or if a kernel or copy would run on a CPU thread.
        """
        return insert(self, tasks)

    def split(self, tasks: Tasks, parts: int) -> TaskGraph:
        """Cut each of ``tasks`` into ``parts`` equal tasks that follow one another."""
        return edit.split(self, tasks, parts)

    def synchronize(
        self, after: npt.ArrayLike, *, call_ns: int, stream: int = ALL_STREAMS, name: str = "cudaStreamSynchronize"
    ) -> TaskGraph:
        """Insert, after each CPU task of ``after``, a call that waits for earlier launches on ``stream``."""
        return synchronize(self, after, call_ns=call_ns, name=name, stream=stream)

    def without_waits(self, tasks: Tasks) -> TaskGraph:
        """Make the wait tasks among ``tasks`` end at once: their threads no longer wait for the GPU there."""
        return edit.without_waits(self, tasks)

    def add_dependencies(
        self,
        source: npt.ArrayLike,
        target: npt.ArrayLike,
        *,
        kind: DependencyKind = DependencyKind.USER,
        lag_ns: npt.ArrayLike = 0,
        anchor: Anchor = Anchor.END,
    ) -> TaskGraph:
        """Let ``target[i]`` wait until ``lag_ns`` after the end (or start: ``anchor``) of ``source[i]``, for each i.

        Raises WhatifError on a cycle, and if the numbers of sources and targets differ.
        """
        ends = as_ids(self, source), as_ids(self, target)
        lags_ns, n = as_ns(lag_ns, "add_dependencies: lag_ns"), len(ends[0])
        if len(ends[1]) != n:
            raise WhatifError(f"add_dependencies: expected a source for each target, got {n} and {len(ends[1])} tasks.")
        if lags_ns.size not in (1, n):
            raise WhatifError(
                f"add_dependencies: expected one lag, or one for each of the {n} dependencies, got {lags_ns.size}."
            )
        return edit.add_dependencies(self, Dependencies.of(*ends, kind, lags_ns, anchor))

    def attach(self, **columns: Tasks) -> TaskGraph:
        """Return the graph with named columns of shape (n_tasks,) for a schedule function to read.

        Their arrays become read-only.
        """
        attached = dict(self.attached)
        for key, column in columns.items():
            attached[key] = as_index(self, column) if isinstance(column, Selection) else np.asarray(column)
            if attached[key].shape[:1] != (len(self),):
                raise WhatifError(f"attach: expected {len(self)} values for column {key!r}, got {attached[key].size}.")
        return self.replace(attached=attached)

    def note(self, sentence: str) -> TaskGraph:
        """Return the graph with a sentence that the report shows with the prediction."""
        return self if sentence in self.notes else self.replace(notes=(*self.notes, sentence))

    def unchanged(self, sentence: str) -> TaskGraph:
        """Return the same graph with a note that the transform changes nothing here, and why."""
        return self.note(sentence).replace(declined=(*self.declined, sentence))

    def with_change(self, change: Change) -> TaskGraph:
        """Return the graph with ``change`` added to ``info.changes``, for later transforms to read."""
        if change in self.info.changes:
            return self
        return self.replace(info=replace(self.info, changes=(*self.info.changes, change)))

    def table_of(self, column: Column) -> Sized | None:
        """Return the table that the values of a column index; None if they are no codes."""
        if column.codes in ("operators", "groups"):
            found: Sized = getattr(self.info, column.codes)
            return found
        return getattr(self, column.codes) if isinstance(column.codes, str) else column.codes

    # -- invariants --------------------------------------------------------------------------------------------

    def check(self) -> TaskGraph:
        """Return this graph if every invariant holds; raise WhatifError with the first violated one otherwise.

        Ids in range, dependencies that point forward in id order (so there is no cycle), durations that are neither
        negative nor outside their bounds, tables that cover their codes.
        """
        n = len(self)
        for column in TASK_COLUMNS & self.__dict__.keys():  # others will have the length that an edit gave them
            if getattr(self, column).shape != (n,):
                raise WhatifError(f"graph: expected {n} values in column {column}, got {getattr(self, column).shape}.")
        for name, attached in self.attached.items():
            if len(attached) != n:
                raise WhatifError(f"graph: expected {n} values in attached column {name!r}, got {len(attached)}.")
        waits = self.waits.task
        if len(waits) and not (int(waits.min()) >= 0 and int(waits.max()) < n):
            raise WhatifError(f"graph: a wait names a task outside 0..{n - 1}.")
        for each in COLUMNS:
            table = self.table_of(each)
            if not n or table is None or each.default < 0:  # a table that not every task has an entry in
                continue
            codes = getattr(self, each.name)
            codes = codes[:1] if codes.strides == (0,) else codes  # one value for all tasks
            if not 0 <= int(codes.min()) <= int(codes.max()) < len(table):
                raise WhatifError(f"graph: column {each.name} has codes outside its table of {len(table)} entries.")
        if n and int(self.duration_ns.min()) < 0:
            worst = int(self.duration_ns.argmin())
            raise WhatifError(f"graph: task {worst} {self.names[self.name[worst]]!r} has a negative duration.")
        if np.any(self.low_ns > self.duration_ns) or np.any(self.high_ns < self.duration_ns):
            raise WhatifError(
                "graph: a duration lies outside its low and high bounds; scale and with_duration change all three."
            )
        for dependencies in (self.dependencies, self.derived):
            if not len(dependencies):
                continue
            ends = dependencies.source, dependencies.target
            if min(int(ids.min()) for ids in ends) < 0 or max(int(ids.max()) for ids in ends) >= n:
                raise WhatifError(f"graph: a dependency names a task outside 0..{n - 1}.")
            backward = np.flatnonzero(dependencies.source >= dependencies.target)
            if len(backward):
                first = int(backward[0])
                raise WhatifError(
                    f"graph: task {dependencies.target[first]} waits for task {dependencies.source[first]}, "
                    "which does not come before it; add it with add_dependencies, which re-orders."
                )
        if float(self.high_ns.sum(dtype=np.float64)) > 2**62 and _longest_ns(self) > 2**62:
            raise WhatifError("graph: the durations add up to more than 146 years; is a factor or a time too large?")
        return self

    # -- exploration -------------------------------------------------------------------------------------------

    def to_pandas(self) -> pandas.DataFrame:
        """Return the tasks as a table with names spelled out, one row per task."""
        from whatif.graph.convert import to_pandas

        return to_pandas(self)

    def to_networkx(self) -> networkx.DiGraph:
        """Return a networkx graph: a node per task, an edge per dependency with kind, lag and anchor.

        A node has the task's columns as attributes, names spelled out as in ``to_pandas``; edges have attributes too,
        and networkx writes them to GraphML and GEXF.
        """
        from whatif.graph.convert import to_networkx

        return to_networkx(self)

    @staticmethod
    def from_networkx(graph: networkx.DiGraph, like: TaskGraph) -> TaskGraph:
        """Return the task graph that ``to_networkx`` made ``graph`` from, with its edits; threads come from ``like``.

        Names and layers may be new. Raises WhatifError if another attribute has an unknown value.
        """
        from whatif.graph.convert import from_networkx

        return from_networkx(graph, like)

    def __repr__(self) -> str:
        return f"TaskGraph({len(self):,} tasks on {len(self.threads)} threads, {self.info.path!r})"

    _repr_html_ = notebook_view


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_code_of(codes: type[IntEnum], value: object) -> bool:
    """Whether a value is a member of ``codes`` or its number; those of another enumeration are numbers, too."""
    return isinstance(value, codes) or (_is_whole(value) and not isinstance(value, IntEnum) and value in list(codes))


def matching(table: Sequence[str], pattern: str, *, whole: bool = False) -> Bool:
    """Return a mask, shape (len(table),), of the strings that the regular expression matches anywhere, or ``whole``.

    Raises WhatifError on an invalid expression.
    """
    try:
        expression = re.compile(pattern)
    except TypeError:
        raise WhatifError(f"expected a regular expression as text, got {pattern!r}.") from None
    except re.error as error:
        raise WhatifError(f"expected a regular expression, got {pattern!r}: {error}.") from None
    match = expression.fullmatch if whole else expression.search
    return np.fromiter((match(text) is not None for text in table), dtype=np.bool_, count=len(table))


def _longest_ns(graph: TaskGraph) -> float:
    """Return a bound on the total time of any path: it has at most one task without predecessors."""
    time_ns = graph.high_ns.astype(np.float64)
    first = np.zeros(len(graph), dtype=np.bool_)
    of_thread = np.full(len(graph.threads), -1, dtype=np.int64)
    of_thread[graph.thread[::-1]] = np.arange(len(graph))[::-1]  # the last write is the first on its thread
    first[of_thread[of_thread >= 0]] = True
    first[graph.dependencies.target] = False
    return float(time_ns[~first].sum() + time_ns[first].max(initial=0))
