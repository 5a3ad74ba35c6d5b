"""The nine operations of Tianshu: its network with and without the principal component, and its rivals.

Ten percent of the operators are held out by their keys, as in `whatif opdb evaluate`; nothing is chosen on them.
Every operation has its own model, as in the paper. Its principal component and architecture are searched on the
V100's rows and shared by the other GPUs, as the paper's are by the values of a mode; a CPU has its own.

    python benchmarks/nine_operations.py --db FOLDER --device NAME [--dimensions ARCHIVE] [--operation Add]
    python benchmarks/nine_operations.py --table          writes the table of docs/estimators.md
    python benchmarks/nine_operations.py --check          fails if the table differs from the results

The database stores only the number of elements of an element-wise operator; NeuSight's archive (``--dimensions``) has
the two sides, the inputs of the paper's networks. Results are in benchmarks/nine_operations.json, by device and
operation, so that parts can be redone; training needs torch, scikit-learn, and half a minute on one core per operation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from whatif.graph.types import Float64
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.devices import device_called
from whatif.opdb.evaluate import SEED, SHARE
from whatif.opdb.index import index_of, read_contributions
from whatif.opdb.keys import held_out
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows, measurements, operators
from whatif.opdb.store import Store
from whatif.opdb.trees import forest_of
from whatif.report.layout import markdown_table

fitting = importlib.import_module("whatif.instrumentation.estimators.fitting")
boosting = importlib.import_module("whatif.instrumentation.estimators.boosting")
samples = importlib.import_module("whatif.instrumentation.estimators.samples")
principal = importlib.import_module("whatif.instrumentation.estimators.principal.fitting")
parameters = importlib.import_module("whatif.instrumentation.estimators.principal.parameters")
searching = importlib.import_module("whatif.instrumentation.estimators.principal.search")

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/estimators.md", ROOT / "benchmarks/nine_operations.json"

# Huang et al., table 3: percent with the principal component, and without; V100, TensorFlow 1.15, its own data.
PUBLISHED = {
    "Add": (0.57, 11.05), "Sub": (1.47, 3.74), "Mul": (1.49, 4.48), "RealDiv": (0.66, 4.68), "MatMul": (2.92, 9.85),
    "ReLU": (0.29, 4.52), "Conv2D": (8.94, 30.58), "Conv2DBackpropInput": (8.33, 32.31),
    "Conv2DBackpropFilter": (12.35, 43.07),
}  # fmt: skip
# Their name and phase in the database.
OPERATIONS = {
    "Add": (("add", "fwd"),), "Sub": (("sub", "fwd"),), "Mul": (("mul", "fwd"),), "RealDiv": (("div", "fwd"),),
    "MatMul": (("linear", "fwd"), ("bmm", "fwd"), ("mm", "fwd")), "ReLU": (("relu", "fwd"),),
    "Conv2D": (("conv2d", "fwd"),), "Conv2DBackpropInput": (("conv2d", "dgrad"),),
    "Conv2DBackpropFilter": (("conv2d", "wgrad"),),
}  # fmt: skip
FEWEST_ROWS = 180
# Less than the effort of a user's own fit (the defaults): 60 models are fitted here.
EFFORT = searching.Effort(
    candidate_steps=400,
    architecture_steps=150,
    final_steps=1500,
    last_steps=0,
    layers=(3, 5, 8),
    neurons=(6, 12, 40),
    kept=2,
)
_START, _END = "<!-- nine operations: start -->\n", "<!-- nine operations: end -->"


@dataclass(frozen=True)
class Case:
    """One operation's measurements on one device, and the inputs of its network."""

    operation: str
    name: str
    provenance: Provenance
    rows: Rows
    parameters: tuple[Any, ...]


def main() -> int:
    """Measure the requested operations, write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--dimensions", type=Path, help="NeuSight's archive")
    parser.add_argument("--operation", choices=tuple(OPERATIONS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    for case in cases(asked.db, asked.device, asked.dimensions) if asked.db else ():
        if asked.operation in (None, case.operation):
            results = _results()  # another process may have written in the meantime
            found = score(case, results)
            results = _results() | {f"{case.provenance.origin.device.name}/{case.operation}/{case.name}": found}
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(case.provenance.origin.device.name, case.operation, case.name, found, flush=True)
    if not asked.table and not asked.check:
        return 0
    before, _, rest = PAGE.read_text().partition(_START)
    _, found_end, after = rest.partition(_END)
    if not found_end:
        sys.exit(f"{PAGE}: expected the markers of the table, got none.")
    written = before + _START + table(_results()) + _END + after
    if asked.check:
        same = written == PAGE.read_text()
        print("the table matches the results" if same else "the table differs from the results; --table writes it")
        return int(not same)
    PAGE.write_text(written)
    return 0


def cases(folder: Path, device: str | None, archive: Path | None) -> Iterator[Case]:
    """Return the operations with enough measurements, by device."""
    parts: dict[tuple[str, str, str], list[tuple[Provenance, Rows]]] = {}
    for source, rows in read_contributions(Store.open(folder))[0]:
        if device not in (None, source.origin.device.name):
            continue
        texts = np.stack([np.array(rows.ops.texts[t].decoded()) for t in ("name", "phase", "dtype")], axis=1)
        for operation, called in OPERATIONS.items():
            for name, phase in called:
                mask = (texts == (name, phase, "fp32")).all(axis=1)
                if mask.any():
                    parts.setdefault((source.origin.device.name, operation, name), []).append((source, rows.take(mask)))
    for (of, operation, name), several in sorted(parts.items()):
        source, rows = several[0][0], _joined([r for t, r in several if t.origin.basis == several[0][0].origin.basis])
        if len(rows) < FEWEST_ROWS:
            continue
        if archive is not None and rows.family == "elementwise":
            yield _with_sides(archive, of, operation, name, source)
        else:
            yield Case(operation, name, source, rows, principal.parameters_of(rows.ops))


def _joined(parts: list[Rows]) -> Rows:
    ops = samples.joined([part.ops for part in parts])
    t_s, low_s, high_s = (np.concatenate([getattr(p, c) for p in parts]) for c in ("t_s", "t_low_s", "t_high_s"))
    return measurements(ops, t_s, t_low_s=low_s, t_high_s=high_s)


def _with_sides(archive: Path, device: str, operation: str, name: str, provenance: Provenance) -> Case:
    """An element-wise operation with the two sides of its tensors."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.count("/") == 3 and member.name.split("/")[1] == name and member.name.endswith(".csv"):
                read = tar.extractfile(member)
                assert read is not None
                found = pd.read_csv(read)
                if device_called(str(found["Device"][0])).name == device:
                    break
    sides = {side: found[side].to_numpy(dtype=np.int64) for side in ("B", "H")}
    tensors = np.full(len(found), 1 if name == "relu" else 2)
    ops = operators("elementwise", {"elements": sides["B"] * sides["H"], "tensors": tensors}, name=name, dtype="fp32")
    rows = measurements(ops, found["Latency"].to_numpy() * 1e-3)
    inputs = tuple(parameters.Parameter(side, values, dimension=True) for side, values in sides.items())
    return Case(operation, name, provenance, rows, inputs)


def score(case: Case, results: dict[str, Any]) -> dict[str, Any]:
    """Return the mean errors of every rival on the held-out operators, percent, and the search results."""
    out = held_out(case.rows.ops.keys, SEED, SHARE)
    t_s, t_known = case.rows.t_s, np.where(out, np.nan, case.rows.t_s)
    began = time.process_time()
    found = _searched(case, out, results)
    result: dict[str, Any] = {"rows": len(t_s), "held_out": int(out.sum()), "component": found.formula()}
    for key, logs, component in (
        ("raw_pc", False, True), ("raw", False, False), ("log_pc", True, True), ("log", True, False),
    ):  # fmt: skip
        networks = principal.train_modes(found, t_s, ~out, EFFORT, logs=logs, component=component)
        if key == "raw_pc":
            best = max(networks.items(), key=lambda item: (found.mode == item[0]).sum())[1]
            result["architecture"] = [best.hidden, best.neurons]
            # As in the paper: the network without the principal component has the same structure.
            kept = {mode: [(n.hidden, n.neurons)] for mode, n in networks.items()}
            found = replace(found, architectures=kept)
        predicted = principal.predict_s(found, networks, t_known, logs=logs, component=component)
        result[key] = _mape_pct(predicted[out], t_s[out])
        result["answered"] = int(np.isfinite(predicted[out]).sum())
    result["network_cpu_s"] = round(time.process_time() - began, 1)
    kept, trial = case.rows.take(~out), case.rows.take(out)
    sample = next(samples.samples_of([(case.provenance, kept)]))
    names = (case.name,)
    arrays = boosting.fit_trees(
        sample.features(names, across=False)[0], sample.target(), fitting.SAME_DEVICE[kept.family]
    )
    x = replace(sample, ops=trial.ops, t_s=trial.t_s).features(names, across=False)[0]
    over = samples.reference_s(trial.ops, sample.sheet, launch=sample.launch)
    result["trees"] = _mape_pct(over * np.exp(forest_of(arrays, x.shape[1], "benchmark").predict(x)), trial.t_s)
    answers = Estimator(
        index_of([(case.provenance, kept)]), case.provenance.origin.device.name, (AnswerSource.INTERPOLATED,)
    ).estimate(trial.ops)
    result["interpolated"] = _mape_pct(answers.t_s, trial.t_s)
    result["noise"] = _noise_pct(trial)
    return result


def _searched(case: Case, out: npt.NDArray[np.bool_], results: dict[str, Any]) -> Any:
    """Search on the rows that are not held out, or reuse the result of another device."""
    shared = results.get(f"V100-PCIE-32/{case.operation}/{case.name}")
    device = case.provenance.origin.device.name
    if shared is None or device == "V100-PCIE-32" or device.startswith("cpu:"):
        known = tuple(replace(p, values=p.values[~out]) for p in case.parameters)
        found = principal.search(known, case.rows.t_s[~out], EFFORT, logs=False)
        fixed = [p for i, p in enumerate(case.parameters) if i not in found.varying]
        return replace(found, parameters=case.parameters, mode=parameters.combinations(fixed, len(out)))
    places, mode = parameters.modes_of(case.parameters)
    varying = tuple(i for i in range(len(case.parameters)) if i not in places)
    wanted = shared["component"].split(" / ")[0].split(" * ")
    exponents = np.array([int(case.parameters[i].name in wanted) for i in varying], dtype=np.int8)
    architectures = {number: [tuple(shared["architecture"])] for number in np.unique(mode).tolist()}
    return principal.Found(case.parameters, varying, mode, exponents, np.empty(0), architectures)


def _mape_pct(predicted: Float64, measured: Float64) -> float:
    known = np.isfinite(predicted)
    return (
        round(float(100 * np.mean(np.abs(predicted[known] / measured[known] - 1))), 2) if known.any() else float("nan")
    )


def _noise_pct(rows: Rows) -> float | None:
    """The median of half the spread of the repeats (10 to 90 %), if it was recorded, percent."""
    spread = (rows.t_high_s - rows.t_low_s) / rows.t_s / 2
    return None if np.isnan(spread).all() else round(float(100 * np.nanmedian(spread)), 2)


def _results() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.is_file() else {}


def table(results: dict[str, Any]) -> str:
    """Return the table, one line per operation and device."""
    headers = (
        "operation", "device", "rows", "held out", "principal component", "layers x neurons", "network", "without it",
        "log network", "without it", "trees", "interpolated", "noise", "Tianshu", "without it",
    )  # fmt: skip
    rows = []
    for key in sorted(results, key=lambda k: (list(PUBLISHED).index(k.split("/")[1]), k)):
        device, operation, name = key.split("/")
        found = results[key]
        cells = [f"{found[k]:.2f}" for k in ("raw_pc", "raw", "log_pc", "log", "trees", "interpolated")]
        noise = "" if found["noise"] is None else f"{found['noise']:.1f}"
        layers, neurons = found["architecture"]
        rows.append(
            (
                f"{operation} ({name})", device, f"{found['rows']:,}", f"{found['held_out']:,}", found["component"],
                f"{layers} x {neurons}", *cells, noise, *(f"{error:.2f}" for error in PUBLISHED[operation]),
            )
        )  # fmt: skip
    return markdown_table(headers, rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
