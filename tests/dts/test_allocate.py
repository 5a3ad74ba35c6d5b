"""Assignment of roles: the heuristic, its constraints, and the exhaustive search."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dts.networks import clusters, equal, estimated, network
from whatif import WhatifError
from whatif.models.dts.allocate import (
    Assignment,
    allocate,
    every_path,
    first_path,
)
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.estimate import played
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.models.dts.plan import Role, Training, run


def joined(*processors: Processor, byte_s: float = 1e9, **slow: float) -> Machines:
    """Processors with a link between any two; ``slow`` ones have that rate on all of theirs."""
    wires = {}
    for one in processors:
        for other in processors:
            if one is not other:
                rate = min(slow.get(one.name, byte_s), slow.get(other.name, byte_s))
                wires[one.name, other.name] = Wire(f"{one.name} > {other.name}", rate)
    return Machines(processors, wires)


HEAVY = Role("heavy", 900.0, 10, {"light": 1})
LIGHT = Role("light", 100.0, 10, {"heavy": 1})


def test_most_work_gets_most_power() -> None:
    machines = joined(Processor("small", 1.0), Processor("large", 9.0), Processor("middle", 5.0))
    assert first_path([LIGHT, HEAVY], machines) == {"light": "middle", "heavy": "large"}


def test_the_parallelization_factor_multiplies_power() -> None:
    machines = joined(Processor("one", 5.0), Processor("four", 2.0, parallelization_factor=4.0))
    assert first_path([HEAVY, LIGHT], machines)["heavy"] == "four"


def test_most_bytes_get_the_best_links() -> None:
    """Both roles send much more than they compute: the strong processor with a poor link is left over."""
    talkers = [Role("one", 1.0, 0, {"two": 10**9}), Role("two", 1.0, 0, {"one": 10**9})]
    machines = joined(Processor("lame", 9.0), Processor("a", 2.0), Processor("b", 1.0), lame=1e6)
    assert set(first_path(talkers, machines).values()) == {"a", "b"}


def test_ranks_are_taken_anew_after_each_role() -> None:
    """Once the server is on the hub, the client goes where its link *to the hub* is best, not its links in all."""
    machines = Machines(
        tuple(Processor(name, power) for name, power in (("hub", 9.0), ("popular", 1.0), ("near", 1.0), ("far", 1.0))),
        {
            (a, b): Wire(f"{a} > {b}", rate)
            for one, other, rate in (
                ("hub", "popular", 1e8), ("hub", "near", 1e9), ("hub", "far", 1e8), ("popular", "far", 1e10),
                ("popular", "near", 1e10),
            )
            for a, b in ((one, other), (other, one))
        },
    )  # fmt: skip
    roles = [Role("server", 1e6, 0, {"client": 10**6}), Role("client", 1.0, 0, {"server": 10**6})]
    assert first_path(roles, machines) == {"server": "hub", "client": "near"}


def test_memory_is_a_constraint() -> None:
    machines = joined(Processor("fast", 9.0, memory_bytes=5.0), Processor("roomy", 1.0, memory_bytes=50.0))
    assert first_path([HEAVY, Role("light", 1.0, 1, {"heavy": 1})], machines) == {"heavy": "roomy", "light": "fast"}


def test_a_placed_role_makes_room() -> None:
    """The heavy role takes the only processor that holds the large one; it moves, since it fits elsewhere."""
    machines = joined(Processor("best", 9.0, memory_bytes=100.0), Processor("small", 1.0, memory_bytes=20.0))
    large = Role("large", 1.0, 90, {"heavy": 1})
    roles = [Role("heavy", 900.0, 10, {"large": 1}), large]
    assert first_path(roles, machines) == {"heavy": "small", "large": "best"}


def test_no_memory_holds_a_role() -> None:
    machines = joined(Processor("a", memory_bytes=2e9), Processor("b", memory_bytes=1e9))
    roles = [Role("server", 1.0, 3 * 10**9, {}), Role("client", 1.0, 1, {})]
    for max_paths in (1, None):
        with pytest.raises(WhatifError, match=r"no processor's memory holds the role 'server', which needs 3 GB; the "):
            allocate(roles, machines, lambda _: (0, {}), max_paths)


def test_no_link_between_partners() -> None:
    machines = Machines((Processor("a"), Processor("b")))
    with pytest.raises(WhatifError, match=r"no processor is left for the role '\w+', which needs .* and links with"):
        first_path([HEAVY, LIGHT], machines)


def test_fewer_processors_than_roles() -> None:
    with pytest.raises(WhatifError, match="expected a processor for each of 7 roles, got 6"):
        estimated("federated_split", equal(6))


def test_max_paths_is_checked() -> None:
    with pytest.raises(WhatifError, match="expected max_paths of 1 or more"):
        allocate([HEAVY, LIGHT], equal(2), lambda _: (0, {}), 0)


def test_the_role_of_greatest_delay_moves_first() -> None:
    """Ranking sends the second role to the processor with the better links; on the other one it is faster."""
    asked: list[Assignment] = []

    def judge(assignment: Assignment) -> tuple[int, dict[str, int]]:
        asked.append(assignment)
        return (5 if assignment["heavy"] == "c" else 9), {"heavy": 1, "light": 7}

    machines = joined(Processor("a", 3.0), Processor("b", 2.0), Processor("c", 1.0))
    found = allocate([HEAVY, LIGHT], machines, judge, 100)
    assert asked[0] == {"heavy": "a", "light": "b"}
    # The light role causes the delay: it changes first, with whoever has the best processor.
    assert asked[1] == {"heavy": "b", "light": "a"}
    assert found.time_ns == 5
    assert found.paths == len(asked) == len({tuple(a.items()) for a in asked})


def best_of_all(name: str, machines: Machines, training: Training) -> int:
    """The shortest batch over plainly every permutation of processors."""
    architecture, dnn = BUILT_IN[name], network()
    roles = list(architecture.roles(dnn, training))
    times = []
    for chosen in permutations([p.name for p in machines.processors], len(roles)):
        assignment = dict(zip((role.name for role in roles), chosen, strict=True))
        times.append(run(played(architecture, dnn, machines, assignment, training).activities).total_ns)
    return min(times)


@pytest.mark.parametrize("name", BUILT_IN)
@given(machines=clusters(5, 5))
@settings(deadline=None, max_examples=8)
def test_all_paths_find_the_best_and_the_heuristic_none_better(name: str, machines: Machines) -> None:
    clients = 1 if name == "federated_split" else 2
    training = Training(clients, cuts=() if name == "federated" else (2,))
    every = estimated(name, machines, clients=clients, max_paths=None, cuts=training.cuts)
    assert every.batch_ns == best_of_all(name, machines, training)
    some = [estimated(name, machines, clients=clients, max_paths=most, cuts=training.cuts) for most in (1, 5, 100)]
    assert every.batch_ns <= some[2].batch_ns <= some[1].batch_ns <= some[0].batch_ns
    assert all(one.paths <= most for one, most in zip(some, (1, 5, 100), strict=True))


def test_like_processors_are_tried_once() -> None:
    """Seven equal machines: one way to give out seven roles instead of 5,040."""
    roles = BUILT_IN["federated_split"].roles(network(), Training(cuts=(2,)))
    assert len(list(every_path(roles, equal(9)))) == 1
    # One unlike machine may have any of the four sorts of roles that differ, or none.
    mixed = Machines((Processor("odd", 3.0), *(Processor(f"m{n}", 1.0) for n in range(8))), anywhere=Wire("", 1e9))
    assert len(list(every_path(roles, mixed))) == 8


def test_too_many_ways_are_reported_before_any_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from whatif.models.dts import allocate as module

    monkeypatch.setattr(module, "MOST_PATHS", 5)
    machines = joined(*(Processor(f"m{n}", float(n + 1)) for n in range(3)))
    asked: list[Assignment] = []

    def judge(assignment: Assignment) -> tuple[int, dict[str, int]]:
        asked.append(assignment)
        return 1, {}

    with pytest.raises(WhatifError, match="there are more than 5 ways to give out the roles; set max_paths"):
        allocate([HEAVY, LIGHT], machines, judge, None)
    assert not asked
    monkeypatch.setattr(module, "MOST_PATHS", 6)
    assert allocate([HEAVY, LIGHT], machines, judge, None).paths == len(asked) == 6


@given(st.integers(2, 6))
def test_symmetry_counts_links(count: int) -> None:
    """A machine with a slower link is not like the others."""
    processors = [Processor(f"m{n}", 1.0) for n in range(count)]
    roles = [Role("one", 1.0, 0, {"two": 1}), Role("two", 1.0, 0, {"one": 1})]
    assert len(list(every_path(roles, joined(*processors)))) == 1
    assert len(list(every_path(roles, joined(*processors, m0=1e6)))) == (2 if count == 2 else 3) - (count == 2)
