"""Tianshu's nine operations as `whatif opdb profile` measured them on one CPU (docs/profile.md): sound, plausible.

Made by `whatif opdb profile add,relu --design grid --shapes 49` and `whatif opdb profile all --shapes 80`, both with
`--within 8` and a budget of five minutes in all, on a virtual machine with an AMD EPYC 7003 that others kept busy.
"""

from pathlib import Path

import numpy as np

from tests.helpers import need
from whatif.opdb.checking import check
from whatif.opdb.store import Store
from whatif.opdb.work import work

need("pyarrow")
FOLDER = Path(__file__).resolve().parent.parent / "data" / "cpu_operators"
# One core with AVX2: two products of eight fp32 numbers a cycle, at most 3.7 GHz (AMD's data sheet of the EPYC 7003).
PEAK_FLOP_S = 2 * 2 * 8 * 3.7e9


def test_what_was_measured_is_sound_and_within_what_one_core_can_do() -> None:
    store = Store.open(FOLDER)
    assert not check(store).problems
    contributions, wrong = store.contributions()
    assert not wrong
    names = set()
    for contribution in contributions:
        rows = contribution.read()
        names |= {
            f"{name} {phase}"
            for name, phase in zip(rows.ops.texts["name"].decoded(), rows.ops.texts["phase"].decoded(), strict=True)
        }
        flops, _ = work(rows.ops)
        assert (flops / rows.t_s < PEAK_FLOP_S).all()
        assert (rows.t_s > 1e-6).all()  # a call from Python
        if rows.family != "elementwise":
            # The largest operators have to come near to what a core can do, and the smallest to be far from it.
            rate = flops / rows.t_s / PEAK_FLOP_S
            assert np.median(rate[flops > 1e9]) > 0.3
    assert names == {
        "add fwd", "sub fwd", "mul fwd", "div fwd", "relu fwd", "mm fwd", "conv2d fwd", "conv2d dgrad", "conv2d wgrad"
    }  # fmt: skip
