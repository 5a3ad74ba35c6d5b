"""Hover text: explanations of what-ifs' names and the page's terms, added to the finished markup of a part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from whatif.prediction.transform import Transform, built_in_summaries
from whatif.report.html.facts import Facts
from whatif.report.html.markup import Html, tag

# Text that is the whole header, first cell of a row, or part before the colon of a legend.
TERMS = {
    "CPU only": "the CPU works and the GPU does not",
    "GPU only": "the GPU works and the CPU does not",
    "CPU and GPU together": "both work at the same time",
    "exposed communication": "time in which GPUs exchange data and nothing else runs",
    "exposed communication, ms": "time in which GPUs exchange data and nothing else runs",
    "exposed": "time in which GPUs exchange data and nothing else runs",
    "neither": "neither the CPU nor the GPU works",
    "operators on the CPU": "PyTorch operators that compute on the CPU",
    "CUDA / HIP calls": "calls from the CPU to the GPU's driver: launches, allocations, synchronizations",
    "communication calls": "calls from the CPU that start an exchange, with the CPU time of the exchange's own threads",
    "other CPU time (Python, framework)": "CPU time between the recorded calls: Python code and the framework",
    "kernels": "programs that run on the GPU",
    "copies": "copies between CPU and GPU memory, or within the GPU's",
    "memsets": "filling of GPU memory",
    "communication": "exchange of data between GPUs",
    "data loading": "reading and preparing the next batch",
    "waits": "a thread waits for another one or for the GPU",
    "launch and hand-over lag": "time between two tasks of the critical path, such as a launch and its kernel",
    "forward": "forward pass",
    "backward": "backward pass: gradients",
    "update": "the optimizer's update of the parameters",
    "data": "reading and preparing the next batch",
    "gemm": "matrix multiplication",
    "convolution": "convolutions",
    "elementwise": "operations on each element: activations, additions, dropout",
    "layout": "changes of memory layout, such as transposes",
    "cast": "changes of number format",
    "fused": "kernels that a compiler generated from several operators",
    "reduction": "sums, means and maxima",
    "indexing": "embedding look-ups, gather, scatter, sort",
    "critical ms": "time on the critical path: shortening anything else does not shorten the step",
    "critical %": "share of the critical path: shortening anything else does not shorten the step",
    "tasks": "operators, calls, kernels and copies",
    "replay error": "how far the simulated recording is from the recorded one",
    "unexplained wait": "waiting for which the recording shows no cause",
    "effort": "how much work the change is for you",
    "source of durations": "where changed durations come from: measurements, a database, a model, a paper",
    "range, %": "nominal 90 % range of the gain",
    "nominal 90 % range, ms": "nine of ten measurements should lie inside",
    "gain %": "how much shorter the step is",
    "MFU": "model FLOPs utilization: FLOPs of the model in a second, as a share of the GPU's peak",
    "of peak": "as a share of what the data sheet promises",
    "FLOP/B": "floating-point operations for each byte of memory traffic",
    "efficiency, %": "throughput as a share of what as many separate workers have",
    "throughput, ×": "times the samples that one worker trains in a second",
    "transfer": "time in which collectives move data",
    "waits for peers": "time that this rank waits for others in collectives and computes nothing",
    "comes last, %": "share of the collectives to which this rank comes last",
    "holds up": "time that others wait for this rank",
    "activations": "results of the forward pass that the backward pass needs",
    "workspace": "memory that an operator needs while it runs",
    "optimizer state": "what the optimizer keeps for each parameter",
}
# Names of what-ifs that are also ordinary words: explained only with options, or alone.
COMMON_WORDS = frozenset(("bandwidth", "contention", "cpu", "device", "distributed", "kernels", "pipeline", "scale"))
# An option and its value, as formatted by composition.spelled; markup.name breaks long ones.
_OPTION = r"[\w.]+=(?:<wbr>)?(?:[\w.+/]|-(?:<wbr>)?)+"
_OPTIONS = rf":(?:<wbr>)?{_OPTION}(?:,(?:<wbr>)?{_OPTION})*"
# A run of text, or a code element, which must stay unchanged.
_TEXT = re.compile(r"<(?:code|canvas|svg)\b.*?</(?:code|canvas|svg)>|(?<=>)[^<>]+(?:<wbr>[^<>]+)*(?=<)", re.DOTALL)


class Words(Struct):
    """The what-ifs that a page can name, and the terms explained so far."""

    summaries: Mapping[str, str]
    used: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Facts) -> Words:
        """Return the vocabulary of a page: the built-in what-ifs and the user's."""
        advice = facts.advice
        trials = (entry.trial for entry in (*advice.alone, *advice.together, *advice.not_gaining, *advice.too_large))
        used: Iterable[Transform] = (*facts.asked, *(transform for trial in trials for transform in trial.transforms))
        built_in = {known: summary for known, summary, _ in built_in_summaries()}
        return cls({**built_in, **{transform.name: transform.summary for transform in used}})

    def explain(self, part: Html, *, what_ifs: bool = True) -> Html:
        """Add hover text to the page's terms, and with ``what_ifs`` to the names of what-ifs."""
        # markup.name may have inserted line breaks into a name.
        known = "|".join(re.escape(each).replace("_", "_(?:<wbr>)?") for each in sorted(self.summaries, key=len)[::-1])
        named = re.compile(rf"(?<![\w./:=&-])({known})({_OPTIONS})?(?![\w(=]|\.\w)")

        def run(found: re.Match[str]) -> str:
            shown = found[0]
            if shown.startswith("<"):
                return shown
            head, _, rest = shown.partition(": ")
            if (term := head.rstrip()) in TERMS and (not rest or rest[0].isdigit()):
                self.used[term] = TERMS[term]
                return _hover(term, TERMS[term]) + shown[len(term) :]
            return named.sub(lambda match: self._what_if(match, shown), shown) if what_ifs else shown

        return Html(_TEXT.sub(run, part))

    def _what_if(self, found: re.Match[str], run: str) -> str:
        known, options = found[1].replace("<wbr>", ""), (found[2] or "").replace("<wbr>", "")[1:]
        if known in COMMON_WORDS and not options and run != found[0]:
            return found[0]
        summary = self.summaries[known].rstrip(".")
        return _hover(found[0], f"{summary}; {options.replace(',', ', ').replace('=', ' ')}" if options else summary)


def _hover(shown: str, meaning: str) -> str:
    return tag("abbr", Html(shown), title=meaning)
