"""DTS (Robinson, Esposito, Zuluaga, MASCOTS 2022): its equations as numbers, and the coherence that §IV-D looks for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dts.networks import network
from whatif.models.dts import equations
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.dnn import Dnn
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.models.dts.plan import Training
from whatif.models.dts.ranking import Ranking, rank

GBIT_S = 1e9 / 8


def test_equation_1() -> None:
    assert equations.pipeline_learning([1, 2, 3], [10, 20, 30], [40, 50, 60], [4, 5]) == 6 + 60 + 150 + 9


def test_equation_2() -> None:
    # The slowest client is the second, the slowest link the first.
    assert equations.federated([10, 20, 5], [30, 60, 15], [7, 2, 2], 4) == 80 + 14 + 4


def test_equation_3() -> None:
    assert (
        equations.split([1, 1], [10, 20], [30, 40], [5, 6], [7, 7], [8, 8], [9])
        == (1 + 10 + 30 + 10 + 15) + (1 + 20 + 40 + 12 + 15) + 9
    )


def test_equation_4() -> None:
    # The second sum is of the server's passes: 3 clients, 15 each.
    assert equations.parallel_split([1, 1, 1], [10, 9, 8], [30, 9, 8], [5, 6, 7], [7] * 3, [8] * 3) == 51 + 45


def test_equation_5() -> None:
    as_printed_once = equations.federated_split([1, 1], [10, 20], [30, 40], [5, 6], [7, 8], [9, 9], [2, 3], 4)
    # The edge's backward pass counts once, where the print has it twice; no way back of the weights, as in the print.
    assert as_printed_once == 1 + 20 + 40 + 12 + 8 + 9 + 3 + 4
    there_and_back = equations.federated_split([1, 1], [10, 20], [30, 40], [5, 6], [7, 8], [9, 9], [2, 3], 4, [2, 5])
    assert there_and_back == as_printed_once + 5


# -- §IV-D: a network of VGG-11's size on clusters of its kind ---------------------------------------------------------

# Figure 3 (d) has processors of 13,000 GFLOP/s.
GFLOP_S = 13_000.0


def large_network() -> Dnn:
    """Eleven layers as VGG-11 has them: 45 GFLOP a sample's training at batch 64, flows that shrink, weights that grow.

    FLOPs and sizes per layer follow from the published layer table at 224 x 224 pixels; times at 13,000 GFLOP/s.
    """
    # Channels in, channels out, pixels a side of what comes out of the convolutions; then the products.
    convolutions = (
        (3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28), (512, 512, 14),
        (512, 512, 14),
    )  # fmt: skip
    products = ((25_088, 4_096), (4_096, 4_096), (4_096, 1_000))
    batch, sides_in = 64, (224, 112, 56, 56, 28, 28, 14, 14)
    flops = [2 * 9 * i * o * side**2 for i, o, side in convolutions] + [2 * i * o for i, o in products]
    weights = [4 * (9 * i * o + o) for i, o, _ in convolutions] + [4 * (i * o + o) for i, o in products]
    flows = [4 * i * side**2 for (i, _, _), side in zip(convolutions, sides_in, strict=True)]
    flows += [4 * i for i, _ in products]
    forward_ns = np.array(flops) * batch / GFLOP_S
    names = tuple(f"layer {number}" for number in range(1, 12))
    return network(
        layers=names, forward_ns=forward_ns, backward_ns=2 * forward_ns, update_ns=np.zeros(11), fetch_ns=0.0,
        weights_bytes=np.array(weights), in_bytes=np.array(flows) * batch, kept_bytes=np.array(flows) * batch,
        copy_byte_s=20e9, gflop_s=GFLOP_S, batch_size=batch,
    )  # fmt: skip


def cluster(gbit_s: float, gflop_s: float = GFLOP_S, count: int = 15, memory_bytes: float = float("inf")) -> Machines:
    like = Processor("", gflop_s, memory_bytes=memory_bytes)
    return Machines.equal(count, Wire("", gbit_s * GBIT_S), like)


def ranked(machines: Machines, clients: int = 3, cut: int = 4) -> Ranking:
    asked = Training(clients, cuts=(cut,))
    return rank(list(BUILT_IN.values()), large_network(), machines, asked, epoch_batches=60, max_paths=1)


def batches_ns(found: Ranking) -> dict[str, float]:
    """The time of a round divided by the batches that it trains on."""
    per_round = {"pipeline_learning": 1}
    return {
        row.name: row.batch.time_ns / per_round.get(row.name, found.training.clients)
        for row in found.possible
        if row.batch
    }


def test_sequential_architectures_do_not_scale() -> None:
    """Figures 3 (a) and (b): with more clients FL and FSL leave PL, SL and PSL further behind."""
    three, five = (batches_ns(ranked(cluster(40), clients)) for clients in (3, 5))
    for name in ("federated", "federated_split"):
        assert five[name] < 0.75 * three[name]  # 3 / 5 of the time, and the averaging
    for name in ("pipeline_learning", "split"):
        assert five[name] == pytest.approx(three[name], rel=0.06)
    assert five["parallel_split"] > 0.8 * three["parallel_split"]  # the clients' part shrinks, the server's does not
    parallel, sequential = ("federated", "federated_split"), ("pipeline_learning", "split", "parallel_split")
    for few, many in zip(parallel, parallel, strict=True):
        for slow in sequential:
            assert five[slow] / five[many] > three[slow] / three[few]


def test_the_worst_parallel_one_is_on_par_with_the_best_sequential_one() -> None:
    found = {row.name: row.epoch.time_ns for row in ranked(cluster(40)).possible if row.epoch}
    worst = max(found["federated"], found["federated_split"])
    assert worst < 1.1 * min(found["pipeline_learning"], found["split"], found["parallel_split"])


def influence(name: str, gbit_s: float, cut: int = 4) -> tuple[float, float]:
    """Ratios of the batch's time as power, then bandwidth, go from two thirds to three halves."""

    def time_ns(rate: float, gflop_s: float) -> float:
        return batches_ns(ranked(cluster(rate, gflop_s), cut=cut))[name]

    power = time_ns(gbit_s, GFLOP_S / 1.5) / time_ns(gbit_s, GFLOP_S * 1.5)
    bandwidth = time_ns(gbit_s / 1.5, GFLOP_S) / time_ns(gbit_s * 1.5, GFLOP_S)
    return power, bandwidth


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_with_much_bandwidth_power_matters_most(name: str) -> None:
    """§IV-D: from 40 Gb/s on the processing power causes the biggest variance."""
    for gbit_s in (40, 100, 400):
        power, bandwidth = influence(name, gbit_s)
        assert power > bandwidth


@pytest.mark.parametrize("name", ["federated", "federated_split", "split"])
def test_with_little_bandwidth_it_is_the_bottleneck(name: str) -> None:
    """§IV-D: at 10 Gb/s and below most of the time is spent sending; clients keep one layer."""
    for gbit_s in (1, 5, 10):
        power, bandwidth = influence(name, gbit_s, cut=1)
        assert bandwidth > power


def test_with_little_bandwidth_federated_split_is_no_better_than_parallel_split() -> None:
    """Figure 3 (d): what 2 n + 1 processors send makes FSL lose what its parallel edge servers gain."""

    def advantage(gbit_s: float) -> float:
        found = batches_ns(ranked(cluster(gbit_s), cut=1))
        return found["parallel_split"] / found["federated_split"]

    assert all(advantage(gbit_s) <= 1 for gbit_s in (1, 2, 5, 10))
    assert advantage(40) > 1.1
    assert advantage(400) > 1.5


def test_where_it_is_cut_decides_whether_it_fits() -> None:
    """§IV-D: half of the network on the clients needs more memory than they have, a smaller part does not."""
    small = Machines(
        (*(Processor(f"server {n}", GFLOP_S, memory_bytes=32e9) for n in range(4)),
         *(Processor(f"client {n}", GFLOP_S, memory_bytes=0.5e9) for n in range(3))),
        anywhere=Wire("", 5 * GBIT_S),
    )  # fmt: skip
    by_cut = {cut: {row.name: row.reason for row in ranked(small, cut=cut).rows} for cut in (1, 8)}
    assert by_cut[1]["federated_split"] == ""
    assert "no processor" in by_cut[8]["federated_split"]
