"""The operators of a recording as questions, with the recorded shapes, and with its dtypes or other ones."""

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
# c10's number of each dtype, an argument of a backward softmax (c10/core/ScalarType.h).
_NUMBERS = {FP16: "5", FP32: "6", BF16: "15"}
# Families that a GPU may compute in TF32.
_PRODUCTS = ("matmul", "conv")
# They only call another operator, which the database has under its own name.
_WRAPPERS = frozenset({"aten::layer_norm", "aten::softmax", "aten::log_softmax", "aten::batch_norm"})


def recorded_questions(path: Path, dtypes: Sequence[str]) -> tuple[list[Question], Counter[str]]:
    """Return the recording's operators, the most expensive first, in each of ``dtypes`` (empty: only as recorded).

    Operators that cannot be replayed are counted by reason. Raises WhatifError for a file without operators with their
    inputs.
    """
    left_out: Counter[str] = Counter()
    questions: dict[Described, Question] = {}
    for operator in distinct_operators(_read(path), _WRAPPERS):
        try:
            for question in _questions(operator, dtypes):
                questions.setdefault(question.operator, question)
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
        op = _described(changed)
        if dtype == "tf32":
            if op.family not in _PRODUCTS or op.dtype != "fp32":
                continue
            op = Described(op.family, op.name, "tf32", op.integers, op.phase, op.layout)
        found.append(Question(op, changed))
    return found


def _described(call: RecordedCall) -> Described:
    inputs = (call.name, call.dims, call.types, call.concrete)
    described = describe(*inputs) or describe_other(*inputs)
    if described is None:
        raise NotReplayable("inputs are too many to be kept")
    return described


def _in_format(recorded: RecordedCall, call: Call, dtype: str) -> RecordedCall:
    """Return the call with its floating-point tensors in another dtype, as autocast converts them."""
    types, concrete = list(recorded.types), list(recorded.concrete)
    for position, argument in enumerate(call.arguments):
        if argument.tensors and argument.is_list:
            raise NotReplayable("types in a list of tensors are not recorded")
        tensor = argument.tensor
        floating = tensor is not None and tensor.dtype in _NUMBERS
        if floating and (dtype == FP32 or not stays_fp32(argument, call)):
            types[position] = dtype
        elif argument.name == "input_dtype" and concrete[position] in _NUMBERS.values():
            concrete[position] = _NUMBERS[dtype]
    return recorded._replace(types=types, concrete=concrete)
