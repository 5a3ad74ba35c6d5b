"""Assignment of roles to processors: the allocation heuristic of DTS §II-C and an exhaustive search.

DTS prints guidelines and a summary; comments mark the choices that they leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from statistics import median

from msgspec import Struct

from whatif.models.dts.machines import Machines, Processor
from whatif.models.dts.plan import Role
from whatif.runtime.errors import WhatifError

Assignment = dict[str, str]  # a role's name -> its processor's
# Assignment -> the time of a round, ns, and the delay that each role causes in it.
Judge = Callable[[Assignment], tuple[int, Mapping[str, int]]]

# An exhaustive search of more assignments is refused before it begins.
MOST_PATHS = 200_000


class Found(Struct, frozen=True):
    """The best assignment, its time per round, and the number of assignments tried."""

    assignment: Assignment
    time_ns: int
    paths: int


def allocate(roles: Sequence[Role], machines: Machines, judge: Judge, max_paths: int | None = 100) -> Found:
    """Return the fastest of up to ``max_paths`` assignments of roles; None tries all.

    Raises WhatifError if there are fewer processors than roles, no processor's memory holds a role, roles that exchange
    data have no link, or an exhaustive search has too many assignments.
    """
    if max_paths is not None and max_paths < 1:
        raise WhatifError(f"dts: expected max_paths of 1 or more, or 0 for all, got {max_paths}.")
    if len(roles) > len(machines.processors):
        raise WhatifError(
            f"dts: expected a processor for each of {len(roles)} roles, got {len(machines.processors)}; add processors "
            "or take fewer clients."
        )
    return _best_of_all(roles, machines, judge) if max_paths is None else _improved(roles, machines, judge, max_paths)


def first_path(roles: Sequence[Role], machines: Machines) -> Assignment:
    """Return the assignment by ranking alone. Raises WhatifError if the constraints cannot be met."""
    placed: Assignment = {}
    free = [processor.name for processor in machines.processors]
    for role in _by_demand(roles, machines):
        # Ranked again: processors that are taken no longer count, nor do links to them.
        ranked = _ranked(role, free, placed, machines)
        if not ranked:
            ranked = [_made_free(role, roles, placed, free, machines)]
        placed[role.name] = ranked[0]
        free.remove(ranked[0])
    return {role.name: placed[role.name] for role in roles}


def every_path(roles: Sequence[Role], machines: Machines) -> Iterator[Assignment]:
    """Return every assignment that meets the constraints, without equivalent ones: of identical processors only the
    first free one is used, and interchangeable roles get theirs in ascending order.
    """
    names = [processor.name for processor in machines.processors]
    alike = machines.alike

    def place(number: int, placed: Assignment) -> Iterator[Assignment]:
        if number == len(roles):
            yield dict(placed)
            return
        role, taken, tried_classes = roles[number], set(placed.values()), set()
        before = roles[number - 1] if number and _interchangeable(roles[number - 1], role) else None
        lowest = names.index(placed[before.name]) if before else -1
        for at, name in enumerate(names):
            if name in taken or at < lowest or alike[at] in tried_classes or not _fits(role, name, placed, machines):
                continue
            tried_classes.add(alike[at])
            placed[role.name] = name
            yield from place(number + 1, placed)
            del placed[role.name]

    yield from place(0, {})


def _best_of_all(roles: Sequence[Role], machines: Machines, judge: Judge) -> Found:
    """The fastest of all assignments."""
    # Counting takes a hundredth of the time of judging.
    count = sum(1 for _ in islice(every_path(roles, machines), MOST_PATHS + 1))
    if count > MOST_PATHS:
        raise WhatifError(f"dts: there are more than {MOST_PATHS:,} ways to give out the roles; set max_paths.")
    if not count:
        raise _impossible(roles, machines)
    judged = ((judge(assignment)[0], assignment) for assignment in every_path(roles, machines))
    time_ns, assignment = min(judged, key=itemgetter(0))
    return Found(assignment, time_ns, count)


def _improved(roles: Sequence[Role], machines: Machines, judge: Judge, max_paths: int) -> Found:
    """Local search from the first assignment: change the roles of the greatest delay, one at a time."""
    current = first_path(roles, machines)
    time_ns, delay = judge(current)
    tried = {_key(current, roles)}
    changes = _changes(current, delay, roles, machines)
    while len(tried) < max_paths and (changed := next(changes, None)):
        if _key(changed, roles) in tried:
            continue
        tried.add(_key(changed, roles))
        changed_ns, delay = judge(changed)
        if changed_ns < time_ns:
            current, time_ns = changed, changed_ns
            changes = _changes(current, delay, roles, machines)
    return Found(current, time_ns, len(tried))


def _changes(
    current: Assignment, delay: Mapping[str, int], roles: Sequence[Role], machines: Machines
) -> Iterator[Assignment]:
    """Assignments with one role moved or swapped, the role of the greatest delay first."""
    by_name = {role.name: role for role in roles}
    owner = {name: role for role, name in current.items()}
    alike = dict(zip((p.name for p in machines.processors), machines.alike, strict=True))
    for slow in sorted(current, key=lambda name: (-delay.get(name, 0), name)):
        rest = {name: at for name, at in current.items() if name != slow}
        candidates = [p.name for p in machines.processors if p.name != current[slow]]
        for candidate in _ranked(by_name[slow], candidates, {}, machines):
            if alike[candidate] == alike[current[slow]]:
                continue  # identical processor: same time
            changed = {**rest, slow: candidate}
            if candidate in owner:
                changed[owner[candidate]] = current[slow]
            if all(_fits(role, changed[role.name], changed, machines) for role in roles):
                yield {role.name: changed[role.name] for role in roles}


def _by_demand(roles: Sequence[Role], machines: Machines) -> list[Role]:
    """Sort the roles by their time with the recorded machine's speed and a median link, the longest first."""
    byte_s = _middling_byte_s(machines)
    return sorted(roles, key=lambda role: -(role.work_ns + sum(role.partners.values()) * 1e9 / byte_s))


def _middling_byte_s(machines: Machines) -> float:
    rates = [wire.byte_s for wire in machines.wires.values()]
    rates += [machines.anywhere.byte_s] if machines.anywhere else []
    return median(rates) if rates else 1e9


def _ranked(role: Role, free: Sequence[str], placed: Assignment, machines: Machines) -> list[str]:
    """Return the free processors that can take ``role``, the best first.

    Processors are ranked by power, by memory and by bandwidth to the partners already placed (to any processor if none
    is). DTS does not print the weights: here power and bandwidth are weighted by the role's compute and transfer time,
    and memory, a constraint, breaks ties.
    """
    able = [name for name in free if _fits(role, name, placed, machines)]
    transfer_ns = sum(role.partners.values()) * 1e9 / _middling_byte_s(machines)
    power = _place_of({name: -_power(machines.by_name[name]) for name in able})
    band = _place_of({name: -_bandwidth(name, role, placed, machines) for name in able})
    memory = _place_of({name: machines.by_name[name].memory_bytes for name in able})  # the rest stays for others

    def rank(name: str) -> tuple[float, int]:
        return role.work_ns * power[name] + transfer_ns * band[name], memory[name]

    return sorted(able, key=rank)


def _place_of(value: Mapping[str, float]) -> dict[str, int]:
    """The rank of each among the distinct values; equals share a rank."""
    order = {found: place for place, found in enumerate(sorted(set(value.values())))}
    return {name: order[found] for name, found in value.items()}


def _power(processor: Processor) -> float:
    # Only the order counts. An unknown power means the speed of the recorded machine; then all are unknown.
    return (processor.gflop_s or 1.0) * processor.parallelization_factor


def _bandwidth(name: str, role: Role, placed: Assignment, machines: Machines) -> float:
    partners = [placed[partner] for partner in role.partners if partner in placed]
    if partners:
        rates = [wire.byte_s for partner in partners if (wire := machines.wire(name, partner))]
        return min(rates, default=0.0)
    others = [p.name for p in machines.processors if p.name != name and p.name not in placed.values()]
    rates = [wire.byte_s for other in others[:64] if (wire := machines.wire(name, other))]
    # As many of the best links as the role has partners.
    return sum(sorted(rates, reverse=True)[: max(len(role.partners), 1)])


def _fits(role: Role, name: str, placed: Assignment, machines: Machines) -> bool:
    if role.memory_bytes > machines.by_name[name].memory_bytes:
        return False
    partners = [placed[partner] for partner in role.partners if partner in placed]
    return all(machines.wire(name, other) and machines.wire(other, name) for other in partners)


def _made_free(role: Role, roles: Sequence[Role], placed: Assignment, free: list[str], machines: Machines) -> str:
    """Move a placed role elsewhere, the slowest first, to make room for ``role``; return the free processor."""
    by_name = {known.name: known for known in roles}

    def delay(name: str) -> float:
        return by_name[name].work_ns / _power(machines.by_name[placed[name]])

    for other in sorted(placed, key=delay, reverse=True):
        at = placed[other]
        rest = {name: where for name, where in placed.items() if name != other}
        for elsewhere in _ranked(by_name[other], free, rest, machines):
            moved = {**rest, other: elsewhere}
            if _fits(role, at, moved, machines):
                placed[other] = elsewhere
                free.remove(elsewhere)
                free.append(at)
                return at
    raise _impossible(roles, machines, role)


def _impossible(roles: Sequence[Role], machines: Machines, role: Role | None = None) -> WhatifError:
    """The error that states why no assignment exists."""
    need = role or max(roles, key=lambda known: known.memory_bytes)
    largest = max(processor.memory_bytes for processor in machines.processors)
    if need.memory_bytes > largest:
        return WhatifError(
            f"dts: no processor's memory holds the role {need.name!r}, which needs {need.memory_bytes / 1e9:.3g} GB; "
            f"the largest has {largest / 1e9:.3g} GB; cut the network elsewhere."
        )
    return WhatifError(
        f"dts: no processor is left for the role {need.name!r}, which needs {need.memory_bytes / 1e9:.3g} GB and links "
        f"with {', '.join(need.partners) or 'none'}; add processors or links, or cut the network elsewhere."
    )


def _interchangeable(one: Role, other: Role) -> bool:
    """Whether two roles can swap processors without effect: same work, memory and partners."""
    same = one.kind and one.kind == other.kind and one.memory_bytes == other.memory_bytes
    return bool(same and one.work_ns == other.work_ns and dict(one.partners) == dict(other.partners))


def _key(assignment: Assignment, roles: Sequence[Role]) -> tuple[str, ...]:
    return tuple(assignment[role.name] for role in roles)
