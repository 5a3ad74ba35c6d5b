"""The callbacks of Lightning and Hugging Face with the real packages, and a cell of a real notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from tests.helpers import need

torch = need("torch")

pytestmark = pytest.mark.slow
QUICK = {"steps": 3, "warmup_steps": 1, "untraced_steps": 2}
# Behind the recorder's own nine.
STEPS = 12


def test_lightning_writes_recording_and_report_into_its_log_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lightning = need("lightning.pytorch")
    callback = need("whatif.instrumentation.lightning").WhatifCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", accumulate_grad_batches=2, default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[callback(**QUICK)],
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8 * 3 * STEPS, 8), 8))
    assert trainer.global_step == STEPS
    graph = whatif.read(tmp_path / "whatif.json.gz")
    assert {"net.0", "net.2"} <= set(graph.layers)
    assert (tmp_path / "whatif.html").stat().st_size > 10_000
    assert "whatif.json.gz: recorded; next: whatif explain" in capfd.readouterr().err


def test_hugging_face_writes_recording_and_report_into_its_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = need("transformers")
    need("accelerate")
    callback = need("whatif.instrumentation.huggingface").WhatifCallback
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(number % 2)} for number in range(4 * STEPS)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=STEPS, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback(**QUICK)]).train()
    assert whatif.apply(whatif.read(tmp_path / "whatif.json.gz"), "fused_adam").predicted_ms > 0
    assert (tmp_path / "whatif.html").stat().st_size > 10_000


def test_a_short_training_says_why_there_is_no_recording(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recording = need("whatif.instrumentation.in_trainer").RecordingInTrainer(report=True)
    recording.start(tmp_path, torch.nn.Linear(2, 2), [None])
    recording.step()
    recording.finish()
    assert "no recording: " in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_cell_is_recorded_in_the_notebooks_own_namespace(tmp_path: Path) -> None:
    nbformat, nbclient = need("nbformat"), need("nbclient")
    train = (
        "%%whatif collect --steps 3 --untraced-steps 2 -o run.json.gz\n"
        "for number in range(20):\n"
        "    optimizer.zero_grad(); model(torch.randn(4, 8)).square().mean().backward(); optimizer.step()\n"
        "print('trained', number)\n"
    )
    cells = [
        "%load_ext whatif\nimport torch\nmodel = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        train,
        "assert number == 19\n%whatif explain run.json.gz",
        "%%whatif collect --inference --nonsense\npass",
        "%%whatif explain\npass",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = {"metadata": {"path": str(tmp_path)}}
    ran = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=kernel).execute()
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in ran.cells]
    assert "trained 19" in said[1]
    assert "run.json.gz: recorded; next: %whatif explain run.json.gz" in said[1]
    assert "a step takes" in " ".join(said[2].split())
    assert "unrecognized arguments: --nonsense" in said[3]
    assert "expected `%%whatif collect [OPTIONS]`" in said[4]
