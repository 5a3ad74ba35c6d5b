"""Input traces: real ones, repeated in time up to a size, in a cache folder and never in the repository."""

from __future__ import annotations

import gzip
import os
import re
import tempfile
from pathlib import Path

from measure import HERE

CACHE = Path(tempfile.gettempdir()) / "whatif-benchmarks"
# The public recordings; without them a small one of the project is used.
PUBLIC = Path(os.environ.get("WHATIF_EXTRA_DATA") or os.devnull, "traces")
OWN = HERE.parent / "traces" / "resnet18_cifar_cpu.json.gz"

# Name: source, size in MB; a source of that size is not repeated.
TRACES = {
    "v100-50": ("hta/v100_allreduce_rank1of2.json.gz", 50),  # 2022, DDP, 123,000 duration events in 5 steps
    "v100-100": ("hta/v100_allreduce_rank1of2.json.gz", 100),
    "resnet50-100": ("kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz", 100),  # the old categories
    "h100-100": ("modded-nanogpt-8xh100/current.rank0.json.gz", 100),  # 2024, times with decimals, shapes
    "v100-1000": ("hta/v100_allreduce_rank1of2.json.gz", 1000),
    "resnet50": ("kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz", 1),
    "own-small": (str(OWN), 1),
}

_SHIFTED = re.compile(
    rb'"(?P<key>ts|correlation|External id|external id|id|Ev Idx|Sequence number)":\s*"?(?P<number>\d+)'
    rb"|ProfilerStep#(?P<step>\d+)"
)
_TIMES = re.compile(rb'"ts":\s*(\d+)(?:\.\d+)?,\s*"dur":\s*(\d+)')
# Larger than any correlation or external id in these recordings.
_ID_SHIFT = 100_000_000


def trace(name: str) -> Path:
    """Return the path of one of ``TRACES``, made on first use."""
    source_name, size_mb = TRACES[name]
    source = PUBLIC / source_name
    if not source.is_file():
        source = OWN
    text = gzip.decompress(source.read_bytes())
    copies = max(1, round(size_mb * 1e6 / len(text)))
    path = CACHE / f"{source.name.partition('.')[0]}.x{copies}.json"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write_repeated(text, copies, partial)
        partial.rename(path)
    return path


def _write_repeated(text: bytes, copies: int, path: Path) -> None:
    """Write the events ``copies`` times, shifted in time; formatting, order and oddities of the recording stay."""
    begin = re.search(rb'"traceEvents"\s*:\s*\[', text)
    assert begin is not None
    end = text.rindex(b"]")
    head, events, tail = text[: begin.end()], text[begin.end() : end].strip(), text[end:]
    times = [(int(ts), int(dur)) for ts, dur in _TIMES.findall(events)]
    span_us = max(ts + dur for ts, dur in times) - min(ts for ts, _ in times) + 1_000
    n_steps = len(set(re.findall(rb"ProfilerStep#(\d+)", events)))
    with path.open("wb") as file:
        file.write(head)
        for copy in range(copies):
            file.write(b",\n" if copy else b"\n")
            file.write(_shifted(events, copy, span_us, n_steps) if copy else events)
        file.write(tail)


def _shifted(events: bytes, copy: int, span_us: int, n_steps: int) -> bytes:
    def shift(match: re.Match[bytes]) -> bytes:
        if match["step"] is not None:
            return b"ProfilerStep#%d" % (int(match["step"]) + copy * n_steps)
        by = copy * (span_us if match["key"] == b"ts" else _ID_SHIFT)
        return match[0][: -len(match["number"])] + b"%d" % (int(match["number"]) + by)

    return _SHIFTED.sub(shift, events)
