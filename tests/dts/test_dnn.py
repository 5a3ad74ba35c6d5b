"""The network from a recording: a chain of layers whose parts add up to the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.dts.networks import equal, network, networks
from tests.helpers import CPU, Build, facts_of
from whatif import Phase, TaskKind, WhatifError
from whatif.models.dts.cuts import narrow_cuts, parts_of, pipeline_cuts
from whatif.models.dts.dnn import Dnn, dnn_of
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.prediction.baseline import Baseline


@pytest.fixture(scope="module")
def recorded(own_traces: Path) -> Dnn:
    return dnn_of(whatif.read(own_traces / "lab_dts" / "dnn1.trace.json.gz"))


def test_the_chain_of_a_recording(recorded: Dnn) -> None:
    """DNN 1 at 50 x 50 pixels and a batch of 100: sizes follow from table II."""
    assert recorded.layers == (
        "conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "conv3", "relu3", "pool3", "flatten", "fc1", "fc_relu1",
        "fc2", "softmax",
    )  # fmt: skip
    # 50 - 4 = 46, / 2 = 23, - 4 = 19, / 2 = 9 pixels are left.
    flows = dict(zip(recorded.layers, recorded.in_bytes.tolist(), strict=True))
    assert flows["conv1"] == 100 * 50 * 50 * 4
    assert flows["pool1"] == 100 * 16 * 46 * 46 * 4
    assert flows["conv2"] == 100 * 16 * 23 * 23 * 4
    assert flows["conv3"] == 100 * 32 * 9 * 9 * 4
    assert recorded.whole.weights_bytes == 72_802 * 4
    assert recorded.batch_size == 100


def test_the_parts_add_up_to_the_step(own_traces: Path) -> None:
    for name in ("lab_dts/dnn1.trace.json.gz", "resnet18_cifar_cpu.json.gz"):
        baseline = Baseline.of(whatif.read(own_traces / name))
        assert dnn_of(baseline.graph).total_ns == pytest.approx(baseline.step_ns, rel=0.01)


def test_work_of_no_layer_goes_with_its_neighbour() -> None:
    """Layers a and b; the loss belongs to b in both directions, the step's begin to the fetch.

    main   data 4 | a 10 | b 20 | loss 3 | loss back 2 | b back 30 | a back 15 | update 6
    """
    build = Build(CPU, n_steps=1, measured_step_ns={"span": (90,)})
    work = (
        (4, "", Phase.DATA), (10, "a", Phase.FORWARD), (20, "b", Phase.FORWARD), (3, "", Phase.FORWARD),
        (2, "", Phase.BACKWARD), (30, "b", Phase.BACKWARD), (15, "a", Phase.BACKWARD), (6, "", Phase.UPDATE),
    )  # fmt: skip
    for duration_ns, layer, phase in work:
        build.task(0, duration_ns, kind=TaskKind.CPU_OP, layer=layer, phase=phase)
    graph = build.graph()
    memory = whatif.graph.memory.Memory(100, 0, 8, tuple(
        whatif.graph.memory.LayerMemory(name, 5, 4, input=size) for name, size in (("a", 8), ("b", 16))
    ))  # fmt: skip
    from dataclasses import replace

    layer_facts = {"layers": [{"name": "a", "gradient_bytes": 10}, {"name": "b", "gradient_bytes": 30}]}
    dnn = dnn_of(graph.replace(info=replace(graph.info, memory=memory, recorded=facts_of(layer_facts))))
    assert dnn.fetch_ns == 4
    assert dnn.forward_ns.tolist() == [10, 23]
    assert dnn.backward_ns.tolist() == [15, 32]
    assert dnn.update_ns.tolist() == [1.5, 4.5]  # as their weights
    assert dnn.in_bytes.tolist() == [8, 16]
    assert dnn.total_ns == 90


def test_what_cannot_be_cut_is_reported(shared_traces: Path) -> None:
    build = Build(CPU, n_steps=1)
    build.task(0, 5, kind=TaskKind.CPU_OP, phase=Phase.FORWARD)
    with pytest.raises(WhatifError, match="expected a recording that names the layers of its model, two at least, got"):
        dnn_of(build.graph())
    with pytest.raises(WhatifError, match="got one whose steps communicate already"):
        dnn_of(whatif.read(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz"))


@given(networks())
def test_parts_add_up(dnn: Dnn) -> None:
    for cut in range(1, len(dnn)):
        one, other = parts_of(dnn, (cut,))
        assert one.work_ns + other.work_ns == pytest.approx(dnn.whole.work_ns)
        assert one.weights_bytes + other.weights_bytes == dnn.whole.weights_bytes
        assert one.out_bytes == other.in_bytes == dnn.in_bytes[cut]


def test_cuts_by_number_and_name() -> None:
    dnn = network()
    assert [dnn.layer_number(text) for text in ("1", "conv1", "fc1")] == [1, 1, 3]
    for text in ("0", "4", "fc2"):
        with pytest.raises(WhatifError, match="dts: expected a cut with layers on both sides, from 1 to 3, got"):
            dnn.layer_number(text)
    with pytest.raises(WhatifError, match="expected a cut after one of the layers conv1, conv2, fc1, fc2, got 'fc3'"):
        dnn.layer_number("fc3")
    with pytest.raises(WhatifError, match="expected ascending cuts from 1 to 3"):
        parts_of(dnn, (2, 2))


def test_the_narrowest_cut_comes_first() -> None:
    assert narrow_cuts(network()) == [(2,), (3,), (1,)]


def machines_of_sizes(*sizes: float) -> Machines:
    return Machines(
        tuple(Processor(f"m{n}", memory_bytes=size) for n, size in enumerate(sizes)), anywhere=Wire("", 1e9)
    )


def test_pipeline_workers_are_as_few_as_hold_the_network() -> None:
    """Layers need 16 + 200, 24 + 100, 80 + 50 and 120 + 20 bytes, and what flows in beside it: 100, 90, 50, 70."""
    dnn = network()
    assert pipeline_cuts(dnn, equal(9), 0) == [(2,)]  # two, through the narrowest place
    assert pipeline_cuts(dnn, equal(9), 3) == [(2, 3)]
    # All four fit nowhere; layers 1-2 need 440 bytes, 3-4 need 320: two processors of 440 will do, and of 439 will not.
    assert pipeline_cuts(dnn, machines_of_sizes(440, 440, 1), 0) == [(2,)]
    assert pipeline_cuts(dnn, machines_of_sizes(439, 439, 439), 0) == [(1, 2)]
    with pytest.raises(WhatifError, match="expected processors whose memory holds the network in any number of parts"):
        pipeline_cuts(dnn, machines_of_sizes(300, 300, 300, 300), 0)
    with pytest.raises(WhatifError, match="expected no more workers than the 4 layers, got 5"):
        pipeline_cuts(dnn, equal(9), 5)


@given(networks(), st.integers(2, 4))
def test_pipeline_cuts_carry_least(dnn: Dnn, workers: int) -> None:
    from itertools import combinations

    if workers > len(dnn):
        return
    (found,) = pipeline_cuts(dnn, equal(9), workers)
    flows = [sum(int(dnn.in_bytes[cut]) for cut in cuts) for cuts in combinations(range(1, len(dnn)), workers - 1)]
    assert sum(int(dnn.in_bytes[cut]) for cut in found) == min(flows)


def test_averaging_is_bound_by_memory() -> None:
    assert network(copy_byte_s=2e9).average_ns(3, 100) == pytest.approx(200)
    assert np.isfinite(network().average_ns(1, 0))
