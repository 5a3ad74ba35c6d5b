"""The processors of a cluster and the links between them (DTS §II-B, table I)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    import networkx

MOST_PROCESSORS = 10_000


class Processor(Struct, frozen=True):
    """A machine that takes one role: its FLOP rate, the fluctuation of that rate, and its free memory.

    ``gflop_s`` counts training as the measuring tool does (``whatif.instrumentation.dts_facts``); None means as fast as
    the recorded machine. DTS lists a parallelization factor without defining it: here it multiplies the rate, like that
    many equal devices in one machine.
    """

    name: str
    gflop_s: float | None = None
    power_fluctuation: float = 0.0  # 0.1 is +-10 %
    memory_bytes: float = float("inf")
    parallelization_factor: float = 1.0

    def slowdown(self, recorded_gflop_s: float | None) -> float:
        """Return the time of work here relative to the recorded machine. Raises WhatifError if unknown."""
        if self.gflop_s is None:
            return 1.0 / self.parallelization_factor
        if recorded_gflop_s is None:
            raise WhatifError(
                f"dts: the recording lacks its FLOPs, so that processor {self.name!r} with its gflop_s cannot "
                "be compared with it; record anew with `whatif collect`, or leave gflop_s out."
            )
        return recorded_gflop_s / (self.gflop_s * self.parallelization_factor)


class Wire(Struct, frozen=True):
    """One direction of a link; transfers with the same ``channel`` take turns."""

    channel: str
    byte_s: float
    latency_ns: float = 0.0
    fluctuation: float = 0.0

    def time_ns(self, size_bytes: float) -> float:
        """Return the time of one transfer, ns."""
        return self.latency_ns + size_bytes * 1e9 / self.byte_s


class Machines(Struct, frozen=True, dict=True):
    """All processors, and a wire for each direction of each link between two names (processors or switches).

    ``anywhere`` is the wire between processors without a named link, for a cluster of equal links.
    """

    processors: tuple[Processor, ...]
    wires: Mapping[tuple[str, str], Wire] = field(default_factory=dict)
    anywhere: Wire | None = None

    def __post_init__(self) -> None:
        """Check the number of processors and that their names are distinct."""
        names = [processor.name for processor in self.processors]
        if not 1 <= len(names) <= MOST_PROCESSORS:
            raise WhatifError(f"dts: expected from 1 to {MOST_PROCESSORS:,} processors, got {len(names)}.")
        double = [name for name, following in pairwise(sorted(names)) if name == following]
        if double:
            raise WhatifError(f"dts: expected processors of different names, got {double[0]!r} twice.")

    @staticmethod
    def equal(count: int, wire: Wire, like: Processor | None = None) -> Machines:
        """Return ``count`` equal processors with a separate link between any two."""
        processors = (replace(like or Processor(""), name=f"processor {number}") for number in range(1, count + 1))
        return Machines(tuple(processors), anywhere=wire)

    @cached_property
    def by_name(self) -> Mapping[str, Processor]:
        """The processors by their names."""
        return {processor.name: processor for processor in self.processors}

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """A class number for each processor; two of the same class are interchangeable."""
        number = list(range(len(self.processors)))
        first: dict[Processor, list[int]] = {}  # attributes without the name -> the first processor of each class
        for at, processor in enumerate(self.processors):
            known = first.setdefault(replace(processor, name=""), [])
            twin = next((before for before in known if self._same_links(processor, self.processors[before])), None)
            if twin is None:
                known.append(at)
            else:
                number[at] = twin
        return tuple(number)

    def _same_links(self, one: Processor, other: Processor) -> bool:
        if not self.wires:
            return True
        rest = [p.name for p in self.processors if p.name not in (one.name, other.name)]

        def wires(name: str, twin: str) -> list[object]:
            ways = [(name, twin), *((name, third) for third in rest), *((third, name) for third in rest)]
            found = [self.wire(*way) for way in ways]
            return [wire and (wire.byte_s, wire.latency_ns, wire.fluctuation) for wire in found]

        return wires(one.name, other.name) == wires(other.name, one.name)

    @cached_property
    def _graph(self) -> networkx.DiGraph[str]:
        import networkx  # takes 0.1 s; only needed for pairs without a direct link

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        for (source, target), wire in self.wires.items():
            graph.add_edge(source, target, cost=1.0 / wire.byte_s)
        return graph

    def wire(self, source: str, target: str) -> Wire | None:
        """Return the route from one processor to another as one wire; None if there is none.

        A route over several links has the rate, channel and fluctuation of the slowest link (the first of equals) and
        the sum of the latencies. Of several routes the one with the least total time per byte is taken.
        """
        key = source, target
        if key not in self._found:
            self._found[key] = self._route(source, target)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[str, str], Wire | None]:
        return {}

    def _route(self, source: str, target: str) -> Wire | None:
        direct = self.wires.get((source, target))
        if direct is not None:
            return direct
        import networkx

        try:
            path: Sequence[str] = networkx.shortest_path(self._graph, source, target, weight="cost")
        except (networkx.NetworkXNoPath, networkx.NodeNotFound):
            path = ()
        parts = [self.wires[hop] for hop in pairwise(path)]
        if parts:
            narrow = min(parts, key=lambda wire: wire.byte_s)
            return replace(narrow, latency_ns=sum(wire.latency_ns for wire in parts))
        return self.anywhere and replace(self.anywhere, channel=f"{source} -> {target}")
