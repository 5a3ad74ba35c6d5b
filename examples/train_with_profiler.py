"""Trains a small network and records five of its steps with torch's own profiler, into trace.json.gz.

python examples/train_with_profiler.py
whatif report trace.json.gz -o report.html
"""

import torch
from torch.profiler import profile, schedule

model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))
optimizer = torch.optim.Adam(model.parameters())
loader = [(torch.randn(64, 512), torch.randint(10, (64,))) for _ in range(20)]


def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Train on one batch."""
    images, labels = batch
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


steps = schedule(wait=5, warmup=3, active=5, repeat=1)
with profile(schedule=steps, record_shapes=True, profile_memory=True) as profiler:
    for batch in loader:
        train_step(batch)
        profiler.step()
profiler.export_chrome_trace("trace.json.gz")
