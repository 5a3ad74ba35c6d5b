"""What the recorder writes beside the events: read once into its types, and written back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.graph.recorded import Bucket, Ddp, Gradient, Layer, MeasuredOperator, Precision, Recorded, StepTimes
from whatif.ingest.file_bytes import FileBytes
from whatif.ingest.recorded import recorded_of, written

# What ``GraphInfo`` holds, so that it is not written twice.
OF_THE_GRAPH = {"gpu", "batch_size"}


class Header(msgspec.Struct):
    whatif: dict[str, Any] = {}


def test_every_recording_of_ours_is_written_back_as_it_was(own_traces: Path) -> None:
    paths = sorted(own_traces.glob("*.json.gz")) + sorted(own_traces.glob("campaign_cpu*/*baseline*.json.gz"))[::4]
    headers = {path.name: msgspec.json.decode(b"".join(FileBytes(path)), type=Header).whatif for path in paths}
    assert sum("layers" in header for header in headers.values()) >= 9
    for name, header in headers.items():
        recorded, damaged = recorded_of(header)
        assert damaged == (), name
        assert written(recorded) == {key: header[key] for key in header.keys() - OF_THE_GRAPH}, name


def test_each_fact_has_its_type() -> None:
    recorded, damaged = recorded_of(
        {
            "layers": [{"name": "a", "type": "Linear", "parameters": 6, "shapes": {"weight": [2, 3]}, "hooks": 1}],
            "grad_ready_order": [{"name": "a.weight", "layer": "a", "bytes": 24}],
            "ddp": {"world_size": 2, "buckets": [{"parameters": ["a.weight"]}]},
            "precision": {"autocast": None, "parameters": "float32"},
            "untraced_step_ms": {"median": 3, "q25": 2.5, "q75": 4.0},
            "operator_times": [{"op": "aten::mm", "dims": [[2, 3]], "ns": {"recorded": 5.0}}],
            "mood": "good",
        }
    )
    assert damaged == ()
    assert recorded == Recorded(
        layers=(Layer("a", "Linear", 6, None, {"weight": (2, 3)}, {"hooks": 1}),),
        gradients=(Gradient("a.weight", "a", 24),),
        ddp=Ddp(2, (Bucket(("a.weight",)),)),
        precision=Precision("float32", present=frozenset(("autocast", "parameters"))),
        untraced_step=StepTimes(3, 2.5, 4.0),
        operator_times=(MeasuredOperator("aten::mm", [[2, 3]], ns={"recorded": 5.0}),),
        other={"mood": "good"},
    )


@pytest.mark.parametrize(
    ("metadata", "damaged"),
    [
        ({"layers": 3}, ("layers",)),
        ({"layers": [{"name": "a", "parameters": -1}, None]}, ("layers",)),
        ({"rates": {"copy_gbyte_s": float("nan")}, "cpu": 7}, ("cpu", "rates")),
        ({"precision": "half", "optimizer": {"foreach": 2}}, ("precision", "optimizer")),
        ({"operator_times": [{"op": "a", "ns": {"recorded": 0}}]}, ("operator_times",)),
        ([1, 2], ()),
    ],
)
def test_what_the_recorder_does_not_write_is_named_and_left_out(metadata: Any, damaged: tuple[str, ...]) -> None:
    recorded, found = recorded_of(metadata)
    assert found == damaged
    assert (recorded.cpu, recorded.rates and recorded.rates.copy_gbyte_s) == (None, None)
    assert not any(layer.parameters for layer in recorded.layers)


def test_times_that_cannot_be_used_are_distinguished_from_none() -> None:
    assert recorded_of({})[0].untraced_step is None
    for times in (7, {"median": "x"}, {"median": float("inf")}, {"median": True}):
        assert recorded_of({"untraced_step_ms": times}) == (Recorded(untraced_step=StepTimes(other=_left(times))), ())


def _left(times: Any) -> dict[str, Any]:
    return times if isinstance(times, dict) else {}


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(("name", "bytes", "shapes", "median", "buckets", "parameters", "ns", "op")), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip
KEYS = ("layers", "grad_ready_order", "ddp", "precision", "optimizer", "rates", "operator_times", "update_times_ns",
        "untraced_step_ms", "profiler_cost_ns", "predicted", "simulated", "input_shape", "cpu", "flops")  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_anything_may_stand_there(metadata: dict[str, Any]) -> None:
    recorded, _ = recorded_of(metadata)
    again, _ = recorded_of(written(recorded))
    assert repr(written(again)) == repr(written(recorded))  # as text: NaN is not NaN
