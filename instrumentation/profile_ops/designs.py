"""Which operators a sweep measures: random sizes as in Tianshu, or a grid; one operator after the other in turn."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whatif.errors import WhatifError
from whatif.graph.described import Described
from whatif.opdb.rows import operators
from whatif.opdb.work import work

# Tianshu, section 4.3: each dimension of a tensor is drawn from 1 to 1024.
LARGEST_DIMENSION = 1024
# Convolutions' other parameters come from the test models (Tianshu, section 4.3): VGG-16 and ResNet-50 have the first
# three, Inception the fourth, as kernel, stride, padding.
CONVOLUTIONS = ((3, 1, 1), (1, 1, 0), (3, 2, 1), (5, 1, 2))
# A sweep's operator may not take more: four dimensions of up to 1024 are a terabyte. On a CPU the most work is that of
# the largest product that is drawn, 2 x 1024^3; the others are our choice.
MOST_BYTES = {"cpu": 256e6, "cuda": 4e9}
MOST_FLOPS = {"cpu": 2.15e9, "cuda": 4e12}
# A draw that is too large is drawn again; one in so many has to fit.
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Sweep:
    """What can be swept under one name: its family, its name and phase in the database, and how sizes are drawn."""

    family: str
    name: str
    phase: str
    draw: Callable[[random.Random], dict[str, int]]
    grid: Callable[[], Iterator[dict[str, int]]]


def _uniform(draw: random.Random) -> int:
    return draw.randint(1, LARGEST_DIMENSION)


def _log_uniform(draw: random.Random, largest: int = LARGEST_DIMENSION) -> int:
    return min(largest, max(1, round(2 ** draw.uniform(0, math.log2(largest)))))


_Draw = Callable[[random.Random], dict[str, int]]
_Grid = Callable[[], Iterator[dict[str, int]]]


def _elementwise(tensors: int) -> tuple[_Draw, _Grid]:
    def draw(draw: random.Random) -> dict[str, int]:
        return {"elements": _uniform(draw) * _uniform(draw), "tensors": tensors}

    def grid() -> Iterator[dict[str, int]]:
        for half_octave in range(49):
            yield {"elements": round(2 ** (half_octave / 2)), "tensors": tensors}

    return draw, grid


def _product(draw: random.Random) -> dict[str, int]:
    return {"batch": 1, "m": _uniform(draw), "n": _uniform(draw), "k": _uniform(draw)}


def _batched(draw: random.Random) -> dict[str, int]:
    return {"batch": _log_uniform(draw, 128), "m": _uniform(draw), "n": _uniform(draw), "k": _uniform(draw)}


def _products() -> Iterator[dict[str, int]]:
    sizes = [2**power for power in range(0, 13, 2)]
    for m, n, k in itertools.product(sizes, repeat=3):
        yield {"batch": 1, "m": m, "n": n, "k": k}


def _convolution(draw: random.Random) -> dict[str, int]:
    # Drawn evenly, nine of ten would be larger than any memory: these are even in their logarithm.
    kernel, stride, padding = draw.choice(CONVOLUTIONS)
    side = _log_uniform(draw)
    sizes = {
        "batch": _log_uniform(draw, 256), "in_channels": _log_uniform(draw), "out_channels": _log_uniform(draw),
        "in_h": side, "in_w": side,
    }  # fmt: skip
    return sizes | _square(kernel, stride, padding)


def _convolutions() -> Iterator[dict[str, int]]:
    grid = itertools.product(CONVOLUTIONS, (1, 8, 64), (3, 16, 64, 256), (16, 64, 256), (7, 14, 28, 56, 112))
    for (kernel, stride, padding), batch, channels, out, side in grid:
        sizes = {"batch": batch, "in_channels": channels, "out_channels": out, "in_h": side, "in_w": side}
        yield sizes | _square(kernel, stride, padding)


def _square(kernel: int, stride: int, padding: int) -> dict[str, int]:
    same = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": 1}
    return {f"{name}_{axis}": value for name, value in same.items() for axis in "hw"} | {"groups": 1}


def _normalized(draw: random.Random) -> dict[str, int]:
    return {"rows": _uniform(draw), "columns": _uniform(draw)}


def _normalizations() -> Iterator[dict[str, int]]:
    for rows, columns in itertools.product([2**p for p in range(0, 15, 2)], [2**p for p in range(4, 15, 2)]):
        yield {"rows": rows, "columns": columns}


def _attended(draw: random.Random) -> dict[str, int]:
    heads, length = 2 ** draw.randint(0, 5), _uniform(draw)
    return {
        "batch": _log_uniform(draw, 64), "query_length": length, "key_length": length, "heads": heads,
        "kv_heads": heads, "head_size": draw.choice((32, 64, 128)), "causal": draw.randint(0, 1),
    }  # fmt: skip


def _attentions() -> Iterator[dict[str, int]]:
    grid = itertools.product((1, 4, 16), (64, 256, 1024), (4, 16), (64, 128), (0, 1))
    for batch, length, heads, head_size, causal in grid:
        yield {
            "batch": batch, "query_length": length, "key_length": length, "heads": heads, "kv_heads": heads,
            "head_size": head_size, "causal": causal,
        }  # fmt: skip


# Tianshu's nine, table 3, come first; `all` means them.
SWEEPS: dict[str, Sweep] = {
    **{name: Sweep("elementwise", name, "fwd", *_elementwise(2)) for name in ("add", "sub", "mul", "div")},
    "mm": Sweep("matmul", "mm", "fwd", _product, _products),
    "relu": Sweep("elementwise", "relu", "fwd", *_elementwise(1)),
    "conv2d": Sweep("conv", "conv2d", "fwd", _convolution, _convolutions),
    "conv2d_dgrad": Sweep("conv", "conv2d", "dgrad", _convolution, _convolutions),
    "conv2d_wgrad": Sweep("conv", "conv2d", "wgrad", _convolution, _convolutions),
    **{
        name: Sweep("elementwise", name, "fwd", *_elementwise(1))
        for name in ("gelu", "tanh", "sigmoid", "silu", "exp", "add_scalar", "mul_scalar", "div_scalar", "copy")
    },
    "linear": Sweep("matmul", "linear", "fwd", _product, _products),
    "bmm": Sweep("matmul", "bmm", "fwd", _batched, _products),
    "softmax": Sweep("normalization", "softmax", "fwd", _normalized, _normalizations),
    "layer_norm": Sweep("normalization", "layer_norm", "fwd", _normalized, _normalizations),
    "attention": Sweep("attention", "attention", "fwd", _attended, _attentions),
}
NINE = tuple(SWEEPS)[:9]
# What Tianshu calls its nine, in TensorFlow's words.
_ALSO = {
    "realdiv": "div", "matmul": "mm", "conv2dbackpropinput": "conv2d_dgrad", "conv2dbackpropfilter": "conv2d_wgrad",
}  # fmt: skip


def sweep_names(text: str) -> list[str]:
    """Return the names of sweeps that ``text`` lists with commas; ``all`` is Tianshu's nine.

    Raises WhatifError where one is not known.
    """
    names = []
    for word in filter(None, text.split(",")):
        lower = word.strip().lower()
        found = NINE if lower == "all" else (_ALSO.get(lower, lower),)
        if found[0] not in SWEEPS:
            raise WhatifError(f"opdb profile: expected operations ({', '.join(SWEEPS)} or all), got {word[:40]!r}.")
        names += [name for name in found if name not in names]
    return names


def design(
    names: Sequence[str], dtypes: Sequence[str], *, shapes: int, grid: bool, seed: int, kind: str
) -> list[Described]:
    """Return the operators to measure on a device of ``kind`` (cpu, cuda): up to ``shapes`` of each name and dtype.

    They take turns, so that whatever is measured when time is up holds some of each. The first ones of a larger design
    are those of a smaller one; sizes depend on the seed and the name alone, and are the same in every dtype.
    """
    columns = [_of_one(name, dtype, shapes, grid, seed, kind) for name in names for dtype in dtypes]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
    return list(dict.fromkeys(what for what in in_turn if what is not None))


def _of_one(name: str, dtype: str, shapes: int, grid: bool, seed: int, kind: str) -> list[Described]:
    sweep = SWEEPS[name]
    if grid:
        fitting = (what for what in (_described(sweep, dtype, sizes) for sizes in sweep.grid()) if _fits(what, kind))
        return list(itertools.islice(fitting, shapes))
    draw = random.Random(f"{seed} {sweep.family} {sweep.phase} {name}")
    found: dict[Described, None] = {}
    for _ in range(min(MOST_DRAWS * shapes, 10_000_000)):
        if len(found) >= shapes:
            break
        what = _described(sweep, dtype, sweep.draw(draw))
        if _fits(what, kind):
            found[what] = None
    return list(found)


def _described(sweep: Sweep, dtype: str, sizes: dict[str, int]) -> Described:
    return Described(sweep.family, sweep.name, dtype, tuple(sizes.items()), sweep.phase)


def _fits(what: Described, kind: str) -> bool:
    """Whether the operator, in fp32, computes something and is within what a sweep may take."""
    ops = operators(
        what.family, {name: [value] for name, value in what.integers}, name=what.name, dtype="fp32", phase=what.phase
    )
    if not ops.possible().all():
        return False
    flops, moved_bytes = work(ops)
    if what.family in ("matmul", "conv", "attention") and flops[0] <= 0:
        return False
    return bool(flops[0] <= MOST_FLOPS[kind] and moved_bytes[0] <= MOST_BYTES[kind])
