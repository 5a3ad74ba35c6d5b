"""Reads a cluster from a TOML file or a preset (docs/cluster.md has the format).

Presets are such files in `whatif/hardware/cluster/presets`, with a source for each number.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from whatif.hardware.cluster.derive_levels import check_connected
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import MOST_WORKERS
from whatif.hardware.cluster.topology import (
    Cluster,
    ClusterLevel,
    ClusterLink,
    Processor,
)
from whatif.hardware.gpu import Gpu
from whatif.runtime.errors import WhatifError, close_names, closest
from whatif.units import Bandwidth

# Common names of links; only NCCL's tuner depends on them.
KINDS = ("NVLink", "PCIe", "Ethernet", "InfiniBand", "Infinity Fabric", "other")
# Models of a link: latency and rate, or Pei et al.'s curve over the message size.
LINK_MODELS = ("latency", "sigmoid")
_LEAST_CONSTANT = 1e-9
MOST_PROCESSORS, MOST_LINKS = 10_000, 100_000
# PCI Express 3.0 with 16 lanes, 128b/130b coding (PCI-SIG).
_PCIE_3_GBYTE_S = 15.75
_LARGEST_FILE_BYTES = 5_000_000
_MOST_LATENCY_US = 1e9

Table = Mapping[str, Any]


def preset_names() -> tuple[str, ...]:
    """Return the names of the clusters that ship with the package, sorted."""
    return tuple(sorted(_preset_texts()))


def load_cluster(name: str) -> Cluster:
    """Return the preset of that name, or the cluster of a TOML file.

    Raises WhatifError with the key in the file that is unknown, missing or impossible.
    """
    if name in _preset_texts():
        return _preset(name)
    path = Path(name)
    if not name.endswith(".toml") and not os.path.isfile(path):  # works for any text, also an invalid path
        close = close_names(name.lower(), preset_names(), 3, 0.4)
        raise WhatifError(
            f"cluster: expected the path of a TOML file or one of {', '.join(close or preset_names())}, got {name!r}."
        )
    try:
        with path.open("rb") as file:  # a device reports size 0 and never ends
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise WhatifError(f"{name}: expected a cluster file, got {error.strerror or error}.") from error
    except ValueError as error:
        raise WhatifError(f"cluster: expected the path of a TOML file, got {name!r}: {error}.") from error
    if len(content) > _LARGEST_FILE_BYTES:
        raise WhatifError(f"{name}: expected a cluster file of at most 5 MB, got a larger one.")
    try:
        return parse_cluster(content.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        raise WhatifError(f"{name}: expected a cluster file (TOML), got a file that is not UTF-8.") from error


@cache
def _preset(name: str) -> Cluster:
    return parse_cluster(_preset_texts()[name], f"{name}.toml")


def usual_cluster(gpu: Gpu) -> Cluster:
    """Return the usual cluster of a GPU: its preset, else nodes with PCI Express on 25 Gbit Ethernet."""
    if gpu.cluster:
        return load_cluster(gpu.cluster)
    (node,), (machines,) = load_cluster("pcie-4gpu").levels, load_cluster("ethernet-25g").levels
    # The preset's node has PCI Express 3.0; messages reach the same share of the device's PCI Express rate.
    link = replace(node.link, byte_s=node.link.byte_s * gpu.pcie_gbyte_s / _PCIE_3_GBYTE_S)
    return Cluster(f"{gpu.name}-pcie", (replace(node, link=link), machines), gpu=gpu.name)


def parse_cluster(text: str, path: str) -> Cluster:
    """Return the cluster that the text of a TOML file describes; ``path`` is its name in errors."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is Python's error, not TOML's
        raise WhatifError(f"{path}: expected a cluster file (TOML), got an error: {str(error)[:120]}.") from error
    top = _Fields(document, path, "")
    head = _Fields(top.table("cluster"), path, "cluster")
    levels = [_level(fields) for fields in top.tables("level")]
    processors: list[Processor] = []
    groups: dict[str, tuple[str, ...]] = {}
    for fields in top.tables("processor"):
        found = _processors(fields)
        name = fields.text("name")
        fields.done()
        if name in groups or len(processors) + len(found) > MOST_PROCESSORS:
            limit = "a name that is not in use" if name in groups else f"at most {MOST_PROCESSORS:,} processors in all"
            raise WhatifError(f"{fields.where('name')}: expected {limit}, got {name!r}.")
        groups[name] = tuple(processor.name for processor in found)
        processors += found
    if len({processor.name for processor in processors}) < len(processors):
        raise WhatifError(f"{path}: processor: expected distinct names, got a duplicate after numbering.")
    links = [link for table, fields in enumerate(top.tables("link")) for link in _links(fields, groups, table)]
    cluster = Cluster(
        name=head.text("name", Path(path).stem), levels=tuple(levels), processors=tuple(processors),
        links=tuple(links), gpu=head.text("gpu", "") or None, path=path,
    )  # fmt: skip
    head.done()
    top.done()
    if not levels and not processors:
        raise WhatifError(f"{path}: expected a [[level]] or a [[processor]], got neither.")
    for number, level in enumerate(levels[:-1]):
        if level.workers is None:
            raise WhatifError(
                f"{path}: level[{number}].workers: expected a number (optional in the last level only), got none."
            )
    check_connected(cluster)
    return cluster


class _Fields:
    """The keys of one table: each is read once, and `done` refuses unread ones."""

    def __init__(self, entries: Table, path: str, name: str) -> None:
        self.entries, self.path, self.name, self.read = entries, path, name, set[str]()

    def where(self, key: str) -> str:
        return f"{self.path}: {'.'.join(part for part in (self.name, key) if part)}"

    def done(self) -> None:
        for key in self.entries:
            if key not in self.read:
                hint = closest(key, self.read, f"known keys: {', '.join(sorted(self.read))}.")
                raise WhatifError(f"{self.where(key)}: expected a known key, got an unknown one; {hint}")

    def table(self, key: str) -> Table:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise WhatifError(f"{self.where(key)}: expected a table [{key}], got {_shown(value)}.")
        return value

    def tables(self, key: str) -> list[_Fields]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise WhatifError(f"{self.where(key)}: expected tables [[{key}]], got {_shown(value)}.")
        return [_Fields(entry, self.path, f"{key}[{number}]") for number, entry in enumerate(value)]

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise WhatifError(f"{self.where(key)}: expected text, got {_shown(value)}.")
        return value

    def number(self, key: str, low: float, high: float, default: float | None, *, whole: bool = False) -> float | None:
        value = self._get(key, default)
        if value is None:
            return None
        wrong = isinstance(value, bool) or not isinstance(value, int if whole else int | float)
        if wrong or not low <= value <= high:
            kind = "whole number" if whole else "number"
            raise WhatifError(f"{self.where(key)}: expected a {kind} from {low:g} to {high:,.0f}, got {_shown(value)}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise WhatifError(f"{self.where(key)}: expected true or false, got {_shown(value)}.")
        return value

    def one_of(self, key: str, known: tuple[str, ...], default: str) -> str:
        value = self._get(key, default)
        if value not in known:
            raise WhatifError(f"{self.where(key)}: expected one of {', '.join(known)}, got {_shown(value)}.")
        return str(value)

    def link(self, *models: str) -> Link:
        full_duplex = self.one_of("duplex", ("full", "half"), "full") == "full"
        if self.one_of("model", models, models[0]) == "sigmoid":
            k, a, w = (self.number(name, _LEAST_CONSTANT, 1 / _LEAST_CONSTANT, None) for name in "kaw")
            if k is None or a is None or w is None:
                raise WhatifError(f"{self.where('model')}: expected k, a and w for the sigmoid, got {_shown(None)}.")
            return Link.sigmoid(k, a, w, full_duplex=full_duplex)
        value = self._get("bandwidth", None)
        value = str(value) if isinstance(value, int | float) else self.text("bandwidth")
        try:
            byte_s = Bandwidth(value).byte_s
        except WhatifError as error:
            raise WhatifError(f"{self.where('bandwidth')}: {error}") from None
        latency_us = self.number("latency_us", 0, _MOST_LATENCY_US, 0.0) or 0.0
        return Link(byte_s, latency_us * 1e3, full_duplex)

    def _get(self, key: str, default: object) -> Any:
        self.read.add(key)
        return self.entries.get(key, default)


def _level(fields: _Fields) -> ClusterLevel:
    workers = fields.number("workers", 1, MOST_WORKERS, None, whole=True)
    level = ClusterLevel(
        name=fields.text("name", fields.name), workers=None if workers is None else int(workers),
        link=fields.link(*LINK_MODELS), shared=fields.flag("shared", True), kind=fields.one_of("kind", KINDS, "other"),
    )  # fmt: skip
    fields.done()
    return level


def _processors(fields: _Fields) -> list[Processor]:
    name, count = fields.text("name"), int(fields.number("count", 1, MOST_PROCESSORS, 1, whole=True) or 1)
    names = [name] if count == 1 else [f"{name}{number}" for number in range(1, count + 1)]
    gflop_s = fields.number("gflop_s", 1e-6, 1e12, None)
    fluctuation = fields.number("power_fluctuation_pct", 0, 100, 0.0) or 0.0
    memory = fields.number("memory_gbyte", 0, 1e9, None)
    factor = fields.number("parallelization_factor", 1e-3, 1e6, 1.0) or 1.0
    return [Processor(each, gflop_s, fluctuation, memory, factor) for each in names]


def _links(fields: _Fields, groups: Mapping[str, tuple[str, ...]], table: int) -> list[ClusterLink]:
    """Return the links of a table: a name with a count means all of its processors, which gives links of all pairs."""
    ends = fields.entries.get("between")
    fields.read.add("between")
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise WhatifError(f"{fields.where('between')}: expected two processor names, got {_shown(ends)}.")
    single = {name: (name,) for names in groups.values() for name in names}
    sides = []
    for end in ends:
        if end not in groups and end not in single:
            raise WhatifError(f"{fields.where('between')}: expected the name of a [[processor]], got {end!r}.")
        sides.append(groups.get(end) or single[end])
    if len(sides[0]) * len(sides[1]) > MOST_LINKS:
        raise WhatifError(
            f"{fields.where('between')}: expected at most {MOST_LINKS:,} links per [[link]], got "
            f"{len(sides[0]):,} x {len(sides[1]):,}; describe equal workers as [[level]]."
        )
    link, shared = fields.link(LINK_MODELS[0]), fields.flag("shared", False)
    fluctuation = fields.number("bandwidth_fluctuation_pct", 0, 100, 0.0) or 0.0
    kind = fields.one_of("kind", KINDS, "other")
    fields.done()
    pairs = dict.fromkeys(
        (min(a, b), max(a, b)) if ends[0] == ends[1] else (a, b) for a in sides[0] for b in sides[1] if a != b
    )
    if not pairs:
        raise WhatifError(f"{fields.where('between')}: expected two processors, got {ends[0]!r} twice.")
    return [ClusterLink(pair, link, fluctuation, shared, kind, table) for pair in pairs]


def _shown(given: object) -> str:
    return "nothing" if given is None else repr(given)[:60]


@lru_cache(maxsize=1)
def _preset_texts() -> dict[str, str]:
    folder = resources.files("whatif.hardware") / "cluster" / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
