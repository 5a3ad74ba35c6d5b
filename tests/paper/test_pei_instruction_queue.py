"""Pei et al. (IEEE Access 2019) §III A to C against what the paper prints: tables 6 and 8.

Table 6 holds the authors' own predictions, table 8 a measured iteration. Figures 7, 9 and 10 print no numbers, and
tables 5 and 7 print errors against times that are not printed: those cannot be scored. What the paper does not print is
assumed (docs/instruction_queue.md): AlexNet's batch is figure 7's, 256; ResNet-50's is 16 in table 6 and 128 in table
8, for which the two tables agree with one another; a K80 runs at its 875 MHz boost, since the paper has it "quite
similar" to a K40. One DOP a GPU is taken from AlexNet's forward time, the other cells are predictions.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import replace
from tests.paper.pei_networks import alexnet, layers_s, network_s, resnet50
from whatif.hardware.gpu import load_gpu
from whatif.opdb.instruction_queue import Units, units_of

# Seconds: AlexNet forward, and forward and backward; ResNet-50 the same.
TABLE_6 = {
    "P40": (0.03494, 0.10996, 0.0331, 0.097),
    "K80-die": (0.08843, 0.29054, 0.087, 0.267),
    "K40": (0.0907, 0.2958, 0.0869, 0.2609),
}
DOP = {"P40": 0.565, "K80-die": 0.519, "K40": 0.515}
TABLE_8_ONE_GPU_S = 0.71388


def units(name: str) -> Units:
    found = units_of(load_gpu(name), dop=DOP[name])
    assert found is not None
    return replace(found, clock_hz=875e6) if name == "K80-die" else found


@pytest.mark.parametrize("name", TABLE_6)
def test_table_6(name: str) -> None:
    """The cell that the DOP is from within 1 %, the three others within 14 %, the authors' own predictions."""
    ours = (*network_s(units(name), alexnet(256)), *network_s(units(name), resnet50(16)))
    misses = np.array(ours) / np.array(TABLE_6[name]) - 1
    assert abs(misses[0]) < 0.01
    assert np.abs(misses[1:]).max() < 0.14
    assert np.abs(misses[1:]).mean() < 0.11


def test_table_8_on_one_gpu() -> None:
    """A measured iteration of ResNet-50 on a P40, with the DOP from another network: theirs misses it by 2.0 %."""
    _, iteration_s = network_s(units("P40"), resnet50(128))
    assert iteration_s == pytest.approx(TABLE_8_ONE_GPU_S, rel=0.02)


def test_what_the_text_says_of_the_layers() -> None:
    """Section IV-A: convolutions and products are over 90 % of AlexNet, and pooling can almost be neglected."""
    layers = list(alexnet(256))
    total = sum(layers_s(units("P40"), layers))
    share = {
        kind: total[[layer.kind == kind for layer in layers]].sum() / total.sum() for kind in ("conv", "linear", "pool")
    }
    assert share["conv"] > share["linear"] > share["pool"]
    assert share["conv"] + share["linear"] > 0.85  # short of the paper's 90 %: ReLU is a kernel of its own here
    assert share["pool"] < 0.06
