"""Records a run of Hugging Face's Trainer: `Trainer(..., callbacks=[WhatifCallback()])`."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .in_trainer import RecordingInTrainer


class WhatifCallback(TrainerCallback):
    """Record some training steps, and write recording and report into the trainer's output folder.

    A step ends with each optimizer step of the trainer. `steps`, `untraced_steps` and `memory` are those of `record`;
    `folder` replaces the output folder; `report` writes `whatif.html` beside the recording at the end of training.
    Training continues undisturbed if the recording fails.
    """

    def __init__(self, *, folder: str | Path | None = None, report: bool = True, **options: Any) -> None:
        self._folder = folder
        self._recording = RecordingInTrainer(report=report, **options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Start the recording."""
        self._recording.start(self._folder or args.output_dir or "", rest["model"], [rest.get("optimizer")])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """End a step."""
        self._recording.step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Write the recording, if not yet written, and the report."""
        self._recording.finish()
