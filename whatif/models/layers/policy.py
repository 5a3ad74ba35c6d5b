"""A policy that removes, scales, resizes or merges layers of a model. Used by ``metaflow``.

Source: Jia et al., "Optimizing DNN Computation with Relaxed Graph Substitutions", MLSys 2019; Daydream (USENIX ATC
2020), Algorithm 9.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph, matching
from whatif.graph.types import Bool
from whatif.runtime.errors import WhatifError, closest
from whatif.runtime.files import check_file_pattern, read_at_most

MOST_FACTOR = 1e6
# Limit for policies: a thousand times the layers of a large model.
_MOST_BYTES = 16 << 20
FORM = (
    'a policy with lists "remove" (layers), "scale" ({layers, factor}) and "merge" ({layers, factor}), '
    "as docs/metaflow.md shows"
)


@dataclass(frozen=True, slots=True)
class Change:
    """Layers as named in the policy, and the factor of their time or their new sizes."""

    layers: tuple[str, ...]
    factor: float
    sizes: tuple[tuple[str, int], ...] = ()


class Policy(Struct, frozen=True):
    """A policy, checked for its form, before its layers are looked up in a recording."""

    remove: tuple[str, ...]
    scale: tuple[Change, ...]
    merge: tuple[Change, ...]

    @staticmethod
    def of(policy: Mapping[str, Any] | Path | str) -> Policy:
        """Read a policy from a mapping, or from a file in JSON or TOML.

        Raises WhatifError if the file cannot be read or the policy has another form.
        """
        where, content = ("the policy", policy) if isinstance(policy, Mapping) else (str(policy), _read(Path(policy)))
        if not isinstance(content, Mapping):
            raise WhatifError(f"metaflow: {where}: expected {FORM}, got {_kind(content)}.")
        unknown = [str(key) for key in content if key not in ("remove", "scale", "merge")]
        if unknown:
            raise WhatifError(f"metaflow: {where}: expected {FORM}, got the key {unknown[0]!r}.")
        found = Policy(
            _layers(f"{where}: remove", content.get("remove", [])),
            _changes(f"{where}: scale", content.get("scale", []), least=1, needs_factor=True),
            _changes(f"{where}: merge", content.get("merge", []), least=2, needs_factor=False),
        )
        if not (found.remove or found.scale or found.merge):
            raise WhatifError(f"metaflow: {where}: expected layers to remove, scale or merge, got none.")
        return found


def _read(path: Path) -> Any:
    try:
        text = read_at_most(path, _MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise WhatifError(f"metaflow: {path}: the policy cannot be read: {error}.") from None
    if path.suffix not in (".json", ".toml"):
        raise WhatifError(f"metaflow: {path}: expected a policy whose name ends in .json or .toml, got another file.")
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise WhatifError(
            f"metaflow: {path}: expected {path.suffix[1:].upper()}, got something else: {message}."
        ) from None


def _changes(where: str, rows: Any, *, least: int, needs_factor: bool) -> tuple[Change, ...]:
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise WhatifError(f"metaflow: {where}: expected a list of {{layers, factor}}, got {_kind(rows)}.")
    found = []
    for number, row in enumerate(rows):
        place = f"{where}[{number}]"
        if needs_factor and isinstance(row, Mapping) and row.keys() == {"layers", "sizes"}:
            found.append(Change(_layers(place, row["layers"]), 1.0, _sizes(place, row["sizes"])))
            continue
        allowed = isinstance(row, Mapping) and row.keys() <= {"layers", "factor"} and "layers" in row
        if not allowed or (needs_factor and "factor" not in row):
            raise WhatifError(f"metaflow: {place}: expected layers and factor, got {_kind(row)}.")
        factor = row.get("factor", 1.0)
        numeric = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not numeric or not 0 < factor <= MOST_FACTOR:
            raise WhatifError(
                f"metaflow: {place}: expected a factor above 0 and up to {MOST_FACTOR:,.0f}, got {factor!r}."
            )
        layers = _layers(place, row["layers"])
        if not layers:
            raise WhatifError(f"metaflow: {place}: expected layers, got none.")
        if least > 1 and len(layers) < least and not isinstance(row["layers"], str):
            raise WhatifError(f"metaflow: {place}: expected {least} layers or more to merge, got {len(layers)}.")
        found.append(Change(layers, float(factor)))
    return tuple(found)


def _sizes(where: str, sizes: Any) -> tuple[tuple[str, int], ...]:
    from whatif.graph.described import FAMILIES, LARGEST_ATTRIBUTE

    if not isinstance(sizes, Mapping) or not sizes:
        raise WhatifError(f"metaflow: {where}: expected sizes as {{out_channels = 128}}, got {_kind(sizes)}.")
    known = [FAMILIES[family].attributes for family in ("conv", "matmul", "normalization", "elementwise")]
    names = sorted({name for attributes in known for name in attributes})
    for name, value in sizes.items():
        if name not in names:
            raise WhatifError(f"metaflow: {where}: expected sizes among {', '.join(names)}, got {name!r}.")
        if type(value) is not int or not 0 < value <= LARGEST_ATTRIBUTE:
            raise WhatifError(f"metaflow: {where}: {name}: expected a whole number above 0, got {value!r}.")
    return tuple(sizes.items())


def _layers(where: str, names: Any) -> tuple[str, ...]:
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) and name for name in listed):
        raise WhatifError(f"metaflow: {where}: expected names of layers, got {_kind(names)}.")
    return tuple(listed)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"keys {', '.join(sorted(map(str, value))[:4]) or 'none'}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


class Resolved(Struct, frozen=True):
    """A policy for one recording: masks over ``graph.layers``, including layers inside a named one.

    The first named of merged layers stays and represents all.
    """

    remove: Bool
    scale: tuple[tuple[Bool, Change], ...]
    merge: tuple[tuple[tuple[Bool, ...], float], ...]

    @staticmethod
    def of(policy: Policy, graph: TaskGraph) -> Resolved:
        """Find the layers of a policy. Raises WhatifError if one is not in the recording, or named for two changes."""
        if len(graph.layers) < 2:
            raise WhatifError(
                "metaflow: expected a recording that names its layers, got one without (`whatif collect` records "
                "them, as torch.profiler does with with_modules=True)."
            )
        remove = _union(graph, [_named(graph, name) for name in policy.remove])
        scale = tuple(
            (_union(graph, [_named(graph, name) for name in change.layers]), change) for change in policy.scale
        )
        merge = []
        for change in policy.merge:
            each = [part for name in change.layers for part in _one_by_one(graph, _named(graph, name))]
            if len(each) < 2:
                raise WhatifError(
                    f"metaflow: merge: expected 2 layers or more, got {', '.join(change.layers)}, which names one."
                )
            for number, part in enumerate(each):
                _refuse_both(graph, part, _union(graph, each[:number]), "merged twice")
            merge.append((tuple(each), change.factor))
        merged = _union(graph, [part for parts, _ in merge for part in parts])
        scaled = _union(graph, [part for part, _ in scale])
        _refuse_both(graph, remove, scaled | merged, "removed and changed as well")
        merged_before = np.zeros(len(graph.layers), dtype=np.bool_)
        for parts, _ in merge:
            _refuse_both(graph, _union(graph, parts), merged_before, "merged twice")
            merged_before |= _union(graph, parts)
        return Resolved(remove, scale, tuple(merge))


def _named(graph: TaskGraph, name: str) -> Bool:
    """The layers with exactly that name, else those whose name fully matches the expression."""
    exact = np.array([layer == name for layer in graph.layers], dtype=np.bool_)
    if exact.any():
        return exact
    check_file_pattern(name, "metaflow: the policy", max(map(len, graph.layers)))
    found = matching(graph.layers, rf"^(?:{name})$")
    found[0] = False  # no layer
    if not found.any():
        hint = closest(name, graph.layers, f"it has {', '.join(graph.layers[1:4])}, …")
        raise WhatifError(f"metaflow: expected layers of the recording, got {name!r}, which it does not have; {hint}")
    return found


def _one_by_one(graph: TaskGraph, chosen: Bool) -> list[Bool]:
    """The outermost of the chosen layers, each with the layers inside it."""
    names = [graph.layers[code] for code in np.flatnonzero(chosen).tolist()]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return [_inside(graph, name) for name in outermost]


def _inside(graph: TaskGraph, name: str) -> Bool:
    return matching(graph.layers, rf"^{re.escape(name)}(\.|$)")


def _union(graph: TaskGraph, masks: Sequence[Bool]) -> Bool:
    """The layers of all masks, and those inside them."""
    found = np.zeros(len(graph.layers), dtype=np.bool_)
    for mask in masks:
        for code in np.flatnonzero(mask & ~found).tolist():
            found |= _inside(graph, graph.layers[code])
    return found


def _refuse_both(graph: TaskGraph, one: Bool, other: Bool, problem: str) -> None:
    both = np.flatnonzero(one & other)
    if len(both):
        raise WhatifError(f"metaflow: layer {graph.layers[both[0]]!r} is {problem}; name it once.")
