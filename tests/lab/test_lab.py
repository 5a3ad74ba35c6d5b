"""The lab: jobs, records, and what its workers do, where no network and no root is needed."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import free_port, need
from whatif.opdb.collective_table import read_table
from whatif.runtime.errors import WhatifError

torch = need("torch")

pytestmark = pytest.mark.slow
nn = torch.nn
hosts = need("benchmarks.lab.hosts")
main = need("benchmarks.lab.__main__")
jobs = need("benchmarks.lab.jobs")
models = need("benchmarks.lab.models")
push_pull = need("benchmarks.lab.push_pull")
replay = need("benchmarks.lab.replay")
collectives = need("benchmarks.lab.collectives")
EXPERIMENTS = [need(f"benchmarks.lab.{name}") for name in ("baseline", "ddp", "parameter_server")]


def test_without_root_or_tools_the_lab_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert main.main(["run", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("lab: expected to be root, since hosts are network namespaces, got another user;")
    assert printed.count("\n") == 1
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    assert main.main(["clean"]) == 1
    assert "expected the commands ip and tc, got no ip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ()}, "expected groups of 1 to 64 hosts"),
        ({"groups": (2, 0)}, "expected groups of 1 to 64 hosts"),
        ({"groups": (65,)}, "expected groups of 1 to 64 hosts"),
        ({"rate_mbit_s": 0.0}, "expected a rate from 0.1 to 100,000 Mbit/s, got 0"),
        ({"uplink_mbit_s": -5.0}, "expected a rate from 0.1 to 100,000 Mbit/s, got -5"),
        ({"rate_mbit_s": float("nan")}, "expected a rate"),
    ],
)
def test_nonsense_hosts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WhatifError, match=message):
        hosts.Hosts(**options)


def test_the_command_lists_what_is_to_do(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "gpt2.trace.json.gz").touch()
    assert main.main(["list", "--out", str(tmp_path), "--only", "baseline,ddp", "--models", "gpt2"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].split() == ["record-gpt2", "there"]
    assert lines[1].split() == ["ddp-gpt2-100mbit", "to", "do"]
    for words in (["--only", "nothing"], ["--models", "gpt9"]):
        with pytest.raises(SystemExit) as stopped:
            main.main(["list", *words])
        assert stopped.value.code == 2


@pytest.mark.parametrize("module", EXPERIMENTS)
def test_jobs_name_their_files(module: Any, tmp_path: Path) -> None:
    made = [name for job in module.jobs(tmp_path) for name in job.made]
    assert len(made) == len(set(made)) >= len(models.MODELS)
    assert all(json.dumps(job.request) for job in module.jobs(tmp_path))


def test_models_are_of_real_size() -> None:
    for name in models.MODELS:
        training = models.Training(name)
        assert 2e6 < training.gradient_bytes < 50e6
        training.step()
        assert all(parameter.grad is not None for parameter in training.model.parameters())


def test_of_each_round_the_slower_rank_counts() -> None:
    def rank(*blocks: list[float]) -> dict[str, Any]:
        return {"rounds": {"local": [{"samples_ms": [block]} for block in blocks]}}

    found = jobs.slower_rank([rank([1, 2, 9], [5, 5, 5]), rank([3, 3, 3], [4, 4, 4])], "local")
    assert found == [
        {"samples_ms": [[3, 3, 3]], "ranks_ms": [2, 3]},
        {"samples_ms": [[5, 5, 5]], "ranks_ms": [5, 4]},
    ]
    assert jobs.quartiles(found) == {"median_ms": 4.0, "q25_ms": 3.0, "q75_ms": 5.0, "steps": 6}


def test_records_are_json_with_a_line_for_each_row(tmp_path: Path) -> None:
    record = {"a": 1, "network": {"groups": [2]}, "rounds": [{"samples_ms": [[1.5, 2]]}, {}], "empty": [], "none": None}
    jobs.write_record(tmp_path / "r.json", record)
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == record
    assert '  {"samples_ms": [[1.5, 2]]},\n' in text


def test_the_table_of_collectives_is_what_calibration_reads(tmp_path: Path) -> None:
    def rank(factor: float) -> dict[str, Any]:
        return {"times_ms": {"4096": [1.0 * factor, 1.2, 1.1], "1048576": [80.0, 82.0 * factor, 84.0]}}

    collectives.write_table(tmp_path / "t.csv", 2, [rank(1.0), rank(2.0)])
    (curve,) = read_table(tmp_path / "t.csv").curves
    assert (curve.operation, curve.workers) == ("all_reduce", 2)
    assert curve.size_bytes == (4096, 1048576)
    assert curve.time_ns == (1.2e6, 84e6)  # medians of 2, 1.2, 1.1 and of 80, 164, 84


def test_buckets_are_filled_as_ddp_fills_them() -> None:
    gradients = [(1.0, 10), (2.0, 10), (3.0, 30), (4.0, 5)]
    assert replay.buckets_of(gradients, 15) == [(2.0, 20), (3.0, 30), (4.0, 5)]
    assert replay.buckets_of(gradients, 55) == [(4.0, 55)]
    assert replay.buckets_of(gradients, 1000) == [(4.0, 55)]


def test_a_recording_becomes_a_plan_of_times(own_traces: Path) -> None:
    plan = replay.plan_of(own_traces / "lab_cpu" / "gpt2.trace.json.gz")
    at, size = zip(*plan.gradients, strict=True)
    assert sum(size) == models.Training("gpt2").gradient_bytes
    assert list(at) == sorted(at)
    assert 0 < at[0] < at[-1] <= plan.backward_ms < plan.step_ms
    # Forward and backward take most of a step, and the loss comes before the first gradient.
    assert plan.backward_ms > 0.7 * plan.step_ms
    assert at[0] > 0.15 * plan.step_ms


class Tiny(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(50, 300), nn.Linear(300, 10)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_parameter_server_adds_up_and_gives_weights_back(by_priority: bool, monkeypatch: Any) -> None:
    """Two workers with batches of their own train as one with the mean of their gradients: by hand, two steps."""
    monkeypatch.setattr(push_pull, "PORT", free_port())
    batches = [torch.randn(8, 50), torch.randn(8, 50)]
    kept, served = Tiny(), Tiny()

    def serve() -> None:
        push_pull.Server(served, "127.0.0.1", 2).serve()

    server = threading.Thread(target=serve)
    server.start()
    workers = [Tiny(), Tiny()]
    clients = [push_pull.Client(worker, "127.0.0.1") for worker in workers]
    for client in clients:
        client.slice_bytes, client.by_use = (4096, True) if by_priority else (None, False)
    for _ in range(2):
        gradients = []
        for worker, batch in zip(workers, batches, strict=True):
            worker.zero_grad(set_to_none=True)
            worker(batch).square().sum().backward()
            kept.zero_grad()
            kept(batch).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in kept.parameters()])
        for client in clients:
            client.drain()
        with torch.no_grad():
            for parameter, one, two in zip(kept.parameters(), *gradients, strict=True):
                parameter -= push_pull.LEARNING_RATE * (one + two) / 2
    for client in clients:
        client.close()
    server.join(10)
    assert not server.is_alive()
    for model in (*workers, served):
        for parameter, expected in zip(model.parameters(), kept.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


def test_what_is_urgent_overtakes_what_waits() -> None:
    """The first message holds the link; of those behind it the most urgent goes next, equal ones in their order."""
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender = push_pull.Sender(here)
    long = bytes(2_000_000)
    sender.put(9, 0, 0, memoryview(long))
    time.sleep(0.1)  # until the thread is stuck in it
    for urgency, number in ((5, 1), (2, 2), (5, 3), (1, 4)):
        sender.put(urgency, number, 0, memoryview(b"ab"))
    order = []
    for _ in range(5):
        number, _, size, _ = push_pull.HEADER.unpack(push_pull.read(there, push_pull.HEADER.size))
        push_pull.read_into(there, memoryview(bytearray(size)))
        order.append(number)
    assert order == [0, 4, 2, 1, 3]
    here.close()
    there.close()
