"""Layouts by "Input Strides": what says that channels lie innermost, and what it makes of a recorded convolution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import whatif
from whatif.ingest.operator_calls import CHANNELS_LAST, describe, describe_other, with_layouts

X, WEIGHT = [8, 64, 28, 32], [16, 64, 3, 3]
LAST = [57_344, 1, 2_048, 64]
USUAL = [57_344, 896, 32, 1]
TYPES = ["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]
DIMS: list[Any] = [X, WEIGHT, [], [], [], [], [], [], []]
CONCRETE = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]


@pytest.mark.parametrize(
    ("strides", "layout"),
    [
        ([LAST, [576, 9, 3, 1], [], [], [], [], [], [], []], "nhwc"),
        ([USUAL, [576, 1, 192, 64], [], [], [], [], [], [], []], "nhwc"),  # cuDNN follows the weight as well
        ([USUAL, [576, 9, 3, 1], [], [], [], [], [], [], []], ""),
        ([LAST], ""),  # not of these inputs
        ("strides", ""),
        (None, ""),
        ([["a", 1, 2, 3], USUAL, [], [], [], [], [], [], []], ""),
    ],
)
def test_a_convolution_has_the_layout_of_its_strides(strides: Any, layout: str) -> None:
    what = describe("aten::convolution", DIMS, TYPES, with_layouts(DIMS, CONCRETE, strides))
    assert what is not None
    assert what.layout == layout


def test_one_channel_and_one_pixel_have_no_layout() -> None:
    assert with_layouts([[8, 1, 4, 4]], [""], [[16, 1, 4, 1]]) == [""]
    assert with_layouts([[8, 64, 1, 1]], [""], [[64, 1, 64, 64]]) == [""]
    assert with_layouts([X], [""], [LAST]) == [CHANNELS_LAST]


def test_what_is_looked_up_is_the_same_in_either_layout() -> None:
    described = [describe_other("aten::relu", [X], ["float"], with_layouts([X], [""], [s])) for s in (LAST, USUAL)]
    assert described[0] == described[1]


@pytest.mark.parametrize(("strides", "layout"), [(LAST, "nhwc"), (USUAL, "")])
@pytest.mark.parametrize("name", ["aten::convolution", "aten::\\u0063onvolution"])  # an escape is left to the decoder
def test_both_readers_take_the_layout(tmp_path: Path, strides: list[int], layout: str, name: str) -> None:
    args = {
        "Input Dims": DIMS, "Input type": TYPES, "Concrete Inputs": CONCRETE,
        "Input Strides": [strides, [576, 9, 3, 1], [], [], [], [], [], [], []],
    }  # fmt: skip
    call = {"ph": "X", "cat": "cpu_op", "name": "NAME", "pid": 1, "tid": 1, "ts": 10.0, "dur": 5.0, "args": args}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [call, call | {"ts": 20.0}]}).replace("NAME", name))
    operators = whatif.read(trace).info.operators
    assert [what.layout for what in operators if what.family == "conv"] == [layout]
