"""Fixtures for every test; the repository root goes on the path, so that ``tests.helpers`` can be imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("whatif", deadline=None)
settings.load_profile("whatif")

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# Tests that run side by side are told a width of 80; reports are as wide as they choose.
os.environ.pop("COLUMNS", None)


def _folder(path: Path) -> Path:
    """The folder where it exists; else skip, or fail where nothing may be skipped."""
    if path.is_dir():
        return path
    if os.environ.get("WHATIF_STRICT") == "1":
        pytest.fail(f"expected the folder {path}, and WHATIF_STRICT=1 allows no skip")
    pytest.skip(f"needs the folder {path}")


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Other people's real traces, beside the repository."""
    return _folder(ROOT.parent / "shared" / "traces")


@pytest.fixture(scope="session")
def own_traces() -> Path:
    """The recordings that ship with the project."""
    return _folder(ROOT / "traces")
