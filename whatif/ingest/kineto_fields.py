"""The format of Kineto: the fields of an event, the two vocabularies of categories, the sizes of data types."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

import msgspec

from whatif.ingest.events import MISSING, EventCategory

NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that are read, in every observed spelling. Untyped, so that no event is lost to an odd value."""

    correlation: Any = MISSING
    correlation_2: Any = msgspec.field(default=MISSING, name="Correlation ID")
    external_id: Any = msgspec.field(default=MISSING, name="External id")
    external_id_2: Any = msgspec.field(default=MISSING, name="external id")
    sequence: Any = msgspec.field(default=MISSING, name="Sequence number")
    forward_thread: Any = msgspec.field(default=MISSING, name="Fwd thread id")
    input_dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    input_dims_2: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")
    input_type: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    concrete_inputs: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    input_strides: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Strides")
    call_stack: msgspec.Raw = msgspec.field(default=NOTHING, name="Call stack")
    device: Any = None
    stream: Any = None
    grid: msgspec.Raw = NOTHING
    block: msgspec.Raw = NOTHING
    registers: Any = msgspec.field(default=MISSING, name="registers per thread")
    bytes: Any = MISSING
    bytes_2: Any = msgspec.field(default=MISSING, name="Bytes")
    collective: Any = msgspec.field(default=None, name="Collective name")
    n_elements: Any = msgspec.field(default=MISSING, name="In msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=MISSING, name="Group size")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sync_kind: Any = msgspec.field(default=None, name="cuda_sync_kind")
    wait_stream: Any = msgspec.field(default=MISSING, name="wait_on_stream")
    wait_correlation: Any = msgspec.field(default=MISSING, name="wait_on_cuda_event_record_corr_id")
    # Of an allocation: "Bytes" is negative if memory is freed.
    address: Any = msgspec.field(default=MISSING, name="Addr")
    total: Any = msgspec.field(default=MISSING, name="Total Allocated")
    device_type: Any = msgspec.field(default=MISSING, name="Device Type")
    device_id: Any = msgspec.field(default=MISSING, name="Device Id")


NO_ARGS = Args()

Scalar = str | int | float | bool | None


class RawEvent(msgspec.Struct, gc=False):
    """One event. The times stay text, because a float64 cannot hold them."""

    ph: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    pid: Scalar = None
    tid: Scalar = None
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    id: Scalar = None
    args: Args | list[Any] | Scalar = NO_ARGS


class Special(IntEnum):
    """Categories of ph "X" events that do not determine an EventCategory; negative, to distinguish them from those."""

    OLD_OPERATOR = -1  # an operator or an annotation, which its name shows
    PYTHON = -2  # an nn.Module call or any other Python function, which its name shows
    IGNORED = -3
    FOREIGN = -4


CATEGORIES: dict[str, EventCategory | Special] = {
    "cpu_op": EventCategory.CPU_OP,
    "user_annotation": EventCategory.ANNOTATION,
    "cuda_runtime": EventCategory.RUNTIME,
    "cuda_driver": EventCategory.RUNTIME,
    "runtime": EventCategory.RUNTIME,
    "kernel": EventCategory.KERNEL,
    "gpu_memcpy": EventCategory.MEMCPY,
    "memcpy": EventCategory.MEMCPY,
    "gpu_memset": EventCategory.MEMSET,
    "memset": EventCategory.MEMSET,
    "cuda_sync": EventCategory.SYNC,
    "overhead": EventCategory.OVERHEAD,
    "operator": Special.OLD_OPERATOR,
    "python_function": Special.PYTHON,
    "gpu_user_annotation": Special.IGNORED,  # copies of user_annotation on the GPU's tracks
    "trace": Special.IGNORED,  # one bar over the whole window
}

MODULE_PREFIX = "nn.Module: "
# The prefix of our recorder's mark around a layer: an operator to Kineto, an annotation to us.
LAYER_ANNOTATION = "whatif::layer::"
# The name of the instant events of allocations (profile_memory=True).
ALLOCATION = "[memory]"
OLD_ANNOTATION = re.compile(r"ProfilerStep#|Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\)#")

# Of NVIDIA devices; one of AMD's, of 64, counts as two.
THREADS_PER_WARP = 32

# Bytes per element, by c10's names of its scalar types.
DTYPE_BYTES = {
    "byte": 1,
    "char": 1,
    "bool": 1,
    "short": 2,
    "int": 4,
    "long": 8,
    "half": 2,
    "bfloat16": 2,
    "float": 4,
    "double": 8,
    "complexhalf": 4,
    "complexfloat": 8,
    "complexdouble": 16,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}


def dtype_bytes(dtype: Any) -> int:
    """Return the bytes of one element of a c10 scalar type; MISSING if it is not known."""
    if not isinstance(dtype, str):
        return MISSING
    name = dtype.removeprefix("c10::").lower()
    return 1 if name.startswith("float8_") else DTYPE_BYTES.get(name, MISSING)


_INTEGER = re.compile(r"(?:stream )?(-?[0-9]{1,19})")


def as_int(value: Any) -> int:
    """Return the int that a JSON value is or spells ("stream 7" is 7); MISSING for anything else."""
    if isinstance(value, bool):
        return MISSING
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (match := _INTEGER.fullmatch(value)):
        return int(match.group(1))
    return MISSING


def as_text(value: Any) -> str:
    """Return a JSON scalar as text; null is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
