"""Which kernels an operation becomes, their names' families, and how lists of tensors are cut into launches."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.from_module.convolutions import over_images
from whatif.from_module.gpu_work import _RULES, BATCH_NORM, as_they_lie, kernels_of
from whatif.from_module.moved_bytes import traffic
from whatif.from_module.multi_tensor import CHUNK_ELEMENTS, launches_of
from whatif.from_module.operations import Operation
from whatif.from_module.tensor_cores import on_tensor_cores
from whatif.graph.kernels import KernelFamily, classify_kernel
from whatif.graph.types import Phase
from whatif.hardware.gpu import load_gpu
from whatif.ingest.op_cost import op_cost

F = "float"


def operation(name: str, *inputs: list[int], out: tuple[int, ...] = (), concrete: list[str] | None = None,
              types: list[str] | None = None, view: bool = False) -> Operation:  # fmt: skip
    types = types or [F] * len(inputs)
    outputs = () if view else ((out, F),)
    return Operation(f"aten::{name}", list(inputs), types, concrete or [""] * len(types), Phase.FORWARD, outputs)


CONV = operation(
    "convolution", [8, 64, 56, 56], [128, 64, 3, 3], [128], [], [], [], [], [], [], out=(8, 128, 28, 28),
    types=[F, F, F, "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"],
    concrete=["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
)  # fmt: skip
CONV_BACKWARD = operation(
    "convolution_backward", [8, 128, 28, 28], [8, 64, 56, 56], [128, 64, 3, 3], [], [], [], [], [], [], [], [],
    out=(8, 64, 56, 56), types=[F, F, F, *["ScalarList"] * 4, "Scalar", "ScalarList", "Scalar", "ScalarList"],
    concrete=["", "", "", "[128]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, True]"],
)  # fmt: skip


def test_a_product_is_one_kernel_asked_for_as_itself() -> None:
    (kernel,) = kernels_of(operation("addmm", [16], [4, 8], [8, 16], out=(4, 16)))
    assert (kernel.what.name, dict(kernel.what.integers)) == ("linear", {"batch": 1, "m": 4, "n": 16, "k": 8})


def test_a_convolution_adds_its_bias_with_a_kernel_of_its_own() -> None:
    product, bias = kernels_of(CONV)
    assert product.what.family == "conv"
    assert product.what.phase == "fwd"
    # 8 x 128 x 28 x 28 numbers are read and written.
    assert dict(bias.what.integers) == {"elements": 802_816, "tensors": 1}


def test_a_convolutions_backward_work_is_two_products_and_a_sum() -> None:
    kernels = kernels_of(CONV_BACKWARD)
    assert [kernel.what.phase for kernel in kernels] == ["dgrad", "wgrad", "fwd"]
    assert [classify_kernel(kernel.name)[0] for kernel in kernels] == [
        KernelFamily.CONVOLUTION, KernelFamily.CONVOLUTION, KernelFamily.REDUCTION,
    ]  # fmt: skip


# Images (batch, channels, sizes), kernels' sizes, strides, paddings and dilations of each axis.
SEVERAL_AXES = {
    "row": ([4, 32, 100], [5], [2], [2], [1]),
    "image": ([4, 32, 28, 20], [3, 5], [2, 1], [1, 2], [1, 1]),
    "volume": ([4, 32, 9, 28, 20], [3, 3, 5], [2, 2, 1], [1, 1, 2], [1, 1, 1]),
    "dilated": ([4, 32, 9, 28, 20], [3, 3, 3], [1, 1, 1], [0, 0, 0], [2, 2, 2]),
}


def convolved(axes: str, *, transposed: bool, groups: int, mask: str = "") -> Operation:
    """A convolution of 32 to 48 channels, or with a mask its gradients."""
    x, kernel, stride, padding, dilation = SEVERAL_AXES[axes]
    options = list(zip(x[2:], kernel, stride, padding, dilation, strict=True))
    if transposed:
        weight, sizes = (
            [32, 48 // groups, *kernel],
            [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in options],
        )
    else:
        weight, sizes = (
            [48, 32 // groups, *kernel],
            [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in options],
        )
    out = (x[0], 48, *sizes)
    concrete = [str(stride), str(padding), str(dilation), str(transposed), str([0] * len(kernel)), str(groups)]
    empty: list[list[int]] = [[]] * 6
    if not mask:
        types = [F, F, "", *["ScalarList"] * 6]
        return operation(
            "convolution", x, weight, [], *empty, out=out, types=types, concrete=["", "", "", *concrete],
        )  # fmt: skip
    return operation(
        "convolution_backward", list(out), x, weight, [], *empty, [], out=tuple(x),
        types=[F, F, F, *["ScalarList"] * 8], concrete=["", "", "", "", *concrete, mask],
    )  # fmt: skip


@pytest.mark.parametrize("axes", SEVERAL_AXES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("mask", ["", "[True, False, False]", "[False, True, False]"])
def test_convolutions_of_other_axes_and_transposed_ones_do_their_products(
    axes: str, transposed: bool, groups: int, mask: str
) -> None:
    """They were priced by their bytes: one of a row in fp32 took a third of what the peak of an H100 allows."""
    call = convolved(axes, transposed=transposed, groups=groups, mask=mask)
    images = over_images(call)
    asked, found = (op_cost(o.name, o.dims, o.types, o.concrete) for o in (call, images))
    assert asked is not None
    assert found is not None
    assert found.flops == asked.flops
    (kernel,) = kernels_of(call)
    assert kernel.known
    sizes = dict(kernel.what.integers)
    assert sizes["groups"] == groups
    phases = {
        "": ("fwd", "dgrad"),
        "[True, False, False]": ("dgrad", "fwd"),
        "[False, True, False]": ("wgrad", "wgrad"),
    }
    assert kernel.what.phase == phases[mask][transposed]


def test_tensor_cores_convolve_in_another_layout() -> None:
    kernels = on_tensor_cores(kernels_of(CONV), load_gpu("H100-SXM-80"), ("conv",), backward=False)
    product, read, written, _ = kernels
    assert product.what.dtype == "tf32"
    assert classify_kernel(product.name) == (KernelFamily.CONVOLUTION, "tf32")
    assert [classify_kernel(kernel.name)[0] for kernel in (read, written)] == [KernelFamily.LAYOUT] * 2
    assert dict(read.what.integers)["elements"] == 8 * 64 * 56 * 56
    assert dict(written.what.integers)["elements"] == 8 * 128 * 28 * 28
    # Without TF32 nothing changes.
    assert on_tensor_cores(kernels_of(CONV), load_gpu("H100-SXM-80"), (), backward=False) == kernels_of(CONV)


@pytest.mark.parametrize(
    ("left", "right", "sizes"),
    [
        ([64, 128], [4, 128, 256], (4, 16, 256, 128)),  # rows of all experts, a matrix of each: a forward pass
        ([4, 16, 128], [4, 128, 256], (4, 16, 256, 128)),
        ([128, 64], [64, 256], (4, 128, 256, 16)),  # their weights' gradients
        ([4, 16, 128], [128, 256], (4, 16, 64, 128)),
    ],
)
def test_a_grouped_product_is_a_batch_of_as_many_flops(
    left: list[int], right: list[int], sizes: tuple[int, ...]
) -> None:
    call = operation("_grouped_mm", left, right, [4], out=(64, 256), types=[F, F, "int"])
    (kernel,) = kernels_of(call)
    assert tuple(dict(kernel.what.integers).values()) == sizes
    cost = op_cost("aten::_grouped_mm", call.dims, call.types, call.concrete)
    assert cost is not None
    assert cost.flops == 2 * prod(sizes)


def test_gradients_of_normalizations_take_a_share_of_the_forward_kernel() -> None:
    layer_norm = operation(
        "native_layer_norm_backward", [8, 512, 1024], [8, 512, 1024], [], [8, 512, 1], [8, 512, 1], [1024], [1024], [],
        out=(8, 512, 1024), types=[F, F, "ScalarList", F, F, F, F, ""],
        concrete=["", "", "[1024]", "", "", "", "", "[True, True, True]"],
    )  # fmt: skip
    kernels = kernels_of(layer_norm)
    assert [(k.what.name, dict(k.what.integers)) for k in kernels] == [
        ("layer_norm", {"rows": 4096, "columns": 1024})
    ] * 2
    for columns, name in ((1024, "softmax"), (2048, "add")):  # longer rows cost what they move
        shape = [8, 16, 512, columns]
        softmax = operation(
            "_softmax_backward_data", shape, shape, [], [], out=tuple(shape), types=[F, F, "Scalar", "Scalar"],
            concrete=["", "", "-1", ""],
        )  # fmt: skip
        (kernel,) = kernels_of(softmax)
        assert kernel.what.name == name


def test_weights_that_are_not_transposed_are_also_asked_for_as_a_batch_of_one() -> None:
    (kernel,) = kernels_of(operation("addmm", [16], [4, 8], [8, 16], out=(4, 16)))
    other = as_they_lie(kernel).also
    assert other is not None
    assert (other.name, other.integers) == ("bmm", kernel.what.integers)


def test_views_and_what_the_host_computes_are_no_kernels() -> None:
    assert kernels_of(operation("view", [4, 4], [], view=True)) == []
    assert kernels_of(operation("transpose", [4, 4], view=True)) == []
    assert kernels_of(operation("empty", [], out=(4, 4))) == []
    on_host = Operation("aten::add", [[4], [4]], [F, F], ["", ""], Phase.UPDATE, (((4,), F),), on_device=False)
    assert kernels_of(on_host) == []


def test_what_no_rule_knows_says_so_and_moves_its_bytes() -> None:
    (kernel,) = kernels_of(operation("fft_c2c", [1000], out=(1000,)))
    assert not kernel.known
    assert dict(kernel.what.integers) == {"elements": 1000, "tensors": 1}
    (known,) = kernels_of(operation("gelu_backward", [1000], [1000], out=(1000,)))
    assert known.known
    assert dict(known.what.integers) == {"elements": 1000, "tensors": 2}


@pytest.mark.parametrize(
    ("call", "numbers", "known"),
    [
        # The gradient of a slice, and padding: fill the output, copy the input.
        (operation("slice_backward", [10, 30], [], out=(40, 30)), [1200, 2 * 300], [True, True]),
        (operation("constant_pad_nd", [10, 30], [], out=(12, 30)), [360, 2 * 300], [True, True]),
        (operation("constant_pad_nd", [12, 30], [], out=(10, 30)), [2 * 300], [True]),
        # A table of 1,000 rows, of which 20 change: rows and values are read, rows are written; the indices are int64.
        (operation("index_add_", [1000, 30], [], [20], [20, 30], [], out=(1000, 30),
                   types=[F, "Scalar", "long int", F, "Scalar"]), [3 * 600 + 40], [True]),
        (operation("index_add", [1000, 30], [], [20], [20, 30], [], out=(1000, 30),
                   types=[F, "Scalar", "long int", F, "Scalar"]), [2 * 30_000, 3 * 600 + 40], [True, True]),
        (operation("index_put_", [1000, 30], [[20]], [20, 30], [], out=(1000, 30), concrete=["", "", "", "True"],
                   types=[F, "TensorList:long int", F, "Scalar"]), [3 * 600 + 40], [False]),
        # 20 columns of 8 rows.
        (operation("index_put_", [8, 1000], [[20]], [8, 20], [], out=(8, 1000),
                   types=[F, "TensorList:long int", F, "Scalar"]), [3 * 160 + 40], [True]),
        # One value for 20 rows, for 20 rows of 5 columns each, and for the rows that a mask of bytes names.
        (operation("index_put_", [1000, 30], [[20]], [], [], out=(1000, 30),
                   types=[F, "TensorList:long int", F, "Scalar"]), [2 * 600 + 40], [True]),
        (operation("index_put_", [1000, 30], [[20, 1], [5]], [], [], out=(1000, 30),
                   types=[F, "TensorList:long int", F, "Scalar"]), [2 * 100 + 50], [True]),
        (operation("index_put_", [1000, 30], [[1000]], [], [], out=(1000, 30),
                   types=[F, "TensorList:bool", F, "Scalar"]), [2 * 30_000 + 250], [True]),
        (operation("index_fill_", [1000, 30], [], [20], [], out=(1000, 30), concrete=["", "0", "", "0.0"],
                   types=[F, "Scalar", "long int", "Scalar"]), [2 * 600 + 40], [True]),
        # Rows of a table that are too long are read and shortened.
        (operation("embedding_renorm_", [1000, 30], [4, 5], [], [], out=(1000, 30),
                   types=[F, "long int", "Scalar", "Scalar"]), [2 * 600 + 40], [True]),
    ],
)  # fmt: skip
def test_what_changes_a_part_moves_that_part(call: Operation, numbers: list[int], known: list[bool]) -> None:
    kernels = kernels_of(call)
    sizes = [dict(kernel.what.integers) for kernel in kernels]
    moved = [size["elements"] * (size["tensors"] + 1) for size in sizes]  # type: ignore[operator]
    assert moved == pytest.approx(numbers, abs=3)
    assert [kernel.known for kernel in kernels] == known


def test_batch_norm_reads_its_input_twice_where_it_trains() -> None:
    x = [8, 64, 56, 56]
    trained, evaluated = (
        kernels_of(operation("native_batch_norm", x, [64], [64], [64], [64], [], out=tuple(x),
                             types=[F] * 5 + ["Scalar"], concrete=[""] * 5 + [trains]))[0]
        for trains in ("True", "False")
    )  # fmt: skip
    assert trained.share == pytest.approx(BATCH_NORM)  # two reads and a write, as an addition has
    assert evaluated.share == pytest.approx(BATCH_NORM * 2 / 3)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mm", KernelFamily.GEMM), ("bmm", KernelFamily.GEMM), ("native_layer_norm_backward", KernelFamily.LAYER_NORM),
        ("native_batch_norm", KernelFamily.NORMALIZATION), ("native_batch_norm_backward", KernelFamily.NORMALIZATION),
        ("_softmax", KernelFamily.SOFTMAX), ("_log_softmax_backward_data", KernelFamily.SOFTMAX),
        ("gelu", KernelFamily.ELEMENTWISE), ("gelu_backward", KernelFamily.ELEMENTWISE),
        ("add", KernelFamily.ELEMENTWISE), ("copy_", KernelFamily.ELEMENTWISE),
        ("masked_fill", KernelFamily.ELEMENTWISE), ("native_dropout", KernelFamily.ELEMENTWISE),
        ("cat", KernelFamily.ELEMENTWISE), ("where", KernelFamily.ELEMENTWISE), ("tril", KernelFamily.ELEMENTWISE),
        ("sum", KernelFamily.REDUCTION), ("mean", KernelFamily.REDUCTION), ("nll_loss_forward", KernelFamily.REDUCTION),
        ("max_pool2d_with_indices", KernelFamily.POOLING), ("embedding", KernelFamily.INDEXING),
        ("index_select", KernelFamily.INDEXING), ("gather", KernelFamily.INDEXING),
    ],
)  # fmt: skip
def test_the_names_of_kernels_show_their_families(name: str, family: KernelFamily) -> None:
    inputs = [[4, 8, 8], [4, 8, 8]] if name == "bmm" else [[8, 8], [8, 8]]
    kernels = kernels_of(operation(name, *inputs, out=(8, 8), concrete=["", "-1"] if "softmax" in name else None))
    assert {classify_kernel(kernel.name) for kernel in kernels} == {(family, "fp32")}


def test_attention_is_one_kernel_and_its_backward_pass_five_products() -> None:
    q = [2, 12, 512, 64]
    forward = operation("_scaled_dot_product_flash_attention", q, q, q, [], [], out=tuple(q),
                        types=[F, F, F, "Scalar", "Scalar"], concrete=["", "", "", "0.0", "True"])  # fmt: skip
    (kernel,) = kernels_of(forward)
    assert dict(kernel.what.integers) == {
        "batch": 2, "query_length": 512, "key_length": 512, "heads": 12, "kv_heads": 12, "head_size": 64, "causal": 1,
    }  # fmt: skip
    backward = operation("_scaled_dot_product_flash_attention_backward", q, q, q, q, q, out=tuple(q))
    assert [k.share for k in kernels_of(backward)] == [2.5]
    assert classify_kernel(kernel.name)[0] == KernelFamily.ATTENTION
    # Its own first truth says what it keeps, not that it is causal.
    efficient = operation("_scaled_dot_product_efficient_attention", q, q, q, [], [], [], [], out=tuple(q),
                          types=[F, F, F, "", "Scalar", "Scalar", "Scalar"],
                          concrete=["", "", "", "", "True", "0.0", "False"])  # fmt: skip
    assert dict(kernels_of(efficient)[0].what.integers)["causal"] == 0


def test_launches_of_lists_by_hand() -> None:
    assert launches_of([10] * 64, 2) == (640,)  # 64 tensors of two lists fill one launch
    assert launches_of([10] * 65, 2) == (640, 10)
    # 320 blocks of 65,536 elements: a large tensor goes on in the next launch.
    assert launches_of([321 * CHUNK_ELEMENTS], 1) == (320 * CHUNK_ELEMENTS, CHUNK_ELEMENTS)
    assert launches_of([0, 5], 1) == (5,)
    assert launches_of([], 3) == ()


@given(st.lists(st.integers(0, 500_000), max_size=200), st.integers(1, 6))
def test_launches_handle_every_element_once(elements: list[int], depth: int) -> None:
    found = launches_of(elements, depth)
    assert sum(found) == sum(elements)
    assert all(0 < count <= 320 * CHUNK_ELEMENTS for count in found)


@given(st.integers(0, 10**9), st.integers(1, 10**9), st.sampled_from(["fp32", "bf16", "fp64"]))
def test_traffic_moves_as_many_bytes_as_it_is_asked_to(read: int, written: int, dtype: str) -> None:
    what = traffic(read, written, dtype)
    sizes = dict(what.integers)
    element = {"fp32": 4, "bf16": 2, "fp64": 8}[dtype]
    moved = sizes["elements"] * (sizes["tensors"] + 1) * element
    assert abs(moved - (read + written)) <= 3 * element


@pytest.mark.parametrize("name", sorted(_RULES))
@pytest.mark.parametrize("inputs", [[], [[]], [[4]], [[2, 3]] * 3, [[2, 3, 4]] * 5, [[2, 3, 4, 5]] * 4, [None]])
def test_inputs_that_no_such_call_has_are_recognized_by_their_bytes(name: str, inputs: list[list[int]]) -> None:
    """A damaged execution trace costs that operator's answer, and not the whole file."""
    kernels = kernels_of(operation(name, *inputs, out=(), types=[F if inputs != [None] else ""] * len(inputs)))
    assert kernels
    assert all(kernel.what.integers for kernel in kernels)


@pytest.mark.parametrize(
    ("name", "types", "moved_bytes"),
    [
        ("_foreach_copy_", ["TensorList:float", "TensorList:c10::Half"], 2 + 4),  # the first list is written alone
        ("_foreach_copy_", ["TensorList:c10::Half", "TensorList:float"], 4 + 2),
        ("_foreach_mul_", ["TensorList:float"], 4 + 4),
        ("_foreach_add_", ["TensorList:float", "TensorList:float"], 4 + 4 + 4),
        ("_foreach_norm", ["TensorList:float"], 4),
        ("_fused_adamw_", ["TensorList:c10::Half"] * 4, 4 * 2 + 3 * 2),
    ],
)
def test_lists_move_their_own_types(name: str, types: list[str], moved_bytes: int) -> None:
    lists = [[[1000, 1000]]] * len(types)
    outputs = () if name.endswith("_") else (((), F),)
    (kernel,) = kernels_of(Operation(f"aten::{name}", lists, types, [""] * len(types), Phase.UPDATE, outputs))
    integers = dict(kernel.what.integers)
    size = 2 if kernel.what.dtype == "fp16" else 4
    assert integers["elements"] * (integers["tensors"] + 1) * size == pytest.approx(1e6 * moved_bytes, rel=1e-5)
