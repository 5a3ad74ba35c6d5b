"""What docs/accuracy.md calls measured, for pairs of the CPU campaign, beside the median of the raw records.

    python -m tests.trust.raw_truth

Prints a line for each pair, the errors against the page and against the raw records, and how far the ratios of the
rounds of one pair spread.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.trust.common import ROOT, TRACES

# The campaign's variant behind a what-if.
VARIANTS = {
    "gradient_accumulation:passes=4": "accumulate_x4",
    "fused_adam:to=foreach": "adam_foreach",
    "fused_adam": "adam_fused",
    "amp:target=bf16": "amp_bf16",
    "batch_size:factor=0.5": "batch_x0.5",
    "batch_size:factor=2": "batch_x2",
    "compile": "compile",
    "data_loading:workers=2": "loader_2",
    "batch_norm_eval": "bn_eval",
    "channels_last": "channels_last",
    "optimizer_in_backward": "update_in_backward",
}
ROW = re.compile(
    r"\| ([\w-]+)(?: \((\w+)\))?: ([\w:=.\\|…-]+?) \| CPU \| ([\d.,]+) ms \| ([\d.,]+) ms \| .*? \| ([\d.,]+) ms"
    r"(?: ± [\d.]+ %)? \| ([+-][\d.]+) % \|(.*)"
)


@dataclass(frozen=True)
class Pair:
    name: str
    predicted_ms: float
    page_ms: float
    raw_ms: float
    ratios: tuple[float, ...]  # changed over baseline, by round
    scored: bool

    @property
    def spread_pct(self) -> float:
        return 100 * (max(self.ratios) - min(self.ratios)) / statistics.median(self.ratios)


def rounds_ms(record: dict[str, Any], key: str) -> list[float]:
    """Return the median of each round, ms."""
    return [statistics.median(sample for block in measured[key] for sample in block) for measured in record["rounds"]]


def pairs() -> Iterator[Pair]:
    """Return every row of the page that has raw records."""
    records: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(TRACES.glob("campaign_cpu*/*.json")):
        record = json.loads(path.read_text())
        if record.get("status") in ("complete", "timed"):
            records.setdefault((record["model"], record["variant"]), []).append((path.parent.name, record))
    for line in (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").splitlines():
        row = ROW.match(line)
        if not row:
            continue
        model, base, what, *times, _, remark = row.groups()
        variant = "checkpoint" if what.startswith("activation_checkpoint") else VARIANTS.get(what)
        baseline_ms, predicted_ms, page_ms = (float(time.replace(",", "")) for time in times)
        key = "samples_ms" if variant == "loader_2" else "cpu_samples_ms"
        for folder, before in records.get((model, base or "baseline"), []):
            for other, after in records.get((model, variant or ""), []):
                if other == folder:
                    before_ms = rounds_ms(after.get("beside", before), key)
                    if abs(statistics.median(before_ms) - baseline_ms) > 0.02 * baseline_ms:
                        continue
                    after_ms = rounds_ms(after, key)
                    ratios = tuple(now / was for was, now in zip(before_ms, after_ms, strict=False))
                    name = f"{model} {base or ''} {what}"
                    scored = "not scored" not in remark
                    yield Pair(name, predicted_ms, page_ms, statistics.median(after_ms), ratios, scored)


def main() -> None:
    """Print the table and its summary."""
    found = list(pairs())
    for pair in found:
        errors = [100 * (pair.predicted_ms / true_ms - 1) for true_ms in (pair.page_ms, pair.raw_ms)]
        print(
            f"{pair.name:55} predicted {pair.predicted_ms:8.2f} page {pair.page_ms:8.2f} raw {pair.raw_ms:8.2f} ms, "
            f"error {errors[0]:+6.1f} / {errors[1]:+6.1f} %, spread {pair.spread_pct:5.1f} %"
            f"{'' if pair.scored else ', not scored'}"
        )
    scored = [pair for pair in found if pair.scored]
    page = [abs(100 * (pair.predicted_ms / pair.page_ms - 1)) for pair in scored]
    raw = [abs(100 * (pair.predicted_ms / pair.raw_ms - 1)) for pair in scored]
    for name, errors in (("page", page), ("raw records", raw)):
        print(f"against the {name}: median {statistics.median(errors):.1f} %, largest {max(errors):.1f} %")
    wide = sum(pair.spread_pct > 12 for pair in scored)
    print(f"{len(found)} pairs, {len(scored)} scored; the ratios of {wide} spread by more than 12 %")


if __name__ == "__main__":
    main()
