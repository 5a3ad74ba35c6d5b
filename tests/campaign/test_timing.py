"""Timing in turn, by a made-up clock: which block runs when, what is kept, and when it ends."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import need

need("torch")
timing = need("benchmarks.campaign.timing")
records = need("benchmarks.campaign.records")
variants = need("benchmarks.campaign.variants")
gpu_machine = need("tests.instrumentation.gpu_machine")

CLOCK = "cpu_samples_ms"
SLOW_AND_FAST_MS = (50.0, 40.0)


class Machine:
    """A clock, ms, that only training steps advance; `pace` gives a step's slowdown over nominal at a given time."""

    def __init__(self, pace: Callable[[float], float]) -> None:
        self.pace, self.now_ms = pace, 0.0
        self.turns: list[str] = []


class Side:
    """Steps of a nominal time; notes each turn."""

    def __init__(self, machine: Machine, name: str, step_ms: float) -> None:
        self.machine, self.name, self.step_ms = machine, name, step_ms
        self.running = False

    def step(self) -> None:
        assert self.running
        self.machine.now_ms += self.step_ms * self.machine.pace(self.machine.now_ms)

    def resume(self) -> None:
        self.running = True
        self.machine.turns.append(self.name)

    def pause(self) -> None:
        self.running = False


def use_clock(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    class Timer:
        def __init__(self, device: Any) -> None:
            self.ends = [machine.now_ms]

        def mark(self) -> None:
            self.ends.append(machine.now_ms)

        def times_ms(self) -> tuple[list[float], list[float]]:
            times = [end - begin for begin, end in itertools.pairwise(self.ends)]
            return [2 * ms for ms in times], times  # half of the wall time is the program's

        def load(self) -> dict[str, float]:
            return {"steps": len(self.ends) - 1, "involuntary_switches": 7}

    monkeypatch.setattr(timing, "StepTimer", Timer)


def timed_in_turn(monkeypatch: pytest.MonkeyPatch, pace: Callable[[float], float]) -> tuple[Any, Any, Machine]:
    machine = Machine(pace)
    use_clock(monkeypatch, machine)
    sides = [Side(machine, name, ms) for name, ms in zip("AB", SLOW_AND_FAST_MS, strict=True)]
    baseline, changed = timing.time_in_turn(*sides, "cpu", clock=CLOCK, goal_pct=3.0)
    return baseline, changed, machine


def test_a_quiet_machine_is_left_after_the_fewest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, changed, machine = timed_in_turn(monkeypatch, lambda now_ms: 1.0)
    assert len(baseline) == len(changed) == timing.FEWEST_ROUNDS
    # A first step and the warm-up of each, then the rounds.
    assert "".join(machine.turns) == "AABB" + "ABBA" * timing.FEWEST_ROUNDS
    for rounds, step_ms in ((baseline, 50.0), (changed, 40.0)):
        assert [row["first_step_ms"] for row in rounds if "first_step_ms" in row] == [2 * step_ms]
        for row in rounds:
            assert [len(row[key]) for key in ("samples_ms", "cpu_samples_ms", "loads")] == [2, 2, 2]
            assert {ms for block in row["cpu_samples_ms"] for ms in block} == {step_ms}
            assert {ms for block in row["samples_ms"] for ms in block} == {2 * step_ms}
            assert [load["steps"] for load in row["loads"]] == [len(block) for block in row["samples_ms"]]
            assert all(load["involuntary_switches"] == 7 for load in row["loads"])


def test_a_pace_that_drifts_does_not_reach_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a minute the machine becomes twice as slow: rounds differ, the two sides of each do not."""
    baseline, changed, _ = timed_in_turn(monkeypatch, lambda now_ms: 1 + now_ms / 60e3)
    step = records.step_time_of(changed, CLOCK)
    assert step.median_ms > 1.05 * SLOW_AND_FAST_MS[1]
    truth = records.paced(step, records.step_time_of(baseline, CLOCK))
    assert truth.step.median_ms / records.step_time_of(baseline, CLOCK).median_ms == pytest.approx(0.8, rel=0.005)
    assert truth.spread_pct < 1.0


class Card(gpu_machine.FakeGpu):
    """A GPU that says at each question whether something slows it down."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__()
        self.reasons = iter(reasons)

    def smi(self, *fields: str) -> str:
        known = super().smi(*fields[:-1])
        return f"{known.strip()}, {next(self.reasons)}\n" if "event_reasons" in fields[-1] else super().smi(*fields)


@pytest.mark.parametrize(
    ("reasons", "turns", "kept"),
    [
        (["0x0"] * 2, 1, []),
        (["0x4"] * 2, 1, []),  # the power cap: large products reach it on every card
        (["0x0", "0x40", "0x0", "0x0"], 2, []),
        (
            ["0x60", "0x80"] * 3,
            3,
            ["thermal slowdown by the driver", "thermal slowdown by the hardware", "power brake"],
        ),
        (["[N/A]"] * 2, 1, []),
    ],
)
def test_a_block_of_a_gpu_that_is_slowed_down_is_repeated_then_marked(
    reasons: list[str], turns: int, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine.install(monkeypatch, Card(reasons), gpu_machine.FakeKineto())
    machine = Machine(lambda now_ms: 1.0)
    use_clock(monkeypatch, machine)
    block = timing._block(Side(machine, "A", 5.0), 3, "cuda")
    assert len(machine.turns) == turns
    assert block.wall_ms == [10.0] * 3
    assert block.clocks["throttled"] == kept
    assert block.clocks["before"]["sm_mhz"] == block.clocks["after"]["sm_mhz"] == 1980
    found = records.summarize([timing._round([block])] * 2)
    assert found.get("throttled", {}) == dict.fromkeys(kept, 2)


def test_noise_costs_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pace that swings with a period near that of a block makes the rounds differ: more are needed."""
    baseline, changed, _ = timed_in_turn(monkeypatch, lambda now_ms: 1 + 0.15 * math.sin(now_ms / 170))
    assert timing.FEWEST_ROUNDS < len(changed) < 200
    assert records.spread_pct(baseline, changed, CLOCK) < 3.0
    # What is left out last had not been enough.
    assert records.spread_pct(baseline[:-1], changed[:-1], CLOCK) >= 3.0


def test_gives_the_goal_up_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_S", 0.0)
    baseline, changed, _ = timed_in_turn(monkeypatch, lambda now_ms: 1 + 0.15 * math.sin(now_ms / 170))
    assert len(changed) == timing.FEWEST_ROUNDS
    assert records.spread_pct(baseline, changed, CLOCK) >= 3.0


@pytest.mark.parametrize(
    ("name", "beside", "clock"),
    [
        ("resnet50--adam_fused", "resnet50--adam_for", CLOCK),
        ("gnmt--adam_fused", "gnmt--baseline", CLOCK),
        ("densenet121--bn_eval", "densenet121--baseline", CLOCK),
        ("gnmt--loader_2", "gnmt--loader_0", "samples_ms"),
        ("gnmt--baseline", None, ""),
        ("gnmt--loader_0", None, ""),
        ("gnmt--offload", None, ""),
    ],
)
def test_a_run_takes_turns_with_the_baseline_that_what_ifs_lead_from(name: str, beside: str | None, clock: str) -> None:
    jobs = {job.name: job for job in variants.all_jobs(full=False, device="cpu")}
    found = variants.baseline_of(jobs[name], jobs.values())
    assert (found and found.name) == beside
    if found:
        assert variants.pair_clock(found.options, jobs[name].options) == clock
