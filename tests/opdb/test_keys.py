"""Keys: the same on every machine, different for different operators; the split that follows from them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.opdb.builders import products
from whatif.opdb.keys import held_out, mixed, op_keys, text_code
from whatif.opdb.rows import operators

SIZES = st.integers(1, 2**40)


def test_a_key_is_what_it_was() -> None:
    """Databases of different people meet by their keys: a change here loses every one that exists."""
    assert text_code("fp32") == 0x88ECE651DB0BF5D1  # the first eight bytes of its SHA-256, the last one first
    # splitmix64 started at 0 gives this first number.
    assert int(mixed(np.zeros(1, dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert [int(key) for key in products([1, 2]).keys] == [15672861925658164135, 8266970039329351385]


def test_columns_count_by_name_and_not_by_order() -> None:
    one = np.array([3], dtype=np.int64)
    two = np.array([4], dtype=np.int64)
    name = {"name": np.array([text_code("mm")], dtype=np.uint64)}
    assert op_keys("matmul", name, {"m": one, "n": two}) == op_keys("matmul", name, {"n": two, "m": one})
    assert op_keys("matmul", name, {"m": one, "n": two}) != op_keys("matmul", name, {"m": two, "n": one})


@given(st.tuples(SIZES, SIZES, SIZES, SIZES), st.tuples(SIZES, SIZES, SIZES, SIZES))
def test_different_operators_have_different_keys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    names = ("batch", "m", "n", "k")
    ops = operators("matmul", {n: [x, y] for n, x, y in zip(names, a, b, strict=True)}, name="mm", dtype="fp32")
    assert (ops.keys[0] == ops.keys[1]) == (a == b)


def test_name_phase_format_and_layout_distinguish_keys() -> None:
    sizes = {"batch": 1, "m": 8, "n": 8, "k": 8}
    base = operators("matmul", sizes, name="mm", dtype="fp32")
    others = [
        operators("matmul", sizes, name="bmm", dtype="fp32"),
        operators("matmul", sizes, name="mm", dtype="fp16"),
        operators("matmul", sizes, name="mm", dtype="fp32", phase="dgrad"),
        operators("matmul", sizes, name="mm", dtype="fp32", layout="nt"),
    ]
    assert len({int(o.keys[0]) for o in (base, *others)}) == 5
    assert len({int(o.group_keys[0]) for o in (base, *others)}) == 5
    # Sizes alone make no other group.
    larger = operators("matmul", {**sizes, "m": 9}, name="mm", dtype="fp32")
    assert larger.group_keys == base.group_keys
    assert larger.keys != base.keys


def test_the_split_takes_its_share_and_depends_on_the_seed() -> None:
    keys = products(list(range(1, 20001))).keys
    out = held_out(keys, 7, 0.1)
    assert 0.09 < out.mean() < 0.11
    other = held_out(keys, 8, 0.1)
    assert 0.005 < (out & other).mean() < 0.015  # independent: a hundredth
    assert not held_out(keys, 7, 1e-12).any()
    # An operator's own part in it does not depend on the others.
    assert (held_out(keys[::3], 7, 0.1) == out[::3]).all()
