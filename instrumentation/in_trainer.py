"""Common part of the callbacks for Lightning and Hugging Face: a recording that never disturbs the trainer."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whatif.runtime.errors import WhatifError

from .messages import recorded, tell
from .recorder import Recording, describe_error, record

RECORDING = "whatif.json.gz"


class RecordingInTrainer:
    """Records the first steps between `start` and `finish` into a trainer's folder; reports on stderr."""

    def __init__(self, *, report: bool, **options: Any) -> None:
        self._report = report
        self._options = options
        self._recording: Recording | None = None
        self.written: Path | None = None

    def start(self, folder: str | Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer | None]) -> None:
        """Start with the warm-up steps; the file is named `whatif.json.gz`, with the rank if there are several."""

        def begin() -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # A trainer may wrap the optimizer.
            found = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers if optimizer is not None]
            optimizer = found[-1] if found else None
            path = Path(folder).absolute() / RECORDING
            self._recording = record(model, optimizer, path, other_optimizers=found[:-1], **self._options)
            self._recording.start()

        self._guarded(begin)

    def step(self) -> None:
        """End a training step."""
        if self._recording is not None:
            self._guarded(self._recording.step)

    def finish(self) -> None:
        """Write the recording, if not yet written and long enough, and the report."""
        if self._recording is not None:
            self._guarded(self._recording.finish)
        if self.written is not None and self._report:
            page = self.written.with_name(self.written.name.removesuffix(".json.gz") + ".html")
            # In a separate process: the report needs memory, and its errors must not reach the training.
            command = [sys.executable, "-m", "whatif", "report", str(self.written), "-o", str(page)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = result.stderr.strip().splitlines()
            tell(f"{page}: written." if result.returncode == 0 else f"no report: {lines[-1] if lines else 'it failed'}")

    def abandon(self) -> None:
        """Remove all hooks from the model."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            tell(f"no recording: {error if isinstance(error, WhatifError) else describe_error(error)}")
            self.abandon()
        else:
            if self._recording is not None and self._recording.written:
                self.written = self._recording.path
                self._recording = None  # Free the model that it refers to.
                tell(recorded(self.written))
