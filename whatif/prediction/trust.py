"""The trust in answers from a recording: the findings in it, and its replay error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from whatif.graph.types import Finding, Severity
from whatif.prediction.baseline import Baseline
from whatif.simulation.steps import CLOCK_NOUNS

# Above this share of the span, unexplained waiting makes every prediction doubtful.
DOUBTFUL_WAIT_PCT = 2.0
# The largest replay error that recordings should have (docs/accuracy.md), and the one beyond which the simulated
# program is not the recorded one: most what-ifs promise a change of a third.
DOUBTFUL_REPLAY_PCT, VOID_REPLAY_PCT = 3.0, 25.0
# The recorded over the untraced step beyond which the recording shows a slower program than the user's.
DOUBTFUL_SLOWDOWN = 1.2
# A larger correction of the CPU's pace means another program.
DOUBTFUL_PACE = 1.2

# The limit for the error of a prediction, by the clock of the step, percent (docs/accuracy.md).
BOUND_PCT = {"gpu": 10.0, "cpu": 12.0}

REPLAY, WAIT, PROFILER = "replay against the recording", "unexplained wait", "cost of the profiler"
LEVELS = {Severity.NOTE: "good", Severity.DOUBT: "doubtful", Severity.VOIDS: "void"}


class Trust(Struct, frozen=True):
    """The verdict on a recording, and its findings, the file's early end first."""

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]  # all checks performed
    meets: str  # the replay error in words

    @property
    def severity(self) -> Severity:
        """The worst severity of the findings."""
        return max((finding.severity for finding in self.findings), default=Severity.NOTE)

    @property
    def level(self) -> str:
        """Return "good", "doubtful" or "void"."""
        return LEVELS[self.severity]

    @property
    def worst(self) -> Finding | None:
        """The first of the worst findings; None if none is worse than a note."""
        if self.severity == Severity.NOTE:
            return None
        return next(finding for finding in self.findings if finding.severity == self.severity)

    @property
    def doubts(self) -> tuple[str, ...]:
        """The sentences of all findings that are worse than a note."""
        return tuple(finding.sentence for finding in self.findings if finding.severity > Severity.NOTE)

    def refusal(self, path: str) -> str | None:
        """Return why answers from the recording at ``path`` are refused, one sentence; None if they are not."""
        worst = self.worst
        if worst is None or worst.severity != Severity.VOIDS:
            return None
        return f"{path}: {worst.sentence}; {worst.remedy}, or answer anyway with --force."

    def __str__(self) -> str:
        """Return the verdict in one sentence."""
        worst = self.worst
        if worst is None:
            return f"No problems found in the checks below: {self.meets}."
        others = len(self.doubts) - 1
        more = f" (and {others} more, below)" if others else ""
        start = "Answers are void" if self.severity == Severity.VOIDS else "Handle with care"
        return f"{start}: {worst.sentence}{more}."

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {
            "level": self.level,
            "sentence": str(self),
            "findings": [
                {
                    "check": finding.check,
                    "severity": finding.severity.name.lower(),
                    "count": finding.count,
                    "sentence": finding.sentence,
                    "remedy": finding.remedy,
                }
                for finding in self.findings
            ],
            "checks": list(self.checks),
        }

    @staticmethod
    def together(trusts: Sequence[Trust], names: Sequence[str]) -> Trust:
        """Return the trust in an answer from several recordings; ``names`` are the recordings' names in findings."""
        found = [
            replace(finding, sentence=f"{name}: {finding.sentence}")
            for name, trust in zip(names, trusts, strict=True)
            for finding in trust.findings
        ]
        checks = dict.fromkeys(check for trust in trusts for check in trust.checks)
        meets = "; ".join(f"{name}: {trust.meets}" for name, trust in zip(names, trusts, strict=True))
        return Trust(tuple(found), tuple(checks), meets)


def trust_of(baseline: Baseline) -> Trust:
    """Return how far answers from a baseline's recording can be trusted."""
    info, noun = baseline.graph.info, CLOCK_NOUNS[baseline.clock]
    error_pct, wait_pct = baseline.replay_error_pct, baseline.unexplained_wait_pct
    found = list(info.findings)
    if abs(error_pct) > DOUBTFUL_REPLAY_PCT:
        severity = Severity.VOIDS if abs(error_pct) > VOID_REPLAY_PCT else Severity.DOUBT
        missed = f"the replay misses the recorded {noun} by {error_pct:+z.1f} %"
        found.append(Finding(REPLAY, severity, 1, missed, "see the other findings, and `whatif info`"))
    if wait_pct > DOUBTFUL_WAIT_PCT:
        # Damage explains it before other programs do.
        damaged = any(finding.severity > Severity.NOTE for finding in info.findings)
        why = "" if damaged else " (other ranks, other processes)"
        found.append(
            Finding(
                WAIT, Severity.DOUBT, 1,
                f"{wait_pct:.0f} % of the span is waiting that nothing in the recording explains{why}; the range "
                "allows for its absence",
                "record all ranks, and all threads",
            )
        )  # fmt: skip
    found += _profiler(baseline)
    meets = f"the replay matches the recorded {noun} within {max(abs(error_pct), 0.01):.2f} %"
    if not info.is_recorded:
        meets = f"the step is {info.made}, not recorded"
    return Trust(tuple(found), (*info.checks, REPLAY, WAIT, PROFILER), meets)


def _profiler(baseline: Baseline) -> list[Finding]:
    """Findings that the replay cannot show, as it reproduces the recording, not the program without the profiler."""
    info, calibration = baseline.graph.info, baseline.calibration
    remark, severity = "", Severity.NOTE  # a correction that ranges include
    if calibration and calibration.met:
        if not 1 / DOUBTFUL_PACE <= calibration.own_pace <= DOUBTFUL_PACE:
            aside = ", beside what other programs took" if calibration.own_pace != calibration.pace else ""
            remark = f"to match the step without the profiler, CPU work is scaled by {calibration.own_pace:.2f}{aside}"
    elif info.untraced_step_ns and baseline.clock != "span":
        times = baseline.measured_ns / info.untraced_step_ns
        if times > DOUBTFUL_SLOWDOWN:
            remark, severity = f"the profiler made the step {times:.1f} times as long", Severity.DOUBT
    return [Finding(PROFILER, severity, 1, remark, "record with fewer options of the profiler")] if remark else []
