"""The vocabulary of operators: families, their attributes, number formats; and a recorded operator in these terms.

An operator is identified by its family, name, phase, number format and layout, and by the integers of its family.
Units are part of the names (`bytes`); names without a unit count elements or tensors.
"""

from __future__ import annotations

from msgspec import Struct

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int", "unknown")
DTYPE_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "int8": 1.0, "int": 8.0,
}  # fmt: skip
PHASES = ("fwd", "dgrad", "wgrad", "bwd", "update")


class Family(Struct, frozen=True):
    """A family of operators whose times follow one model.

    Times are interpolated along `sizes`; `modes` have to be equal. Together they are the attributes.
    """

    name: str
    sizes: tuple[str, ...]
    modes: tuple[str, ...] = ()

    @property
    def attributes(self) -> tuple[str, ...]:
        """The integers of an operator, in written order."""
        return self.sizes + self.modes


FAMILIES = {
    family.name: family
    for family in (
        # out (batch, m, n) = left (batch, m, k) times right (batch, k, n)
        Family("matmul", ("batch", "m", "n", "k")),
        Family(
            "conv",
            ("batch", "in_channels", "out_channels", "in_h", "in_w"),
            ("kernel_h", "kernel_w", "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w",
             "groups"),
        ),
        # `tensors` of `elements` each are read, one is written.
        Family("elementwise", ("elements",), ("tensors",)),
        # Each of `rows` is normalized over its `columns`: softmax, layer norm.
        Family("normalization", ("rows", "columns")),
        Family(
            "attention",
            ("batch", "query_length", "key_length", "heads"),
            ("kv_heads", "head_size", "causal"),
        ),
        # `bytes` as in nccl-tests: the whole buffer, also for all-gather and reduce-scatter.
        Family("collective", ("bytes",), ("ranks", "nodes")),
        # Anything else: its layout is the recorded form of its inputs, as JSON. It is looked up, never estimated.
        Family("other", ()),
    )
}  # fmt: skip

# The family of an operator's name, for queries by name.
FAMILY_OF_NAME = {
    **dict.fromkeys(("mm", "bmm", "linear", "matmul"), "matmul"),
    "conv2d": "conv",
    **dict.fromkeys(
        ("add", "sub", "mul", "div", "pow", "add_scalar", "mul_scalar", "div_scalar", "pow_scalar", "relu", "gelu",
         "tanh", "sigmoid", "silu", "exp", "copy"),
        "elementwise",
    ),
    **dict.fromkeys(("softmax", "log_softmax", "layer_norm", "rms_norm"), "normalization"),
    **dict.fromkeys(("attention",), "attention"),
    **dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"), "collective"
    ),
}  # fmt: skip
# Defaults of attributes: a number, or the attribute whose value is used instead (squares are given by one side).
# Attributes that are not listed are required.
DEFAULTS: dict[str, int | str] = {
    "batch": 1, "stride_h": 1, "padding_h": 0, "dilation_h": 1, "groups": 1, "causal": 0, "nodes": 1,
    "kernel_w": "kernel_h", "stride_w": "stride_h", "padding_w": "padding_h", "dilation_w": "dilation_h",
    "in_w": "in_h", "kv_heads": "heads", "key_length": "query_length",
}  # fmt: skip


# Elementwise operators that read two tensors.
TWO_TENSORS = frozenset(("add", "sub", "mul", "div", "pow"))

# Larger numbers are damage or malice: no device holds a tensor of 2**44 elements.
LARGEST_ATTRIBUTE = 2**44
# A text column has few distinct values; a shard with more of them is no table of measurements.
LONGEST_TEXT = 4096
# Elements of a tensor of several dimensions are a product of sizes.
_LARGEST_PRODUCT = 2**62


class Described(Struct, frozen=True):
    """An operator of the database: the key of a row."""

    family: str
    name: str
    dtype: str
    integers: tuple[tuple[str, int], ...]
    phase: str = "fwd"
    layout: str = ""


def check_described(operator: Described) -> None:
    """Raise ValueError if an operator from a file has an unknown word or an impossible size."""
    family = FAMILIES.get(operator.family)
    if family is None or operator.dtype not in DTYPES or operator.phase not in PHASES:
        raise ValueError(f"an operator of {operator.family[:40]!r}, {operator.dtype[:40]!r}, {operator.phase[:40]!r}")
    if sorted(name for name, _ in operator.integers) != sorted(family.attributes):
        raise ValueError(f"an operator of {operator.family!r} with other sizes")
    if not all(0 <= value <= _LARGEST_PRODUCT for _, value in operator.integers):
        raise ValueError(f"an operator of {operator.family!r} of an impossible size")
