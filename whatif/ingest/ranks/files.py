"""Which file is which rank: by the trace's header, else by the file's name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from whatif.runtime.errors import WhatifError
from whatif.runtime.files import RECORDING_SUFFIXES, is_address, is_folder, recordings_in

# rank3, rank_3, rank-03, or the number before torch's own ending: worker_3.1234.pt.trace.json.
IN_NAME = (re.compile(r"rank[ _.-]?(\d{1,6})", re.IGNORECASE), re.compile(r"(?:worker|trainer|gpu)[ _.-]?(\d{1,6})"))
_DIGITS = re.compile(r"(\d+)")


def find_recordings(paths: Sequence[str | Path]) -> list[str]:
    """Return the files that ``paths`` names, including those in folders, in the order of their names.

    Files and folders are paths of this machine, or addresses that fsspec reaches. Raises WhatifError if a folder
    holds none, or if one file is named twice.
    """
    found: list[str] = []
    for path in paths:
        inside = recordings_in(path) if is_folder(path) else [str(path)]
        if not inside:
            raise WhatifError(
                f"{path}: expected a folder with the recordings of a run's ranks "
                f"({', '.join(RECORDING_SUFFIXES)}), got none in it; name the files."
            )
        found += inside
    by_file: dict[str, str] = {}
    for file in found:
        same = file if is_address(file) else os.path.realpath(file)
        if same in by_file:
            raise WhatifError(f"{file}: expected each rank's recording once, got this file twice; name it once.")
        by_file[same] = file
    return sorted(found, key=_in_order)


def chosen(files: Sequence[str], only: Sequence[int] | None) -> list[str]:
    """Return the files of the ranks in ``only``, if every file's name has a different rank; else all files."""
    named = [_in_name(file) for file in files]
    if only is None or None in named or len(set(named)) < len(named):
        return list(files)
    wanted = set(only)
    return [file for file, rank in zip(files, named, strict=True) if rank in wanted]


def _name(path: str) -> str:
    return path.replace(os.sep, "/").rpartition("/")[2]


def _in_order(path: str) -> tuple[object, ...]:
    """Key that sorts by name, numbers in it by value: rank10 after rank9."""
    parts = _DIGITS.split(_name(path))
    return (*((int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)), path)


class RankFacts(Struct, frozen=True):
    """A recording's place in the run; None if it is unknown."""

    rank: int | None
    world_size: int | None


def rank_facts(header: dict[str, Any]) -> RankFacts:
    """Return the rank and the number of ranks in the header that torch writes (``distributedInfo``)."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, size = info.get("rank"), info.get("world_size")
    return RankFacts(
        rank if type(rank) is int and 0 <= rank < 10**6 else None,
        size if type(size) is int and 1 <= size < 10**6 else None,
    )


class Places(Struct, frozen=True):
    """The rank of each file, in the order of the files, the number of ranks of the run, and warnings."""

    ranks: tuple[int, ...]
    world_size: int
    warnings: tuple[str, ...] = field(default=())


def place(files: Sequence[str], facts: Sequence[RankFacts]) -> Places:
    """Give each file its rank. Raises WhatifError if two files are one rank, or of runs of different sizes."""
    warnings = []
    sizes = sorted({t.world_size for t in facts if t.world_size is not None})
    if len(sizes) > 1:
        which = " and ".join(str(size) for size in sizes[:3])
        raise WhatifError(
            f"{files[0]}: expected the ranks of one run, got recordings of runs with {which} ranks; name only one run."
        )
    ranks = [t.rank for t in facts]
    if None in ranks:
        named = [_in_name(file) for file in files]
        if None in named or len(set(named)) < len(named):
            named = list(range(len(files)))
            warnings.append("the recordings do not name their ranks: they are numbered in the order of the file names")
        ranks = [by_name if rank is None else rank for rank, by_name in zip(ranks, named, strict=True)]
    placed = [int(rank or 0) for rank in ranks]
    seen: dict[int, str] = {}
    for file, rank in zip(files, placed, strict=True):
        if rank in seen:
            raise WhatifError(
                f"{file}: expected each rank once, got rank {rank} in {seen[rank]} as well; name one of the two."
            )
        seen[rank] = file
    world_size = max([*sizes, *(rank + 1 for rank in placed)])
    missing = sorted(set(range(world_size)) - set(placed)) if world_size < 10**6 else []
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        warnings.append(
            f"{len(missing)} of {world_size} ranks {'is' if len(missing) == 1 else 'are'} missing ({some}): time "
            "that the others wait for them counts as transfer"
        )
    return Places(tuple(placed), world_size, tuple(warnings))


def _in_name(file: str) -> int | None:
    return next((int(found[1]) for pattern in IN_NAME if (found := pattern.search(_name(file)))), None)
