"""The lab's DTS experiment: the paper's networks, who computes what, and a real round between namespaces."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.runtime.errors import WhatifError

torch = need("torch")
dts = need("benchmarks.lab.dts")
dts_facts = need("whatif.instrumentation.dts_facts")
models = need("benchmarks.lab.dts_models")
roles = need("benchmarks.lab.dts_roles")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "parameters"), [("dnn1", 72_802), ("dnn2", 1_044_482)])
def test_the_networks_of_tables_2_and_3(name: str, parameters: int) -> None:
    model = models.build(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    images, labels = models.batch_of(name)
    assert model(images).shape == (100, 2)
    assert labels.shape == (100,)


def test_the_facts_of_the_networks() -> None:
    """The paper: DNN 2 has 14 times the weights and takes 4.8 times the computation."""
    facts = {name: dts_facts.measure_network(models.build(name), models.batch_of(name)[0]) for name in ("dnn1", "dnn2")}
    one, two = facts["dnn1"], facts["dnn2"]
    assert two.flops / one.flops == pytest.approx(4.8, abs=0.05)
    assert (one.parameters, two.parameters) == (72_802, 1_044_482)
    rows = {layer.name: layer for layer in one.layers}
    # Convolutions of 46, 19 and 5 pixels a side; a multiply-add is two.
    assert rows["conv1"].flops == 2 * 25 * 16 * 46**2
    assert rows["conv2"].flops == 2 * 25 * 16 * 32 * 19**2
    assert rows["fc1"].flops == 2 * 256 * 32
    assert rows["conv3"].input_bytes == 4 * 32 * 9 * 9
    assert rows["conv3"].output_bytes == 4 * 64 * 5 * 5
    assert rows["conv2"].weights_bytes == 4 * (25 * 16 * 32 + 32)
    assert one.macs == one.flops / 2
    assert one.sample_bytes == 4 * 50 * 50
    assert one.memory_bytes(100) > 100 * rows["relu1"].input_bytes
    as_json = json.loads(json.dumps(one.to_dict()))
    assert as_json["layers"][0]["name"] == "conv1"


def test_the_power_of_a_processor() -> None:
    """A step that sleeps has the rate that its FLOPs say; the rest is arithmetic."""
    import time

    power = dts_facts.measure_power(lambda: time.sleep(0.01), 1e6, 10, steps=5)
    assert 0.5 * 3 < power.gflop_s <= 3.0
    found = dts_facts.power_of([10.0, 10.0, 9.0, 10.0, 12.0])
    assert found.gflop_s == 10.0
    assert found.fluctuation_pct == pytest.approx(20.0)
    assert 'name = "x y"\ngflop_s = 10\npower_fluctuation_pct = 20\nmemory_gbyte = 2\n' in found.toml("x y", 2)
    from whatif.hardware.cluster.cluster_file import parse_cluster

    link = '[[link]]\nbetween = ["x", "y"]\nbandwidth = "1Gbps"\n'
    assert parse_cluster(found.toml("x") + found.toml("y") + link, "t").processors[1].gflop_s == 10
    with pytest.raises(WhatifError, match="expected at least 3 steps"):
        dts_facts.measure_power(lambda: None, 1e6, 10, steps=2)


class Twice(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Calls one layer twice."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(self.layer(x))


def test_a_layer_without_weights_that_is_called_twice_is_two() -> None:
    found = dts_facts.measure_network(Twice(torch.nn.ReLU()), torch.zeros(2, 3))
    assert [layer.name for layer in found.layers] == ["layer", "layer (call 2)"]
    assert [layer.output_bytes for layer in found.layers] == [12, 12]


def test_weights_that_are_used_twice_cannot_be_cut() -> None:
    with pytest.raises(
        WhatifError, match="expected each layer with weights to be called once, got several calls of 'layer'"
    ):
        dts_facts.measure_network(Twice(torch.nn.Linear(3, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("dnn", ["dnn1", "dnn2"])
@pytest.mark.parametrize("architecture", dts.ARCHITECTURES)
def test_every_role_knows_its_partners(architecture: str, dnn: str) -> None:
    found = {seat.role: seat for seat in dts.seats(architecture, dnn)}
    for seat in found.values():
        assert all(seat.role in found[other].partners for other in seat.partners)
        assert hasattr(roles.Member, f"_{architecture}_{seat.role.split()[0]}")
        if seat.twin:
            twin = found[seat.twin]
            assert not twin.twin
            assert (twin.first, twin.last) == (seat.first, seat.last)
    # One real computation a core at once, and the roles of `whatif dts`.
    if architecture in ("federated", "federated_split"):
        assert sum(1 for seat in found.values() if seat.role.startswith("client") and not seat.twin) == 2
    from whatif.ingest.read import read
    from whatif.models.dts.architecture import load_architecture
    from whatif.models.dts.dnn import Dnn, dnn_of
    from whatif.models.dts.plan import Training

    trace = Path(__file__).resolve().parents[2] / "traces" / "lab_dts" / f"{dnn}.trace.json.gz"
    network: Dnn = dnn_of(read(trace))
    cut = models.CUTS[dnn]
    named = {"pipeline_learning": cut.workers, "federated": ()}.get(architecture, (cut.client,))
    training = Training(3, cuts=tuple(network.layer_number(name) for name in named))
    assert {role.name for role in load_architecture(architecture).roles(network, training)} == set(found)


def test_parts_learn_what_the_whole_learns() -> None:
    """Client and server of DNN 1, joined by what they would send, make the same step as the whole network."""
    request = {"dnn": "dnn1", "seed": 0, "first": None, "last": "pool2"}
    client, server = roles.Part(request), roles.Part({**request, "first": "pool2", "last": None})
    whole = roles.LocalTraining("dnn1")
    whole.step()
    sent = torch.frombuffer(bytearray(client.forward()), dtype=torch.float32).view(100, 32, 9, 9)
    server.forward(sent)
    back = torch.frombuffer(bytearray(server.backward()), dtype=torch.float32).view(100, 32, 9, 9)
    client.backward(back)
    own = [*client.module.state_dict().values(), *server.module.state_dict().values()]
    for mine, theirs in zip(own, whole.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or shutil.which("tc") is None, reason="namespaces need root, ip and tc"
)
def test_a_round_of_federated_learning_over_cables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes, three cables of 50 Mbit/s: weights of 291 kB take 47 ms each way, and are averaged."""
    from benchmarks.lab.hosts import namespaces

    monkeypatch.setattr(dts, "ROUNDS", {"dnn1": 1})
    monkeypatch.setattr(dts, "EPOCH_BATCHES", 2)
    dts.DtsJob("federated", "dnn1", 50.0).run(tmp_path)
    record = json.loads((tmp_path / "dnn1-federated.json").read_text())
    assert record["replayed"] == ["client 3"]
    batch, epoch = record["runs"]
    assert batch["median_ms"] > 2 * 45  # the network alone
    assert epoch["median_ms"] > batch["median_ms"]
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]
