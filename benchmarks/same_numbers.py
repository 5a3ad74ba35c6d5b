"""Compare all answers of two checkouts of this project: no number may differ.

    python benchmarks/same_numbers.py BEFORE AFTER [--extra FOLDER] [--only GLOB]
    python benchmarks/same_numbers.py BEFORE --save FILE
    python benchmarks/same_numbers.py --against FILE AFTER

One process loads the package of BEFORE, asks all questions, unloads it, and does the same with AFTER. The questions are
every transform with its default options, some with others and composed (``MORE``), and the JSON output of the commands
in ``COMMANDS``. The recordings are those in BEFORE/traces (AFTER/traces with ``--against``), and
public ones in ``--extra``, by default $WHATIF_EXTRA_DATA/traces if that exists.

Numbers, names and the structure of an answer are compared exactly. Prose is compared separately, since its
wording may improve: differences are counted, shown with ``--texts``, and do not fail the comparison.
Exits 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# Commands whose output is compared for each recording, in addition to predictions.
COMMANDS = ("info", "explain", "memory")

# Questions in addition to transforms with their defaults: forms that the defaults do not cover.
MORE = {
    "activation_checkpoint": ["activation_checkpoint:layers=.*[0-9]"],
    "amp": ["amp:target=bf16", "amp:matrix_speedup=3,memory_speedup=2"],
    "balance_ranks": ["balance_ranks:follow=median"],
    "bandwidth": ["distributed:workers=4,bandwidth=10Gbps bandwidth"],
    "batch_size": ["batch_size:factor=2", "batch_size:factor=0.5"],
    "blueconnect": ["distributed:workers=8,bandwidth=10Gbps blueconnect"],
    "contention": ["distributed:workers=4,bandwidth=10Gbps contention"],
    "cpu": ["cpu:speedup=0.5,loading=no"],
    "data_loading": ["data_loading:workers=2"],
    "device": ["device:to=H100-SXM-80", "device:to=T4"],
    "dgc": ["distributed:workers=4,bandwidth=10Gbps dgc"],
    "distributed": [
        "distributed:workers=4,bandwidth=10Gbps",
        "distributed:workers=4,bandwidth=10Gbps,overlap=no",
        "distributed:workers=16,bandwidth=25GB/s,bucket_mb=1",
        "distributed:workers=4,bandwidth=10Gbps amp fused_adam",
    ],
    "fsdp": ["fsdp:workers=4,bandwidth=10Gbps"],
    "fused_adam": ["fused_adam:to=foreach", "amp fused_adam"],
    "p3": ["p3:workers=4,bandwidth=10Gbps"],
    "parameter_server": ["parameter_server:workers=4,bandwidth=10Gbps"],
    "pipeline": ["pipeline:stages=2,micro_batches=4,bandwidth=10Gbps"],
    "scale": [
        "scale:kind=gpu,factor=0.5",
        "scale:kind=cpu,factor=0.5",
        "scale:phase=backward,factor=2",
        "scale:name=gemm|mm,factor=0",
    ],
    "straggler": ["straggler:slowdown=2,workers=4", "distributed:workers=4,bandwidth=10Gbps straggler"],
    "tensor_parallel": ["tensor_parallel:workers=2,bandwidth=100GB/s"],
    "vdnn": ["vdnn:layers=all,mb=8"],
    "zero": ["zero:workers=4,bandwidth=10Gbps", "zero:workers=4,bandwidth=10Gbps,stage=3"],
}
# Options that depend on the recording: name -> (graph, folder for files) -> options.
FITTED: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "kernels": lambda graph, folder: {"file": _first_kernels(graph, folder)},
    "metaflow": lambda graph, folder: {"policy": _policy(graph)},
}
# Transforms that became options of another: the new form replaces a name that is gone.
_ARCHITECTURES = ("federated", "federated_split", "parallel_split", "pipeline_learning", "split")
RENAMED = {name: f"dts:architecture={name}" for name in _ARCHITECTURES}

# Keys whose strings are prose.
TEXTS = {
    "caveats", "effort", "how", "message", "notes", "quirks", "reason", "sentence", "sentences", "trust", "verdict",
    "verdict_as_recorded", "warnings",
}  # fmt: skip

Answer = dict[str, Any]
Answers = dict[str, dict[str, Answer]]  # recording -> question -> answer


# -- a package from a checkout ----------------------------------------------------------------------------------------


class CheckoutFinder:
    """Finds ``whatif`` and its two top-level folders in one checkout, before any installed one."""

    def __init__(self, checkout: Path) -> None:
        self.folders = {
            "whatif": checkout / "whatif",
            "whatif.transforms": checkout / "transforms",
            "whatif.instrumentation": checkout / "instrumentation",
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of one of the three packages; their modules are found by the path of the package."""
        folder = self.folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


@contextmanager
def package_of(checkout: Path) -> Iterator[ModuleType]:
    """Yield the ``whatif`` of a checkout; no checkout's modules stay loaded afterwards."""
    finder = CheckoutFinder(checkout)
    finders = list(sys.meta_path)
    _unload()
    # An editable install of another checkout would find the modules that this one lacks.
    sys.meta_path[:] = [finder, *(f for f in finders if "__editable__" not in getattr(f, "__module__", ""))]
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("whatif")
        _check_origin(checkout)
    finally:
        sys.meta_path[:] = finders
        _unload()


def _unload() -> None:
    for name in [name for name in sys.modules if name == "whatif" or name.startswith("whatif.")]:
        del sys.modules[name]
    gc.collect()


def _check_origin(checkout: Path) -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (name == "whatif" or name.startswith("whatif.")) and file and not Path(file).is_relative_to(checkout):
            raise SystemExit(f"same_numbers: expected {name} from {checkout}, got it from {file}.")


# -- recordings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """A file, or a folder with the ranks of one run; answers use its path relative to ``folder``."""

    folder: Path
    path: str


def recordings(kind: str, folder: Path, only: str, largest_mb: float) -> Iterator[tuple[str, Recording]]:
    """Return every recording below a folder with its name, and the folders that hold the ranks of one run."""
    ranks: dict[Path, int] = {}
    for file in sorted(folder.rglob("*")):
        if not re.search(r"\.(json|json\.gz|sqlite)$", file.name) or not file.is_file():
            continue
        name = f"{kind}/{file.relative_to(folder)}"
        if not fnmatch(name, only):
            continue
        if file.stat().st_size > largest_mb * 1e6:
            print(f"left out: {name}, {file.stat().st_size / 1e6:.0f} MB (--largest-mb)", file=sys.stderr)
            continue
        yield name, Recording(folder, str(file.relative_to(folder)))
        if re.match(r"rank_?\d+\.", file.name):
            ranks[file.parent] = ranks.get(file.parent, 0) + 1
    for parent, count in sorted(ranks.items()):
        if count > 1:
            yield f"{kind}/{parent.relative_to(folder)}/", Recording(folder, str(parent.relative_to(folder)))


# -- answers ----------------------------------------------------------------------------------------------------------


def answers_of(checkout: Path, recorded: dict[str, Recording], asked: Answers | None, label: str) -> Answers:
    """Ask the package of a checkout all questions on every recording, or only those answered in ``asked``."""
    start_s, found = time.process_time(), {}
    with package_of(checkout) as whatif, tempfile.TemporaryDirectory() as scratch:
        asker = Asker(whatif, Path(scratch))
        for place, (name, recording) in enumerate(recorded.items()):
            _progress(f"{label}: {place + 1} of {len(recorded)}, {name}")
            found[name] = asker.ask(recording, None if asked is None else asked.get(name, {}).keys())
    _progress("")
    print(f"{label}: {time.process_time() - start_s:.0f} s of CPU time", file=sys.stderr)
    return found


class Asker:
    """Asks one loaded package."""

    def __init__(self, whatif: ModuleType, scratch: Path) -> None:
        self.whatif, self.scratch = whatif, scratch
        self.main = importlib.import_module("whatif.cli.main").main
        listed = json.loads(self._command("transforms", "--json")["printed"])
        self.transforms = [row["name"] for row in listed["transforms"] if row["origin"] == "built-in"]
        self._graphs: dict[str, Any] = {}
        self._remember_graphs()

    def ask(self, recording: Recording, only: Any) -> dict[str, Answer]:
        """Return the package's answers for a recording, by question."""
        self._graphs.clear()
        os.chdir(recording.folder)
        try:
            baseline = self.whatif.apply(self.whatif.read(recording.path)).baseline
        except Exception as error:
            return {"read": self._failed(error)}
        found = {"read": self._answer(self.whatif.apply(baseline))}
        for name, question in self._questions():
            if only is None or question in only:
                found[question] = self._predicted(baseline, name, question)
        for command in COMMANDS:
            if only is None or command in only:
                printed = self._command(command, recording.path, "--json", "--quiet")
                found[command] = json.loads(printed.pop("printed") or "{}") | printed
        return found

    def _questions(self) -> Iterator[tuple[str, str]]:
        """Every transform of this package with its questions, including the names of merged transforms."""
        for name in sorted(
            {*self.transforms, *(name for name, now in RENAMED.items() if _known(now, self.transforms))}
        ):
            yield from ((name, question) for question in [name, *MORE.get(name, [])])

    def _predicted(self, baseline: Any, name: str, question: str) -> Answer:
        try:
            if name in FITTED:
                options = FITTED[name](baseline.graph, self.scratch)
                loaded = [self.whatif.load_transform(name, **options)]
            else:
                spelled = [word if word in self.transforms else RENAMED.get(word, word) for word in question.split()]
                loaded = [self.whatif.load_transform(word) for word in spelled]
            return self._answer(self.whatif.apply(baseline, *loaded))
        except Exception as error:
            return self._failed(error)

    def _answer(self, prediction: Any) -> Answer:
        graph, report = prediction.graph, prediction.to_dict()
        # The question itself, whose form may change.
        report.pop("transforms")
        for part in report.get("contributions", ()):
            del part["name"], part["options"]
        shape = {"n_tasks": len(graph), "n_threads": len(graph.threads), "work_ns": int(graph.duration_ns.sum())}
        return _plain({**report, **shape})

    def _failed(self, error: Exception) -> Answer:
        message = str(error).replace(str(self.scratch), "SCRATCH")
        if isinstance(error, self.whatif.WhatifError):
            return {"refused": True, "message": message}
        frames = "".join(traceback.format_exception(error)[-2:])
        return {"crashed": type(error).__name__, "message": f"{message} {frames}"}

    def _command(self, *words: str) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = self.main(list(words))
        printed = {"printed": out.getvalue(), "exit": status}
        return {**printed, "message": err.getvalue()} if status else printed

    def _remember_graphs(self) -> None:
        """Let commands reuse the last graph that was read, since they read the same file repeatedly."""
        for name in ("read", "read_ranks"):
            home, read = sys.modules[getattr(self.whatif, name).__module__], getattr(self.whatif, name)

            def remembered(path: Any, *, name: str = name, read: Callable[..., Any] = read, **options: Any) -> Any:
                key = f"{name} {path}"
                if key not in self._graphs:
                    self._graphs[key] = read(path, **options)
                return self._graphs[key]

            setattr(home, name, remembered)


def _known(spelled: str, transforms: Sequence[str]) -> bool:
    return spelled.partition(":")[0] in transforms


def _first_kernels(graph: Any, folder: Path) -> Path:
    """A file that halves the mean duration of the three kernels that come first."""
    codes, durations_ns = graph.name[graph.on_gpu], graph.duration_ns[graph.on_gpu]
    first = list(dict.fromkeys(codes.tolist()))[:3]
    file = folder / "kernels.json"
    file.write_text(json.dumps({graph.names[code]: durations_ns[codes == code].mean() / 2e3 for code in first}))
    return file


def _policy(graph: Any) -> dict[str, Any]:
    """A policy that removes a layer and widens another, both from the middle of the recording's."""
    layers = [re.escape(layer) for layer in graph.layers if layer]
    middle = len(layers) // 2
    return (
        {"remove": layers[middle : middle + 1], "scale": [{"layers": [layers[-1]], "factor": 1.25}]} if layers else {}
    )


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    answers: int = 0
    refused: int = 0
    recordings: int = 0
    unreadable: int = 0
    differ: int = 0
    new: int = 0
    texts: int = 0
    lines: list[str] = field(default_factory=list)
    text_lines: list[str] = field(default_factory=list)


def compare(before: Answers, after: Answers, leave_out: Sequence[str]) -> Tally:
    """Compare the answers one by one."""
    tally = Tally()
    for name, old in before.items():
        new = after.get(name, {})
        tally.recordings += 1
        tally.unreadable += old.keys() == {"read"}
        for question in {**old, **new}:
            if question not in old:  # a what-if that BEFORE does not have
                tally.new += 1
                continue
            tally.answers += 1
            tally.refused += "refused" in old[question]
            differing, texts = differences(old[question], new.get(question), leave_out)
            tally.differ += bool(differing)
            tally.texts += bool(texts)
            tally.lines += [f"{name}  {question}  {line}" for line in differing]
            tally.text_lines += [f"{name}  {question}  {line}" for line in texts]
    return tally


def differences(old: Answer, new: Answer | None, leave_out: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a line for each key in which two answers differ: those of numbers and structure, and those of texts."""
    if new is None:
        return ["asked only before"], []
    before, after = dict(leaves(old)), dict(leaves(new))
    differing: list[str] = []
    texts: list[str] = []
    for key in {**before, **after}:
        was, now = (json.dumps(side[key]) if key in side else "nothing" for side in (before, after))
        if was != now and not any(fnmatch(key, pattern) for pattern in leave_out):
            (texts if key.split(".")[-1] in TEXTS else differing).append(f"{key}  {was} -> {now}")
    return differing, texts


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Return each leaf of a JSON value with its key; a list has its length as well, and sentences are one leaf."""
    if key.split(".")[-1] in TEXTS and not isinstance(value, dict):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        yield f"{key}.length", len(value)
        for place, part in enumerate(value):
            yield from leaves(part, f"{key}[{place}]")
    else:
        yield key, value


# -- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Compare two checkouts, or one with saved answers."""
    args = arguments()
    checkouts = [Path(path).resolve() for path in args.checkouts]
    home = checkouts[0]
    recorded = dict(recordings("traces", home / "traces", args.only, args.largest_mb))
    extra = args.extra or os.path.join(os.environ.get("WHATIF_EXTRA_DATA", ""), "traces")
    if args.extra or (os.environ.get("WHATIF_EXTRA_DATA") and os.path.isdir(extra)):
        recorded |= recordings("extra", Path(extra).resolve(strict=True), args.only, args.largest_mb)
    if not recorded:
        print(f"same_numbers: expected recordings in {home / 'traces'}, got none.", file=sys.stderr)
        return 2
    save = args.save and Path(args.save).resolve()
    if args.against:
        saved: Answers = json.loads(Path(args.against).read_text())
        before = {name: answers for name, answers in saved.items() if fnmatch(name, args.only)}
    else:
        before = answers_of(checkouts[0], recorded, None, "before")
        if save:
            save.write_text(json.dumps(before))
    if len(checkouts) == 1 and not args.against:
        print(f"{sum(map(len, before.values()))} answers on {len(before)} recordings saved")
        return 0
    after = answers_of(checkouts[-1], {name: r for name, r in recorded.items() if name in before}, None, "after")
    tally = compare(before, after, args.leave_out)
    for line in tally.lines[: args.most] + (tally.text_lines if args.texts else []):
        print(line)
    if len(tally.lines) > args.most:
        print(f"... and {len(tally.lines) - args.most} more lines (--most)")
    print(
        f"{tally.refused} of the answers are refusals; {tally.unreadable} of the files are unreadable; "
        f"texts differ: {tally.texts}{'' if args.texts or not tally.texts else ' (--texts shows them)'}"
    )
    print(f"{tally.new} answers of what-ifs that are new")
    print(f"{tally.answers} answers on {tally.recordings} recordings compared, {tally.differ} differ")
    return 1 if tally.differ else 0


def arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", help="BEFORE and AFTER; one with --save, --against")
    parser.add_argument("--extra", metavar="FOLDER", help="other people's recordings ($WHATIF_EXTRA_DATA/traces)")
    parser.add_argument("--only", default="*", metavar="GLOB", help="recordings, e.g. 'traces/campaign_cpu/vgg*'")
    parser.add_argument("--largest-mb", type=float, default=60, help="leave larger files out (default: 60)")
    parser.add_argument("--save", metavar="FILE", help="write the answers of BEFORE into a file")
    parser.add_argument("--against", metavar="FILE", help="compare with a file from --save, not BEFORE")
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="KEY", help="glob of a key; may be repeated"
    )
    parser.add_argument("--texts", action="store_true", help="show how sentences differ")
    parser.add_argument("--most", type=int, default=200, help="lines to print (default: 200)")
    args = parser.parse_args()
    expected = (1,) if args.against else (1, 2) if args.save else (2,)
    if len(args.checkouts) not in expected:
        parser.error(f"expected BEFORE and AFTER, or one of them with --save or --against, got {args.checkouts}")
    return args


if __name__ == "__main__":
    sys.exit(main())
