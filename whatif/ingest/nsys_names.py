"""The meaning of the texts of NVTX ranges: operators of ``emit_nvtx``, PyTorch's marks, and the user's ranges."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

import msgspec
from msgspec import Struct

from whatif.ingest.events import MISSING
from whatif.ingest.kineto_fields import LAYER_ANNOTATION, MODULE_PREFIX, OLD_ANNOTATION
from whatif.ingest.marks import AUTOGRAD, STEP


class RangeKind(IntEnum):
    """The meaning of a range."""

    OPERATOR = 0
    MARK = 1  # PyTorch's or our own annotation, which keeps its name
    STEP = 2  # may be a training step, named by the user
    UPDATE = 3
    ZERO_GRAD = 4
    LOADING = 5
    PHASE = 6  # "forward", "backward": no layer, and no part of a layer's name
    USER = 7


class RangeText(Struct, frozen=True):
    """A parsed text: ``sequence`` and ``dims`` are an operator's autograd number and input shapes."""

    kind: RangeKind
    name: str
    sequence: int = MISSING
    dims: Any = None


_OPERATOR = re.compile(
    r"(aten|autograd|torch|prim|prims|c10d|_c10d_functional|inductor|quantized|torchvision|profiler)::"
    r"|CompiledFunction|Torch-Compiled Region|TorchDynamo |AOTDispatcher |triton_"
)
# torch writes this one as an annotation beside the operators.
_COMPILED_GRAPH = "## Call CompiledFxGraph"
_MOST_DIGITS = 18  # of a number that fits in 64 bits
# Longer texts are not the shapes of an operator.
_LONGEST_SHAPES = 20_000

# Users' names for the parts of a step, matched as a whole and in any case; a number may follow.
_NUMBER = r"[ _\-#:=.\[(]*\d*[\])]?"
_WORDS = (
    (RangeKind.STEP, rf"((train|training|global)[ _\-]?)?(step|iteration|iter|batch){_NUMBER}"),
    (RangeKind.UPDATE, r"(optimizer|optim|opt)([ _.]*(step|update))?(\(\))?|weight[ _]update"),
    (RangeKind.ZERO_GRAD, r"((optimizer|optim|opt)[ _.]*)?zero[ _]?grads?(\(\))?"),
    (
        RangeKind.LOADING,
        r"(data|batch)[ _\-]?(load|loading|loader|fetch|fetching|prep|preparation)|data|dataloader"
        r"|(load|get|fetch)[ _\-]?(data|batch)",
    ),
    (RangeKind.PHASE, r"(forward|fwd|backward|bwd)([ _\-]?(pass|step))?(\(\))?"),
)
_KINDS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _WORDS)
# A longer text is the name of a layer.
_LONGEST_WORD = 60


def read_text(text: str) -> RangeText:
    """Parse the text of a range. Never raises; a text of no other kind is a ``USER`` range.

    ``torch.autograd.profiler.emit_nvtx`` (and ``nsys profile --pytorch=autograd-shapes-nvtx``) writes an operator as
    "aten::conv2d, seq = 12, op_id = 7, sizes = [[8, 3, 32, 32], []], input_op_ids = [...]", each part optional.
    """
    head, _, _ = text.partition(", input_op_ids = ")
    head, has_sizes, sizes = head.partition(", sizes = ")
    head, has_id, _ = _cut_number(head, ", op_id = ")
    name, has_sequence, sequence = _cut_number(head, ", seq = ")
    if name.startswith((LAYER_ANNOTATION, MODULE_PREFIX, _COMPILED_GRAPH)) or OLD_ANNOTATION.match(name):
        return RangeText(RangeKind.MARK, name)
    if has_sizes or has_id or has_sequence or _OPERATOR.match(name):
        return RangeText(RangeKind.OPERATOR, name, sequence, _shapes(sizes) if has_sizes else None)
    if len(name) <= _LONGEST_WORD:
        word = name.strip().lstrip(":")
        for kind, pattern in _KINDS:
            if pattern.fullmatch(word):
                return RangeText(kind, name)
    # Nodes of autograd have the names of classes.
    return RangeText(RangeKind.OPERATOR if name.isidentifier() and AUTOGRAD.search(name) else RangeKind.USER, name)


def is_profiler_step(name: str) -> bool:
    """Whether a mark is torch.profiler's own around a step."""
    return STEP.match(name) is not None


def is_backward(name: str) -> bool:
    """Whether the name of a phase is that of a backward pass."""
    return name.strip().lstrip(":").casefold().startswith("b")


def without_number(name: str) -> str:
    """Return a step's name without its number, so that the steps of one loop share it."""
    return re.sub(r"\d+", "", name).casefold()


def _cut_number(text: str, key: str) -> tuple[str, bool, int]:
    """Cut ``key`` and the number after it off the end of a text."""
    head, found, number = text.rpartition(key)
    if found and len(number) <= _MOST_DIGITS and number.isdecimal():
        return head, True, int(number)
    return text, False, MISSING


def _shapes(text: str) -> Any:
    """The shapes as lists of integers; None if the text holds anything else."""
    if len(text) > _LONGEST_SHAPES:
        return None
    try:
        return msgspec.json.decode(text, type=list[list[int]])
    except msgspec.MsgspecError:
        return None
