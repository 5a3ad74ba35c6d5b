"""DDP's buckets: what a real DistributedDataParallel reports, and that the rule finds the same without one."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")
instrumentation = need("whatif.instrumentation")
ddp_buckets = need("whatif.instrumentation.ddp_buckets")
nn = torch.nn
MIB = 1 << 20


class Net(nn.Module):
    """The layers are not called in the order in which they are made, and one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(600, 600)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(600, 600), nn.LayerNorm(600)) for _ in range(5)])
        self.early = nn.Linear(600, 600)
        self.frozen = nn.Linear(600, 600).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.late(self.blocks(self.frozen(self.early(self.early(x)))))


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)  # torch puts the rank before each line of a traceback
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def record(model: Any, path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with instrumentation.record(model, optimizer, path, steps=3, warmup_steps=2, untraced_steps=2) as recording:
        while not recording.done:
            optimizer.zero_grad()
            model(torch.ones(2, 600)).square().mean().backward()
            optimizer.step()
            recording.step()
    with gzip.open(path) as file:
        return json.load(file)["whatif"]


@pytest.mark.parametrize("cap_mb", [None, 3, 25])
def test_the_rule_finds_the_buckets_that_ddp_reports(process_group: None, tmp_path: Path, cap_mb: int | None) -> None:
    options = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
    wrapped = record(nn.parallel.DistributedDataParallel(Net(), **options), tmp_path / "ddp.json.gz")
    alone = record(Net(), tmp_path / "alone.json.gz")
    assert (wrapped["ddp"]["source"], alone["ddp"]["source"]) == ("ddp", "rule")
    assert wrapped["ddp"]["world_size"] == 1
    cap_bytes = (cap_mb or 25) * MIB
    limits = (cap_bytes, MIB if cap_mb is None else cap_bytes)
    assert (wrapped["ddp"]["bucket_cap_bytes"], wrapped["ddp"]["first_bucket_bytes"]) == limits
    assert wrapped["grad_ready_order"] == alone["grad_ready_order"]
    assert ddp_buckets.fill_buckets(alone["grad_ready_order"], *limits) == wrapped["ddp"]["buckets"]
    if cap_mb is None:
        assert alone["ddp"]["buckets"] == wrapped["ddp"]["buckets"]
    assert len(wrapped["ddp"]["buckets"]) == {None: 2, 3: 3, 25: 1}[cap_mb]
    trained = [row for row in wrapped["layers"] if row["name"] != "frozen"]
    assert sum(bucket["bytes"] for bucket in wrapped["ddp"]["buckets"]) == sum(row["gradient_bytes"] for row in trained)


def test_buckets_that_are_never_rebuilt_are_those_of_the_registration_order(
    process_group: None, tmp_path: Path
) -> None:
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=3)
    ddp = record(model, tmp_path / "run.json.gz")["ddp"]
    assert ddp["source"] == "ddp"
    sizes = [int(size) for size in model._get_ddp_logging_data()["bucket_sizes"].split(",")]
    assert [bucket["bytes"] for bucket in ddp["buckets"]] == sizes
    assert ddp["buckets"][-1]["parameters"][0] == "late.weight"


def test_a_sparse_gradient_is_as_large_as_its_rows_and_sent_by_itself() -> None:
    """All of the table counted as its gradient, also as the layer's in memory."""
    layers = need("whatif.instrumentation.layers")
    table, out = torch.nn.EmbeddingBag(1000, 8, mode="sum", sparse=True), torch.nn.Linear(8, 2)
    model = torch.nn.Sequential(table, out)
    watched = layers.GradientOrder(model)
    model(torch.arange(6).reshape(2, 3)).sum().backward()
    watched.remove()
    rows = watched.rows()
    size = 6 * (8 * 4 + 8)  # indices of 8 bytes
    assert {row["name"]: row["bytes"] for row in rows} == {"1.bias": 8, "1.weight": 64, "0.weight": size}
    buckets = ddp_buckets.describe_buckets(model, rows)["buckets"]
    assert {tuple(sorted(bucket["parameters"])): bucket["bytes"] for bucket in buckets} == {
        ("0.weight",): size, ("1.bias", "1.weight"): 72
    }  # fmt: skip
    found = {row["name"]: row["gradient_bytes"] for row in layers.describe_layers(model, rows)}
    assert found == {"(root)": 0, "0": size, "1": 72}


def test_each_dtype_fills_buckets_of_its_own() -> None:
    rows = [
        {"name": name, "bytes": size, "dtype": dtype}
        for name, size, dtype in [("a", 6, "x"), ("b", 3, "y"), ("c", 6, "x"), ("d", 8, "y"), ("e", 9, "x")]
    ]
    assert ddp_buckets.fill_buckets(rows, cap_bytes=9, first_bytes=5) == [
        {"bytes": 6, "parameters": ["a"]},
        {"bytes": 11, "parameters": ["b", "d"]},
        {"bytes": 15, "parameters": ["c", "e"]},
    ]
