"""Print the peak of one rank's step under ``fully_shard`` by PyTorch's own tracker, bytes: python fsdp_tracker.py JSON.

Tensors are fake and collectives do nothing, so that any number of ranks is one process.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def peak_bytes(path: str, name: str, kwargs: dict[str, int], batch: int, workers: list[int]) -> list[int]:
    """Return the peak for each number of ranks; the model's blocks are units of their own."""
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for count in workers:
        distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
        mesh = init_device_mesh("cpu", (count,))
        with FakeTensorMode():
            model = getattr(module, name)(**kwargs)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            # Without state and without lists: the tracker counts what DTensor makes of lists at its global size.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            tokens = torch.randint(0, 1000, (batch, kwargs["context"]))
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                for step in range(2):
                    out = model(tokens)
                    loss = nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), tokens.reshape(-1))
                    del out
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 0:
                        tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
        found.append(sum(each["Total"] for each in snapshot.values()))
        distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(peak_bytes(**json.loads(sys.argv[1]))))
