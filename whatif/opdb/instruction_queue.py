"""Pei et al.'s abstract instruction queue: what a kernel takes, from hardware facts and counts of instructions alone.

Source: Pei et al., "Iteration Time Prediction for CNN in Multi-GPU Platform: Modeling and Analysis", IEEE Access 2019,
        §III B and C, equations 6 to 19 and table 2. Its layers are in ``whatif.opdb.queue_layers``.
A kernel is four kinds of warp instructions, 128 bytes or 32 multiply-adds each: Global Load (I), Shared Load (M), CP
(K) and Global Store (L). A multiprocessor works off one block after another:

    C_b = I + M + L                        where shared loads outlast computing (equation 8)
    C_b = I + 1 + L_S + ceil(K / m) + L    where computing outlasts them (equation 14), m = SP units / LDST units
    C_k = C_b ceil(blocks / multiprocessors) + L_GS                                    (equations 7, 12, 13 and 19)

What the print leaves open, and what is assumed here (docs/instruction_queue.md):

- *dispatch*, printed as the kernel's total, counts one multiprocessor's part; else a queue would hold all of them.
- m divides warp instructions in cycles of a whole LDST array. Where it has 16 units instead of 32, a memory instruction
  takes two cycles; on the paper's four GPUs it takes one.
- Latencies of other GPUs are those of the P40, and a store's is a load's: 92 and 374 cycles, table 2.
- *Bandwidth limitation of the cache levels*: operand tiles fit shared memory twice (one is filled while the other is
  used), accumulators half of the registers, and no kernel is faster than its compulsory bytes from the memory.
- *DOP* is the share of the queue's ideal pace that is reached: C_b is divided by it. The paper tunes one for each GPU
  and CNN and prints none; here one number serves all, unless the caller names another.
- The peak follows the clock of the data sheet's fp32 peak. Formats with units of their own have so many more lanes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64
from whatif.hardware.gpu import Gpu

# Of 1.0, 0.9, 0.8, 0.7 and 0.6 what suits NeuSight's convolutions on a V100 best (mean absolute percentage error): the
# paper's ideal.
DOP = 1.0
# Table 2, NVIDIA P40.
SHARED_LATENCY_CYCLES, GLOBAL_LATENCY_CYCLES = 92.0, 374.0
# Section III-B: what one instruction of a warp moves, and how many threads a warp has.
INSTRUCTION_BYTES, WARP_THREADS = 128.0, 32.0
# Registers of a multiprocessor hold 256 KiB since Kepler (CUDA C++ Programming Guide); half of them for accumulators.
_ACCUMULATOR_BYTES = 128 * 1024
_SIDES = (16, 32, 64, 128, 256)
# Smaller blocks have fewer outputs than two for each thread of the four warps that an SM issues from.
_FEWEST_OUTPUTS = 1024
# A block's warps, and of how many outputs each: eight by eight for a thread, as GEMM libraries have it.
_MOST_WARPS, _OUTPUTS_OF_A_WARP = 8, 2048
# How deep the tiles of both operands are that lie in shared memory.
_DEPTH = 8
# Long sums may be cut among blocks, whose parts another kernel adds (split-K).
_CUTS = (1, 2, 4, 8, 16, 32, 64, 128)
_PRODUCTS_AT_ONCE = 256


class Units(Struct, frozen=True):
    """What the queue asks of a GPU in one number format; ``lanes`` are multiply-adds of a multiprocessor and cycle.

    ``dop``, in (0, 1], is the degree of parallelism of section III-C: the share of the queue's ideal pace.
    """

    multiprocessors: int
    lanes: float
    load_store_units: int
    clock_hz: float
    shared_bytes: int
    memory_byte_s: float
    dop: float = 1.0

    @property
    def m(self) -> float:
        """SP units for each LDST unit (equation 17)."""
        return self.lanes / self.load_store_units

    @property
    def slot_cycles(self) -> float:
        """Cycles that the LDST units take for an instruction of a warp."""
        return WARP_THREADS / self.load_store_units


def units_of(gpu: Gpu, dtype: str = "fp32", *, dop: float = DOP) -> Units | None:
    """Return the units that multiply in ``dtype``; None for a device that the model does not know (not NVIDIA's)."""
    shared = gpu.shared_bytes_per_sm
    if shared is None:
        return None
    lanes = gpu.matrix_tflops(dtype) * 1e12 / (2 * gpu.sm_count * gpu.clock_hz)
    return Units(gpu.sm_count, lanes, gpu.load_store_units, gpu.clock_hz, shared, gpu.memory_gbyte_s * 1e9, dop)


def kernel_s(
    units: Units,
    blocks: Float64,
    *,
    loads: Float64,
    shared: Float64,
    computes: Float64,
    stores: Float64,
    moved_bytes: Float64,
) -> Float64:
    """Return the time of n kernels of so many ``blocks``, seconds, shape (n,), from one block's warp instructions.

    ``moved_bytes`` are those of the whole kernel that have to cross the memory's bus.
    """
    covered = np.ceil(computes / units.m)
    bound_by_storage = loads + shared + stores
    bound_by_compute = loads + 1 + covered + stores
    block = np.where(
        shared > covered,
        bound_by_storage * units.slot_cycles,
        bound_by_compute * units.slot_cycles + SHARED_LATENCY_CYCLES,
    )
    iterations = np.ceil(blocks / units.multiprocessors)
    cycles = block * iterations / units.dop + GLOBAL_LATENCY_CYCLES
    return np.asarray(np.maximum(cycles / units.clock_hz, moved_bytes / units.memory_byte_s))


def product_s(
    units: Units,
    batch: Float64,
    m: Float64,
    n: Float64,
    k: Float64,
    *,
    element_bytes: float,
    moved_bytes: Float64,
    products: float = 1.0,
) -> Float64:
    """Return the time of n batches of products (m, k) times (k, n), seconds, shape (n,): the best partition's.

    An element of complex numbers has twice the bytes and takes four ``products``. The search is that of section III-C:
    all tiles that the levels of memory hold, and all cuts of the sum.
    """
    found = np.empty(np.shape(m))
    # All partitions at once, of as many products as stay in a cache.
    for start in range(0, len(found), _PRODUCTS_AT_ONCE):
        some = slice(start, start + _PRODUCTS_AT_ONCE)
        found[some] = _partitioned_s(
            units, batch[some], m[some], n[some], k[some], *_partitions(units, element_bytes),
            element_bytes=element_bytes, moved_bytes=moved_bytes[some], products=products,
        ).min(axis=0)  # fmt: skip
    return found


@lru_cache(maxsize=64)
def _partitions(units: Units, element_bytes: float) -> tuple[Float64, Float64, Float64]:
    """Rows and columns of a tile, and into how many parts the sum is cut, shape (n_partitions, 1) each."""
    able = [
        (rows, columns, cut)
        for rows in _SIDES
        for columns in _SIDES
        for cut in _CUTS
        if rows * columns >= _FEWEST_OUTPUTS
        and rows * columns * max(element_bytes, 4) <= _ACCUMULATOR_BYTES
        and 2 * (rows + columns) * _DEPTH * element_bytes <= units.shared_bytes
    ]
    rows, columns, cuts = np.array(able, dtype=np.float64).T[:, :, None]
    return rows, columns, cuts


def _partitioned_s(
    units: Units, batch: Float64, m: Float64, n: Float64, k: Float64, rows: Float64, columns: Float64, cut: Float64, *,
    element_bytes: float, moved_bytes: Float64, products: float,
) -> Float64:  # fmt: skip
    """The time of each product (n,) by each partition, shape (n_partitions, n)."""
    depth = np.ceil(k / cut)
    warps = np.clip(rows * columns // _OUTPUTS_OF_A_WARP, 1, _MOST_WARPS)
    # A warp's outputs are about as many rows as columns: its operands are two sides of that square.
    side = np.sqrt(rows * columns / warps)
    instruction = element_bytes / INSTRUCTION_BYTES
    product = kernel_s(
        units,
        batch * np.ceil(m / rows) * np.ceil(n / columns) * cut,
        loads=(rows + columns) * depth * instruction,
        shared=2 * side * warps * depth * instruction,
        computes=products * rows * columns * depth / WARP_THREADS,
        stores=rows * columns * instruction,
        moved_bytes=moved_bytes,
    )
    outputs = batch * m * n * element_bytes
    added = stream_s(units, read_bytes=cut * outputs, written_bytes=outputs)
    return product + np.where(cut > 1, added, 0.0)


# What a block of a kernel that only moves has to do: 256 threads of four elements each.
_STREAM_BLOCK_BYTES = 256 * 4 * 4.0


def stream_s(units: Units, *, read_bytes: Float64, written_bytes: Float64, flops: Float64 | float = 0.0) -> Float64:
    """Return the time of n kernels that read, compute a little, and write, seconds, shape (n,)."""
    blocks = np.maximum(np.ceil(np.maximum(read_bytes, written_bytes) / _STREAM_BLOCK_BYTES), 1.0)
    loads, stores = (amount / blocks / INSTRUCTION_BYTES for amount in (read_bytes, written_bytes))
    return kernel_s(
        units, blocks, loads=loads, shared=np.zeros(np.shape(blocks)), stores=stores,
        computes=np.asarray(flops / 2 / blocks / WARP_THREADS), moved_bytes=read_bytes + written_bytes,
    )  # fmt: skip
