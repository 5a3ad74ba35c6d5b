"""Fixtures for every test; the repository root goes on the path, so that ``tests.helpers`` can be imported."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from whatif.__main__ import COLLECTIONS
from whatif.hardware import roofline
from whatif.models.durations import database
from whatif.models.exchange import beside_kernels, stragglers

# How long an example takes says more of the machine than of the code.
settings.register_profile("whatif", deadline=None)
settings.load_profile("whatif")

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from tests.helpers import EXTRA_DATA, REBUILD, extra_data, stale_builds  # noqa: E402 - importable from here on

# Commands that tests call in this process collect as seldom as `whatif` does: at every 700 objects, of a heap that
# holds all tests, a quarter of their time went there.
gc.set_threshold(*COLLECTIONS)
# Nothing is kept in the user's own cache; the tests of the cache name a folder of theirs.
os.environ["WHATIF_CACHE"] = ""
# Tests work in folders of their own.
if os.environ.get(EXTRA_DATA):
    os.environ[EXTRA_DATA] = str(Path(os.environ[EXTRA_DATA]).resolve())
# Threads of torch that wait for each other spin, and take the cores from tests that run beside them: BERT's steps took
# five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests that run side by side see a width of 80; reports are as wide as they choose.
os.environ.pop("COLUMNS", None)


def pytest_sessionstart() -> None:
    """Refuse to test loops that were compiled from an older source."""
    if stale := stale_builds():
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        pytest.exit(f"{names}: older than the source; {REBUILD}", returncode=4)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what reads the public recordings: some are large."""
    for item in items:
        if "shared_traces" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Return the folder of the public recordings, made by others."""
    return extra_data("traces")


@pytest.fixture(scope="session")
def own_traces() -> Path:
    """Return the folder of the recordings that ship with the project."""
    return ROOT / "traces"


@pytest.fixture
def no_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Isolate the tests from the user's op database."""
    monkeypatch.setenv("WHATIF_OPDB", str(tmp_path / "none"))
    yield
    database._opened.cache_clear()


@pytest.fixture(scope="module")
def equal_gpus() -> Iterator[None]:
    """GPUs of equal speed without losses to NCCL: steps drawn by hand leave both terms out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "GPU_SPREAD_PCT", 0.0)
        patch.setattr(beside_kernels, "TRAFFIC", 0.0)
        yield


@pytest.fixture(scope="module")
def round_v100() -> Iterator[None]:
    """A V100 that moves 720 bytes/ns, 0.8 of its peak: steps that are drawn by hand have round numbers."""
    tables = copy.deepcopy(roofline._architectures())
    tables["volta"]["memory"] = [0.8, 0.5, 0.95]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "_architectures", lambda: tables)
        yield
