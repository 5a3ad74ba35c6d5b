"""Which operators a sweep measures, and how each is spelled as a call: without measuring anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import need
from whatif.graph.described import Described
from whatif.ingest.operator_calls import describe
from whatif.opdb.rows import operators
from whatif.opdb.work import work
from whatif.runtime.errors import WhatifError

torch = need("torch")
designs = need("whatif.instrumentation.profile_ops.designs")
spelling = need("whatif.instrumentation.profile_ops.spelled")
schema = need("whatif.instrumentation.operators.schema")
calls = need("whatif.instrumentation.operators.calls")
from_recording = need("whatif.instrumentation.profile_ops.from_recording")
collectives = need("whatif.instrumentation.profile_ops.collectives")

# The database has these under no name of torch's: nothing reads them back.
NOT_READ_BACK = {"attention", "copy"}


def design(names: list[str], shapes: int, **options: Any) -> list[Described]:
    return designs.design(
        names, options.pop("dtypes", ["fp32"]), **{"grid": False, "seed": 0, "kind": "cpu"} | options, shapes=shapes
    )


@given(name=st.sampled_from(sorted(designs.SWEEPS)), seed=st.integers(0, 99), dtype=st.sampled_from(["fp32", "bf16"]))
def test_a_call_is_read_back_as_the_operator_that_it_was_made_of(name: str, seed: int, dtype: str) -> None:
    (what,) = design([name], 1, seed=seed, dtypes=[dtype])
    call = spelling.spelled(what)
    found = describe(call.name, call.dims, call.types, call.concrete)
    if name in NOT_READ_BACK:
        assert found is None
    else:
        # A product of batch 1 and all gradients have one spelling each.
        assert found == what


@pytest.mark.parametrize("name", sorted(designs.SWEEPS))
def test_every_sweep_has_a_schema_in_this_torch(name: str) -> None:
    for what in [*design([name], 3), *design([name], 3, grid=True)]:
        call = spelling.spelled(what)
        found = schema.resolve(call)
        assert schema.overload_of(found) is not None


def test_both_gradients_at_once_are_one_call() -> None:
    (what,) = design(["conv2d_dgrad"], 1)
    both = Described(what.family, what.name, what.dtype, what.integers, "bwd")
    call = spelling.spelled(both)
    assert describe(call.name, call.dims, call.types, call.concrete) == both


def test_the_nine_are_tianshus_and_its_own_names_are_understood() -> None:
    # Table 3 of the paper.
    paper = "Add,Sub,Mul,Realdiv,Matmul,Relu,Conv2D,Conv2DBackpropInput,Conv2DBackpropFilter"
    assert designs.sweep_names(paper) == designs.sweep_names("all") == list(designs.NINE)
    assert designs.sweep_names("gelu,all,add")[:2] == ["gelu", "add"]
    with pytest.raises(WhatifError, match=r"expected operations .*add.* got 'fft'"):
        designs.sweep_names("fft")


def test_dimensions_are_drawn_evenly_from_1_to_1024() -> None:
    rows = [dict(what.integers) for what in design(["mm"], 400)]
    drawn = np.array([[row[side] for side in "mnk"] for row in rows])
    assert drawn.min() >= 1
    assert drawn.max() <= 1024
    assert abs(drawn.mean() - 512.5) < 4 * 1024 / np.sqrt(12 * drawn.size)  # four standard errors of an even draw


def test_a_larger_design_begins_with_the_smaller_one_and_operators_take_turns() -> None:
    few, more = design(["add", "mm", "conv2d"], 4), design(["add", "mm", "conv2d"], 9)
    assert few == more[: len(few)]
    assert [what.name for what in few[:6]] == ["add", "mm", "conv2d"] * 2
    assert design(["mm"], 4, seed=1) != design(["mm"], 4, seed=2)


def test_sizes_are_the_same_in_every_format_and_stay_within_bounds() -> None:
    both = design(["conv2d"], 50, dtypes=["fp32", "bf16"])
    assert [what.integers for what in both[::2]] == [what.integers for what in both[1::2]]
    for what in both[::2]:
        ops = operators(what.family, dict(what.integers), name=what.name, dtype="fp32")
        flops, moved_bytes = work(ops)
        assert 0 < flops[0] <= designs.MOST_FLOPS["cpu"]
        assert moved_bytes[0] <= designs.MOST_BYTES["cpu"]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (Described("matmul", "mm", "fp8", (("batch", 1), ("m", 1), ("n", 1), ("k", 1))), "number format fp8"),
        (Described("elementwise", "frobnicate", "fp32", (("elements", 1), ("tensors", 1))), "frobnicate is not known"),
        (Described("elementwise", "add", "fp32", (("elements", 1), ("tensors", 2)), "update"), "phase update"),
        (Described("other", "aten::sum", "fp32", (), layout="not JSON"), "inputs not recorded"),
        (Described("collective", "all_reduce", "fp32", (("bytes", 8), ("ranks", 2), ("nodes", 2))), "several hosts"),
    ],
)
def test_what_has_no_call_says_why(what: Described, reason: str) -> None:
    with pytest.raises(calls.NotReplayable, match=reason):
        spelling.spelled(what)


def test_collectives_have_whole_parts_and_count_the_whole_buffer() -> None:
    found = collectives.collective_design(["all_gather", "all_reduce"], (2, 3), (1000, 65536), ("fp32", "bf16"))
    assert len(found) == 2 * 2 * 2 * 2
    for what in found:
        sizes = dict(what.integers)
        element_bytes = 4 if what.dtype == "fp32" else 2
        assert sizes["bytes"] % (sizes["ranks"] * element_bytes) == 0
        assert spelling.spelled(what).dims == [[sizes["bytes"] // element_bytes]]
    with pytest.raises(WhatifError, match=r"expected collectives .* got 'gather'"):
        collectives.collective_design(["gather"], (2,), (8,), ("fp32",))


def test_a_recordings_operators_in_other_formats(own_traces: Path) -> None:
    recorded, _ = from_recording.recorded_questions(own_traces / "transformer_cpu.json.gz", ())
    halved, _ = from_recording.recorded_questions(own_traces / "transformer_cpu.json.gz", ("bf16",))
    tf32, _ = from_recording.recorded_questions(own_traces / "transformer_cpu.json.gz", ("tf32",))
    assert len(recorded) > 20
    families = {question.operator.family for question in recorded}
    assert {"matmul", "elementwise", "normalization", "other"} <= families
    products = [question.operator for question in recorded if question.operator.family == "matmul"]
    assert {what.dtype for what in products} == {"fp32"}
    assert {q.operator.integers for q in halved if q.operator.family == "matmul"} == {
        what.integers for what in products
    }
    assert {q.operator.dtype for q in halved if q.operator.family == "matmul"} == {"bf16"}
    # A GPU multiplies in TF32 and does nothing else in it.
    assert {q.operator.family for q in tf32} == {"matmul"}
    # The mask of a choice and the weights of a normalization keep their types.
    norm = next(q.call for q in halved if q.call.name == "aten::native_layer_norm")
    assert norm.types[0] == "c10::BFloat16"
    assert norm.types[2] == "float"


@pytest.mark.parametrize("data", [b"", b"[1, 2", b"[]", b"\x1f\x8bdamaged", b'{"traceEvents": []}', b"\xff\xfe"])
def test_a_file_that_is_no_recording_gets_one_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(WhatifError, match="expected a recording") as caught:
        from_recording.recorded_questions(path, ())
    assert "\n" not in str(caught.value)


def test_a_recording_that_means_harm_runs_nothing(tmp_path: Path) -> None:
    """Names and values of a trace are data: what fits no schema is counted, whatever it says."""
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 100, "pid": 1, "tid": 1}
    evil = [
        ("aten::__import__", [[1]], ["float"], [""]),
        ("aten::add", [[2], [2], []], ["float", "float", "Scalar"], ["", "", "__import__('os')"]),
        ("aten::mm", [[2, 2], [2, 2]], ["float", "evil"], ["", ""]),
        ("aten::mm", [[10**18, 10**18], [10**18, 2]], ["float", "float"], ["", ""]),
    ]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": 10 * place, "dur": 5, "pid": 1, "tid": 1,
         "args": {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete}}
        for place, (name, dims, types, concrete) in enumerate(evil)
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [step, *events]}))
    questions, left_out = from_recording.recorded_questions(path, ("fp16",))
    assert sum(left_out.values()) == 3
    # The absurd product has a call; the process that would run it has no room for it.
    assert [question.call.name for question in questions] == ["aten::mm"]


@pytest.mark.parametrize("name", sorted(designs.SWEEPS))
def test_an_operator_is_called_as_programs_call_it_and_gives_the_same(name: str) -> None:
    replay = need("whatif.instrumentation.operators.replay")
    what = Described(*_small(name))
    call = spelling.spelled(what)
    found = schema.resolve(call)
    run, _ = replay._bind(found, torch.device("cpu"), with_graph=False)
    overload = schema.overload_of(found)
    # torch has no other name for a convolution's gradients: autograd calls them from inside.
    assert (run.func is overload) == (what.phase != "fwd")
    if not found.op.endswith("_"):
        given, wanted = run(), overload(*run.args, **run.keywords)
        pairs = zip(given, wanted, strict=True) if isinstance(given, tuple) else [(given, wanted)]
        assert all(one is other is None or torch.equal(one, other) for one, other in pairs)


def _small(name: str) -> tuple[Any, ...]:
    sweep = designs.SWEEPS[name]
    sizes = dict(design([name], 1)[0].integers)
    small = {
        key: min(value, 6) if key not in ("head_size", "causal", "tensors") else value for key, value in sizes.items()
    }
    return sweep.family, sweep.name, "fp32", tuple(small.items()), sweep.phase
