"""What the profiler costs: only recorded rounds are counted, and the profiler goes on recording afterwards."""

import json
from pathlib import Path

from tests.helpers import need

torch = need("torch")
profiler_cost = need("whatif.instrumentation.profiler_cost")


def test_events_of_recorded_rounds_are_counted_and_no_others(tmp_path: Path) -> None:
    cost = profiler_cost.ProfilerCost()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        cost.measure()
        torch.ones(3).cumsum(0)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(), strict=False)["traceEvents"]
    updates = sum(event.get("name") == "aten::lerp_" for event in events)
    assert updates == 4 * profiler_cost._CALLS * (profiler_cost._ROUNDS + 1)  # One round warms up, outside the mark.
    per_call, rest = divmod(profiler_cost._operators(events), profiler_cost._CALLS * profiler_cost._ROUNDS)
    assert per_call > 20
    assert rest == 0
    assert cost.summary(events)["per_event"] > 0
    assert any(event.get("name") == "aten::cumsum" for event in events)


def test_nothing_measured_is_no_cost() -> None:
    assert profiler_cost.ProfilerCost().summary([]) is None
