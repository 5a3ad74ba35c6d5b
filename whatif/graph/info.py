"""What is known of a recording beside its tasks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from whatif.graph.memory import Memory, peak
from whatif.graph.recorded import ProfilerEstimate, Recorded
from whatif.graph.types import Change, Finding, ProcessGroup, Severity
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.graph.described import Described


@dataclass(frozen=True)
class GraphInfo:
    """What is known of the recording beside its tasks. Times are measured ones; ``None`` is not known."""

    path: str = ""
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    n_steps: int = 0
    step_source: str = "none"  # what shows where steps begin: profiler marks, optimizer marks, repetition, none
    loop: tuple[int, int] = (0, 0)  # GPU tasks, too few for a step, that repeat so often where no steps were found
    step_option: tuple[str, ...] = ()  # the command line's option with which the user said so, and its value
    # Measured time of each step by each clock, ns; the span has one entry.
    measured_step_ns: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steady: tuple[int, int] = (0, 0)  # steps [first, last) that are neither first nor last where there are enough
    untraced_step_ns: int | None = None
    launch_lag_ns: int = 0
    queue_depth: int = 0  # pending GPU tasks per stream at which a launch blocks; 0: no limit seen
    batch_size: int | None = None  # of a forward pass
    batch_factor: float = 1.0  # where that is unknown: its samples over those of the recorded step
    passes: int = 1  # forward and backward passes of a step: more than one where gradients are accumulated
    workers: int | None = None  # how many copies of the model train together, by the trace's header or a what-if
    copy_devices: int = 1  # across how many devices what-ifs cut one copy: stages times parts of their blocks
    node: str = ""  # the device, by its name in `hardware/`, whose usual node and network what-ifs assume
    optimizer: str | None = None  # its class, from the optimizer's marks
    execution: tuple[str, ...] = ("eager",)  # else those seen of compiled (torch.compile), cuda_graph
    groups: tuple[ProcessGroup, ...] = ()  # that collectives are among, each once
    operators: tuple[Described, ...] = ()  # what tasks are of, in the op database's words, each once
    gradient_bytes: tuple[int, ...] = ()  # of a step by autograd's operators, in the order in which it finishes them
    memory: Memory | None = None  # what a step keeps on the device; None where the recording does not tell
    loads_in_processes: bool = False  # whether processes of their own prepare the batches
    changes: tuple[Change, ...] = ()  # what transforms did that later ones have to know
    quirks: tuple[str, ...] = ()  # sentences about what was odd in the recording
    findings: tuple[Finding, ...] = ()  # of the checks of its integrity; that its file was cut comes first
    checks: tuple[str, ...] = ()  # that were made
    origin_ns: int = 0  # what the recording's own clock showed where ``start_ns`` is 0
    ranks: tuple[GraphInfo, ...] = ()  # of a graph of several ranks: what is known of each one's recording
    recorded: Recorded = field(default_factory=Recorded)  # what the recorder wrote beside the events
    profiler: ProfilerEstimate | None = None  # of a trace that another program recorded; None if unknown

    def expect_steps(self, name: str) -> None:
        """Raise WhatifError for the what-if ``name`` where one step cannot be distinguished from several."""
        tasks, times = self.loop
        if times:
            raise WhatifError(
                f"{name}: expected a recording with steps, got {tasks} GPU tasks that repeat {times:,} times, any "
                "number of which may form a step; set --step-count or --step-mark."
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to warn of: what the checks found that makes answers doubtful, then the quirks."""
        return (*(f.sentence for f in self.findings if f.severity > Severity.NOTE), *self.quirks)

    @property
    def is_predicted(self) -> bool:
        """Whether ``whatif predict`` made this step, so that nothing in it was measured."""
        return self.recorded.predicted is not None

    @property
    def made(self) -> str:
        """How the step came about, in a word: recorded, predicted by `whatif predict` or simulated by `export`."""
        if self.is_predicted:
            return "predicted"
        return "recorded" if self.recorded.simulated is None else "simulated"

    @property
    def is_recorded(self) -> bool:
        """Whether the steps' times were measured."""
        return self.made == "recorded"

    @property
    def peak_bytes(self) -> int | None:
        """The most that a step keeps on the device, bytes; None where the recording does not tell."""
        return None if self.memory is None else peak(self.memory).total

    @property
    def devices(self) -> int:
        """How many devices train together: each copy's, of all copies."""
        return self.copy_devices * (self.workers or 1)

    def cut_across(self, devices: int) -> GraphInfo:
        """Return what is known of a step whose every device is now ``devices``, each with a part of its work."""
        return replace(self, copy_devices=self.copy_devices * devices)

    @property
    def samples(self) -> int | None:
        """How many samples all workers together train in a step; None where the batch is not known."""
        if self.ranks:  # each may have a batch of its own; other workers are as these are on average
            of_ranks = [rank.batch_size * rank.passes for rank in self.ranks if rank.batch_size is not None]
            workers = self.workers or len(self.ranks)
            if workers == 1:  # the step is the first rank's
                return of_ranks[0] if self.ranks[0].batch_size is not None else None
            return round(sum(of_ranks) * workers / len(of_ranks)) if len(of_ranks) == len(self.ranks) else None
        return None if self.batch_size is None else self.batch_size * self.passes * (self.workers or 1)
