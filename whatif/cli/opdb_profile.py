"""``whatif opdb profile``: measure operators on this machine, into the database."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from whatif.cli.opdb_names import the_store
from whatif.cli.options import number, whole_number, with_torch
from whatif.units import counted

# Imported by name at run time: the library never depends on torch.
REQUEST = "whatif.instrumentation.profile_ops.request"
_MOST_THREADS, _MOST_BYTES = 4096, 1 << 40
_SHAPES = whole_number(1, 1_000_000)
_SECONDS = number(lambda time_s: 0 < time_s < math.inf, "a number of seconds above 0")
_PERCENT = number(lambda pct: 0 < pct < math.inf, "a percentage above 0")


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``whatif opdb profile``."""
    parser.add_argument(
        "operations", metavar="OPERATION[,...]", nargs="?", default="",
        help="add, mm, conv2d_wgrad, softmax, all_reduce, ...; all: the nine operations of the Tianshu benchmark",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="recording", metavar="TRACE", help="measure the operators of a recording instead"
    )
    parser.add_argument("--shapes", type=_SHAPES, default=100, metavar="N", help="shapes per operation (default: 100)")
    parser.add_argument(
        "--design", choices=("random", "grid"), default="random", help="how to choose sizes (default: random)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0, 1 << 60), default=0, metavar="N", help="seed of random sizes (default: 0)"
    )
    parser.add_argument(
        "--dtype",
        type=_words,
        default=(),
        metavar="LIST",
        help="fp32, tf32, bf16, fp16 (default: fp32, or as recorded)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to measure (default: the GPU, if there is one)"
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1, _MOST_THREADS),
        default=1,
        metavar="N",
        help="CPU threads (default: 1, timed by the thread's CPU clock)",
    )
    parser.add_argument(
        "--cache", choices=("hot", "cold"), help="state of the cache for inputs (default: hot; cold with --from)"
    )
    parser.add_argument(
        "--method",
        choices=("chain_difference", "graph_replay"),
        help="how to time; graph_replay runs chains as CUDA graphs",
    )
    parser.add_argument(
        "--ranks",
        type=_integers(2, 4096),
        default=(2,),
        metavar="LIST",
        help="numbers of ranks for collectives (default: 2)",
    )
    parser.add_argument(
        "--sizes", type=_integers(1, _MOST_BYTES), metavar="LIST",
        help="buffer sizes of collectives in bytes (default: powers of 2 from 1 KiB to 64 MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=_PERCENT, default=3.0, metavar="PERCENT",
        help="stop measuring an operator when half the width of its 90 %% interval is below this (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--budget-s",
        type=_SECONDS,
        default=math.inf,
        metavar="S",
        help="stop after about this many seconds",
    )
    parser.add_argument("--author", help="author of the measurements")
    parser.add_argument("--licence", help="licence of the measurements")


def run_profile(args: argparse.Namespace) -> int:
    """Measure, and report what was and was not measured."""
    from whatif.cli.reading import progress_bar, show, warn
    from whatif.cli.status import INTERRUPTED
    from whatif.report.text_profile import print_profiled, profiled_dict

    profiling = with_torch(REQUEST, "opdb profile", "record,opdb")
    sizes: dict[str, Any] = {"sizes_bytes": args.sizes} if args.sizes else {}
    request = profiling.Request(
        operations=args.operations, recording=Path(args.recording) if args.recording else None, shapes=args.shapes,
        grid=args.design == "grid", seed=args.seed, dtypes=args.dtype, device=args.device, threads=args.threads,
        cache=args.cache, method=args.method, ranks=args.ranks, wanted=args.within / 100, budget_s=args.budget_s,
        author=args.author, licence=args.licence, **sizes,
    )  # fmt: skip
    device = profiling.device_name(request)  # checks the options before making a folder
    store = the_store(args, create=True)
    with progress_bar("measuring") as progress:
        done = profiling.run_request(request, store, progress)
    result = (done, device, store.folder)
    show(args, lambda: profiled_dict(*result), lambda: print_profiled(*result))
    warn(_warnings(done))
    return INTERRUPTED if done.interrupted else 0


def _warnings(done: Any) -> list[str]:
    found = [f"{counted(count, 'operator')} not measured: {reason}" for reason, count in sorted(done.left_out.items())]
    if done.damaged_lines:
        found.append(f"{done.damaged_lines:,} damaged lines in the journal of an earlier run were ignored")
    return [*found, *done.merged.refused]


def _integers(least: int, most: int) -> Any:
    read = whole_number(least, most)
    return lambda text: tuple(dict.fromkeys(read(word) for word in text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
