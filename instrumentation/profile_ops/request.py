"""A request of the command line or a notebook, from its words to questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from whatif.graph.described import Described
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

from ..gpu import GPU
from .collectives import LAYOUTS, SIZES_BYTES, collective_design
from .designs import design, sweep_names
from .from_recording import recorded_questions
from .machine import Way, origin_of
from .profile import WANTED, Profiled, profile, questions_of
from .visits import Question

DTYPES = ("fp32", "tf32", "bf16", "fp16")
MOST_RANKS = 256


@dataclass(frozen=True)
class Request:
    """What to measure, and how. ``device`` None: a GPU if any; ``cache`` None: cold for a recording, else hot."""

    operations: str = ""
    recording: Path | None = None
    shapes: int = 100
    grid: bool = False
    seed: int = 0
    dtypes: tuple[str, ...] = ()
    device: str | None = None
    threads: int = 1
    cache: str | None = None
    method: str | None = None
    ranks: tuple[int, ...] = (2,)
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    wanted: float = WANTED
    budget_s: float = float("inf")
    author: str | None = None
    licence: str | None = None

    def way(self) -> Way:
        """Return how operators are measured. Raises WhatifError for options that exclude each other."""
        device = self.device or ("cuda" if GPU.available() else "cpu")
        method = self.method or "chain_difference"
        if method == "graph_replay" and device != "cuda":
            raise WhatifError(
                f"opdb profile: expected --device cuda for --method graph_replay, got {device}: only CUDA has graphs."
            )
        # In a step the inputs of large operators are not cached; Tianshu's chains read the same inputs again.
        return Way(device, self.threads, self.cache or ("cold" if self.recording else "hot"), method)


def run_request(request: Request, store: Store, progress: Callable[[int, int], None] | None = None) -> Profiled:
    """Measure the request into a database. Raises WhatifError for an unknown word."""
    way = request.way()
    questions, left_out = _questions(request, way)
    done = profile(
        store, questions, way, precision=request.wanted, budget_s=request.budget_s, author=request.author,
        licence=request.licence, progress=progress,
    )  # fmt: skip
    done.left_out += left_out
    return done


def device_name(request: Request) -> str:
    """Return the database's name of the measured device."""
    return origin_of(request.way()).device.name


def _questions(request: Request, way: Way) -> tuple[list[Question], Counter[str]]:
    unknown = [dtype for dtype in request.dtypes if dtype not in DTYPES]
    if unknown:
        raise WhatifError(f"opdb profile: expected number formats ({', '.join(DTYPES)}), got {unknown[0][:40]!r}.")
    if request.recording is not None:
        if request.operations:
            raise WhatifError("opdb profile: expected operations or --from, got both; run them separately.")
        return recorded_questions(request.recording, request.dtypes)
    words = [word.strip() for word in request.operations.split(",") if word.strip()]
    if not words:
        raise WhatifError(
            "opdb profile: expected operations such as add,mm or all, or a recording with --from, got none."
        )
    dtypes = request.dtypes or ("fp32",)
    collectives = [word for word in words if word in LAYOUTS]
    swept = sweep_names(",".join(word for word in words if word not in LAYOUTS))
    operators: list[Described] = design(
        swept, dtypes, shapes=request.shapes, grid=request.grid, seed=request.seed, kind=way.device
    )
    if collectives:
        operators += _collectives(collectives, request, dtypes, way)
    return questions_of(operators)


def _collectives(names: Sequence[str], request: Request, dtypes: Sequence[str], way: Way) -> list[Described]:
    if "tf32" in dtypes:
        raise WhatifError("opdb profile: expected collectives of fp32, bf16 or fp16, got tf32, which is never sent.")
    most = GPU.count() if way.device == "cuda" else MOST_RANKS
    if not all(2 <= count <= most for count in request.ranks):
        raise WhatifError(f"opdb profile: expected groups of 2 to {most} ranks on this machine, got {request.ranks}.")
    return collective_design(names, request.ranks, request.sizes_bytes, dtypes)
