"""`collect` on typical training scripts: what it detects, and the share of their time that has a layer.

Coverage is the share of operator time in forward and backward passes that belongs to a layer, by the median step: loss
and whatever else the script does there count as not covered; data loading and update are no layer's work.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import need
from whatif.graph.types import Phase, TaskKind

torch = need("torch")

pytestmark = pytest.mark.slow
collect = need("whatif.instrumentation.collect").collect

PLAIN = """
import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48 * 64, 10),
)
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(800, 3, 16, 16), torch.randint(10, (800,)))
for image, label in torch.utils.data.DataLoader(data, batch_size=20, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

SCALED = """
import torch
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), 2)
head = nn.Linear(96, 5)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
scaler = torch.amp.GradScaler("cpu")
for _ in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = head(model(torch.randn(8, 48, 96)).mean(1))
        loss = nn.functional.cross_entropy(scores, torch.randint(5, (8,)))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""

# The module is never called, only parts of it, and the whole step happens inside the optimizer's.
TRAINER = """
import torch
from torch import nn

class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(400, 900), nn.GELU(), nn.Linear(900, 64))
        self.decoder = nn.Sequential(nn.Linear(64, 900), nn.GELU(), nn.Linear(900, 400))

    def training_step(self, batch, index):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

class Trainer:
    def fit(self, module, loader):
        optimizer = module.configure_optimizers()
        for index, batch in enumerate(loader):
            def closure():
                optimizer.zero_grad()
                loss = module.training_step(batch, index)
                loss.backward()
                return loss

            optimizer.step(closure)

data = torch.utils.data.TensorDataset(torch.randn(4000, 400))
Trainer().fit(Autoencoder(), torch.utils.data.DataLoader(data, batch_size=100))
"""

HUGGING_FACE = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(
    vocab_size=200, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, num_labels=3
)
rows = [{"input_ids": torch.randint(200, (48,)), "labels": torch.tensor(number % 3)} for number in range(400)]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=8, max_steps=40, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, logging_strategy="no",
)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows).train()
"""

COMPILED_MODEL = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
for _ in range(40):
    optimizer.zero_grad()
    compiled(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
"""

COMPILED_FUNCTION = COMPILED_MODEL.replace(
    'compiled = torch.compile(model, backend="aot_eager")',
    '@torch.compile(backend="aot_eager")\ndef compiled(x):\n    return model(x)\n',
)


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A second thread that has to wait for its core spins in the first one's operators."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)  # Trainers write into the folder in which they run.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.set_num_threads(threads)


def record(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return metadata and layer names of the recording `run.json` of a script."""
    Path("train.py").write_text(text)
    assert collect("train.py", [], Path("run.json"), steps=5, untraced_steps=4, stop=True).recording
    metadata = json.loads(Path("run.json").read_text())["whatif"]
    return metadata, [row["name"] for row in metadata["layers"]]


def coverage() -> float:
    graph = whatif.read("run.json")
    passes = (graph.kind == TaskKind.CPU_OP) & ((graph.phase == Phase.FORWARD) | (graph.phase == Phase.BACKWARD))
    shares = []
    for step in sorted({int(step) for step in graph.step[passes]} - {-1}):
        chosen = passes & (graph.step == step)
        time_ns = graph.duration_ns[chosen]
        shares.append(float(time_ns[graph.layer[chosen] > 0].sum() / time_ns.sum()))
    assert len(shares) >= 4
    return statistics.median(shares)


def test_a_plain_loop() -> None:
    metadata, layers = record(PLAIN)
    assert layers == ["(root)", *"012345678"]
    assert metadata["data_loading"] == {"workers": 0, "batch_size": 20, "pin_memory": False, "prefetch_factor": None}
    assert metadata["batch_size"] == 20
    assert metadata["flops"]["layers"]["0"] == 2 * 20 * 16 * 16 * 32 * 27
    assert coverage() >= 0.95


def test_autocast_with_a_gradient_scaler() -> None:
    metadata, layers = record(SCALED)
    assert "TransformerEncoder.layers.1.self_attn" in layers
    assert metadata["precision"]["autocast"] == "bfloat16"
    assert metadata["optimizer"]["type"] == "AdamW"
    assert coverage() >= 0.95


def test_a_trainer_that_steps_with_a_closure() -> None:
    metadata, layers = record(TRAINER)
    assert layers == ["(root)"] + [
        f"{part}{layer}" for part in ("encoder", "decoder") for layer in ("", ".0", ".1", ".2")
    ]
    assert metadata["layers"][0]["type"] == "Autoencoder"
    assert metadata["input_shape"] == [100, 400]
    assert coverage() >= 0.95


def test_hugging_faces_trainer() -> None:
    need("transformers")
    need("accelerate")
    metadata, layers = record(HUGGING_FACE)
    assert "bert.encoder.layer.1.attention.self.query" in layers
    assert metadata["data_loading"]["batch_size"] == metadata["batch_size"] == 8
    assert {"transformers", "accelerate"} <= set(metadata["libraries"])
    assert coverage() >= 0.95


@pytest.mark.parametrize("text", [COMPILED_MODEL, COMPILED_FUNCTION], ids=["model", "function"])
def test_a_compiled_model_is_marked_and_not_compiled_anew(text: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    metadata, layers = record(text)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert metadata["execution"] == {"compiled": True, "cuda_graph": False}
    assert layers == ["(root)", *"0123"]
    assert metadata["flops"] is None  # Their modules are not called.
    assert len(metadata["grad_ready_order"]) == 6
    assert metadata["ddp"]["buckets"][0]["bytes"] == sum(row["gradient_bytes"] for row in metadata["layers"])
