"""Small measurements and databases for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import need
from whatif.opdb.index import Index, index_of
from whatif.opdb.provenance import Device, Environment, Method, Origin, Provenance, Source, contribution_id
from whatif.opdb.rows import Operators, Rows, measurements, operators
from whatif.opdb.schema import SCHEMA_VERSION
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

need("pyarrow")

V100, T4 = "V100-PCIE-16", "T4"


def origin(device: str = V100, *, method: str = "event_pair", launch: bool | None = True, author: str = "a") -> Origin:
    """The origin of made-up measurements."""
    return Origin(
        device=Device(name=device, reported_as=device),
        environment=Environment(framework="pytorch", framework_version="2.1.0"),
        method=Method(name=method, includes_launch=launch), source=Source(author=author, licence="MIT"),
    )  # fmt: skip


def products(m: Sequence[int], n: int = 64, k: int = 64, *, dtype: str = "fp32", name: str = "mm") -> Operators:
    """Matrix products that differ in their rows."""
    return operators("matmul", {"batch": 1, "m": m, "n": n, "k": k}, name=name, dtype=dtype)


def timed(m: Sequence[int], t_us: Sequence[float], **options: str) -> Rows:
    """Measured matrix products (m, 64) times (64, 64)."""
    return measurements(products(m, **options), np.array(t_us) * 1e-6)  # type: ignore[arg-type]


def some_rows(seed: int = 0, count: int = 20) -> Rows:
    """Matrix products of random sizes and times."""
    random = np.random.default_rng(seed)
    sizes = {name: random.integers(1, 2000, count) for name in ("batch", "m", "n", "k")}
    ops = operators("matmul", sizes, name="bmm", dtype="fp32")
    return measurements(ops, random.uniform(1e-5, 1e-3, count), kernels=[f"kernel {i % 3}" for i in range(count)])


def database(folder: Path, *contributions: tuple[Rows, Origin]) -> Store:
    """A database of these contributions."""
    store = Store.open(folder, create=True)
    for rows, where in contributions:
        store.add(rows, where)
    return store


def indexed(*contributions: tuple[Rows, Origin]) -> Index:
    """An index of rows in memory."""
    return index_of([(provenance(rows, where), rows.canonical()) for rows, where in contributions])


def provenance(rows: Rows, where: Origin) -> Provenance:
    """The sidecar that rows would have."""
    rows = rows.canonical()
    sha256 = rows.sha256()
    return Provenance(
        schema_version=SCHEMA_VERSION, contribution=contribution_id(where, rows.family, sha256), family=rows.family,
        rows=len(rows), sha256=sha256, times_sha256=rows.times_sha256(), origin=where,
    )  # fmt: skip


def files_of(store: Store) -> dict[str, bytes]:
    """Every sidecar of a database, by its path: they name the content of the shards."""
    return {str(p.relative_to(store.folder)): p.read_bytes() for p in store.sidecars()}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a data folder for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("WHATIF_OPDB", raising=False)
    return tmp_path / "cache"


def sentence(error: pytest.ExceptionInfo[WhatifError]) -> str:
    """The message; asserts that it is one line that states what was expected."""
    text = str(error.value)
    assert "expected" in text
    assert "\n" not in text
    return text
