"""What `check()` holds: every invariant of a graph, broken once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers import step
from whatif import (
    Dependencies,
    DependencyKind,
    TaskGraph,
    WhatifError,
)
from whatif.graph.types import Waits


def broken(graph: TaskGraph, **columns: Any) -> TaskGraph:
    return graph.replace(**{name: change(getattr(graph, name).copy()) for name, change in columns.items()})


def put(value: int) -> Any:
    def change(column: Any) -> Any:
        column[3] = value
        return column

    return change


def row(source: int, target: int) -> Dependencies:
    return Dependencies.of([source], [target], DependencyKind.USER)


def wait_of(task: int) -> Waits:
    return Waits(np.array([task], np.int32), np.array([-1], np.int32), np.array([0]))


BROKEN = {
    "a negative duration": (lambda g: broken(g, duration_ns=put(-1), low_ns=put(-1)), "negative duration"),
    "a duration under its bound": (lambda g: broken(g, low_ns=put(10**6)), "outside its low and high"),
    "a duration over its bound": (lambda g: broken(g, high_ns=put(0)), "outside its low and high"),
    "a name without entry": (lambda g: broken(g, name=put(99)), "column name"),
    "a thread without entry": (lambda g: broken(g, thread=put(2)), "column thread"),
    "a layer without entry": (lambda g: broken(g, layer=put(-1)), "column layer"),
    "a short column": (lambda g: broken(g, flops=lambda c: c[:-1]), "column flops"),
    "an id out of range": (lambda g: g.replace(dependencies=row(0, 11)), "outside"),
    "a negative id": (lambda g: g.replace(dependencies=row(-1, 3)), "outside"),
    "a backward dependency": (lambda g: g.replace(dependencies=row(3, 1)), "come before"),
    "a task that waits for itself": (lambda g: g.replace(dependencies=row(3, 3)), "come before"),
    "a wait of a task that is not there": (
        lambda g: g.replace(waits=wait_of(77)), "outside",
    ),
    "a negative wait": (
        lambda g: g.replace(waits=wait_of(-1)), "outside|task",
    ),
    "a kind that does not exist": (lambda g: broken(g, kind=put(50)), "kind"),
    "an attached column that is too short": (lambda g: g.replace(attached={"p": np.zeros(3)}), "'?p'?"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_check_catches(what: str) -> None:
    breaks, message = BROKEN[what]
    with pytest.raises(WhatifError, match=message):
        breaks(step()).check()
