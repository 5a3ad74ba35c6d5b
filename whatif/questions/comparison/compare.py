"""Two recordings, part by part: what changed in time, count and kind, and which what-if describes the change."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from whatif.ingest.lines import Lines, lines_if_any
from whatif.prediction.baseline import Baseline
from whatif.questions.comparison.causes import Cause, cause_of, causes
from whatif.questions.comparison.describe_change import Description, describe_change
from whatif.questions.comparison.differences import without_wrappers
from whatif.questions.comparison.part_changes import PartChange, part_changes
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.questions.explain import Explanation, Part, explain, parts_by
from whatif.runtime.progress import Progress

# More parts than any recording has: all of them are compared.
ALL_PARTS = 10**9


class Comparison(Struct, frozen=True):
    """Recordings A and B side by side; parts with the largest change of work first."""

    two: TwoRecordings
    explained: tuple[Explanation, Explanation]
    causes: tuple[Cause, ...]  # of the critical path, the largest change first
    phases: tuple[PartChange, ...]
    layers: tuple[PartChange, ...]
    lines: tuple[PartChange, ...]  # of the source; none unless both traces hold stacks
    kernels: tuple[PartChange, ...]  # by family: kernels, or operators if there is no GPU
    operations: tuple[PartChange, ...]  # by name: likewise
    pace: float | None  # time of the same call in B over that in A, the median weighted by time
    description: Description | None  # None if no what-ifs were tried

    @property
    def headline(self) -> str:
        """Return the change of the measured step in one sentence."""
        two = self.two
        before_ms, after_ms = two.measured[0].ms, two.measured[1].ms
        step = "span" if two.clock == "span" else "step"
        digits = 2 if before_ms >= 10 else 4
        change = f"{before_ms:,.{digits}f} → {after_ms:,.{digits}f} ms a {step}, {two.change_pct:+z.1f} %"
        if two.noise_ms is None:
            return f"{change}; noise not known: one {step}, or no spread recorded"
        side = "within" if two.within_noise else "beyond"
        return f"{change}, {side} the noise ({two.noise_pct:.1f} %)"

    @property
    def cause(self) -> Cause | None:
        """Return the cause of the step's change, if that is more than noise and one cause explains it."""
        return None if self.two.within_noise else cause_of(self.causes, self.two.change_ms)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before trusting the numbers: of the two together, then of each recording alone."""
        blocking = [str(item) for item in self.two.differences if item.blocks]
        found = [f"the work or the machines differ: {'; '.join(blocking)}"] if blocking else []
        both = set(self.explained[0].warnings) & set(self.explained[1].warnings)
        found += [*self.two.remarks, *(f"A and B: {text}" for text in self.explained[0].warnings if text in both)]
        for name, explanation in zip("AB", self.explained, strict=True):
            found += [f"{name}: {text}" for text in explanation.warnings if text not in both]
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object with the keys that scripts rely on."""
        two = self.two
        sides = zip(("a", "b"), (two.before, two.after), two.measured, self.explained, strict=True)
        return {
            **{
                side: {
                    "trace": baseline.graph.info.path,
                    "gpu": baseline.graph.info.gpu,
                    "steps": baseline.graph.info.n_steps,
                    **measured.to_dict(),
                    "baseline_ms": baseline.step_ms,
                    "replay_error_pct": baseline.known_error_pct,
                    "breakdown": explanation.breakdown.to_dict(),
                    "verdict": explanation.verdict,
                }
                for side, baseline, measured, explanation in sides
            },
            "step_clock": two.clock,
            "change_ms": two.change_ms,
            "change_pct": two.change_pct,
            "noise_pct": two.noise_pct,
            "within_noise": two.within_noise if two.noise_pct is not None else None,
            "pace": self.pace,
            "differences": [item.to_dict() for item in two.differences],
            "what_if": self.description.to_dict() if self.description else None,
            "cause": self.cause.to_dict() if self.cause else None,
            "causes": [cause.to_dict() for cause in self.causes],
            "phases": [part.to_dict("phase") for part in self.phases],
            "layers": [part.to_dict("layer") for part in self.layers],
            "lines": [part.to_dict("line") for part in self.lines],
            "kernels": [part.to_dict("family") for part in self.kernels],
            "operations": [part.to_dict("name") for part in self.operations],
            "warnings": list(self.warnings),
        }


def compare(two: TwoRecordings, *, describe: bool = True, progress: Progress | None = None) -> Comparison:
    """Compare two recordings; with ``describe`` also try which what-if leads from one to the other.

    ``progress(done, total)`` counts the what-ifs that were tried.
    """
    explained_a, explained_b = explain(two.before, ALL_PARTS), explain(two.after, ALL_PARTS)
    lines = _lines(two)
    return Comparison(
        two=two,
        explained=(explained_a, explained_b),
        causes=causes((explained_a, explained_b), lines),
        phases=part_changes(explained_a.phases, explained_b.phases),
        # Names that differ only by wrappers of the whole model are the same.
        layers=part_changes(explained_a.all_layers, explained_b.all_layers, without_wrappers),
        # An edit moves lines: the remaining ones are matched by file and function.
        lines=()
        if lines is None
        else part_changes(_line_parts(two.before, lines[0]), _line_parts(two.after, lines[1]), _without_numbers),
        kernels=part_changes(explained_a.kernels, explained_b.kernels),
        operations=part_changes(explained_a.operations, explained_b.operations),
        pace=two.pace,
        description=describe_change(two, progress) if describe else None,
    )


def _lines(two: TwoRecordings) -> tuple[Lines, Lines] | None:
    """The lines of both recordings, if both have them."""
    before = lines_if_any(two.before.graph)
    after = lines_if_any(two.after.graph) if before is not None else None
    return (before, after) if before is not None and after is not None else None


def _line_parts(baseline: Baseline, lines: Lines) -> list[Part]:
    return parts_by(baseline, lines.code, lines.names)


def _without_numbers(line: str) -> str:
    return re.sub(r"\(\d+\)", "", line)
