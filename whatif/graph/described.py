"""What operators are called: families, their attributes, number formats; and a recorded operator in these words.

An operator is identified by its family, name, phase, number format and layout, and by the integers of its family.
Units stand in the names (`bytes`); what has none counts elements or tensors.
"""

from __future__ import annotations

from msgspec import Struct

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int", "unknown")
DTYPE_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "int8": 1.0, "int": 8.0,
}  # fmt: skip
PHASES = ("fwd", "dgrad", "wgrad", "bwd", "update")


class Family(Struct, frozen=True):
    """A family of operators whose times follow one law.

    `sizes` are what an interpolation moves along, `modes` what has to be equal; together they are the attributes.
    """

    name: str
    sizes: tuple[str, ...]
    modes: tuple[str, ...] = ()

    @property
    def attributes(self) -> tuple[str, ...]:
        """The integers of an operator, in the order in which they are written."""
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
        # `bytes` as nccl-tests counts them: the whole buffer, of all-gather and reduce-scatter as well.
        Family("collective", ("bytes",), ("ranks", "nodes")),
        # Anything else: its layout is what a recording says of its inputs, as JSON. It is looked up, never estimated.
        Family("other", ()),
    )
}  # fmt: skip

# Which family an operator's name belongs to, where a person asks by name.
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
# What most operators are, where a person does not say it: a number, or the attribute that stands in for it (squares are
# asked for by one side). Attributes that are not here are required.
DEFAULTS: dict[str, int | str] = {
    "batch": 1, "stride_h": 1, "padding_h": 0, "dilation_h": 1, "groups": 1, "causal": 0, "nodes": 1,
    "kernel_w": "kernel_h", "stride_w": "stride_h", "padding_w": "padding_h", "dilation_w": "dilation_h",
    "in_w": "in_h", "kv_heads": "heads", "key_length": "query_length",
}  # fmt: skip


# Elementwise operators that read two tensors.
TWO_TENSORS = frozenset(("add", "sub", "mul", "div", "pow"))

# Larger numbers are damage or malice: no device holds a tensor of 2**44 elements.
LARGEST_ATTRIBUTE = 2**44
# A text column says a few different things; a shard with more of them is no table of measurements.
LONGEST_TEXT = 4096
# Elements of a tensor of several dimensions are a product of sizes.
_LARGEST_PRODUCT = 2**62


class Described(Struct, frozen=True):
    """An operator of the database: what makes a row of it."""

    family: str
    name: str
    dtype: str
    integers: tuple[tuple[str, int], ...]
    phase: str = "fwd"
    layout: str = ""


def check_described(what: Described) -> None:
    """Raise ValueError where an operator from a file has an unknown word or an impossible size."""
    family = FAMILIES.get(what.family)
    if family is None or what.dtype not in DTYPES or what.phase not in PHASES:
        raise ValueError(f"an operator of {what.family[:40]!r}, {what.dtype[:40]!r}, {what.phase[:40]!r}")
    if sorted(name for name, _ in what.integers) != sorted(family.attributes):
        raise ValueError(f"an operator of {what.family!r} with other sizes")
    if not all(0 <= value <= _LARGEST_PRODUCT for _, value in what.integers):
        raise ValueError(f"an operator of {what.family!r} of an impossible size")
