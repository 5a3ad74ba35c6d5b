"""The memory of a step from its allocations: which blocks live from a layer's forward to its backward work."""

from __future__ import annotations

import re
from itertools import starmap

import numpy as np
from msgspec import Struct

from whatif.graph.memory import LayerMemory, Memory
from whatif.graph.types import Bool, Int64
from whatif.ingest.events import Allocations, Events
from whatif.ingest.recorded import MOST_BYTES
from whatif.ingest.resident import Resident
from whatif.ingest.step_rows import StepRows

# c10's number of CUDA and HIP devices.
GPU_DEVICE = 1
# Backward nodes whose forward operators autocast runs in full precision, so that the tensors which these keep stay in
# it. Elementwise operators, pooling and batch normalization follow their input, which has 16 bits in most models.
_FULL_PRECISION = re.compile(r"LayerNorm|Softmax|NllLoss|CrossEntropy|Embedding|GroupNorm|IndexSelect|RmsNorm|MseLoss")


class Blocks(Struct, frozen=True):
    """Blocks of memory, one row each, shape (n_blocks,): times of allocation and free, ns, and bytes.

    ``birth_ns`` is -1 if it lies before the step, ``death_ns`` the step's end if the block outlives it. The places
    of both in the recording, ``allocated`` and ``freed``, order events of one time; -1: before the recording.
    """

    birth_ns: Int64
    death_ns: Int64
    size_bytes: Int64
    allocated: Int64
    freed: Int64

    def without(self, rows: Int64) -> Blocks:
        """The blocks but those in ``rows``."""
        return Blocks(*(np.delete(getattr(self, name), rows) for name in self.__struct_fields__))


def blocks_of(allocations: Allocations, begin_ns: int, end_ns: int) -> Blocks:
    """Pair each allocation with the free of the same address, for all blocks that a step allocated or freed."""
    # Nothing after the step is needed: a block that is not freed by its end outlives it.
    order = _by_address(allocations.address[: np.searchsorted(allocations.time_ns, end_ns)])
    address, time_ns, size = (
        column[order] for column in (allocations.address, allocations.time_ns, allocations.size_bytes)
    )
    allocated = size > 0
    freed_next = np.append((address[1:] == address[:-1]) & (size[1:] < 0), False)
    birth = np.flatnonzero(allocated)
    has_end, after = freed_next[birth], np.minimum(birth + 1, len(order) - 1)
    # Freed, but allocated before the recording began.
    orphan = np.flatnonzero(~allocated & ~np.append(False, (allocated & freed_next)[:-1]))
    before = np.full(len(orphan), -1)
    births = np.concatenate([time_ns[birth], before])
    deaths = np.concatenate([np.where(has_end, time_ns[after], end_ns), time_ns[orphan]])
    sizes = np.concatenate([size[birth], -size[orphan]])
    at = np.concatenate([order[birth], before])
    until = np.concatenate([np.where(has_end, order[after], len(order)), order[orphan]])
    births = np.where(births < begin_ns, -1, births)
    deaths = np.minimum(deaths, end_ns)
    touched = np.flatnonzero((births < end_ns) & (deaths >= begin_ns) & ~((births < 0) & (deaths >= end_ns)))
    return Blocks(births[touched], deaths[touched], sizes[touched], at[touched], until[touched])


def _by_address(address: Int64) -> Int64:
    """Return the stable order: that of one number for address and place, if it fits, sorts three times as fast."""
    n, low = len(address), int(address.min(initial=np.iinfo(np.int64).max))
    if (int(address.max(initial=0)) - low + 1) * n >= 2**63:
        return np.argsort(address, kind="stable")
    return np.sort((address - low) * n + np.arange(n)) % n


def memory_of_allocations(events: Events, rows: StepRows, static: Resident) -> Memory | None:
    """Return the memory of the step of ``rows``; None if its allocations were not recorded."""
    allocations = _of_one_device(events.allocations, rows.end_ns)
    if allocations is None:
        return None
    begin_ns = rows.forward_ns if rows.passes > 1 else rows.begin_ns
    blocks = blocks_of(allocations, begin_ns, rows.end_ns)
    if rows.passes > 1:  # all gradients count as there all the while
        blocks = _without_gradients(blocks, rows, static)
    resident_bytes = _held_by_gpu(allocations, blocks, begin_ns)
    if resident_bytes is None:  # a CPU's batch counts as there all the while
        blocks = _without_batch(blocks, rows, static.inputs)
    if not len(blocks.size_bytes):
        return None
    uses = _uses(events, rows, blocks)
    levels = _Levels.of(blocks, begin_ns, rows.end_ns)
    row = rows.row_at(levels.time_ns, events.start_ns)
    activations, gradients = (uses.by_row(chosen) for chosen in (uses.kept, uses.gradient))
    expected = sum(static.gradients.values())
    # Gradients that the step does not allocate existed before: they are added to, or not set to None.
    gradients_stay = rows.passes > 1 or 2 * int(gradients.sum()) < expected
    if gradients_stay:
        gradients = first_of_name(rows.names, static.gradients)
    held_gradients = 0 if gradients_stay else _held_in_forward(rows, blocks, expected)
    live = np.cumsum(activations)
    later_gradients = np.zeros_like(live) if gradients_stay else np.cumsum(gradients[::-1])[::-1]
    # Of the changes at the time of the release, only the last leaves the level from which the pass starts.
    released = int(np.searchsorted(levels.time_ns, _released_ns(rows, blocks), side="right")) - 1
    in_forward = (levels.time_ns < rows.backward_ns) & (np.arange(len(levels.time_ns)) >= released)
    in_backward = (levels.time_ns >= rows.backward_ns) & (levels.time_ns < rows.update_ns)
    most, _ = levels.most(in_forward, row, len(live))
    forward = np.maximum(most - live - held_gradients, 0)
    most, at_ns = levels.most(in_backward, row, len(live))
    backward = np.maximum(most - live - later_gradients - (gradients if gradients_stay else 0), 0)
    fixed = np.minimum(_as_large_as_parameters(blocks, uses, static, at_ns), backward)
    most, _ = levels.most(levels.time_ns >= rows.update_ns, np.zeros_like(row), 1)
    inputs, buffers = static.inputs + static.buffers, static.buffers
    if resident_bytes is not None:
        known = static.parameters + static.optimizer_state + (int(gradients.sum()) if gradients_stay else 0)
        inputs = max(resident_bytes - known, 0)
        # Held all the time: parameters that the recording does not name and the like, but not a batch that is reused.
        buffers = max(inputs - static.inputs, 0)
    columns = (
        activations, gradients, forward, backward, uses.by_row(uses.kept & uses.from_before),
        uses.by_row(uses.kept & ~uses.halved), np.zeros_like(live), fixed,
    )  # fmt: skip
    return Memory(
        parameters=static.parameters,
        optimizer_state=static.optimizer_state,
        inputs=inputs,
        buffers=buffers,
        layers=tuple(starmap(LayerMemory, zip(rows.names, *(column.tolist() for column in columns), strict=True))),
        update_workspace=max(int(most[0]) - (0 if gradients_stay else int(gradients.sum())), 0),
        gradients_stay=gradients_stay,
        gradients_in_forward=held_gradients > 0,
        source="allocations",
    )


def _without_gradients(blocks: Blocks, rows: StepRows, static: Resident) -> Blocks:
    """The blocks but the gradients that passes through other parts make, or zero before the last backward pass."""
    made, zeroed = ((rows.others_ns <= ns) & (ns < rows.backward_ns) for ns in (blocks.birth_ns, blocks.death_ns))
    crosses = (made & (blocks.death_ns > rows.update_ns)) | (zeroed & (blocks.birth_ns < 0))
    return blocks.without(np.flatnonzero(crosses & np.isin(blocks.size_bytes, sorted(static.sizes))))


def _without_batch(blocks: Blocks, rows: StepRows, size: int) -> Blocks:
    """The blocks but the batch that a step makes and leaves to the next one, and the one that was left to it."""
    sized, new = blocks.size_bytes == size, blocks.birth_ns >= 0
    made = np.flatnonzero(sized & new & (blocks.birth_ns < rows.backward_ns) & (blocks.death_ns > rows.update_ns))
    left = np.flatnonzero(sized & ~new & (blocks.death_ns < rows.backward_ns))
    return blocks.without(np.append(made[:1], left[:1])) if len(made) else blocks


def _of_one_device(allocations: Allocations | None, end_ns: int) -> Allocations | None:
    """The allocations before ``end_ns`` of the GPU that has most of them, else of the CPU."""
    if allocations is None or not len(allocations):
        return None
    gpu = allocations.device_type == GPU_DEVICE
    kept: Bool = ~gpu
    if gpu.any():
        devices, count = np.unique(allocations.device[gpu], return_counts=True)
        kept = gpu & (allocations.device == devices[int(count.argmax())])
    chosen = np.flatnonzero(kept[: np.searchsorted(allocations.time_ns, end_ns)])
    return Allocations(*(getattr(allocations, name)[chosen] for name in Allocations.__struct_fields__))


def _held_by_gpu(allocations: Allocations, blocks: Blocks, begin_ns: int) -> int | None:
    """Bytes that a GPU's allocator holds from before the step to its end; None on a CPU."""
    first = int(np.searchsorted(allocations.time_ns, begin_ns))
    if allocations.device_type[0] != GPU_DEVICE or first >= len(allocations):
        return None
    if not 0 <= allocations.total_bytes[first] < MOST_BYTES:
        return None
    at_begin = int(allocations.total_bytes[first] - allocations.size_bytes[first])
    return max(at_begin - int(blocks.size_bytes[blocks.birth_ns < 0].sum()), 0)


class _Uses(Struct, frozen=True):
    """The use of each block of a step, shape (n_blocks,), and the row that it belongs to."""

    size_bytes: Int64
    n_rows: int
    row: Int64  # the one that keeps an activation, or makes a gradient
    kept: Bool  # from a row's forward to its backward work
    gradient: Bool
    from_before: Bool  # an earlier row made it
    halved: Bool  # autocast would make it in 16 bits

    def by_row(self, chosen: Bool) -> Int64:
        """Bytes of the chosen blocks of each row, shape (n_rows,)."""
        sums = np.bincount(self.row[chosen], weights=self.size_bytes[chosen], minlength=self.n_rows)
        return np.rint(sums).astype(np.int64)


def _uses(events: Events, rows: StepRows, blocks: Blocks) -> _Uses:
    born = rows.row_at(np.maximum(blocks.birth_ns, rows.begin_ns), events.start_ns)
    dies = rows.row_at(blocks.death_ns, events.start_ns)
    outlives = blocks.death_ns > rows.update_ns
    is_new = blocks.birth_ns >= 0
    in_forward = is_new & (blocks.birth_ns < rows.backward_ns)
    kept = in_forward & (blocks.death_ns >= rows.backward_ns)
    # The row that frees a block kept it; one that the training loop holds until the next step belongs to its maker.
    row = np.where(kept & ~outlives, dies, born)
    gradient = is_new & ~in_forward & (blocks.birth_ns <= rows.update_ns) & outlives
    full = np.array([_FULL_PRECISION.search(name) is not None for name in events.names], dtype=np.bool_)
    at = np.searchsorted(events.start_ns[rows.backward], blocks.death_ns, side="right") - 1
    node = rows.backward[np.maximum(at, 0)]
    halved = (at >= 0) & ~full[events.name[node]] & ~outlives
    return _Uses(blocks.size_bytes, len(rows.names), row, kept, gradient, born < row, halved)


class _Levels(Struct, frozen=True):
    """Total bytes of a step's blocks after each change, in order of time, shape (n_changes,)."""

    time_ns: Int64
    level: Int64

    @staticmethod
    def of(blocks: Blocks, begin_ns: int, end_ns: int) -> _Levels:
        ends = blocks.death_ns < end_ns
        time_ns = np.concatenate([np.maximum(blocks.birth_ns, begin_ns), blocks.death_ns[ends]])
        change = np.concatenate([blocks.size_bytes, -blocks.size_bytes[ends]])
        order = np.lexsort((np.concatenate([blocks.allocated, blocks.freed[ends]]), time_ns))
        return _Levels(time_ns[order], np.cumsum(change[order]))

    def most(self, chosen: Bool, row: Int64, n_rows: int) -> tuple[Int64, Int64]:
        """The highest level at the chosen changes of each row and when, shape (n_rows,); 0 and -1 where none is."""
        most = np.zeros(n_rows, dtype=np.int64)
        np.maximum.at(most, row[chosen], self.level[chosen])
        at_ns = np.full(n_rows, -1, dtype=np.int64)
        highest = np.flatnonzero(chosen & (self.level == most[row]))
        at_ns[row[highest]] = self.time_ns[highest]
        return most, at_ns


def first_of_name(names: tuple[str, ...], sizes: dict[str, int]) -> Int64:
    """The bytes of each layer at its first row, shape (n_rows,); those of layers without a row at row 0."""
    found = np.zeros(len(names), dtype=np.int64)
    first = {name: number for number, name in reversed(list(enumerate(names)))}
    for name, size in sizes.items():
        found[first.get(name, 0)] += size
    return found


def _held_in_forward(rows: StepRows, blocks: Blocks, expected: int) -> int:
    """Bytes of the last step's gradients, if they live until the end of the forward pass."""
    late = (blocks.birth_ns < 0) & (blocks.death_ns >= rows.backward_ns - (rows.backward_ns - rows.begin_ns) // 10)
    held_bytes = int(blocks.size_bytes[late].sum())
    return held_bytes if expected and 2 * held_bytes > expected else 0


def _released_ns(rows: StepRows, blocks: Blocks) -> int:
    """When the last block that the step before left is freed before the pass: the update's end had them all."""
    leftover = (blocks.birth_ns < 0) & (blocks.death_ns < rows.builds_ns)
    return int(blocks.death_ns[leftover].max(initial=rows.begin_ns))


def _as_large_as_parameters(blocks: Blocks, uses: _Uses, static: Resident, at_ns: Int64) -> Int64:
    """Bytes of the short-lived blocks of a parameter's size that exist at each time, shape of ``at_ns``."""
    found = np.zeros(len(at_ns), dtype=np.int64)
    sizes = np.array(sorted(static.sizes), dtype=np.int64)
    # Scalars and small vectors would match by chance, and are negligible.
    chosen = ~uses.kept & ~uses.gradient & np.isin(blocks.size_bytes, sizes) & (blocks.size_bytes > 1024)
    for edge_ns, sign in ((blocks.birth_ns[chosen], 1), (blocks.death_ns[chosen], -1)):
        order = np.argsort(edge_ns)
        sums = np.append(0, np.cumsum(blocks.size_bytes[chosen][order]))
        found += sign * sums[np.searchsorted(edge_ns[order], at_ns, side="right")]
    return found
