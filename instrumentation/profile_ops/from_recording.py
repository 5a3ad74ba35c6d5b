"""The operators of a recording as questions: exactly its operators, shapes and types, also in other number formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whatif.graph.described import Described
from whatif.ingest.operator_calls import describe, describe_other
from whatif.runtime.errors import WhatifError

from ..operators.calls import BF16, FP32, Call, NotReplayable, RecordedCall
from ..operators.measure import TRANSFERS
from ..operators.recording import Operator, distinct_operators
from ..operators.schema import resolve
from ..operators.variants import stays_fp32
from ..recording_file import read_json
from .visits import Question

FP16 = "c10::Half"
_FORMATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "tf32": FP32}
# c10's number of each type, which a backward softmax takes (c10/core/ScalarType.h).
_NUMBERS = {FP16: "5", FP32: "6", BF16: "15"}
# Families whose products a GPU may compute in TF32.
_PRODUCTS = ("matmul", "conv")
# They hand on to an operator that the database knows by its own name.
_HANDED_ON = frozenset({"aten::layer_norm", "aten::softmax", "aten::log_softmax", "aten::batch_norm"})


def recorded_questions(path: Path, dtypes: Sequence[str]) -> tuple[list[Question], Counter[str]]:
    """Return the recording's operators, the dearest first, in each of ``dtypes`` (none: as recorded alone).

    Those that cannot be repeated alone are counted by the reason. Raises WhatifError for a file that gives no operators
    with their inputs.
    """
    left_out: Counter[str] = Counter()
    questions: dict[Described, Question] = {}
    for operator in distinct_operators(_read(path), _HANDED_ON):
        try:
            for question in _questions(operator, dtypes):
                questions.setdefault(question.what, question)
        except NotReplayable as reason:
            left_out[str(reason)] += 1
    return list(questions.values()), left_out


def _read(path: Path) -> dict[str, Any]:
    trace, _ = read_json(path, "a recording or a trace of torch.profiler")
    if not isinstance(trace, dict):
        raise WhatifError(f"{path}: expected a recording or a trace of torch.profiler, got another file.")
    return trace


def _questions(operator: Operator, dtypes: Sequence[str]) -> list[Question]:
    if operator.transfers:
        raise NotReplayable(TRANSFERS)
    recorded = operator.call
    call = resolve(recorded)
    if not dtypes:
        return [Question(_described(recorded), recorded)]
    found = []
    for dtype in dtypes:
        changed = _in_format(recorded, call, _FORMATS[dtype])
        what = _described(changed)
        if dtype == "tf32":
            if what.family not in _PRODUCTS or what.dtype != "fp32":
                continue
            what = Described(what.family, what.name, "tf32", what.integers, what.phase, what.layout)
        found.append(Question(what, changed))
    return found


def _described(call: RecordedCall) -> Described:
    said = (call.name, call.dims, call.types, call.concrete)
    what = describe(*said) or describe_other(*said)
    if what is None:
        raise NotReplayable("inputs are too many to be kept")
    return what


def _in_format(recorded: RecordedCall, call: Call, wanted: str) -> RecordedCall:
    """The call with its floating-point tensors in another format, as autocast chooses it."""
    types, concrete = list(recorded.types), list(recorded.concrete)
    for place, argument in enumerate(call.arguments):
        if argument.tensors and argument.is_list:
            raise NotReplayable("types in a list of tensors are not recorded")
        tensor = argument.tensor
        floating = tensor is not None and tensor.dtype in _NUMBERS
        if floating and (wanted == FP32 or not stays_fp32(argument, call)):
            types[place] = wanted
        elif argument.name == "input_dtype" and concrete[place] in _NUMBERS.values():
            concrete[place] = _NUMBERS[wanted]
    return recorded._replace(types=types, concrete=concrete)
