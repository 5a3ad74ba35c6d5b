"""The forms of a call, by their shapes, types and strides alone."""

import importlib
from typing import Any

import pytest


def module(name: str) -> Any:
    """A module that needs no torch."""
    return importlib.import_module(f"whatif.instrumentation.{name}")


op_calls = module("operators.calls")
op_variants = module("operators.variants")


def tensor(name: str, *shape: int, dtype: str = "float", strides: tuple[int, ...] | None = None) -> Any:
    return op_calls.Argument(name, (op_calls.TensorSpec(shape, strides, dtype),))


def call(op: str, *arguments: Any) -> Any:
    return op_calls.Call(op, arguments, backward=False)


def forms(one: Any, parameters: list[list[int]], batch_size: int = 4, others: tuple[Any, ...] = ()) -> dict[str, Any]:
    metadata = {"batch_size": batch_size, "layers": [{"name": "all", "shapes": dict(enumerate(parameters))}]}
    run = op_variants.describe_run([one, *others], metadata)
    return op_variants.variants(one, run, op_variants.VARIANTS)


def shapes(one: Any) -> list[tuple[int, ...]]:
    return [spec.shape for spec in one.tensors()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-7", -7),
        ("0.5", 0.5),
        ("2.", 2.0),
        ("True", True),
        ("[]", []),
        ("[1, 2]", [1, 2]),
        ("-inf", -float("inf")),
        ("[True, False]", [True, False]),
        ("1e-05", 1e-05),
    ],
)
def test_values_are_read(text: str, value: Any) -> None:
    read = op_calls.parse_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["", "f()", "[1, [2]]", "1 + 1", "{}", "'a'", None, 5, "[1,", "(1, 2)"])
def test_what_is_no_value_is_refused(text: Any) -> None:
    with pytest.raises(op_calls.NotReplayable):
        op_calls.parse_value(text)


def test_a_weight_never_grows_with_the_batch() -> None:
    """Also not one with as many output channels as the batch has samples."""
    convolution = call("conv2d", tensor("input", 4, 3, 8, 8), tensor("weight", 4, 3, 3, 3))
    made = forms(convolution, [[4, 3, 3, 3]])
    assert shapes(made["batch_x2"]) == [(8, 3, 8, 8), (4, 3, 3, 3)]
    assert shapes(made["batch_x0.5"]) == [(2, 3, 8, 8), (4, 3, 3, 3)]


def test_what_may_be_a_weight_or_a_batch_is_left_alone() -> None:
    addition = call("add_", tensor("self", 4, 16), tensor("other", 4, 16))
    assert "batch_x2" not in forms(addition, [[4, 16]])
    assert shapes(forms(addition, [[5, 16]])["batch_x2"]) == [(8, 16), (8, 16)]


def test_an_odd_batch_has_no_half() -> None:
    relu = call("relu", tensor("self", 5, 16))
    assert forms(relu, [], batch_size=5).keys() == {"recorded", "bf16", "batch_x2"}


# Activations [4 sequences, 10 tokens, 16 wide] make the products below have 40 rows or sum over 40.
SEQUENCES = (call("gelu", tensor("self", 4, 10, 16)),)


def test_rows_of_a_product_with_a_weight_grow() -> None:
    product = call("mm", tensor("self", 40, 24), tensor("mat2", 24, 16))
    assert shapes(forms(product, [[24, 16]], others=SEQUENCES)["batch_x2"]) == [(80, 24), (24, 16)]


def test_what_a_weight_gradient_sums_over_grows() -> None:
    product = call("mm", tensor("self", 24, 40, strides=(1, 24)), tensor("mat2", 40, 16, strides=(16, 1)))
    grown = forms(product, [[24, 16]], others=SEQUENCES)["batch_x2"]
    assert shapes(grown) == [(24, 80), (80, 16)]
    assert [spec.strides for spec in grown.tensors()] == [(1, 24), (16, 1)]


def test_a_product_that_is_either_is_left_alone() -> None:
    product = call("mm", tensor("self", 40, 40), tensor("mat2", 40, 40))
    assert "batch_x2" not in forms(product, [[40, 40]], others=SEQUENCES)


def test_sizes_follow_the_batch() -> None:
    sizes = op_calls.Argument("input_sizes", value=[3, 4, 2, 16])
    backward = call("select_backward", tensor("grad_output", 4, 2, 16), sizes)
    assert forms(backward, [])["batch_x2"].arguments[1].value == [3, 8, 2, 16]


def test_states_of_recurrent_layers_have_the_batch_in_the_middle() -> None:
    flag = op_calls.Argument("batch_first", value=True)
    layer = call("lstm", tensor("input", 4, 9, 16), tensor("hx", 2, 4, 32), tensor("params", 128, 16), flag)
    assert shapes(forms(layer, [[128, 16]])["batch_x2"]) == [(8, 9, 16), (2, 8, 32), (128, 16)]


def test_normalizations_keep_fp32_weights_beside_bf16_inputs() -> None:
    normalization = call(
        "native_batch_norm_backward",
        tensor("grad_out", 4, 16, 8, 8),
        tensor("input", 4, 16, 8, 8),
        tensor("weight", 16),
        tensor("save_invstd", 16),
        op_calls.Argument("train", value=True),
    )
    made = forms(normalization, [[16]])
    assert [spec.dtype for spec in made["bf16"].tensors()] == ["c10::BFloat16"] * 2 + ["float"] * 2
    assert made["eval"].arguments[-1].value is False
    assert shapes(made["batch_x2"])[2:] == [(16,), (16,)]


def test_only_images_have_channels() -> None:
    convolution = call("conv2d", tensor("input", 4, 3, 8, 8), tensor("weight", 5, 3, 3, 3))
    strides = [spec.strides for spec in forms(convolution, [])["bf16_channels_last"].tensors()]
    assert strides == [(192, 1, 24, 3), (27, 1, 9, 3)]
    attention = call("scaled_dot_product_attention", tensor("query", 4, 2, 9, 8))
    assert "channels_last" not in forms(attention, [], others=(convolution,))
    assert "channels_last" not in forms(call("relu", tensor("self", 4, 2, 9, 8)), [])


def test_bf16_has_no_bf16_form() -> None:
    assert forms(call("relu", tensor("self", 3, dtype="c10::BFloat16")), []).keys() == {"recorded"}


def test_cudnn_batch_normalization_is_torchs_own_in_eval_mode() -> None:
    backward = call(
        "cudnn_batch_norm_backward",
        *(tensor(name, 4, 16, 8, 8) for name in ("input", "grad_output")),
        *(tensor(name, 16) for name in ("weight", "running_mean", "running_var", "save_mean", "save_var")),
        op_calls.Argument("epsilon", value=1e-5),
        tensor("reserveSpace", 0, dtype="unsigned char"),
    )
    changed = forms(backward, [])["eval"]
    assert changed.op == "native_batch_norm_backward"
    assert [argument.name for argument in changed.arguments[-3:]] == ["train", "eps", "output_mask"]
