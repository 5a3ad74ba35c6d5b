"""Measure real training over real sockets between hosts that are network namespaces of this machine; needs root.

    python -m benchmarks.lab run --out traces/lab_cpu --only ddp --budget-s 220
    python -m benchmarks.lab list --out traces/lab_cpu
    python -m benchmarks.lab clean

Existing results in the folder are kept: a run that was interrupted, or whose budget ended, resumes with the
same command. A run removes everything it creates on the machine; `clean` does so after a run that was killed.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from whatif.runtime.errors import WhatifError

from .hosts import check_machine, clean
from .models import MODELS

# In running order: everything is predicted from the recordings of the first.
EXPERIMENTS = ("baseline", "ddp", "parameter_server", "hierarchical", "collectives")
# Run only if named: their results have separate folders (traces/lab_dts, traces/lab_ranks_cpu,
# traces/lab_pipeline_cpu).
OTHERS = ("dts", "other_hosts", "pipeline", "pipeline_copies", "plans")
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (done, or the budget is used up), 1 (failed), 2 (usage) or 130 (interrupted)."""
    args = _parse(argv)
    try:
        if args.command == "clean":
            return _clean()
        jobs = [job for name in args.only or EXPERIMENTS for job in _jobs(name, args.out, tuple(args.models))]
        return _list(jobs, args.out) if args.command == "list" else _run(jobs, args.out, args.budget_s)
    except WhatifError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; run the same command to continue", file=sys.stderr)
        return INTERRUPTED


def _jobs(experiment: str, out: Path, models: tuple[str, ...]) -> list[Any]:
    module: Any = importlib.import_module(f".{experiment}", __package__)
    found: list[Any] = module.jobs(out, models)
    return found


def _run(jobs: list[Any], out: Path, budget_s: float) -> int:
    check_machine()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhatifError(f"{out}: expected a folder to write into, got {error.strerror}: name another.") from error
    begin, longest, failed = time.monotonic(), 0.0, 0
    for job in jobs:
        if job.is_done(out):
            continue
        # Jobs that would exceed the budget are not started.
        if time.monotonic() - begin + longest > budget_s:
            print("lab: the budget is used; run the same command to continue", file=sys.stderr)
            break
        before = time.monotonic()
        try:
            job.run(out)
            status = "done"
        except WhatifError as error:
            failed, status = failed + 1, str(error)
        longest = max(longest, time.monotonic() - before)
        print(f"{job.name:32} {time.monotonic() - before:6.1f} s  {status}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def _list(jobs: list[Any], out: Path) -> int:
    for job in jobs:
        print(f"{job.name:32} {'there' if job.is_done(out) else 'to do'}")
    return 0


def _clean() -> int:
    removed = clean()
    print(f"removed {len(removed)} namespaces of labs that had ended" if removed else "nothing was left to remove")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("command", choices=("run", "list", "clean"))
    parser.add_argument("--out", type=Path, default=Path("traces/lab_cpu"), help="folder of results")
    known = EXPERIMENTS + OTHERS
    parser.add_argument("--only", type=_names(known), default=[], help=f"comma-separated, from {', '.join(known)}")
    parser.add_argument("--models", type=_names(MODELS), default=[], help=f"comma-separated, from {', '.join(MODELS)}")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no job that would end later")
    return parser.parse_args(argv)


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"expected names from {', '.join(known)}, got {', '.join(unknown)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
