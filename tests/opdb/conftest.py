"""Fixtures for tests of the op database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import need
from whatif.opdb import blending


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other in thousands of short loops take minutes where other tests run beside them."""
    need("sklearn.ensemble")  # only what is loaded can be limited
    with need("threadpoolctl").threadpool_limits(1, "openmp"):
        yield


@pytest.fixture
def no_known_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources whose errors nobody knows answer alone, the first one first."""
    monkeypatch.setattr(blending, "errors", dict)
