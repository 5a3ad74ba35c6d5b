"""Mutants: one line of the library made wrong at a time; some test must fail.

    python -m tests.trust.mutate [ID ...]

A mutant is found by its text, wherever the file lies; ``test_mutate.py`` fails if a text is gone or no longer unique,
and the mutant needs a new one. The tests run in a copy of the checkout. Prints for each the test that fails, or
"SURVIVED" (or that the tests took too long), and at last which of these tests fail without a mutant too; takes
minutes each.
"""

# ruff: noqa: E501  (the mutants hold lines of the library as they are)

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800
COPIED = (
    "whatif",
    "transforms",
    "instrumentation",
    "tests",
    "traces",
    "examples",
    "benchmarks",
    "docs",
    "pyproject.toml",
)

# The tests that are to kill the mutants of a group.
TESTS = {
    "simulator": ["tests/test_simulate.py", "tests/test_calibrate.py", "tests/test_edit.py", "tests/sweep"],
    "derive": [
        "tests/test_derived.py",
        "tests/test_simulate.py",
        "tests/test_insert_remove.py",
        "tests/test_edit.py",
        "tests/ingest/test_build.py",
        "tests/ingest/test_waiting.py",
        "tests/ranks",
    ],
    "edit": [
        "tests/test_edit.py",
        "tests/test_insert_remove.py",
        "tests/test_simulate.py",
        "tests/test_training_transforms.py",
        "tests/transforms",
    ],
    "insert": [
        "tests/test_insert_remove.py",
        "tests/test_edit.py",
        "tests/test_training_transforms.py",
        "tests/transforms",
    ],
    "remove": [
        "tests/test_insert_remove.py",
        "tests/test_edit.py",
        "tests/test_training_transforms.py",
        "tests/transforms",
    ],
    "calibrate": ["tests/test_calibrate.py", "tests/cli/test_calibration.py", "tests/test_validate.py"],
    "ingest": [
        "tests/ingest/test_kineto_damage.py",
        "tests/ingest/test_kineto_decimal.py",
        "tests/ingest/test_kineto_fields.py",
        "tests/ingest/test_build.py",
        "tests/test_fuzz.py",
        "tests/ingest",
        "tests/test_real_traces.py",
    ],
    "collectives": ["tests/cluster", "tests/paper", "tests/transforms"],
    "chain": [
        "tests/opdb/test_estimators.py",
        "tests/opdb/test_same_shape.py",
        "tests/opdb/test_learned.py",
        "tests/opdb",
        "tests/operator_graph",
    ],
}


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new``."""

    name: str
    group: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "sim1",
        "simulator",
        "            end_ns += thread_lag_ns[t]\n            free_ns[t] = end_ns if end_ns > 0 else 0",
        "            free_ns[t] = end_ns if end_ns > 0 else 0",
    ),
    Mutant(
        "sim2",
        "simulator",
        "                if reached_ns > start_ns:\n                    start_ns = reached_ns\n            end_ns",
        "                if reached_ns >= start_ns + 1000000:\n                    start_ns = reached_ns\n            end_ns",
    ),
    Mutant(
        "sim3",
        "simulator",
        "        if ready > start:\n            start = ready\n        end = start + duration_ns[task]",
        "        start = ready\n        end = start + duration_ns[task]",
    ),
    Mutant("sim4", "simulator", "time = (start if anchor else end) + lag", "time = end + lag"),
    Mutant(
        "sim5",
        "simulator",
        "key = (ready_ns if ready_ns > free else free, ready_ns, task)",
        "key = (ready_ns, ready_ns, task)",
    ),
    Mutant(
        "sim6",
        "simulator",
        "simulate(high.replace(duration_ns=graph.high_ns), schedule)",
        "simulate(high.replace(duration_ns=graph.duration_ns), schedule)",
    ),
    Mutant(
        "sim7",
        "simulator",
        "    ready_ns = {int(task): 0 for task in np.flatnonzero(missing_array == 0)}",
        "    ready_ns = {int(task): 1 for task in np.flatnonzero(missing_array == 0)}",
    ),
    Mutant(
        "der1",
        "derive",
        'last = np.searchsorted(launched, wait, side="left") - 1',
        'last = np.searchsorted(launched, wait, side="left")\n        last = np.minimum(last, len(launched) - 1)',
    ),
    Mutant(
        "der2",
        "derive",
        "same_rank = rank[graph.thread[waits.task]] == rank[stream]",
        "same_rank = rank[graph.thread[waits.task]] == rank[graph.thread[waits.task]]",
    ),
    Mutant(
        "der3",
        "derive",
        "source[found] = first[n - depth]",
        "source[found] = first[n - depth + 1]",
    ),
    Mutant("der4", "derive", "DependencyKind.QUEUE, anchor=Anchor.START", "DependencyKind.QUEUE, anchor=Anchor.END"),
    Mutant(
        "der5",
        "derive",
        "                if launch[task] > newest[t]:\n                    newest[t] = launch[task]",
        "                newest[t] = launch[task]",
    ),
    Mutant("der6", "derive", "                if seen[call] == stream:\n                    continue\n", ""),
    Mutant(
        "ed1",
        "edit",
        "    np.minimum(low, duration, out=low)\n    np.maximum(high, duration, out=high)\n",
        "",
    ),
    Mutant("ed2", "edit", "total // n + (part < total % n)", "total // n"),
    Mutant(
        "ed3",
        "edit",
        "source = np.where(old.anchor == Anchor.START, first[old.source], last[old.source])",
        "source = last[old.source]",
    ),
    Mutant(
        "ed4", "edit", "    return np.rint(numbers).astype(np.int64)", "    return np.floor(numbers).astype(np.int64)"
    ),
    Mutant(
        "ed5",
        "edit",
        "waits = Waits(moved[graph.waits.task], graph.waits.scope, graph.waits.lag_ns)\n    dependencies = renumbered",
        "waits = Waits(graph.waits.task, graph.waits.scope, graph.waits.lag_ns)\n    dependencies = renumbered",
    ),
    Mutant("in1", "insert", "turn.append(first_turn + 2)", "turn.append(-(first_turn + 2))"),
    Mutant("in2", "edit", "result, marked = np.zeros(len(is_old)", "result, marked = np.ones(len(is_old)"),
    Mutant(
        "in3",
        "insert",
        "lag_ns = np.full(len(scope), tasks.return_ns, dtype=np.int64)",
        "lag_ns = np.full(len(scope), 0, dtype=np.int64)",
    ),
    Mutant(
        "in4",
        "insert",
        "Dependencies.of(launches, ids, DependencyKind.LAUNCH, graph.info.launch_lag_ns)",
        "Dependencies.of(launches, ids, DependencyKind.LAUNCH, 0)",
    ),
    Mutant("in5", "insert", 'return {**rows, "layer": new["layer"], "phase": new["phase"]}', "return {**rows}"),
    Mutant(
        "cal1",
        "calibrate",
        "cost_ns *= (recorded.step_ns - self.target_ns) / (recorded.step_ns - without.step_ns)",
        "cost_ns *= 1.0",
    ),
    Mutant("cal2", "calibrate", "left_ns = np.maximum(time_ns - cost, 0)", "left_ns = np.abs(time_ns - cost)"),
    Mutant(
        "cal3",
        "calibrate",
        "        return min(max(pace, PACE_LOW * scale), PACE_HIGH * scale)",
        "        return pace",
    ),
    Mutant(
        "cal4",
        "calibrate",
        "return math.hypot(lower, self.missed), math.hypot(higher, max(abs(self.missed), too_short))",
        "return lower, higher",
    ),
    Mutant(
        "cal5",
        "calibrate",
        "            if follows < FOLLOWS and self.graph.has_gpu:\n                return 1.0, first, self._unexplained(first)\n",
        "            if False:\n                return 1.0, first, self._unexplained(first)\n",
    ),
    Mutant(
        "cal6", "calibrate", "return self.pace / self.untraced.running if self.untraced else 1.0", "return self.pace"
    ),
    Mutant(
        "kin1",
        "ingest",
        "far = (np.abs(time_ns - np.median(time_ns)) > FAR_NS) | (duration_ns > FAR_NS)",
        "far = np.abs(time_ns - np.median(time_ns)) > FAR_NS",
    ),
    Mutant(
        "kin2",
        "ingest",
        "order = order_by(start_ns, -duration_ns)",
        "order = order_by(start_ns, duration_ns)",
    ),
    Mutant(
        "kin3",
        "ingest",
        "up = (rest > divisor - rest) | ((rest == divisor - rest) & (quotient % 2 == 1))",
        "up = (rest >= divisor - rest)",
    ),
    Mutant(
        "kin4",
        "ingest",
        "if self._file.damage is not None:\n                    self._dropped[self._file.damage] += 1\n                return tail",
        "return tail",
    ),
    Mutant(
        "kin5",
        "ingest",
        "        if not inflater.eof:\n            self.damage, self.is_cut = ends_early(self.size_bytes), True",
        "        if False:\n            self.damage, self.is_cut = ends_early(self.size_bytes), True",
    ),
    Mutant(
        "kin6",
        "ingest",
        '            if exhausted:\n                self._note_end()\n                return b""',
        '            if exhausted:\n                return b""',
    ),
    Mutant(
        "gpu1",
        "ingest",
        "return int(np.median(lags)) if len(lags) >= MIN_SAMPLES else DEFAULT_LAUNCH_LAG_NS",
        "return int(lags.mean()) if len(lags) >= MIN_SAMPLES else DEFAULT_LAUNCH_LAG_NS",
    ),
    Mutant("gpu2", "ingest", "queued = ~first & ((launched_ns + LATE_NS < before_ns) | (call < 0))", "queued = ~first"),
    Mutant(
        "gpu3",
        "ingest",
        "early: Bool = of_calls(calls.start_ns, correlated, start_ns) > start_ns + LATE_NS",
        "early: Bool = np.zeros(len(start_ns), dtype=np.bool_)",
    ),
    Mutant(
        "col1",
        "collectives",
        "return rounds * _hops(network), rounds * (network.workers - 1) / network.workers * 1e9 / network.ring_byte_s",
        "return rounds * _hops(network), rounds * 1e9 / network.ring_byte_s",
    ),
    Mutant("col2", "collectives", "left = 1.0 if level.shared else 1 / below", "left = 1.0"),
    Mutant("col3", "collectives", "buffers = 1 if network.workers == 2 else rounds", "buffers = rounds"),
    Mutant(
        "col4",
        "collectives",
        "total += (crossings - outside) * level.link.latency_ns\n        crossings = outside",
        "total += crossings * level.link.latency_ns\n        crossings = outside",
    ),
    Mutant("col5", "collectives", "sent = [(network.workers - below) * 1e9", "sent = [network.workers * 1e9"),
    Mutant(
        "col6",
        "collectives",
        "sent = (level.workers - 1) / level.workers * (below if level.shared else 1)",
        "sent = (level.workers - 1) / level.workers",
    ),
    Mutant(
        "ch1",
        "chain",
        "ordered = dict.fromkeys([*_in_order(own_rows), *_in_order(other_rows)])",
        "ordered = dict.fromkeys([*_in_order(other_rows), *_in_order(own_rows)])",
    ),
    Mutant("ch2", "chain", "good = (rank >= 0) & (measured.aside[row] == Aside.SOUND)", "good = rank >= 0"),
    Mutant(
        "ch3",
        "chain",
        "took_over = anchored & (answers.answered_by == AnswerSource.INTERPOLATED)",
        "took_over = answers.answered_by == AnswerSource.INTERPOLATED",
    ),
    Mutant("ch4", "chain", "if gpu is not None and gpu.vendor == vendor}", "if gpu is not None}"),
    Mutant("ch5", "chain", "np.minimum.at(best, query, rank)", "np.maximum.at(best, query, rank)"),
    Mutant(
        "ch6",
        "chain",
        "for rank, number in sorted(able.get(key, [])):",
        "for rank, number in sorted(able.get(key, []), reverse=True):",
    ),
    Mutant("rm1", "remove", "lag_ns=np.minimum(out.lag_ns, 0)", "lag_ns=out.lag_ns"),
    Mutant(
        "rm2",
        "remove",
        "return np.asarray(gone | (removed & ~still_needed & (graph.kind == TaskKind.RUNTIME)), dtype=np.bool_)",
        "return np.asarray(gone | (removed & (graph.kind == TaskKind.RUNTIME)), dtype=np.bool_)",
    ),
    Mutant("rm3", "remove", "flatnonzero(gone & (graph.start_ns >= 0) & among(", "flatnonzero(gone & among("),
    Mutant("comp1", "simulator", "free_ns[t] = end_ns if end_ns > 0 else 0", "free_ns[t] = end_ns"),
    Mutant(
        "comp2",
        "simulator",
        "points[at] = source[row] + (n_tasks if anchors[row] == 0 else 0)",
        "points[at] = source[row] + n_tasks",
    ),
]


def places(root: Path) -> dict[str, Path]:
    """Return the one file of the library that holds the text of each mutant once, by the mutant's name.

    Raises:
        ValueError: the text of some mutants is not there exactly once.

    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "whatif").rglob("*.py"))}
    found = {m.name: [path for path, text in texts.items() for _ in range(text.count(m.old))] for m in MUTANTS}
    wrong = [name for name, paths in found.items() if len(paths) != 1]
    if wrong:
        raise ValueError(f"the text of {', '.join(wrong)} is not there exactly once")
    return {name: path for name, (path,) in found.items()}


def failing(tests: list[str], root: Path) -> str | None:
    """Return the first of these tests that fails in the copy, None where all pass.

    Raises:
        TimeoutError: they take longer than ``SECONDS``.

    """
    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-rf", *tests]
    # The copy's own folder comes first, so that no installed checkout is tested instead.
    program = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')];"
        "from benchmarks.same_numbers import CheckoutFinder; from pathlib import Path;"
        "sys.meta_path.insert(0, CheckoutFinder(Path.cwd()));"
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    # Nothing is compiled in the copy: tests of compiled loops are skipped there, however strict the caller is.
    environment = {**os.environ, "PYTHONPATH": str(root), "WHATIF_STRICT": ""}
    command = [sys.executable, "-c", program, *words]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1) or len(failed) != done.returncode:
        raise RuntimeError(f"the tests did not run: {done.stdout[-500:]}{done.stderr[-500:]}")
    return failed[0] if failed else None


def killer(mutant: Mutant, path: Path, root: Path) -> str | None:
    """Return the test of the mutant's group that fails, None where none does; the file is as before afterwards."""
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return failing(TESTS[mutant.group], root)
    finally:
        path.write_text(original, encoding="utf-8")


def main(names: list[str]) -> None:
    """Try the mutants of these names, or all."""
    killers = set()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():  # loops run as the text says: nothing compiled comes along
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so"))
            else:
                shutil.copy(ROOT / name, root / name)
        path_of = places(root)
        for mutant in MUTANTS:
            if names and mutant.name not in names:
                continue
            try:
                test = killer(mutant, path_of[mutant.name], root)
            except TimeoutError:
                print(f"{mutant.name}: not known after {SECONDS} s", flush=True)
                continue
            killers.update([test] if test else [])
            print(f"{mutant.name}: {f'killed by {test}' if test else 'SURVIVED'}", flush=True)
        while killers and (broken := failing(sorted(killers), root)):
            print(f"{broken} fails without a mutant, and kills none")
            killers.remove(broken)


if __name__ == "__main__":
    main(sys.argv[1:])
