"""Pairs of runs with the what-ifs between them: found among the runs of a campaign, or named in a pairs.toml."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from whatif.ingest.record_file import read_json
from whatif.prediction.transform import built_in_names, parse_spec, plug_in_names
from whatif.questions.validate.validate_records import (
    DEFAULT_OPTIONS,
    TRACE_SUFFIXES,
    Run,
    StepTime,
    find_files,
    run_of,
    step_time_of,
)
from whatif.questions.validate.validate_truth import Truth, paced, unpaced
from whatif.questions.validate.validate_what_ifs import (
    IMPLEMENTATIONS,
    changed_options,
    is_plain,
    what_ifs_between,
)
from whatif.runtime.errors import WhatifError, closest
from whatif.runtime.files import check_file_pattern, read_at_most

PAIRS_FILE = "pairs.toml"
_MOST_PAIRS_BYTES = 16 << 20
SHOWN_CHARACTERS = 40
_PAIR_KEYS = {"question", "hardware", "baseline", "changed", "what_if", "remark", "scored"}
_RUN_KEYS = {"name", "remark", "scored"}


@dataclass(frozen=True)
class Pair:
    """A baseline recording, what the changed run measured, and the what-ifs between them.

    Runs of a campaign have ``untraced`` step times on both sides, by ``clock`` ("wall" or "cpu thread"). Of a pair of
    recordings that a file names, both are None: the recordings are compared.
    """

    question: str
    hardware: str  # "": that of the baseline's recording
    what_ifs: tuple[str, ...]
    baseline: Path
    changed: Path
    clock: str = "recorded"
    baseline_untraced: StepTime | None = None
    changed_untraced: StepTime | None = None
    remark: str = ""
    scored: bool = True  # False if a constant of the model was chosen while looking at this pair
    truth: Truth | None = None  # how ``changed_untraced`` was made; None if recordings are compared


class Unpaired(Struct, frozen=True):
    """A run without a prediction to compare it with, and why."""

    name: str
    reason: str


def find_pairs(paths: list[Path]) -> tuple[list[Pair], list[Unpaired]]:
    """Return the pairs among files and folders (searched recursively), and every run that is in none of them.

    A pairs.toml may name installed what-ifs, and transform scripts among ``paths`` by their files' names. Raises
    WhatifError if a path does not exist, if a pairs.toml is invalid, or if nothing is found.
    """
    for path in paths:
        if not path.exists():
            raise WhatifError(f"{path}: expected a folder of recorded pairs, or a file of one, got nothing; check it.")
    scripts = {path.name: str(path) for path in paths if path.suffix == ".py"}
    pairs: list[Pair] = []
    remarks: dict[tuple[Path, str], dict[str, Any]] = {}
    for path in find_files(paths, ".toml"):
        if path.name == PAIRS_FILE or path in paths:
            named_pairs, named_remarks = _read_pairs_file(path, scripts)
            pairs += named_pairs
            remarks |= named_remarks
    runs: list[Run] = []
    lab_runs: list[Pair | Unpaired] = []
    damaged: list[Unpaired] = []
    for path in find_files(paths, ".json"):
        content = read_json(path)
        run = None if content is None else run_of(path, content)
        if content is not None and _is_lab_record(content):
            lab_runs += _lab_pairs(path, content)
        elif run is not None:
            runs.append(run)
        elif path.with_name(f"{path.stem}{TRACE_SUFFIXES[0]}").is_file():
            damaged.append(Unpaired(path.stem, "it has a recording, but its record cannot be read"))
    found, unpaired = pair_runs(runs)
    unpaired += damaged
    pairs += [_with_remark(pair, remarks, pair.changed.stem) for pair in found]
    unpaired += [run for run in lab_runs if isinstance(run, Unpaired)]
    pairs += [_with_remark(run, remarks, run.question) for run in lab_runs if isinstance(run, Pair)]
    if not pairs and not unpaired:
        where = ", ".join(map(str, paths))
        raise WhatifError(
            f"{where}: expected records of runs, or pairs in a {PAIRS_FILE}, got none of either; "
            "see docs/validate.md for how to record pairs."
        )
    return pairs, unpaired


def pair_runs(runs: list[Run]) -> tuple[list[Pair], list[Unpaired]]:
    """Pair each run with its baseline: the run of the same model, machine and batch from which what-ifs lead to it.

    The model's own baseline is preferred to one with another optimizer. A run that differs in the optimizer's
    implementation alone is paired with every slower implementation.
    """
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[(*run.machine, run.model, _baseline_batch(run))].append(run)
    pairs: list[Pair] = []
    unpaired: list[Unpaired] = []
    for group in groups.values():
        plain = [run for run in group if run.measured and is_plain(run.options, DEFAULT_OPTIONS)]
        idle = []
        for run in group:
            found, missing = _pairs_of(run, [other for other in plain if other is not run])
            pairs += found
            if missing is not None and any(run is other for other in plain):
                idle.append((run, missing))
            elif missing is not None:
                unpaired.append(Unpaired(run.name, missing.reason))
        used = {pair.baseline for pair in pairs}
        unpaired += [Unpaired(run.name, _why_idle(run, why, plain)) for run, why in idle if run.trace not in used]
    return pairs, unpaired


def _why_idle(run: Run, missing: _Missing, plain: list[Run]) -> str:
    """Why a plain run is on neither side of a pair; ``missing`` is why it is no changed run."""
    if missing.unrecorded_baseline or (run.variant != "baseline" and len(plain) == 1):
        return missing.reason
    if run.trace is None:
        return "a baseline without its recording, so nothing is predicted from it"
    return "a baseline, and no run here builds on it"


def _baseline_batch(run: Run) -> float | None:
    """The batch size that the run would have if it had not changed it."""
    factor = run.options["batch_factor"]
    if run.batch is None or not isinstance(factor, int | float) or factor <= 0:
        # Skipped runs have no batch; they are in no pair.
        return None
    return run.batch / factor


class _Missing(NamedTuple):
    """Why a run is in no pair."""

    reason: str
    unrecorded_baseline: bool = False


def _pairs_of(run: Run, plain: list[Run]) -> tuple[list[Pair], _Missing | None]:
    """The pairs of a run, else the reason why there is none."""
    if not run.measured:
        if run.status == "complete":
            return [], _Missing("its record holds no step time")
        return [], _Missing(run.status + (f": {run.reason}" if run.reason else ""))
    reached = [base for base in plain if not what_ifs_between(base.options, run.options)[1]]
    if run.beside is not None:  # rounds of others were minutes apart
        reached = [base for base in reached if base.name == run.beside.name]
    reached.sort(key=lambda base: _preference(base, run))
    if not reached:
        return [], _Missing(_no_baseline(run, plain))
    chosen = reached if is_plain(run.options, DEFAULT_OPTIONS) else reached[:1]
    with_trace = [base for base in chosen if base.trace is not None]
    if not with_trace:
        return [], _Missing(f"its baseline {chosen[0].name} has no recording", unrecorded_baseline=True)
    return [_pair(base, run) for base in with_trace], None


def _preference(base: Run, run: Run) -> tuple[bool, int, int, str]:
    """The sort key of baselines: the model's own first, then the plainest optimizer, then the fewest changes."""
    implementation = base.options["implementation"]
    rank = IMPLEMENTATIONS.index(implementation) if implementation in IMPLEMENTATIONS else len(IMPLEMENTATIONS)
    return base.variant != "baseline", rank, len(changed_options(base.options, run.options)), base.name


def _no_baseline(run: Run, plain: list[Run]) -> str:
    if not plain:
        return "no baseline: no other plain run of the same model, machine and batch was measured"
    missing = min((what_ifs_between(base.options, run.options)[1] for base in plain), key=len)
    return f"no what-if yet for {', '.join(missing)}"


def _pair(base: Run, run: Run) -> Pair:
    what_ifs, _ = what_ifs_between(base.options, run.options)
    remark = ""
    # Loader processes use no CPU time of the training thread, and a GPU none at all.
    timed = run.beside or base
    by_wall = run.on_gpu or run.options["loader_workers"] != base.options["loader_workers"]
    if not by_wall and (run.cpu is None or timed.cpu is None):
        by_wall, remark = True, "by the wall clock: no CPU time in the record"
    origin = "" if base.variant == "baseline" else f" ({base.variant})"
    assert base.trace is not None
    before, after = (timed.wall, run.wall) if by_wall else (timed.cpu, run.cpu)
    assert before is not None
    assert after is not None
    return Pair(
        question=f"{run.model}{origin}: {' '.join(map(_shortened, what_ifs))}",
        hardware=run.hardware,
        what_ifs=what_ifs,
        baseline=base.trace,
        changed=run.record,
        clock="wall" if by_wall else "cpu thread",
        baseline_untraced=before,
        changed_untraced=(truth := paced(after, before)).step,
        truth=truth,
        remark=remark,
    )


def _shortened(what_if: str) -> str:
    """A what-if, truncated for people if it names many layers."""
    return what_if if len(what_if) <= SHOWN_CHARACTERS else what_if[: SHOWN_CHARACTERS - 1] + "…"


def _is_lab_record(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a record of the lab: runs over a real network besides plain steps (docs/lab.md)."""
    return isinstance(content.get("baseline"), dict) and isinstance(content.get("runs"), list)


def _lab_pairs(path: Path, content: Mapping[str, Any]) -> Iterator[Pair | Unpaired]:
    """The runs of a record of the lab, in its order: each as a pair, or with the reason why it is none.

    A record names the recording of one worker that every prediction starts from, and for each of its runs the what-ifs
    that lead there.
    """
    baseline = content["baseline"]
    # A record names a file of its own folder only.
    trace = path.parent / Path(str(baseline.get("trace", ""))).name
    plain = step_time_of(baseline.get("rounds"), "samples_ms")
    for row in content["runs"]:
        if not isinstance(row, dict):
            continue
        name = f"{path.stem}/{row.get('name', '')}"
        what_ifs = row.get("what_if")
        changed = step_time_of(row.get("rounds"), "samples_ms")
        if plain is None or changed is None:
            yield Unpaired(name, "its record holds no step time")
        elif not isinstance(what_ifs, list) or not what_ifs:
            yield Unpaired(name, "no what-if yet for what it does")
        elif not trace.is_file():
            yield Unpaired(name, f"its baseline {trace.name} has no recording")
        else:
            specs = tuple(map(str, what_ifs))
            specs = _checked_names(str(path), specs, {})
            # "real", or "replayed" if the steps slept as long as the recorded ones computed.
            compute = str(row.get("compute", "real"))
            yield Pair(
                question=name,
                hardware="CPU",
                what_ifs=specs,
                baseline=trace,
                changed=path,
                clock="wall",
                baseline_untraced=plain,
                changed_untraced=changed,
                truth=unpaced(changed, plain),
                remark="" if compute == "real" else f"{compute} compute",
            )


def _with_remark(pair: Pair, remarks: dict[tuple[Path, str], dict[str, Any]], name: str) -> Pair:
    entry = remarks.get((pair.changed.parent, name))
    if entry is None:
        return pair
    remark = "; ".join(text for text in (pair.remark, entry.get("remark", "")) if text)
    return replace(pair, remark=remark, scored=entry.get("scored", True))


def _read_pairs_file(
    path: Path, scripts: Mapping[str, str]
) -> tuple[list[Pair], dict[tuple[Path, str], dict[str, Any]]]:
    """The pairs that a file names, and its remarks on runs of its folder, by (folder, name of the record)."""
    try:
        content = tomllib.loads(read_at_most(path, _MOST_PAIRS_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise WhatifError(f"{path}: expected a TOML file of pairs, got '{error}'; correct it.") from error
    if unknown := sorted(set(content) - {"pair", "run"}):
        hint = closest(unknown[0], ("pair", "run"), "correct it.")
        raise WhatifError(f"{path}: expected [[pair]] and [[run]], got {unknown[0]!r}; {hint}")
    pairs = []
    for place, row in enumerate(_rows(path, content, "pair", _PAIR_KEYS, required=("baseline", "changed", "what_if"))):
        where = f"{path}: [[pair]] {place + 1}"
        what_if = row["what_if"]
        specs = _checked_names(where, what_if if isinstance(what_if, list) else [what_if], scripts)
        pairs.append(
            Pair(
                question=str(row.get("question") or f"{row['baseline']} → {row['changed']}"),
                hardware=str(row.get("hardware") or ""),
                what_ifs=specs,
                baseline=path.parent / str(row["baseline"]),
                changed=path.parent / str(row["changed"]),
                remark=str(row.get("remark", "")),
                scored=row.get("scored", True),
            )
        )
        compared = [(pair.baseline, pair.changed, pair.what_ifs) for pair in pairs]
        if (first := compared.index(compared[-1])) < place:
            raise WhatifError(f"{where}: expected another pair, got that of [[pair]] {first + 1} again; name it once.")
    runs = _rows(path, content, "run", _RUN_KEYS, required=("name",))
    for place, row in enumerate(runs):
        if not path.with_name(f"{str(row['name']).partition('/')[0]}.json").is_file():
            raise WhatifError(
                f"{path}: [[run]] {place + 1}: expected the name of a record in the folder, without .json, got "
                f"{row['name']!r}; correct it."
            )
    return pairs, {(path.parent, str(row["name"])): row for row in runs}


def _rows(
    path: Path, content: dict[str, Any], table: str, keys: set[str], required: tuple[str, ...]
) -> list[dict[str, Any]]:
    rows = content.get(table, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WhatifError(f"{path}: expected [[{table}]] tables, got another kind of {table!r}; see docs/validate.md.")
    for place, row in enumerate(rows):
        where = f"{path}: [[{table}]] {place + 1}"
        if missing := [key for key in required if not row.get(key)]:
            raise WhatifError(f"{where}: expected {', '.join(required)}, got no {missing[0]}; add it.")
        if unknown := sorted(set(row) - keys):
            hint = closest(unknown[0], keys, "correct it.")
            raise WhatifError(f"{where}: expected {', '.join(sorted(keys))}, got {unknown[0]!r}; {hint}")
        if not isinstance(scored := row.get("scored", True), bool):
            raise WhatifError(f"{where}: expected scored = true or false, got {scored!r}; correct it.")
    return rows


def _checked_names(where: str, specs: Iterable[Any], scripts: Mapping[str, str]) -> tuple[str, ...]:
    """Check the what-ifs that a folder of pairs names: it is data, and runs no script that the user did not name.

    ``scripts`` are the user's, path by name; their paths replace the names. Patterns that may take long are refused.
    """
    known = {*built_in_names(), *plug_in_names(), *scripts}
    checked = []
    for spec in specs:
        name = parse_spec(spec)[0] if isinstance(spec, str) else ""
        if name not in known:
            remedy = f"add the path of {name} to the command" if name.endswith(".py") else "see `whatif transforms`"
            raise WhatifError(f"{where}: expected what_if to name an installed what-if, got {spec!r}; {remedy}.")
        for value in parse_spec(spec)[1].values():
            check_file_pattern(value, f"{where}: {spec[:60]!r}")
        checked.append(scripts.get(name, name) + spec.removeprefix(name))
    return tuple(checked)
