"""Visits, the interval of a time, the pace, and the journal that survives whatever ends a run: nothing is measured."""

import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.graph.described import Described
from whatif.opdb.provenance import Device, Environment, Method, Origin
from whatif.runtime.errors import WhatifError

torch = need("torch")
visits = need("whatif.instrumentation.profile_ops.visits")
journals = need("whatif.instrumentation.profile_ops.journal")
pace = need("whatif.instrumentation.profile_ops.pace")
timing = need("whatif.instrumentation.operators.timing")

ADD = Described("elementwise", "add", "fp32", (("elements", 8), ("tensors", 2)))
MM = Described("matmul", "mm", "bf16", (("batch", 1), ("m", 2), ("n", 3), ("k", 4)))
ORIGIN = Origin(
    device=Device(name="cpu:Test x1"),
    environment=Environment(framework="pytorch"),
    method=Method(name="chain_difference"),
)


def test_the_difference_of_two_chains_cancels_what_is_paid_once() -> None:
    """A clock that counts: 1,000 ns to begin and end, 5,000 ns a call."""
    called = 0

    def call() -> None:
        nonlocal called
        called += 1

    def clock(work: Any) -> float:
        before = called
        work()
        return 1000.0 + 5000.0 * (called - before)

    assert timing.Chain([call], clock, estimate_ns=5000.0).by_difference() == 5000.0
    # What takes as long as a chain is called once, and the clock's own cost is in it.
    assert timing.Chain([call], clock, estimate_ns=5e6).by_difference() == pytest.approx(5000.0)


def test_no_call_is_timed_that_touches_the_memory_of_its_result_for_the_first_time() -> None:
    """Results of three sets of inputs live on while a fourth is made: the first four calls are not timed."""
    called: list[int] = []
    timed: list[int] = []

    def clock(work: Any) -> float:
        before = len(called)
        work()
        timed.extend(called[before:])
        return 1.0

    chain = timing.Chain([partial(called.append, number) for number in range(3)], clock, estimate_ns=5e6)
    chain.by_difference()
    assert called == [0, 1, 2, 0, 1]
    assert timed == [1]


def test_the_interval_is_students() -> None:
    """Three visits with medians 9, 10 and 11: s = 1, t(2; 90 %) = 2.920, 2.920 / sqrt(3) / 10 = 16.9 %."""
    found = visits.Visited([visits.Visit([1.0, middle, 99.0], []) for middle in (9.0, 10.0, 11.0)])
    assert found.half_width == pytest.approx(2.920 / math.sqrt(3) / 10)
    assert found.is_settled(0.17)
    assert not found.is_settled(0.16)
    assert not visits.Visited(found.visits[:2]).is_settled(1e9)
    assert visits.Visited(skipped="too large").is_settled(0.0)


def test_a_time_is_reported_at_the_machines_fastest_pace() -> None:
    """The machine was twice as slow in the second visit, and so was the operator."""
    found = visits.Visited([visits.Visit([10.0, 12.0, 14.0], [4.0] * 3), visits.Visit([20.0, 24.0, 28.0], [8.0] * 3)])
    timed = found.timed(ADD, pace_ns=visits.fastest_pace_ns([found]))
    assert timed.t_s == pytest.approx(12e-9)
    assert timed.repeats == 6
    assert timed.t_low_s == pytest.approx(10e-9)
    assert timed.t_high_s == pytest.approx(14e-9)
    # The same at half of that pace; and for an operator that waits for memory half of the time.
    assert found.timed(ADD, pace_ns=8.0).t_s == pytest.approx(24e-9)
    found.exponent = pace.STREAMS
    assert found.timed(ADD, pace_ns=8.0).t_s == pytest.approx((14 * math.sqrt(2) + 20) / 2 * 1e-9)


def test_what_streams_through_memory_goes_less_with_the_pace() -> None:
    large = Described("elementwise", "add", "fp32", (("elements", 1 << 20), ("tensors", 2)))
    product = Described("matmul", "mm", "fp32", (("batch", 1), ("m", 2048), ("n", 2048), ("k", 2048)))
    anything = Described("other", "aten::cumsum", "fp32", (), layout="[]")
    assert [pace.sensitivity(what) for what in (ADD, large, product, anything)] == [1.0, 0.5, 1.0, 1.0]


def test_times_without_a_pace_are_reported_as_they_are() -> None:
    found = visits.Visited([visits.Visit([10.0, 12.0, 14.0], [])])
    assert found.timed(ADD, pace_ns=visits.fastest_pace_ns([found])).t_s == pytest.approx(12e-9)


def test_a_difference_below_zero_is_no_time() -> None:
    assert visits.Visited([visits.Visit([-3.0, -1.0, 2.0], [])]).timed(ADD, 1.0) is None
    # One round that was disturbed is no harm.
    timed = visits.Visited([visits.Visit([-300.0, 10.0, 11.0], [])]).timed(ADD, 1.0)
    assert timed.t_s == pytest.approx(10e-9)
    assert timed.t_low_s == 0.0


def test_the_fastest_pace_is_remembered_by_machine(tmp_path: Path) -> None:
    assert pace.fastest(tmp_path, "this", 5.0) == 5.0
    assert pace.fastest(tmp_path, "this", 7.0) == 5.0
    assert pace.fastest(tmp_path, "that", 7.0) == 7.0
    assert pace.fastest(tmp_path, "this", 4.0) == 4.0


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"this": "x"}', '{"this": -1, "that": NaN}', "\x00"])
def test_a_damaged_pace_is_taken_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / pace.FILE).write_text(text)
    assert pace.fastest(tmp_path, "this", 5.0) == 5.0
    assert json.loads((tmp_path / pace.FILE).read_text())["this"] == 5.0


def test_the_pace_is_that_of_the_work_itself() -> None:
    """Twice the time where the clock says so: the median of as many samples as a tenth of the operator's time holds."""
    taken: list[float] = []

    def clock(work: Any) -> float:
        work()
        taken.append(100.0 + len(taken))
        return taken[-1]

    machine = pace.Pace(clock)
    before = len(taken)
    assert machine.sample() == 100.0 + before
    assert machine.sample(beside_ns=50 * machine._once_ns) == statistics.median(taken[-5:])


def written(folder: Path) -> Path:
    with journals.Journal(folder, ORIGIN) as journal:
        journal.keep(ADD, {"ns": [1.0, 2.0], "pace_ns": [3.0, 4.0]})
        journal.keep(MM, {"skipped": "refused by torch (RuntimeError)"})
        journal.keep(ADD, {"ns": [5.0]})
        return Path(journal.path)


def test_a_journal_is_read_back_and_gone_when_it_is_done_with(tmp_path: Path) -> None:
    path = written(tmp_path)
    with journals.Journal(tmp_path, ORIGIN) as journal:
        assert journal.found[ADD].visits == [visits.Visit([1.0, 2.0], [3.0, 4.0]), visits.Visit([5.0], [])]
        assert journal.found[MM].skipped == "refused by torch (RuntimeError)"
        assert journal.damaged_lines == 0
        journal.remove()
    assert not path.exists()
    assert not list(tmp_path.iterdir())


def test_a_journal_that_was_cut_anywhere_loses_the_cut_line_alone(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    path = next(tmp_path.rglob("*.jsonl"))
    head = whole.index(b"\n") + 1
    for length in range(head, len(whole)):
        path.write_bytes(whole[:length])
        lines = whole[head:length].count(b"\n")
        with journals.Journal(tmp_path, ORIGIN) as journal:
            kept = sum(len(one.visits) + (one.skipped is not None) for one in journal.found.values())
            assert lines <= kept <= lines + 1  # a line that lacks its end alone is whole
            assert journal.damaged_lines <= 1
            journal.keep(ADD, {"ns": [7.0]})
        with journals.Journal(tmp_path, ORIGIN) as journal:
            assert journal.found[ADD].visits[-1].ns == [7.0]


@pytest.mark.parametrize(
    "line",
    [
        b"not JSON",
        b"\xff\xfe\x00",
        b"[]",
        b'{"op": ["elementwise", "add", "fp32", "fwd", "", {"elements": 8, "tensors": 2}]}',
        b'{"op": ["elementwise", "add", "fp32", "fwd", "", {"elements": 8}], "ns": [1.0]}',
        b'{"op": ["evil", "add", "fp32", "fwd", "", {}], "ns": [1.0]}',
        b'{"op": ["elementwise", "add", "fp32", "fwd", "", {"elements": 8, "tensors": 2}], "ns": ["1"]}',
        b'{"op": ["elementwise", "add", "fp32", "fwd", "", {"elements": 8, "tensors": 2}], "ns": [1e999]}',
        b'{"op": ["elementwise", "add", "fp32", "fwd", "", {"elements": 8, "tensors": 2}], "ns": [1], "pace_ns": [0]}',
        b'{"op": ["elementwise", "add", "fp32", "fwd", "", {"elements": 8, "tensors": 2}], "ns": [1], "pace_ns":[1,2]}',
        b"[" * 90_000,
        b'{"op": ["other", "' + b"x" * 200_000 + b'", "fp32", "fwd", "", {}], "ns": [1.0]}',
    ],
)
def test_a_damaged_line_costs_itself_alone(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with journals.Journal(tmp_path, ORIGIN) as journal:
        assert journal.damaged_lines == 1
        assert len(journal.found[ADD].visits) == 2


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(b'{"whatif_opdb_journal": 2}\n')
    with pytest.raises(WhatifError, match=r"expected the journal of this device"), journals.Journal(tmp_path, ORIGIN):
        pass


def test_two_runs_at_once_are_advised_to_wait(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with (
        journals.Journal(tmp_path, ORIGIN),
        pytest.raises(WhatifError, match="expected no other run measuring"),
        journals.Journal(tmp_path, ORIGIN),
    ):
        pass
