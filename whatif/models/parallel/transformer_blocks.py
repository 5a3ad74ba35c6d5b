"""Parts of a transformer that can be split across workers: products that leave a block's stream, and those that return.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3: the first product of a part is cut by columns (its outputs), the last one by rows (its inputs), and the work
between them is done on each worker's columns (attention on its heads).
"""

from __future__ import annotations

from typing import NamedTuple

from whatif.graph.recorded import Layer
from whatif.graph.task_graph import TaskGraph
from whatif.models.layers.layer_facts import layer_rows
from whatif.models.layers.segments import segments
from whatif.models.parallel.passes import Use

# The linear layer of transformers' GPT-2 stores its weights transposed: inputs, outputs.
_TRANSPOSED = "Conv1D"
_PRODUCTS = ("Linear", "LazyLinear", "NonDynamicallyQuantizableLinear", _TRANSPOSED)
_ATTENTION = "MultiheadAttention"
_EMBEDDING = "Embedding"


class Product(NamedTuple):
    """A layer that multiplies by a matrix: its name, inputs and outputs; for an attention both the stream's width."""

    layer: str
    inputs: int
    outputs: int


class Part(NamedTuple):
    """Products cut by columns, and the one cut by rows (None: no such); a whole attention module is both."""

    columns: tuple[Product, ...]
    rows: Product | None


def split_parts(graph: TaskGraph, forward: list[Use], layers: str | None) -> list[Part]:
    """Return the attentions and the MLPs of the blocks of a transformer, in the order of the pass.

    ``forward``: the uses of layers (numbered as in ``graph.layers``) in one forward pass. Blocks are the repeated
    layers, or those that ``layers`` matches. Within one, products that read the block's stream open a part, and the
    first that returns to its width closes it: one that reads something else, or one after the query, key and value.
    """
    products = _products(graph)
    called = [graph.layers[use.part] for use in sorted(forward, key=lambda use: use.first)]
    found: list[Part] = []
    for block in segments(graph, layers):
        within = f"{block}."
        inside = [name for name in called if name == block or name.startswith(within)]
        attention = [name for name in inside if name in products and products[name][0] == _ATTENTION]
        in_block = [
            products[name] for name in inside
            if name in products and not any(name.startswith(f"{above}.") for above in attention)
        ]  # fmt: skip
        found += _pairs(in_block)
    return found


def _pairs(products: list[tuple[str, Product]]) -> list[Part]:
    """The parts of one block, by the widths of its products in the order of the calls."""
    if not products:
        return []
    width = products[0][1].inputs
    found: list[Part] = []
    opened: list[Product] = []
    for kind, product in products:
        if kind == _ATTENTION:
            found.append(Part((product,), product))
            opened = []
        elif opened and product.outputs == width and (product.inputs != width or _is_attention(opened, width)):
            found.append(Part(tuple(opened), product))
            opened = []
        elif product.inputs == width:
            opened.append(product)
        else:
            opened = []
    return found


def _is_attention(opened: list[Product], width: int) -> bool:
    """Whether these compute query, key and value: three products, or fewer with more outputs than inputs."""
    return len(opened) >= 3 or sum(product.outputs for product in opened) > len(opened) * width


def vocabulary_parts(graph: TaskGraph, forward: list[Use], parts: list[Part]) -> list[Part]:
    """Return the largest embedding as a part cut by rows, and the product with as many outputs as its vocabulary.

    That product is outside of the blocks, whose MLPs may be as wide. A linear layer without parameters, the last of the
    pass, multiplies by the embedding's.
    """
    width = parts[0].columns[0].inputs
    rows = layer_rows(graph)
    called = [graph.layers[use.part] for use in sorted(forward, key=lambda use: use.first)]
    tables = [
        (shape[0], name) for name in called if (shape := _shape(rows.get(name), _EMBEDDING)) and shape[1] == width
    ]
    if not tables:
        return []
    words, table = max(tables)
    inside = {product.layer for part in parts for product in (*part.columns, part.rows) if product}
    linear = [name for name in called if name in rows and rows[name].type in _PRODUCTS and name not in inside]
    heads = [name for name in linear if _shape(rows[name], *_PRODUCTS) == (words, width)]
    heads = heads or [name for name in linear[-1:] if rows[name].parameters == 0]
    return [Part((), Product(table, words, width)), *(Part((Product(name, width, words),), None) for name in heads)]


def _products(graph: TaskGraph) -> dict[str, tuple[str, Product]]:
    found: dict[str, tuple[str, Product]] = {}
    for name, row in layer_rows(graph).items():
        shape = _shape(row, *_PRODUCTS)
        if shape:
            found[name] = "Linear", Product(name, shape[1], shape[0])
        elif row.type == _ATTENTION:
            attention = _shape(row, _ATTENTION, key="in_proj_weight")
            if attention:
                found[name] = _ATTENTION, Product(name, attention[1], attention[1])
    return found


def _shape(row: Layer | None, *types: str, key: str = "weight") -> tuple[int, int] | None:
    """Outputs and inputs of a layer's matrix; None if it is of another type or unknown."""
    if row is None or row.type not in types:
        return None
    shape = row.shapes.get(key, ())
    if len(shape) != 2 or not all(0 < length < 2**31 for length in shape):
        return None
    return (shape[1], shape[0]) if row.type == _TRANSPOSED else (shape[0], shape[1])
