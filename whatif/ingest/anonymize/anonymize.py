"""Copy a recording without anything that identifies people or machines, so that it can be shared."""

from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from whatif.ingest.anonymize.text import Scrubber, dropped_field, find_secrets
from whatif.ingest.exported import EXPORTED_BEGIN
from whatif.ingest.file_bytes import FileBytes
from whatif.ingest.json_chunks import EventArray
from whatif.ingest.kineto_fields import LAYER_ANNOTATION
from whatif.ingest.read_events import SQLITE_MAGIC
from whatif.ingest.record_file import read_record
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import replaceable_file, replacing
from whatif.runtime.progress import Progress

STACK_FRAMES, PROCESS_NAMES = "stack frames", "names of processes and threads"

# Text is kept in these arguments of an event, and dropped in any other: a profiler may write more than we know of.
TEXT_ARGUMENTS = frozenset((
    "Input type", "Concrete Inputs", "Collective name", "dtype", "Process Group Name", "Process Group Description",
    "kind", "kernel", "src", "dst", "cuda_sync_kind", "stream", "Device Type", "kernel_backend", "labels", "group",
))  # fmt: skip
# And in these fields beside the events.
TEXT_HEADERS = frozenset(("whatif", "deviceProperties", "distributedInfo", "displayTimeUnit"))
# Numbers and lists of numbers stay everywhere, also as text; addresses of machines are no numbers.
_NUMBERS = re.compile(rb'(?:\d\.\d+(?![\d.])|[\d\s\[\],"+\-]|true|false|null)*+')
# Cleaned arguments are kept for as many distinct texts; traces repeat a few thousand.
_MOST_CACHED = 200_000
# Labels of tracks that stay: the number, and whether it is one of torch's threads.
_TRACK_LABEL = re.compile(r"(?:stream|thread) -?\d+(?: \(pt_\w+\))?|CPU|GPU \d+|python")
_TRACK_NUMBER = re.compile(r"(?:stream|thread) -?\d+")

# The values of an operator's arguments that stay: numbers, lists of them, True, False, None, and einsum's equations.
_VALUE = r"(?:-?(?:\d{1,19}(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|inf|nan)|True|False|None)"
_PLAIN_VALUE = re.compile(rf"|{_VALUE}|\[(?:{_VALUE}(?:, ?{_VALUE})*)?\]|[a-z]{{1,6}}(?:,[a-z]{{1,6}})*->[a-z]{{0,6}}")
_VALUES = "Concrete Inputs"
DROPPED_VALUES = "values of arguments that are no numbers"
# Annotations of torch and of whatif, and operators of common libraries: they need no review.
_OWN_ANNOTATION = re.compile(
    r"(?:ProfilerStep#\d+|Optimizer\.(?:step|zero_grad)#\w+\.\w+|enumerate\(DataLoader\)#\S+"
    r"|whatif::(?!layer)\w+.*|Torch-Compiled Region.*"
    r"|nccl:\w+|## Call CompiledFxGraph .*|PyTorch Profiler \(\d+\))"
)
_OWN_OPERATOR = re.compile(
    r"(?:aten|prims?|c10d|nccl|autograd|cuda|cudnn|mkldnn|quantized|torch|profiler|inductor|triton)::"
)

_NOTHING = msgspec.Raw(b"")
_Scalar = str | int | float | bool | None | msgspec.UnsetType


class _Event(msgspec.Struct, gc=False, omit_defaults=True):
    """The fields of an event that are copied. Times stay text, exact to the last digit."""

    ph: _Scalar = msgspec.UNSET
    cat: _Scalar = msgspec.UNSET
    name: _Scalar = msgspec.UNSET
    pid: _Scalar = msgspec.UNSET
    tid: _Scalar = msgspec.UNSET
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    id: _Scalar = msgspec.UNSET
    s: _Scalar = msgspec.UNSET
    bp: _Scalar = msgspec.UNSET
    args: dict[str, msgspec.Raw] | list[Any] | str | int | float | bool | msgspec.UnsetType | None = msgspec.UNSET


class Anonymized(Struct, frozen=True):
    """The file written, counts of what was removed by kind, and how many layer words were numbered."""

    path: Path
    removed: dict[str, int]
    lost: dict[str, int]  # events that could not be read, by reason
    renamed_words: int | None
    kept: dict[str, tuple[str, ...]]  # by kind: the texts of known words that a user chose


def anonymize(
    path: str | Path, output: str | Path | None = None, *, rename_layers: bool = False, progress: Progress | None = None
) -> Anonymized:
    """Write a copy of a Kineto recording, or of a campaign's record, that does not show where and by whom it was made.

    Paths, stacks, command lines and the names of hosts, users and processes are removed. Events, times, shapes,
    annotations and the names of kernels, operators and layers stay (layers numbered if ``rename_layers``), if they
    consist of words found in every trace: paths and addresses are cut out, and any other word gets a stand-in.
    ``output`` is a file, or a folder for one of the same name; by default it is "NAME.anonymous.json.gz" beside the
    input. Raises WhatifError if the input is no such file, or the output is the input.
    """
    if not str(path):
        raise WhatifError("expected the path of a trace, got an empty string; name a file.")
    source = Path(path)
    target = _target(source, output)
    if source.exists() and not (source.is_file() or source.is_dir()):
        raise WhatifError(
            f"{path}: expected a file, got a pipe or a device, which cannot be read twice; save it first."
        )
    start = next(iter(FileBytes(source)), b"")
    if start.startswith(SQLITE_MAGIC):
        raise WhatifError(
            f"{path}: expected a Kineto recording, got an SQLite database, which `whatif anonymize` does not rewrite; "
            "share a recording of `whatif collect` instead."
        )
    if start.startswith(EXPORTED_BEGIN):
        raise WhatifError(
            f"{path}: expected a recording, got a timeline of `whatif export`, which would be unreadable afterwards; "
            "anonymize its recording and export the copy."
        )
    lost: Counter[str] = Counter()
    record = read_record(source) if not source.name.endswith(".gz") else None
    # The campaign names the runs of a record and their files.
    scrubber = Scrubber(find_secrets(start), rename_layers=rename_layers, known_words=record is None)
    kept: dict[str, tuple[str, ...]] = {}
    with replacing(target) as part, _writing(part, target.name.endswith(".gz")) as out:
        try:
            if record is not None:
                out.write(msgspec.json.format(msgspec.json.encode(_clean_record(record, scrubber)), indent=1))
            else:
                kept = _copy(EventArray(FileBytes(source, progress), _Event, lost), scrubber, out)
        except RecursionError:
            raise WhatifError(
                f"{path}: expected values nested a few levels deep, got hundreds; this is not a profiler trace."
            ) from None
    renamed = len(scrubber.layers) if scrubber.layers is not None else None
    removed = {kind: n for kind, n in sorted(scrubber.removed.items()) if n}
    return Anonymized(target, removed, dict(lost), renamed, kept)


def _target(source: Path, output: str | Path | None) -> Path:
    if output is None:
        stem, dot, suffix = source.name.partition(".json")
        target = source.with_name(f"{stem.removesuffix('.trace')}.anonymous" + (dot + suffix or ".json"))
    else:
        target = Path(output) / source.name if Path(output).is_dir() else Path(output)
    if os.path.realpath(target) == os.path.realpath(source) or (target.exists() and os.path.samefile(source, target)):
        raise WhatifError(
            f"{target}: expected another file than the trace itself, which is never overwritten; name a new file."
        )
    # A copy is a recording like any other, so only its name shows that it is one.
    return replaceable_file(target, "copy of this command", lambda _: ".anonymous" in target.name)


@contextmanager
def _writing(path: Path, compressed: bool) -> Iterator[IO[bytes]]:
    with path.open("wb") as raw:
        # No file name and no time in the gzip header.
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) if compressed else raw
        with packed:
            yield packed  # type: ignore[misc]


def _clean_record(record: dict[str, Any], scrubber: Scrubber) -> Any:
    """A campaign's record; of a failure only the last line stays, which gives the reason."""
    failure = record.get("failure")
    if isinstance(failure, str):
        lines = failure.strip().splitlines() or [""]
        scrubber.removed[STACK_FRAMES] += len(lines) - 1
        record = {**record, "failure": lines[-1]}
    return scrubber.value(record)


def _copy(events: EventArray[_Event], scrubber: Scrubber, out: IO[bytes]) -> dict[str, tuple[str, ...]]:
    """Write the events as they are read, then the header, which is known only after them; return the kept texts."""
    cleaner = _EventCleaner(scrubber)
    encoder = msgspec.json.Encoder()
    separator = b""
    out.write(b'{"traceEvents":[')
    for chunk in events:
        kept = [event for event in chunk if cleaner.clean(event)]
        if kept:
            out.write(separator + encoder.encode(kept)[1:-1])
            separator = b","
    out.write(b"]")
    for key, value in events.header.items():
        if key not in TEXT_HEADERS and (_has_text(encoder.encode(value)) or scrubber.words(scrubber.text(key)) != key):
            scrubber.removed[dropped_field(key)] += 1
            continue
        out.write(b"," + encoder.encode(key) + b":" + encoder.encode(scrubber.value(value, key)))
    out.write(b"}\n")
    return {kind: tuple(sorted(texts)) for kind, texts in cleaner.kept.items() if texts}


def _has_text(encoded: bytes) -> bool:
    return b'"' in encoded and _NUMBERS.fullmatch(encoded) is None


# Replaces the name of any Python function that is not a module's.
_A_FUNCTION = "a function"


class _EventCleaner:
    """Cleans events in place; texts repeat, so the results are cached."""

    def __init__(self, scrubber: Scrubber) -> None:
        self._scrubber = scrubber
        cached = lru_cache(maxsize=_MOST_CACHED)
        self._name, self._value = cached(scrubber.name), cached(self._clean_value)
        self._plain = cached(self._plain_values)
        self._sound_keys: set[str] = set()
        self.kept: dict[str, set[str]] = {kind: set() for kind in ("annotations", "operators", "layers and classes")}

    def clean(self, event: _Event) -> bool:
        """Clean an event; False if it is to be dropped."""
        name = event.name
        if event.cat == "python_function" and not (isinstance(name, str) and name.startswith("nn.Module: ")):
            # Its name is private; the event stays, as recording it cost the program time.
            self._scrubber.removed[STACK_FRAMES] += 1
            event.name, event.args = _A_FUNCTION, msgspec.UNSET
            return True
        if event.ph == "M":
            return self._clean_label(event)
        if isinstance(name, str):
            annotates = event.cat in ("user_annotation", "gpu_user_annotation")
            event.name = clean = self._name(name, is_annotation=annotates, kernel=event.cat in ("kernel", "Kernel"))
            self._note(clean, event.cat, annotates=annotates)
        for part in ("ts", "dur"):
            raw = bytes(getattr(event, part))
            if raw[:1] in (b'"', b"[", b"{") and not _NUMBERS.fullmatch(raw):
                setattr(event, part, _NOTHING)
        for part in ("ph", "cat", "pid", "tid", "id", "s", "bp"):
            value = getattr(event, part)
            if isinstance(value, str) and not value.isdecimal():
                setattr(event, part, self._name(value, is_annotation=False))
        event.args = self._arguments(event.args) if isinstance(event.args, dict) else msgspec.UNSET
        return True

    def _note(self, name: str, category: object, *, annotates: bool) -> None:
        """Collect the names that users chose."""
        if name.startswith((LAYER_ANNOTATION, "nn.Module: ")):
            self.kept["layers and classes"].add(name.partition("::layer::")[2] or name.removeprefix("nn.Module: "))
        elif annotates and not _OWN_ANNOTATION.fullmatch(name):
            self.kept["annotations"].add(name)
        elif category == "cpu_op" and "::" in name and not _OWN_OPERATOR.match(name):
            self.kept["operators"].add(name)

    def _arguments(self, arguments: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        kept = {}
        for key, raw in arguments.items():
            encoded = bytes(raw)
            is_text = b'"' in encoded and _has_text(encoded)
            if (is_text and key not in TEXT_ARGUMENTS) or not self._is_sound(key):
                self._scrubber.removed[dropped_field(key)] += 1
                if key == "Call stack":
                    kept[key] = msgspec.Raw(b'"' + b";".join([b"-"] * (encoded.count(b";") + 1)) + b'"')
            elif key == _VALUES:
                kept[key] = self._plain(encoded) if is_text else raw
            else:
                kept[key] = self._value(encoded) if is_text else raw
        return kept

    def _is_sound(self, key: str) -> bool:
        """Whether the name of an argument contains nothing private."""
        if key not in self._sound_keys:
            if self._scrubber.words(self._scrubber.text(key)) != key:
                return False
            self._sound_keys.add(key)
        return True

    def _clean_value(self, encoded: bytes) -> msgspec.Raw:
        value = msgspec.json.decode(encoded)
        clean = self._scrubber.value(value)
        # The original text if nothing was removed: numbers in it keep their last digit.
        return msgspec.Raw(encoded if clean == value else msgspec.json.encode(clean))

    def _plain_values(self, encoded: bytes) -> msgspec.Raw:
        """The values of an operator's arguments that may stay; any other becomes ""."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(item) for item in value]
            if not isinstance(value, str):
                return None if isinstance(value, dict) else value
            return value if _PLAIN_VALUE.fullmatch(value) else ""

        value = msgspec.json.decode(encoded)
        clean = plain(value)
        self._scrubber.removed[DROPPED_VALUES] += clean != value
        return msgspec.Raw(encoded if clean == value else msgspec.json.encode(clean))

    def _clean_label(self, event: _Event) -> bool:
        """Clean the label of a track, where Kineto writes the process's command line and the names of its threads."""
        arguments = event.args if isinstance(event.args, dict) else {}
        label = next((key for key in ("name", "labels") if key in arguments), None)
        event.args = {key: raw for key, raw in arguments.items() if not _has_text(bytes(raw))}
        if label is not None:
            text = msgspec.json.decode(bytes(arguments[label]))
            sound = str(text).strip()
            if not _TRACK_LABEL.fullmatch(sound):
                number = _TRACK_NUMBER.match(sound)
                sound = number[0] if number else "python" if event.name == "process_name" else ""
                self._scrubber.removed[PROCESS_NAMES] += 1
            event.args[label] = msgspec.Raw(msgspec.json.encode(sound))
        return isinstance(event.name, str) and self._scrubber.words(self._scrubber.text(event.name)) == event.name
