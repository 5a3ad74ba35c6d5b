"""Read a PyTorch execution trace in MLCommons' Chakra schema: the operators of a run, without times.

``torch.profiler.ExecutionTraceObserver`` writes it as JSON. Sridharan et al., "Chakra: Advancing performance
benchmarking and co-design using standardized execution traces", 2023.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from whatif.from_module.gpu_work import has_rule
from whatif.from_module.moved_bytes import moves_once
from whatif.from_module.operations import Operation, OperatorGraph
from whatif.graph.types import Phase
from whatif.ingest.marks import BACKWARD_PREFIX
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import GZIP_MAGIC, read_at_most

_SCHEMA = re.compile(r"\d+\.\d+\.\d+-chakra\.")
_MOST_NODES = 5_000_000
_MOST_BYTES = 2_000_000_000
_TENSOR = re.compile(r"Tensor\((.+)\)")
_STEP = re.compile(r"Optimizer\.step#")


def read_chakra(path: Path) -> OperatorGraph:
    """Return the operators of an execution trace (JSON, plain or gzip). Raises WhatifError for any other file.

    Of nested operators, those with a kernel rule count, else the innermost ones. Layers, parameters and the
    batch are unknown, and so are memory and samples per second.
    """
    nodes = _nodes(path)
    by_id = {node["id"]: node for node in nodes}
    children: dict[int, list[dict[str, Any]]] = {}
    for node in nodes:
        children.setdefault(node["ctrl_deps"] if node["ctrl_deps"] in by_id else -1, []).append(node)
    operations = [
        operation
        for place in sorted(children.get(-1, []), key=itemgetter("id"))
        for operation in _walk(place, children, Phase.FORWARD, "", -1)
    ]
    # Ids order the operators of a step: those of autograd's thread have the larger ones.
    operations.sort(key=lambda found: found[0])
    if not operations:
        raise WhatifError(f"{path}: expected operators (aten::...) in the execution trace, got none; record a step.")
    notes = ("read from an execution trace: host time is that of eager PyTorch, layers are unknown",)
    return OperatorGraph(str(path), [operation for _, operation in operations], notes=notes)


def _content(path: Path) -> bytes:
    """The decompressed content of the file, limited to the size of the largest supported trace."""
    data = read_at_most(path, _MOST_BYTES)
    if not data.startswith(GZIP_MAGIC):
        return data
    with gzip.open(io.BytesIO(data)) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise WhatifError(f"{path}: expected an execution trace of at most 2 GB, got a larger one; record one step.")
    return data


def _nodes(path: Path) -> list[dict[str, Any]]:
    try:
        document = msgspec.json.decode(_content(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise WhatifError(f"{path}: expected a readable execution trace, got '{reason}'.") from error
    except (msgspec.DecodeError, EOFError, ValueError, RecursionError) as error:
        raise WhatifError(
            f"{path}: expected an execution trace as JSON, got a file that is not JSON or ends early."
        ) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not _SCHEMA.match(schema) or not isinstance(document.get("nodes"), list):
        raise WhatifError(
            f"{path}: expected an execution trace in the schema of Chakra, got another file; write one with "
            "torch.profiler.ExecutionTraceObserver (a recording needs no prediction: try `whatif explain`)."
        )
    nodes = [node for node in document["nodes"] if _is_sound(node)]
    if len(nodes) > _MOST_NODES:
        raise WhatifError(f"{path}: expected at most {_MOST_NODES:,} nodes, got {len(nodes):,}; record a single step.")
    return nodes


def _is_sound(node: Any) -> bool:
    return (
        isinstance(node, dict)
        and type(node.get("id")) is int
        and type(node.get("ctrl_deps")) is int
        and node["ctrl_deps"] != node["id"]
        and isinstance(node.get("name"), str)
        and all(isinstance(node.get(side), dict) for side in ("inputs", "outputs"))
    )


def _walk(
    root: dict[str, Any], children: dict[int, list[dict[str, Any]]], phase: Phase, caller: str, number: int
) -> Iterator[tuple[int, Operation]]:
    """Yield the operators under a node that count, each with its position in time."""
    pending = [(root, phase, caller, number)]
    while pending:
        node, phase, caller, number = pending.pop()
        name = node["name"]
        inner = children.pop(node["id"], [])  # visits each node once, even if a damaged file has cycles
        sequence = _attribute(node, "seq_id")
        if name.startswith(BACKWARD_PREFIX):
            phase, caller, number = Phase.BACKWARD, name.removeprefix(BACKWARD_PREFIX).rpartition("::")[2], -1
        elif _STEP.match(name):
            phase = Phase.UPDATE
        elif phase == Phase.BACKWARD and sequence >= 0:
            number = sequence
        works = [child for child in inner if child["name"].startswith("aten::")]
        is_leaf = not works or (moves_once(name) and not _calls_one_with_a_rule(works, children))
        if name.startswith("aten::") and (has_rule(name) or is_leaf):
            operation_number = number if caller else sequence
            operation = _operation(node, phase, caller, operation_number)
            if operation is not None:
                yield node["id"], operation
            continue
        pending += [(child, phase, caller, number) for child in inner]


def _calls_one_with_a_rule(called: list[dict[str, Any]], children: dict[int, list[dict[str, Any]]]) -> bool:
    pending, visited = list(called), set[int]()
    while pending:
        node = pending.pop()
        if has_rule(node["name"]):
            return True
        if node["id"] not in visited:
            visited.add(node["id"])
            pending += children.get(node["id"], [])
    return False


def _attribute(node: dict[str, Any], name: str) -> int:
    attributes = node.get("attrs")
    for attribute in attributes if isinstance(attributes, list) else []:
        if isinstance(attribute, dict) and attribute.get("name") == name and type(attribute.get("value")) is int:
            return int(attribute["value"])
    return -1


def _operation(node: dict[str, Any], phase: Phase, caller: str, sequence: int) -> Operation | None:
    values, shapes, types = (node["inputs"].get(key) for key in ("values", "shapes", "types"))
    if not (isinstance(values, list) and isinstance(shapes, list) and isinstance(types, list)):
        return None
    if not len(values) == len(shapes) == len(types):
        return None
    spelled = [_argument(*results) for results in zip(values, shapes, types, strict=True)]
    storages = {_storage(value) for value in values}
    outputs = []
    results = [node["outputs"].get(key) for key in ("values", "shapes", "types")]
    if all(isinstance(column, list) for column in results):
        for value, shape, kind in zip(*results, strict=False):
            tensor = _TENSOR.fullmatch(kind) if isinstance(kind, str) else None
            # An output that shares its memory with an input is a view, unless the operator works in place.
            view = _storage(value) in storages and not node["name"].endswith("_")
            if tensor is not None and not view and _is_shape(shape):
                outputs.append((tuple(shape), tensor[1]))
    dims, kinds, concrete = (list(column) for column in zip(*spelled, strict=True)) if spelled else ([], [], [])
    return Operation(node["name"], dims, kinds, concrete, phase, tuple(outputs), sequence, caller)


def _argument(value: Any, shape: Any, kind: Any) -> tuple[list[Any], str, str]:
    """One argument in the profiler's format."""
    spelled = kind if isinstance(kind, str) else ""
    tensor = _TENSOR.fullmatch(spelled)
    if tensor is not None:
        return (list(shape), tensor[1], "") if _is_shape(shape) else ([], "", "")
    if spelled.startswith("GenericList"):
        member = re.search(r"Tensor\(([^)]+)\)", spelled)
        if member is not None:
            fits = isinstance(shape, list) and all(map(_is_shape, shape))
            return (list(shape), f"TensorList:{member[1]}", "") if fits else ([], "", "")
        items = value if isinstance(value, list) else []
        return [], "ScalarList", f"[{', '.join(map(str, items))}]"
    if spelled in ("Int", "Double", "Bool"):
        return [], "Scalar", str(value)
    return [], "", ""


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**44 for size in shape)


def _storage(value: Any) -> int:
    """The storage id of a tensor (tensor, storage, offset, elements, bytes of one, device); -1 for other values."""
    return value[1] if isinstance(value, list) and len(value) == 6 and type(value[1]) is int else -1
