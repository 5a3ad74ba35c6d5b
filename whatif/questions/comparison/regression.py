"""Whether a recording is slower than its baseline by more than is allowed and by more than noise: a gate for CI."""

from __future__ import annotations

from enum import Enum
from typing import Any

from msgspec import Struct

from whatif.prediction.trust import trust_of
from whatif.questions.comparison.causes import Cause
from whatif.questions.comparison.compare import Comparison, compare
from whatif.questions.comparison.part_changes import PartChange
from whatif.questions.comparison.two_recordings import TwoRecordings

# How many of the parts that grew are named.
NAMED_PARTS = 3
# If the same calls slowed down by this share of the step's slowdown, the machine is suspected: our choice.
MACHINE_SHARE = 0.5


class Status(Enum):
    """The result of the gate. Only ``OK`` lets a change pass."""

    OK = "ok"
    REGRESSED = "regressed"
    NOT_COMPARABLE = "not comparable"


class Regression(Struct, frozen=True):
    """The verdict on two recordings, and the parts of the step that grew most."""

    two: TwoRecordings
    allowed_pct: float
    status: Status
    verdict: str
    causes: tuple[Cause, ...]  # of the critical path, the largest change first
    parts_are: str  # layers, or kernels or operators if no layers are known
    grown: tuple[PartChange, ...]
    lines: tuple[PartChange, ...]  # that grew most, if both traces have lines
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON object with the keys that scripts rely on."""
        two = self.two
        return {
            "status": self.status.value,
            "verdict": self.verdict,
            "baseline": {"trace": two.before.graph.info.path, **two.measured[0].to_dict()},
            "changed": {"trace": two.after.graph.info.path, **two.measured[1].to_dict()},
            "step_clock": two.clock,
            "change_pct": two.change_pct,
            "allowed_pct": self.allowed_pct,
            "noise_pct": two.noise_pct,
            "causes": [cause.to_dict() for cause in self.causes],
            "differences": [item.to_dict() for item in two.differences],
            "lines": [part.to_dict("line") for part in self.lines],
            "grown": [part.to_dict(self.parts_are.removesuffix("s")) for part in self.grown],
            "warnings": list(self.warnings),
        }


def check_regression(two: TwoRecordings, allowed_pct: float) -> Regression:
    """Judge recording B against its baseline A.

    It regressed if its measured step is longer by more than ``allowed_pct`` percent and by more than the noise of
    the two, if known. Recordings of another device, model, batch or input are never compared.
    """
    blocking = [str(item) for item in two.differences if item.blocks]
    if blocking:
        verdict = f"not comparable: {'; '.join(blocking)}; record a new baseline of what is to be compared"
        return Regression(two, allowed_pct, Status.NOT_COMPARABLE, verdict, (), "", (), (), ())
    found = compare(two, describe=False)
    regressed = two.change_pct > allowed_pct and not two.within_noise
    status = Status.REGRESSED if regressed else Status.OK
    if found.layers:
        parts_are, parts = "layers", found.layers
    else:
        parts_are, parts = "kernels" if two.on_gpu else "operators", found.operations
    verdict = _verdict(two, allowed_pct, status)
    if regressed and found.cause is not None:
        verdict = f"{verdict}; cause: {found.cause}"
    return Regression(
        two, allowed_pct, status, verdict, found.causes, parts_are, _grown(parts), _grown(found.lines),
        (*_doubts(found, allowed_pct), *two.remarks, *_damage(two)),
    )  # fmt: skip


def _grown(parts: tuple[PartChange, ...]) -> tuple[PartChange, ...]:
    """The parts whose work grew most."""
    grown = sorted((part for part in parts if part.work_change_ms > 0), key=lambda part: -part.work_change_ms)
    return tuple(grown[:NAMED_PARTS])


def _verdict(two: TwoRecordings, allowed_pct: float, status: Status) -> str:
    before_ms, after_ms = two.measured[0].ms, two.measured[1].ms
    digits = 2 if before_ms >= 10 else 4
    step = "span" if two.clock == "span" else "step"
    noise = "noise not known" if two.noise_pct is None else f"noise {two.noise_pct:.1f} %"
    change = (
        f"{status.value}: a {step} takes {before_ms:,.{digits}f} → {after_ms:,.{digits}f} ms, {two.change_pct:+z.1f} % "
        f"(allowed +{allowed_pct:g} %, {noise})"
    )
    if status is Status.OK and two.change_pct > allowed_pct:
        change += ": more than allowed, but within the noise"
    return "; ".join((change, *two.not_recorded))


def _damage(two: TwoRecordings) -> list[str]:
    """Doubts about either of the recordings."""
    return [f"{name}: {doubt}" for name, side in zip("AB", (two.before, two.after), strict=True)
            for doubt in trust_of(side).doubts]  # fmt: skip


def _doubts(found: Comparison, allowed_pct: float) -> list[str]:
    two, doubts = found.two, []
    pace_pct = 100.0 * (found.pace - 1) if found.pace is not None else 0.0
    # A uniform slowdown is a slower machine more often than a slower program.
    if two.change_pct > allowed_pct and pace_pct > max(allowed_pct, two.change_pct * MACHINE_SHARE):
        doubts.append(
            f"the same calls take {1 + pace_pct / 100:.2f} times as long as in the baseline (median): the machine may "
            "have been slower, and not the program; record both again, one right after the other"
        )
    if two.noise_pct is None:
        doubts.append("the noise is not known, so the allowed change alone decides; record more steps")
    elif two.noise_pct > allowed_pct:
        doubts.append(
            f"the noise of the two recordings ({two.noise_pct:.1f} %) hides changes above the allowed "
            f"{allowed_pct:g} %; record more steps, or on a quieter machine"
        )
    return doubts
