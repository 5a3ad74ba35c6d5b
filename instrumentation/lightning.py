"""Records a run of Lightning's Trainer: `Trainer(callbacks=[WhatifCallback()])`."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from .in_trainer import RecordingInTrainer


class WhatifCallback(Callback):
    """Record some training steps, and write recording and report into the trainer's log folder.

    A step ends with each optimizer step of the trainer. `steps`, `untraced_steps` and `memory` are those of `record`;
    `folder` replaces the log folder; `report` writes `whatif.html` beside the recording at the end of training.
    Training continues undisturbed if the recording fails.
    """

    def __init__(self, *, folder: str | Path | None = None, report: bool = True, **options: Any) -> None:
        self._folder = folder
        self._recording = RecordingInTrainer(report=report, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the recording."""
        folder = self._folder or trainer.log_dir or trainer.default_root_dir
        self._recording.start(folder, pl_module, trainer.optimizers)
        self._steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step if the optimizer has run."""
        if trainer.global_step != self._steps_before:
            self._steps_before = trainer.global_step
            self._recording.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the recording, if not yet written, and the report."""
        self._recording.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove all hooks from the model."""
        self._recording.abandon()
