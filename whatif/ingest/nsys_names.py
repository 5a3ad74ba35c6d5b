"""What the texts of NVTX ranges mean: operators of ``emit_nvtx``, marks that PyTorch writes, and people's own words."""

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
    """What a range is to us."""

    OPERATOR = 0
    MARK = 1  # PyTorch's or our own annotation, which keeps its name
    STEP = 2  # may be a training step, in people's own words
    UPDATE = 3
    ZERO_GRAD = 4
    LOADING = 5
    PHASE = 6  # "forward", "backward": no layer, and no part of a layer's name
    USER = 7


class RangeText(Struct, frozen=True):
    """One text, read: ``sequence`` and ``dims`` are an operator's autograd number and input shapes."""

    kind: RangeKind
    name: str
    sequence: int = MISSING
    dims: Any = None


_OPERATOR = re.compile(
    r"(aten|autograd|torch|prim|prims|c10d|_c10d_functional|inductor|quantized|torchvision|profiler)::"
    r"|CompiledFunction|Torch-Compiled Region|TorchDynamo |AOTDispatcher |triton_"
)
# Torch writes this one as an annotation beside the operators.
_COMPILED_GRAPH = "## Call CompiledFxGraph"
_MOST_DIGITS = 18  # of a number that fits in 64 bits
# Shapes of one operator: longer ones are no shapes.
_LONGEST_SHAPES = 20_000

# Words that people write around the parts of a step, whole and in any case; a number may follow.
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
# Words are short: a longer text is somebody's name for a layer.
_LONGEST_WORD = 60


def read_text(text: str) -> RangeText:
    """Read the text of a range. Never raises; every text that nothing else claims is a ``USER`` range.

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
    """Cut ``key`` and the number behind it off the end of a text."""
    head, found, number = text.rpartition(key)
    if found and len(number) <= _MOST_DIGITS and number.isdecimal():
        return head, True, int(number)
    return text, False, MISSING


def _shapes(text: str) -> Any:
    """The shapes as lists of whole numbers; None where the text holds anything else."""
    if len(text) > _LONGEST_SHAPES:
        return None
    try:
        return msgspec.json.decode(text, type=list[list[int]])
    except msgspec.MsgspecError:
        return None
