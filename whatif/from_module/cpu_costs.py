"""The CPU time of operations: a table with its sources in ``cpu_costs.toml``."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

from msgspec import Struct

from whatif.from_module.operations import Operation


class CpuCosts(Struct, frozen=True):
    """CPU times, ns; the table explains the fields."""

    launch_ns: int
    operator_ns: int
    view_ns: int
    layer_call_ns: int
    node_ns: int
    parameter_ns: int
    range_factor: float
    operators: dict[str, int]

    def operation_ns(self, operation: Operation, kernels: int) -> int:
        """Return the CPU time of an operation without its launches, ns."""
        measured = self.operators.get(operation.name)
        if measured is not None:
            return measured
        return self.operator_ns if kernels or not operation.on_device else self.view_ns


@lru_cache(maxsize=1)
def cpu_costs() -> CpuCosts:
    """Return the shipped table."""
    import tomllib

    text = (resources.files("whatif.from_module") / "cpu_costs.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    table.pop("source")
    return CpuCosts(**table)
