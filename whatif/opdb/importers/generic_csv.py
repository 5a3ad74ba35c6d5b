"""Reader of any CSV table with the database's column names.

Required: ``name``, ``dtype``, the integers of the operator's family, and a time with its unit in its name: ``t_s``,
``t_ms``, ``t_us`` or ``t_ns``. Optional: ``family``, ``phase``, ``layout``, ``device``, ``repeats``, ``kernels``, the
range, ``t_low_ms`` and ``t_high_ms`` (10 and 90 % of the repeats, in the unit of the time), the method of measurement,
``method``, ``launch`` and ``cache``, the ``framework``, and the ``contribution``: rows of several stay apart.
`whatif opdb export FILE.csv` writes the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from whatif.graph.described import DEFAULTS, DTYPES, FAMILIES, FAMILY_OF_NAME, PHASES
from whatif.opdb.devices import device_called
from whatif.opdb.importers.found import Found, file_sha256, integers, numbers, read_table
from whatif.opdb.provenance import Environment, Method, Origin, Source
from whatif.opdb.rows import Rows, measurements, operators
from whatif.opdb.schema import CACHE_STATES, LAUNCHES, METHODS
from whatif.runtime.errors import WhatifError

# Columns whose values the rows of one contribution share.
_SHARED = ["device", "family", "method", "launch", "cache", "framework", "contribution"]
_LAUNCHES = {word: included for included, word in LAUNCHES.items()}
_UNITS = {"t_s": 1.0, "t_ms": 1e-3, "t_us": 1e-6, "t_ns": 1e-9}


def read_csv(
    path: Path,
    *,
    device: str | None = None,
    method: Method | None = None,
    author: str | None = None,
    licence: str | None = None,
) -> Found:
    """Read a table; ``method`` overrides its columns for all rows.

    Raises WhatifError if a required column is missing, or nothing names the device.
    """
    table = read_table(path, str(path), ("name", "dtype"))
    units = [column for column in _UNITS if column in table]
    if len(units) != 1:
        raise WhatifError(f"{path}: expected one column of times (t_s, t_ms, t_us or t_ns), got {len(units)}.")
    if device is None and "device" not in table:
        raise WhatifError(f"{path}: expected a column 'device', got none; name the device with --device.")
    found = Found()
    table = _usable(_labelled(table, device, method), found)
    source = Source(author=author, licence=licence, sha256=file_sha256(path))
    for (reported, family, name, launch, cache, framework, _), part in table.groupby(_SHARED, sort=True):
        origin = Origin(
            device=device_called(str(reported)),
            environment=Environment(framework=str(framework) or None),
            method=Method(name=str(name), includes_launch=_LAUNCHES[str(launch)], cache=str(cache)),
            source=source,
        )
        found.keep(_measured(part, str(family), units[0], path), origin)
    if not found.contributions:
        raise WhatifError(
            f"{path}: expected measurements of operators, got none that are usable; see docs/opdb.md for the columns."
        )
    return found


def _labelled(table: pd.DataFrame, device: str | None, method: Method | None) -> pd.DataFrame:
    """The table with all columns of text, by default those that say nothing; ``device`` and ``method`` override."""
    table = table.assign(
        device=device if device is not None else _texts(table, "device", ""), dtype=_texts(table, "dtype", ""),
        name=_texts(table, "name", ""), family=_families(table), phase=_texts(table, "phase", "fwd"),
        layout=_texts(table, "layout", ""), method=_texts(table, "method", "unknown"),
        launch=_texts(table, "launch", "unknown"), cache=_texts(table, "cache", "unknown"),
        framework=_texts(table, "framework", ""), contribution=_texts(table, "contribution", ""),
    )  # fmt: skip
    if method is None:
        return table
    return table.assign(method=method.name, launch=LAUNCHES[method.includes_launch], cache=method.cache)


def _usable(table: pd.DataFrame, found: Found) -> pd.DataFrame:
    """The rows whose words are known; the others are counted in ``found``."""
    known = table["family"].isin(list(FAMILIES)) & table["dtype"].isin(DTYPES) & table["phase"].isin(PHASES)
    known &= (table["name"] != "") & (table["device"].str.strip() != "")
    found.drop((~known).sum(), "an unknown operator, number format, phase or device")
    ways = table["method"].isin(METHODS) & table["launch"].isin(_LAUNCHES) & table["cache"].isin(CACHE_STATES)
    found.drop((known & ~ways).sum(), "an unknown method, launch or cache state")
    return table[known & ways]


def _measured(part: pd.DataFrame, family: str, time: str, path: Path) -> Rows:
    """The measurements of operators of one family; ``time`` is the column of their times."""
    attributes = {a: _integers(part, a, path) for a in FAMILIES[family].attributes}
    ops = operators(
        family, attributes, name=part["name"].tolist(), dtype=part["dtype"].tolist(), phase=part["phase"].tolist(),
        layout=part["layout"].tolist(),
    )  # fmt: skip
    scale, unit = _UNITS[time], time.removeprefix("t_")
    t, low, high = (numbers(part, c) * scale for c in (time, f"t_low_{unit}", f"t_high_{unit}"))
    repeats = np.clip(np.nan_to_num(numbers(part, "repeats"), nan=0, posinf=-1, neginf=-1), -1, 2**31 - 1)
    return measurements(ops, t, t_low_s=low, t_high_s=high, repeats=repeats, kernels=_texts(part, "kernels", ""))


def _families(table: pd.DataFrame) -> list[str]:
    by_name = [FAMILY_OF_NAME.get(str(name), "") for name in table["name"]]
    if "family" not in table:
        return by_name
    return [str(text) if isinstance(text, str) else named for text, named in zip(table["family"], by_name, strict=True)]


def _texts(table: pd.DataFrame, column: str, default: str) -> list[str]:
    if column not in table:
        return [default] * len(table)
    return [str(text) if isinstance(text, str) else default for text in table[column]]


def _integers(table: pd.DataFrame, attribute: str, path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if attribute not in table:
        default = DEFAULTS.get(attribute)
        if isinstance(default, int):
            return np.full(len(table), default, dtype=np.int64)
        if default is None or default not in table:
            raise WhatifError(f"{path}: expected a column {attribute!r}, which its operators need, got none.")
        return _integers(table, default, path)
    return integers(table, attribute)
