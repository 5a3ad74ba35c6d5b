"""The time of a round of an architecture on a cluster: assign roles, schedule, simulate (DTS figure 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.models.dts.allocate import Assignment, Found, allocate
from whatif.models.dts.built_in import Architecture
from whatif.models.dts.dnn import Dnn
from whatif.models.dts.machines import Machines
from whatif.models.dts.plan import (
    Plan,
    Role,
    Training,
    busy_ns,
    run,
    spread_ns,
)
from whatif.runtime.errors import WhatifError


class Spread(Struct, frozen=True):
    """A time without fluctuations of processors and links, and its median and 90 % range with them, ns."""

    time_ns: int  # without fluctuations
    median_ns: float
    low_ns: float
    high_ns: float


class Estimate(Struct, frozen=True):
    """One architecture on one cluster: its assignment of roles and its time per batch."""

    architecture: Architecture
    dnn: Dnn
    machines: Machines
    training: Training  # of one batch
    roles: tuple[Role, ...]
    assignment: Assignment
    paths: int  # the number of assignments tried
    batch_ns: int

    def plan(self, batches: int = 1) -> Plan:
        """Return the plan of a round with the given number of batches per client."""
        training = replace(self.training, batches=batches)
        return played(self.architecture, self.dnn, self.machines, self.assignment, training)

    def spread(self, batches: int = 1, *, samples: int = 1000, seed: int = 0) -> Spread:
        """Return the round's time with its distribution over ``samples`` draws of the fluctuations."""
        activities = self.plan(batches).activities
        time_ns = run(activities).total_ns
        if not any(activity.fluctuation for activity in activities):
            return Spread(time_ns, float(time_ns), float(time_ns), float(time_ns))
        low, middle, high = np.percentile(spread_ns(activities, samples, seed), (5, 50, 95)).tolist()
        return Spread(time_ns, middle, low, high)


def estimate(
    architecture: Architecture, dnn: Dnn, machines: Machines, training: Training, max_paths: int | None = 100
) -> Estimate:
    """Return the fastest assignment of an architecture, over its candidate cuts if none is given.

    Raises WhatifError if the roles cannot be assigned, or if a user's script fails.
    """
    cuts: Sequence[tuple[int, ...]] = [training.cuts]
    if not training.cuts and architecture.cuts is not None:
        cuts = _of_script(architecture, architecture.cuts, dnn, training, machines)
    found: list[Estimate] = []
    reason: WhatifError | None = None
    for cut in cuts:
        choice = replace(training, batches=1, cuts=tuple(cut))
        try:
            found.append(_with_cuts(architecture, dnn, machines, choice, max_paths))
        except WhatifError as error:
            reason = reason or error  # another cut may fit
    if not found:
        raise reason or WhatifError(f"dts: {architecture.name} offers no way to cut the network.")
    return min(found, key=lambda estimate: estimate.batch_ns)


def _with_cuts(
    architecture: Architecture, dnn: Dnn, machines: Machines, training: Training, max_paths: int | None
) -> Estimate:
    roles: Sequence[Role] = tuple(_of_script(architecture, architecture.roles, dnn, training))

    def judge(assignment: Assignment) -> tuple[int, dict[str, int]]:
        activities = played(architecture, dnn, machines, assignment, training).activities
        return run(activities).total_ns, busy_ns(activities, assignment)

    if architecture.allocate is not None:
        chosen = dict(_of_script(architecture, architecture.allocate, roles, machines))
        _check_own(architecture, chosen, roles, machines)
        assignment = {role.name: chosen[role.name] for role in roles}
        found = Found(assignment, judge(assignment)[0], 1)
    else:
        found = allocate(roles, machines, judge, max_paths)
    return Estimate(architecture, dnn, machines, training, tuple(roles), found.assignment, found.paths, found.time_ns)


def played(
    architecture: Architecture, dnn: Dnn, machines: Machines, assignment: Assignment, training: Training
) -> Plan:
    """Return the plan of a round. Raises WhatifError if a user's script fails."""
    plan = Plan(dnn, machines, assignment)
    _of_script(architecture, architecture.play, plan, training)
    return plan


def _of_script(architecture: Architecture, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a script's function; errors in it become a WhatifError."""
    try:
        return function(*arguments)
    except WhatifError:
        raise
    except Exception as error:
        raise WhatifError(
            f"dts: {function.__name__}() of the architecture {architecture.name!r} failed: {type(error).__name__}: "
            f"{error}."
        ) from error


def _check_own(architecture: Architecture, assignment: Assignment, roles: Sequence[Role], machines: Machines) -> None:
    """Raise WhatifError if a user's allocation heuristic omits a role or breaks a constraint."""
    where = f"dts: allocate() of {architecture.name!r}"
    for role in roles:
        at = assignment.get(role.name)
        if at is None or at not in machines.by_name:
            raise WhatifError(f"{where}: expected a processor of the cluster for the role {role.name!r}, got {at!r}.")
        if role.memory_bytes > machines.by_name[at].memory_bytes:
            raise WhatifError(f"{where}: the memory of {at!r} does not hold the role {role.name!r}.")
    if len(set(assignment.values())) < len(assignment):
        raise WhatifError(f"{where}: expected one role a processor, got one processor for several.")
