"""torch's own profiler as a tracer of training steps."""

import json
import threading
from pathlib import Path
from typing import Any

from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from whatif.runtime.errors import WhatifError

from .gc_pauses import GcMarks
from .layers import LayerMarks
from .line_marks import LineMarks
from .line_steps import placed_lines
from .whole_steps import STEPS_BEFORE_LINES, TRACER_WARMUP_STEPS, line_steps_needed


class KinetoTracer:
    """Records with torch.profiler: operators with shapes, GPU work and its calls, and the layers' marks."""

    def __init__(
        self, model: nn.Module, *, cuda: bool, steps: int, memory: bool, scratch: Path, lines: bool = False
    ) -> None:
        self._model = model
        self._scratch = scratch
        self._steps, self._count = steps, 0
        self._marks: LayerMarks | None = None
        self._pauses: GcMarks | None = None
        self._lines = LineMarks() if lines else None
        self._thread = threading.current_thread()
        active = steps + line_steps_needed(steps) if lines else steps
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU],
            # One more step, so that the profiler still runs after the last recorded one, when its overhead is measured.
            schedule=schedule(wait=0, warmup=TRACER_WARMUP_STEPS, active=active + 1, repeat=1),
            record_shapes=True,
            profile_memory=memory,
            # Without these events a trace does not show which GPU work a synchronizing CPU thread waits for.
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=cuda),
        )

    def start(self) -> None:
        """Mark the layers and the pauses, and start the profiler."""
        self._marks = LayerMarks(self._model)
        self._pauses = GcMarks()
        self._profiler.start()

    def step(self) -> None:
        """End a training step; the next one begins."""
        self._profiler.step()
        self._count += 1
        if self._lines is not None and self._count == TRACER_WARMUP_STEPS + self._steps + STEPS_BEFORE_LINES:
            self._lines.start()

    def stop(self) -> None:
        """Stop the profiler and remove the marks from the model."""
        if self._lines is not None and self._marks is not None:
            self._lines.stop()
        if self._pauses is not None:
            self._pauses.remove()
        if self._marks is not None:
            self._marks.remove()
            self._profiler.stop()
            if threading.current_thread() is not self._thread:
                # Kineto has dropped the events; writing them would crash.
                raise WhatifError(
                    "expected the training thread to run until the steps are recorded, got one that ended: run more "
                    "steps."
                )
        self._marks = self._pauses = None

    def trace(self) -> dict[str, Any]:
        """Return the profiler's Chrome trace; raises WhatifError if it is not valid JSON, OSError if it is missing."""
        try:
            self._profiler.export_chrome_trace(str(self._scratch))
            # Names come from the user's program: they may contain invalid UTF-8 and control characters.
            trace = json.loads(self._scratch.read_text(encoding="utf-8", errors="replace"), strict=False)
        except FileNotFoundError as error:  # On a full disk the profiler prints a line and continues.
            raise OSError(error.errno, "no trace file from torch.profiler") from error
        except ValueError as error:
            raise WhatifError(
                f"expected valid JSON from torch.profiler, got {error}: record again with fewer steps, or another"
                " torch."
            ) from error
        finally:
            for file in (self._scratch, self._scratch.with_name(f"{self._scratch.name}.tmp")):  # the profiler's
                file.unlink(missing_ok=True)
        assert isinstance(trace, dict)
        if self._lines is not None:
            lines, events = self._lines, trace["traceEvents"]
            placed = placed_lines(
                events, lines.ran, lines.thread, trace.get("baseTimeNanoseconds", 0), TRACER_WARMUP_STEPS, self._steps
            )
            events += [lines.event(*line) for line in placed]
        return trace
