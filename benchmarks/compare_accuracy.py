"""The what-ifs that `whatif compare` names for pairs of recordings that differ in one: the counts of docs/compare.md.

python benchmarks/compare_accuracy.py

The pairs are from the campaigns of docs/compare.md (traces/campaign_cpu, _2 and _3). A name is right if it is
that of the pair's what-if, with any options. Prints each pair, and the counts by what-if; takes minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import whatif
from whatif.prediction.transform import parse_spec
from whatif.questions.comparison.compare import compare
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.questions.validate.validate_pairs import Pair, find_pairs
from whatif.questions.validate.validate_records import TRACE_SUFFIXES

TRACES = Path(__file__).resolve().parent.parent / "traces"
CAMPAIGNS = ("campaign_cpu", "campaign_cpu_2", "campaign_cpu_3")


def pairs() -> Iterator[tuple[Pair, str]]:
    """Yield each pair that differs in one what-if, and the name of the what-if."""
    for campaign in CAMPAIGNS:
        for pair in find_pairs([TRACES / campaign])[0]:
            if len(pair.what_ifs) == 1:
                yield pair, parse_spec(pair.what_ifs[0])[0]


def named(pair: Pair) -> str:
    """Return the what-ifs that `whatif compare` names, "" for none."""
    changed = next(path for end in TRACE_SUFFIXES if (path := pair.changed.with_suffix(end)).exists())
    two = TwoRecordings.of(whatif.read(pair.baseline), whatif.read(changed))
    description = compare(two).description
    found = description.found if description else None
    return "" if found is None else " + ".join(sorted(found.names)) + (" undone" if found.undone else "")


def main() -> None:
    """Print the pairs, and the numbers of right and wrong names."""
    verdicts: Counter[tuple[str, str]] = Counter()
    for pair, right in pairs():
        names = named(pair)
        verdict = "right" if names == right else "wrong" if names else "none"
        verdicts[right, verdict] += 1
        print(f"{verdict:<6} {pair.question}: {right}, named: {names or '-'}", flush=True)
    for name in [*dict.fromkeys(name for name, _ in verdicts), ""]:
        counts = Counter[str]()
        for (kind, verdict), count in verdicts.items():
            counts[verdict] += count if name in ("", kind) else 0

        print(f"{name or 'all'}: {counts['right']} of {counts.total()} right, {counts['wrong']} wrong")


if __name__ == "__main__":
    main()
