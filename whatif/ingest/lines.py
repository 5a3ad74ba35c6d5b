"""Source lines of a graph's tasks, from the stacks in its trace, which is read a second time on request.

A trace has stacks in one of two forms: operators carry a ``Call stack`` (torch 1.8 to 1.11), or every Python function
is an event (``with_stack=True`` since then, and ``whatif collect --lines``). A task is named by its innermost frame of
user code. torch's Python function events give the line where the function is defined; call stacks and our recorder's
events give the line that runs.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from whatif.graph.order import order_by
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Int32, Int64, ThreadKind
from whatif.ingest.decimal_ns import parse_us_as_ns
from whatif.ingest.events import base_ns_of
from whatif.ingest.file_bytes import FileBytes
from whatif.ingest.json_chunks import EventArray
from whatif.ingest.kineto_fields import NOTHING, Scalar, as_int, as_text
from whatif.ingest.nest import Nest
from whatif.ingest.read_events import is_sqlite
from whatif.runtime.errors import WhatifError

By = Literal["line", "file", "layer", "stack"]

# Library files, by folder or, if the profiler cut the path, by the package at its start.
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3[.\d]*)/|^<|^runpy\.py|/whatif/|^whatif/")
_PACKAGES = frozenset({
    "torch", "torchvision", "torchaudio", "torchmetrics", "numpy", "transformers", "timm", "lightning",
    "pytorch_lightning", "accelerate", "apex", "deepspeed", "megatron", "tqdm", "wandb", "PIL", "datasets", "triton",
    "flash_attn", "xformers", "tensorboard", "bitsandbytes", "peft", "einops", "ignite", "fairscale",
})  # fmt: skip
_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")
_BUILT_IN = re.compile(r"^<built-in (?:method|function) (\S+?)(?: of .*)?>$")
# Modules that only call others are not layers of a model.
_CONTAINERS = re.compile(r"(^|/)torch/nn/")
_FORWARD = re.compile(r"^_?forward(_impl|_features)?$")
SEPARATOR = " › "
# Text found in every trace with stacks: the category of Python functions or the operators' argument.
_HINTS = (b"python_function", b"Call stack")
_LONGEST_HINT = max(map(len, _HINTS))


class _Args(msgspec.Struct, gc=False, frozen=True):
    call_stack: Any = msgspec.field(default=None, name="Call stack")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Any = msgspec.field(default=-1, name="Fwd thread id")


class _Event(msgspec.Struct, gc=False):
    ph: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    tid: Scalar = None
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    args: _Args | list[Any] | Scalar = None


class Lines(Struct, frozen=True):
    """The source line (file, layer, stack) of each task: ``code``, shape (n_tasks,), into ``names``; -1 if unknown."""

    by: By
    names: tuple[str, ...]
    code: Int32


def read_lines(graph: TaskGraph, by: By = "line", path: Path | None = None) -> Lines:
    """Return the source lines (files, layers, stacks) of a graph's tasks, read from the trace that it was made of.

    A stack is the user's frames, outermost first, joined by ``SEPARATOR``. ``path`` replaces the path in the graph.
    Raises WhatifError if that is not a single Kineto trace or holds no stacks.
    """
    path = path or Path(graph.info.path)
    if graph.info.ranks or path.is_dir() or not path.is_file():
        raise WhatifError(
            f"{path}: expected one trace to read lines from, got several ranks or no file; name one trace."
        )
    if is_sqlite(path):
        raise WhatifError(
            f"{path}: expected a trace of torch.profiler, whose call stacks name code, got a report of Nsight Systems; "
            "record with `whatif collect --lines`."
        )
    frames, operators, base_ns = _read(path)
    if not frames and not any(stack for _, _, stack, _, _ in operators):
        expected, option = ("layers, call stacks", "") if by == "layer" else ("call stacks", " --lines")
        raise WhatifError(
            f"{path}: expected {expected} or Python functions in the trace, got none; record with "
            f"`whatif collect{option}`, or with torch.profiler and with_stack=True."
        )
    return _Namer(graph, by, base_ns).name(frames, operators)


def lines_if_any(graph: TaskGraph, by: By = "line", path: Path | None = None) -> Lines | None:
    """Return the result of ``read_lines``; None if it raises or no task has a line. Cheap without stacks."""
    path = path or Path(graph.info.path)
    if graph.info.ranks or not path.is_file() or not may_have_stacks(path):
        return None
    try:
        lines = read_lines(graph, by, path)
    except WhatifError:
        return None
    return lines if len(lines.code) == len(graph) and (lines.code >= 0).any() else None


def may_have_stacks(path: Path) -> bool:
    """Whether a file can hold stacks, by a search of its bytes: far cheaper than decoding it in vain."""
    before = b""
    for piece in FileBytes(path, None):
        seam = before + piece[:_LONGEST_HINT]
        if any(hint in part for part in (seam, piece) for hint in _HINTS):
            return True
        before = piece[-_LONGEST_HINT:]
    return False


class _Timed(list[Any]):
    """Rows with their start and end, ns, in arrays of shape (n_rows,)."""

    start_ns: Int64
    end_ns: Int64


def _read(path: Path) -> tuple[_Timed, _Timed, int]:
    dropped: Counter[str] = Counter()
    array = EventArray(FileBytes(path, None), _Event, dropped)
    frames, operators = _Timed(), _Timed()
    frame_times: list[tuple[Any, Any]] = []
    operator_times: list[tuple[Any, Any]] = []
    for events in array:
        for event in events:
            if event.ph != "X":
                continue
            category = event.cat
            if category == "python_function":
                frames.append((as_text(event.tid), as_text(event.name)))
                frame_times.append((event.ts, event.dur))
            elif category == "cpu_op" or category == "Operator":
                args = event.args
                if type(args) is _Args:
                    stack = args.call_stack if isinstance(args.call_stack, str) else ""
                    sequence = as_int(args.sequence)
                    if stack or sequence >= 0:
                        backward = as_int(args.forward_thread) > 0
                        operators.append((as_text(event.tid), as_text(event.name), stack, sequence, backward))
                        operator_times.append((event.ts, event.dur))
    for rows, times in ((frames, frame_times), (operators, operator_times)):
        start_ns, start_status = parse_us_as_ns([ts for ts, _ in times])
        duration_ns, duration_status = parse_us_as_ns([dur for _, dur in times])
        bad = (start_status != 0) | (duration_status != 0) | (duration_ns < 0)
        rows.start_ns, rows.end_ns = start_ns, np.where(bad, start_ns, start_ns + duration_ns)
    return frames, operators, base_ns_of(array.header)


class _Namer:
    """Names the tasks of a graph, thread by thread."""

    def __init__(self, graph: TaskGraph, by: By, base_ns: int) -> None:
        self._graph, self._by = graph, by
        self._names: dict[str, int] = {}
        self._of_stack: dict[str, int] = {}
        self._of_frame: dict[str, tuple[str, bool]] = {}
        # The graph's times count from the recording's first task.
        self._time_ns = graph.start_ns + graph.info.origin_ns - base_ns

    def name(self, frames: _Timed, operators: _Timed) -> Lines:
        graph = self._graph
        code = np.full(len(graph), -1, dtype=np.int32)
        frames_of, operators_of = _by_thread(frames), _by_thread(operators)
        backward_lines = self._backward(frames, frames_of, operators, operators_of)
        for index, thread in enumerate(graph.threads):
            if thread.kind != ThreadKind.CPU:
                continue
            tid = thread.name.removeprefix("CPU thread ")
            tasks = np.flatnonzero((graph.thread == index) & (graph.start_ns >= 0))
            if not len(tasks):
                continue
            times_ns = self._time_ns[tasks]
            found = np.full(len(tasks), -1, dtype=np.int64)
            if tid in frames_of:
                found = _longest(self._changes(frames, frames_of[tid]), times_ns)
            rows = operators_of.get(tid, np.empty(0, dtype=np.int64))
            if len(rows):
                stacks = np.array([self._stack(operators[row][2]) for row in rows.tolist()], dtype=np.int64)
                lines = np.where(stacks >= 0, stacks, backward_lines[rows])
                rows, lines = rows[lines >= 0], lines[lines >= 0]
                nested = order_by(operators.start_ns[rows], -operators.end_ns[rows])
                rows, lines = rows[nested], lines[nested]
                at = Nest(operators.start_ns[rows], operators.end_ns[rows]).innermost(times_ns)
                found = np.where(at >= 0, lines[np.maximum(at, 0)], found) if len(rows) else found
                if tid not in frames_of and self._by != "layer":
                    found = _until_next(found)
            code[tasks] = found
        launched = graph.launch_of
        known = launched >= 0
        code[known] = code[launched[known]]
        return Lines(self._by, tuple(self._names), code)

    def _backward(
        self, frames: _Timed, frames_of: dict[str, Int64], operators: _Timed, operators_of: dict[str, Int64]
    ) -> Int64:
        """The line of each backward operator: that of the forward operator with its sequence number."""
        lines: dict[int, int] = {}
        for tid, rows in operators_of.items():
            forward = [row for row in rows.tolist() if operators[row][3] >= 0 and not operators[row][4]]
            if tid in frames_of and forward:
                at = self._at(self._changes(frames, frames_of[tid]), operators.start_ns[forward]).tolist()
            else:
                at = [self._stack(operators[row][2]) for row in forward]
            lines |= {operators[row][3]: line for row, line in zip(forward, at, strict=True) if line >= 0}
        names = list(self._names)
        found = np.full(len(operators), -1, dtype=np.int64)
        for row, (_, _, _, sequence, backward) in enumerate(operators):
            if backward and sequence in lines:
                name = names[lines[sequence]]
                label = {"line": f"backward of {name}", "stack": f"{name}{SEPARATOR}backward"}
                found[row] = self._code(label.get(self._by, name))
        return found

    def _changes(self, frames: _Timed, rows: Int64) -> tuple[Int64, Int64]:
        """Times at which a thread's innermost user frame changes, ns, and the code of each new one (-1: none)."""
        order = rows[np.lexsort((-frames.end_ns[rows], frames.start_ns[rows]))]
        times: list[int] = []
        codes: list[int] = []
        # Of each open function: its end, the label while it is innermost, and whether it is user code.
        stack: list[tuple[int, str, bool]] = []

        def change(time_ns: int) -> None:
            # Starts and durations are rounded separately: a function may end a nanosecond after the next one starts.
            times.append(max(time_ns, times[-1]) if times else time_ns)
            codes.append(self._code(stack[-1][1]) if stack and stack[-1][1] else -1)

        starts, ends = frames.start_ns[order].tolist(), frames.end_ns[order].tolist()
        for row, start, end in zip(order.tolist(), starts, ends, strict=True):
            while stack and stack[-1][0] <= start:
                ended = stack.pop()[0]
                change(ended)
            label, is_user = self._frame(frames[row][1])
            outer = stack[-1] if stack else (0, "", False)
            if is_user and self._by == "stack":
                callers = next((label for _, label, user_code in reversed(stack) if user_code), "")
                label = f"{callers}{SEPARATOR}{label}" if callers else label
            elif not is_user:
                appends = outer[2] and label and self._by in ("line", "stack")
                label = f"{outer[1]}{SEPARATOR}{label}" if appends else outer[1]
            stack.append((end, label, is_user))
            change(start)
        while stack:
            ended = stack.pop()[0]
            change(ended)
        return np.array(times, dtype=np.int64), np.array(codes, dtype=np.int64)

    @staticmethod
    def _at(changes: tuple[Int64, Int64], times_ns: Int64) -> Int64:
        times, codes = changes
        at = np.searchsorted(times, times_ns, side="right") - 1
        return np.where(at >= 0, codes[np.maximum(at, 0)], -1)

    def _code(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _frame(self, name: str) -> tuple[str, bool]:
        """The label of a function's event, and whether the function is user code."""
        known = self._of_frame.get(name)
        if known is None:
            found = _FRAME.match(name)
            built_in = _BUILT_IN.match(name)
            if found is not None and is_users(found["file"]):
                known = (found["file"] if self._by == "file" else name), True
            else:
                known = (found["function"] if found else built_in[1] if built_in else ""), False
            self._of_frame[name] = known
        return known

    def _stack(self, stack: str) -> int:
        """The code of a call stack, innermost frame first; -1 for none."""
        if not stack:
            return -1
        known = self._of_stack.get(stack)
        if known is None:
            frames = [found for text in stack.split(";") if (found := _FRAME.match(text.strip()))]
            users = [frame for frame in frames if is_users(frame["file"])]
            name = ""
            if self._by == "layer":
                name = SEPARATOR.join(_layers_of(frames))
            elif self._by == "stack":
                name = SEPARATOR.join(frame[0] for frame in reversed(users))
            elif users:
                name = users[0]["file"] if self._by == "file" else users[0][0]
            known = self._of_stack[stack] = self._code(name) if name else -1
        return known


def _layers_of(frames: list[re.Match[str]]) -> Iterator[str]:
    """The forward functions of a stack, the outermost first, without those that belong to torch itself."""
    for frame in reversed(frames):
        if _FORWARD.match(frame["function"]) and not _CONTAINERS.search(frame["file"]):
            yield f"{frame['file'].rpartition('/')[2]}({frame['line']})"


def is_users(file: str) -> bool:
    """Whether a file is user code, not a library's or Python's."""
    if _INSTALLED.search(file):
        return False
    first = file.partition("/")[0].removesuffix(".py")
    return first not in _PACKAGES and first not in sys.stdlib_module_names


def _by_thread(rows: _Timed) -> dict[str, Int64]:
    places_of: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places_of.setdefault(row[0], []).append(place)
    return {tid: np.array(places, dtype=np.int64) for tid, places in places_of.items()}


def _longest(changes: tuple[Int64, Int64], times_ns: Int64) -> Int64:
    """The code that runs longest between each time of a thread and the next, shape of ``times_ns``.

    ``changes`` are times, ns, and the code that runs from each on; -1 if unknown. Python may run many lines in between.
    """
    edges_ns = np.append(np.iinfo(np.int64).min, changes[0])
    codes = np.append(-1, changes[1])
    ends_ns = np.append(times_ns[1:], times_ns[-1:])
    first = np.searchsorted(edges_ns, times_ns, side="right") - 1
    count = np.maximum(np.searchsorted(edges_ns, ends_ns, side="left") - first, 1)
    task = np.repeat(np.arange(len(times_ns)), count)
    span = np.arange(len(task)) - np.repeat(np.cumsum(count) - count - first, count)
    until_ns = np.append(edges_ns[1:], np.iinfo(np.int64).max)
    time_ns = np.minimum(until_ns[span], ends_ns[task]) - np.maximum(edges_ns[span], times_ns[task])
    n_codes = int(codes.max()) + 2
    keys, which = np.unique(task * n_codes + codes[span] + 1, return_inverse=True)
    total_ns = np.bincount(which, weights=time_ns)
    order = np.lexsort((total_ns, keys // n_codes))
    last = np.flatnonzero(np.append(np.diff(keys[order] // n_codes) > 0, True))
    return np.asarray(keys[order[last]] % n_codes - 1, dtype=np.int64)


def _until_next(code: Array) -> Array:
    """Fill unknown codes from the next known one: time before an operator belongs to the operator's line."""
    position = np.arange(len(code))
    following = np.minimum.accumulate(np.where(code >= 0, position, len(code))[::-1])[::-1]
    return np.where(following < len(code), code[np.minimum(following, len(code) - 1)], -1)
