"""Records paired ground truth: models under variants, each with its untraced step time, its peak memory and a trace.

    python -m benchmarks.campaign OUT --rounds 3

Existing recordings are kept, so the same command resumes an interrupted or truncated campaign.
Every run is a separate process; a failure is written into its record and stops nothing else. See docs/campaign.md.
"""

import argparse
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from whatif.runtime.errors import WhatifError

from .pack import MB, pack
from .queue import Plan, Progress, Queue
from .variants import VARIANTS, Job, all_jobs

PACK_FILES = 4

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (done, or the budget is used up), 1 (failed), 2 (usage) or 130 (interrupted)."""
    args = _parse(argv)
    try:
        return _run(args)
    except WhatifError as error:
        print(f"campaign: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    from whatif.instrumentation.gpu import GPU

    device = "cuda" if GPU.available() else "cpu"
    full = args.full or (device == "cuda" and not args.tiny)
    emulated = device == "cpu" and _emulates_bf16()
    if args.in_turn and device == "cuda":
        raise WhatifError("--in-turn: expected a CPU, got a GPU, whose clock other processes do not disturb; omit it.")
    jobs = all_jobs(full=full, device=device, models=args.models, variants=args.variants, emulated=emulated)
    if args.list:
        try:
            _list(jobs)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader closed the pipe; the interpreter's flush at exit must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhatifError(
            f"{args.out}: expected a folder to write into, got {error.strerror}: name another."
        ) from error
    plan = Plan(
        args.out,
        full,
        device,
        rounds=args.rounds,
        budget_s=args.budget_s,
        timeout_s=args.timeout_s,
        trace_bytes=int(args.trace_mb * MB),
        measure_operators=args.measure_operators,
        goal_pct=args.in_turn,
        ahead=device == "cuda",
    )
    try:
        return record_all(jobs, plan)
    finally:
        if args.pack:
            names = [job.name for job in jobs]
            files, left_out = pack(args.out, args.pack, names, file_bytes=int(args.pack_mb * MB), files=PACK_FILES)
            print(f"campaign: packed {len(files)} files, {len(left_out)} traces left out", file=sys.stderr)


def record_all(jobs: list[Job], plan: Plan) -> int:
    """Record the jobs with progress on stderr; returns 0, or 130 if interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Bar(*columns, console=console) as bar:
            shown = bar.add_task("campaign", total=None)
            reported = 0

            def report(progress: Progress) -> None:
                nonlocal reported
                reported += 1
                task = progress.task
                console.print(f"{task.job.name:44} {task.part:9} {task.round}  {progress.text}")
                bar.update(shown, completed=progress.done, total=progress.total)

            queue = Queue(jobs, plan, report)
            queue.run()
    except KeyboardInterrupt:
        console.print("campaign: interrupted; run the same command to continue")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if not reported:
        console.print("campaign: nothing is left to do: every part was recorded, does not apply or has failed twice")
    if queue.left_out:
        console.print(f"campaign: {len(queue.left_out)} parts left out; run the same command to continue")
    return 0


def _interrupt(number: int, frame: Any) -> NoReturn:
    """Treat SIGTERM as an interrupt: what was recorded is kept and packed."""
    raise KeyboardInterrupt


def _emulates_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 slower than float32."""
    import torch
    from whatif.instrumentation.rates import measure_cpu_rates

    torch.set_num_threads(1)
    rates: dict[str, float] = measure_cpu_rates()
    return rates["bf16_gflops"] < rates["fp32_gflops"]


def _list(jobs: list[Job]) -> None:
    for job in jobs:
        print(f"{job.tier}  {job.name:44} {f'no: {job.reason}' if job.reason else 'yes'}")
    print(f"{sum(not job.reason for job in jobs)} runs, {sum(bool(job.reason) for job in jobs)} that do not apply")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    from .models import FULL

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for records, traces and logs")
    parser.add_argument("--models", type=_names(FULL), default=(), help="comma-separated; all by default")
    parser.add_argument("--variants", type=_names(VARIANTS), default=(), help="comma-separated; all by default")
    parser.add_argument(
        "--rounds", type=_positive(int), default=1, help="how often each run is timed, in rounds over all"
    )
    parser.add_argument(
        "--in-turn", type=_positive(float), metavar="PCT",
        help="time each run in turn with its baseline until their ratio is known within PCT percent (CPU)",
    )  # fmt: skip
    parser.add_argument("--budget-s", type=_positive(float), default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--timeout-s", type=_positive(float), default=180.0, help="time limit of one part of a run, s")
    parser.add_argument(
        "--trace-mb", type=_positive(float), default=3.0, help="size limit of a trace, met by keeping fewer steps"
    )
    parser.add_argument("--measure-operators", action="store_true", help="also time the operators of baselines alone")
    parser.add_argument(
        "--pack", type=Path, metavar="FILE.tar", help="pack the results into FILE-1.tar, FILE-2.tar ..."
    )
    parser.add_argument(
        "--pack-mb", type=_positive(float), default=16.0, help=f"size limit of each of {PACK_FILES} packed files"
    )
    parser.add_argument("--list", action="store_true", help="print the jobs in their order and stop")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="small twins of the models: the default without a GPU")
    size.add_argument("--full", action="store_true", help="models as published: the default on a GPU")
    return parser.parse_args(argv)


def _names(known: Collection[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected names from {', '.join(known)}, got {', '.join(unknown)}")
        return names

    return parse


def _positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type by this in its messages.
    return parse


if __name__ == "__main__":
    sys.exit(main())
