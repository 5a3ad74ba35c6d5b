"""The operators that a sweep measures: random sizes as in Tianshu, or a grid; operators take turns."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whatif.graph.described import Described
from whatif.opdb.rows import operators
from whatif.opdb.work import work
from whatif.runtime.errors import WhatifError

# Tianshu, section 4.3: each dimension of a tensor is drawn from 1 to 1024.
LARGEST_DIMENSION = 1024
# Convolutions' other parameters come from the test models (Tianshu, section 4.3): VGG-16 and ResNet-50 have the first
# three, Inception the fourth, as kernel, stride, padding.
CONVOLUTIONS = ((3, 1, 1), (1, 1, 0), (3, 2, 1), (5, 1, 2))
# Limits of an operator in a sweep: four dimensions of up to 1024 are a terabyte. On a CPU the limit of FLOPs is that of
# the largest matrix product drawn, 2 x 1024^3; the others are our choice.
MOST_BYTES = {"cpu": 256e6, "cuda": 4e9}
MOST_FLOPS = {"cpu": 2.15e9, "cuda": 4e12}
# Draws above the limits are repeated, at most this often per operator on average.
MOST_DRAWS = 10_000


Sizes = dict[str, int]


@dataclass(frozen=True)
class Sweep:
    """A sweep: its family, name and phase in the database, and how its sizes are drawn."""

    family: str
    name: str
    phase: str
    draw: Callable[[random.Random], Sizes]
    grid: Sequence[Sizes]


def _uniform(draw: random.Random) -> int:
    return draw.randint(1, LARGEST_DIMENSION)


def _log_uniform(draw: random.Random, largest: int = LARGEST_DIMENSION) -> int:
    return min(largest, max(1, round(2 ** draw.uniform(0, math.log2(largest)))))


def _elementwise(tensors: int) -> tuple[Callable[[random.Random], Sizes], list[Sizes]]:
    def draw(draw: random.Random) -> Sizes:
        return {"elements": _uniform(draw) * _uniform(draw), "tensors": tensors}

    return draw, [{"elements": round(2 ** (half_octave / 2)), "tensors": tensors} for half_octave in range(49)]


def _product(draw: random.Random) -> Sizes:
    return {"batch": 1, "m": _uniform(draw), "n": _uniform(draw), "k": _uniform(draw)}


def _batched(draw: random.Random) -> Sizes:
    return {"batch": _log_uniform(draw, 128), "m": _uniform(draw), "n": _uniform(draw), "k": _uniform(draw)}


def _convolution(draw: random.Random) -> Sizes:
    # Log-uniform: of uniform draws nine of ten would not fit in any memory.
    window, side = draw.choice(CONVOLUTIONS), _log_uniform(draw)
    return _convolution_sizes(window, _log_uniform(draw, 256), _log_uniform(draw), _log_uniform(draw), side)


def _convolution_sizes(window: tuple[int, int, int], batch: int, channels: int, out: int, side: int) -> Sizes:
    sizes = {"batch": batch, "in_channels": channels, "out_channels": out, "in_h": side, "in_w": side}
    per_axis = {**dict(zip(("kernel", "stride", "padding"), window, strict=True)), "dilation": 1}
    return sizes | {f"{name}_{axis}": value for name, value in per_axis.items() for axis in "hw"} | {"groups": 1}


def _normalized(draw: random.Random) -> Sizes:
    return {"rows": _uniform(draw), "columns": _uniform(draw)}


def _attended(draw: random.Random) -> Sizes:
    heads, length = 2 ** draw.randint(0, 5), _uniform(draw)
    return _attention_sizes(_log_uniform(draw, 64), length, heads, draw.choice((32, 64, 128)), draw.randint(0, 1))


def _attention_sizes(batch: int, length: int, heads: int, head_size: int, causal: int) -> Sizes:
    return {
        "batch": batch, "query_length": length, "key_length": length, "heads": heads, "kv_heads": heads,
        "head_size": head_size, "causal": causal,
    }  # fmt: skip


_POWERS = [2**power for power in range(0, 15, 2)]
_PRODUCTS = [{"batch": 1, "m": m, "n": n, "k": k} for m, n, k in itertools.product(_POWERS[:-1], repeat=3)]
_NORMALIZATIONS = [{"rows": rows, "columns": columns} for rows, columns in itertools.product(_POWERS, _POWERS[2:])]
_CONVOLUTIONS = [
    _convolution_sizes(*sizes)
    for sizes in itertools.product(CONVOLUTIONS, (1, 8, 64), (3, 16, 64, 256), (16, 64, 256), (7, 14, 28, 56, 112))
]
_ATTENTIONS = [
    _attention_sizes(*sizes) for sizes in itertools.product((1, 4, 16), (64, 256, 1024), (4, 16), (64, 128), (0, 1))
]

# Tianshu's nine operations, table 3, come first; `all` means these.
SWEEPS: dict[str, Sweep] = {
    **{name: Sweep("elementwise", name, "fwd", *_elementwise(2)) for name in ("add", "sub", "mul", "div")},
    "mm": Sweep("matmul", "mm", "fwd", _product, _PRODUCTS),
    "relu": Sweep("elementwise", "relu", "fwd", *_elementwise(1)),
    "conv2d": Sweep("conv", "conv2d", "fwd", _convolution, _CONVOLUTIONS),
    "conv2d_dgrad": Sweep("conv", "conv2d", "dgrad", _convolution, _CONVOLUTIONS),
    "conv2d_wgrad": Sweep("conv", "conv2d", "wgrad", _convolution, _CONVOLUTIONS),
    **{
        name: Sweep("elementwise", name, "fwd", *_elementwise(1))
        for name in ("gelu", "tanh", "sigmoid", "silu", "exp", "add_scalar", "mul_scalar", "div_scalar", "copy")
    },
    "linear": Sweep("matmul", "linear", "fwd", _product, _PRODUCTS),
    "bmm": Sweep("matmul", "bmm", "fwd", _batched, _PRODUCTS),
    "softmax": Sweep("normalization", "softmax", "fwd", _normalized, _NORMALIZATIONS),
    "layer_norm": Sweep("normalization", "layer_norm", "fwd", _normalized, _NORMALIZATIONS),
    "attention": Sweep("attention", "attention", "fwd", _attended, _ATTENTIONS),
}
NINE = tuple(SWEEPS)[:9]
# Tianshu's names of its nine operations, which are TensorFlow's.
_TENSORFLOW_NAMES = {
    "realdiv": "div", "matmul": "mm", "conv2dbackpropinput": "conv2d_dgrad", "conv2dbackpropfilter": "conv2d_wgrad",
}  # fmt: skip


def sweep_names(text: str) -> list[str]:
    """Return the names of sweeps in ``text``, separated by commas; ``all`` is Tianshu's nine.

    Raises WhatifError for an unknown one.
    """
    names = []
    for word in filter(None, text.split(",")):
        lower = word.strip().lower()
        found = NINE if lower == "all" else (_TENSORFLOW_NAMES.get(lower, lower),)
        if found[0] not in SWEEPS:
            raise WhatifError(f"opdb profile: expected operations ({', '.join(SWEEPS)} or all), got {word[:40]!r}.")
        names += [name for name in found if name not in names]
    return names


def design(
    names: Sequence[str], dtypes: Sequence[str], *, shapes: int, grid: bool, seed: int, kind: str
) -> list[Described]:
    """Return the operators to measure on a device of ``kind`` (cpu, cuda): up to ``shapes`` of each name and dtype.

    They take turns, so that a measurement that is cut short covers all of them. A smaller design is the beginning of a
    larger one; sizes depend only on the seed and the name, and are the same in every dtype.
    """
    columns = [_one_sweep(name, dtype, shapes, grid, seed, kind) for name in names for dtype in dtypes]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
    return list(dict.fromkeys(operator for operator in in_turn if operator is not None))


def _one_sweep(name: str, dtype: str, shapes: int, grid: bool, seed: int, kind: str) -> list[Described]:
    sweep = SWEEPS[name]
    if grid:
        fitting = (op for op in (_described(sweep, dtype, sizes) for sizes in sweep.grid) if _fits(op, kind))
        return list(itertools.islice(fitting, shapes))
    draw = random.Random(f"{seed} {sweep.family} {sweep.phase} {name}")
    found: dict[Described, None] = {}
    for _ in range(min(MOST_DRAWS * shapes, 10_000_000)):
        if len(found) >= shapes:
            break
        op = _described(sweep, dtype, sweep.draw(draw))
        if _fits(op, kind):
            found[op] = None
    return list(found)


def _described(sweep: Sweep, dtype: str, sizes: Sizes) -> Described:
    return Described(sweep.family, sweep.name, dtype, tuple(sizes.items()), sweep.phase)


def _fits(op: Described, kind: str) -> bool:
    """Whether the operator, in fp32, computes something and is within the limits of a sweep."""
    ops = operators(
        op.family, {name: [value] for name, value in op.integers}, name=op.name, dtype="fp32", phase=op.phase
    )
    if not ops.possible().all():
        return False
    flops, moved_bytes = work(ops)
    if op.family in ("matmul", "conv", "attention") and flops[0] <= 0:
        return False
    return bool(flops[0] <= MOST_FLOPS[kind] and moved_bytes[0] <= MOST_BYTES[kind])
