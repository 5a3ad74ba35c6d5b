"""ONNX models as a second input: the forward pass in PyTorch's words; and files that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.cli.main import main
from whatif.from_module.gpu_work import kernels_of
from whatif.from_module.onnx_file import read_onnx
from whatif.graph.types import Phase
from whatif.runtime.errors import WhatifError


def small_network(path: Path, batch: int | str) -> Path:
    """Conv(3 -> 8, 3x3, stride 2) - BatchNorm - Relu - GlobalAveragePool - Flatten - Gemm(8 -> 10) - Softmax."""
    onnx = need("onnx")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT

    def weights(name: str, *sizes: int) -> Any:
        count = 1
        for size in sizes:
            count *= size
        return helper.make_tensor(name, number, sizes, [0.0] * count)

    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "o", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fw", "fb"], ["g"], transB=1),
        helper.make_node("Softmax", ["g"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes, "small",
        [helper.make_tensor_value_info("x", number, [batch, 3, 32, 32])],
        [helper.make_tensor_value_info("y", number, [batch, 10])],
        [weights("w", 8, 3, 3, 3), weights("b", 8), *(weights(n, 8) for n in "somv"), weights("fw", 10, 8),
         weights("fb", 10)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(path))
    return path


def test_the_forward_pass_is_found(tmp_path: Path) -> None:
    graph = read_onnx(small_network(tmp_path / "small.onnx", 4))
    assert [operation.name.removeprefix("aten::") for operation in graph.operations] == [
        "convolution", "native_batch_norm", "relu", "adaptive_avg_pool2d", "addmm", "_softmax",
    ]  # fmt: skip
    assert {operation.phase for operation in graph.operations} == {Phase.FORWARD}
    assert graph.metadata["batch_size"] == 4
    asked = [kernel.what for operation in graph.operations for kernel in kernels_of(operation)]
    convolution = dict(asked[0].integers)
    assert (convolution["in_h"], convolution["stride_h"], convolution["padding_w"]) == (32, 2, 1)
    (product,) = (dict(what.integers) for what in asked if what.family == "matmul")
    assert product == {"batch": 1, "m": 4, "n": 10, "k": 8}
    (softmax,) = (dict(what.integers) for what in asked if what.family == "normalization")
    assert softmax == {"rows": 4, "columns": 10}


def test_sizes_that_are_not_fixed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="expected fixed shapes, got none for 'x' of Conv"):
        read_onnx(small_network(tmp_path / "small.onnx", "batch"))


@pytest.mark.parametrize("data", [b"", b"no protobuf at all", b"\x08\x07\x12\x00"])
def test_other_files_are_refused_with_one_sentence(data: bytes, tmp_path: Path) -> None:
    need("onnx")
    path = tmp_path / "other.onnx"
    path.write_bytes(data)
    with pytest.raises(WhatifError) as error:
        read_onnx(path)
    assert "expected an ONNX model" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    need("onnx")
    with pytest.raises(WhatifError, match="no such file"):
        read_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora", "r=4", "--freeze", "fc"], "got --lora, --freeze; an ONNX file holds"),
        (["--input", "4,3,32,32"], "got --input"),
        (["--optimizer", "adamw"], "got --optimizer"),
        (["--dtype", "bf16"], "got --dtype"),
    ],
)
def test_options_that_build_a_model_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(small_network(tmp_path / "small.onnx", 8))
    assert main(["predict", path, *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["predict", path, "--inference", "--tf32", "none", "--quiet"]) == 0
