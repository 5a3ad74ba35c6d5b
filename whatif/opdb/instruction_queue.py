"""Pei et al.'s abstract instruction queue: kernel times from hardware facts and instruction counts alone.

Source: Pei et al., "Iteration Time Prediction for CNN in Multi-GPU Platform: Modeling and Analysis", IEEE Access 2019,
        §III B and C, equations 6 to 19 and table 2. Its layers are in ``whatif.opdb.queue_layers``.
A kernel is four kinds of warp instructions, 128 bytes or 32 multiply-adds each: Global Load (I), Shared Load (M), CP
(K) and Global Store (L). A multiprocessor executes one block after another:

    C_b = I + M + L                        if shared loads take longer than computing (equation 8)
    C_b = I + 1 + L_S + ceil(K / m) + L    if computing takes longer (equation 14), m = SP units / LDST units
    C_k = C_b ceil(blocks / multiprocessors) + L_GS                                    (equations 7, 12, 13 and 19)

What the paper leaves open, and what is assumed here (docs/instruction_queue.md):

- *dispatch*, printed as the kernel's total, counts one multiprocessor's part; else a queue would hold all of them.
- m divides warp instructions in cycles of a whole LDST array. Where it has 16 units instead of 32, a memory instruction
  takes two cycles; on the paper's four GPUs it takes one.
- Latencies of other GPUs are those of the P40, and a store's is a load's: 92 and 374 cycles, table 2.
- *Bandwidth limitation of the cache levels*: operand tiles fit shared memory twice (one is filled while the other is
  used), accumulators half of the registers, and no kernel is faster than its compulsory bytes from the memory.
- *DOP* is the achieved share of the queue's ideal throughput: C_b is divided by it. The paper tunes one for each GPU
  and CNN and prints none; here one value serves all, unless the caller passes another.
- The clock is that of the data sheet's fp32 peak. Formats with dedicated units have proportionally more lanes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64
from whatif.hardware.gpu import Gpu

# Of 1.0, 0.9, 0.8, 0.7 and 0.6 the best fit to NeuSight's convolutions on a V100 (mean absolute percentage error): the
# paper's ideal.
DOP = 1.0
# Table 2, NVIDIA P40.
SHARED_LATENCY_CYCLES, GLOBAL_LATENCY_CYCLES = 92.0, 374.0
# Section III-B: bytes that one warp instruction moves, and threads of a warp.
INSTRUCTION_BYTES, WARP_THREADS = 128.0, 32.0
# Registers of a multiprocessor hold 256 KiB since Kepler (CUDA C++ Programming Guide); half of them for accumulators.
_ACCUMULATOR_BYTES = 128 * 1024
_SIDES = (16, 32, 64, 128, 256)
# The fewest outputs of a block: smaller ones have less than two for each thread of the four warps an SM issues from.
_FEWEST_OUTPUTS = 1024
# Warps of a block, and outputs of each warp: eight by eight for a thread, as in GEMM libraries.
_MOST_WARPS, _OUTPUTS_OF_A_WARP = 8, 2048
# Depth of the tiles of both operands in shared memory.
_DEPTH = 8
# Long sums may be split among blocks, and the parts added by another kernel (split-K).
_CUTS = (1, 2, 4, 8, 16, 32, 64, 128)
_PRODUCTS_AT_ONCE = 256


class Units(Struct, frozen=True):
    """The hardware facts of a GPU for one number format; ``lanes`` are multiply-adds of a multiprocessor and cycle.

    ``dop``, in (0, 1], is the degree of parallelism of section III-C: the share of the queue's ideal throughput.
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
        """Cycles of the LDST units for one warp instruction."""
        return WARP_THREADS / self.load_store_units


def units_of(gpu: Gpu, dtype: str = "fp32", *, dop: float = DOP) -> Units | None:
    """Return the units that multiply in ``dtype``; None for a device that the model does not cover (not NVIDIA's)."""
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
    """Return the time of n kernels of ``blocks`` blocks each, seconds, shape (n,), from one block's warp instructions.

    ``moved_bytes`` is the memory traffic of the whole kernel.
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
    """Return the time of n batches of products (m, k) times (k, n) with the best partition, seconds, shape (n,).

    A complex element has twice the bytes and takes four ``products``. The search is that of section III-C:
    all tiles that fit the memory levels, and all splits of the sum.
    """
    found = np.empty(np.shape(m))
    # All partitions at once, in batches of products that stay in a cache.
    for start in range(0, len(found), _PRODUCTS_AT_ONCE):
        some = slice(start, start + _PRODUCTS_AT_ONCE)
        found[some] = _partitioned_s(
            units, batch[some], m[some], n[some], k[some], *_partitions(units, element_bytes),
            element_bytes=element_bytes, moved_bytes=moved_bytes[some], products=products,
        ).min(axis=0)  # fmt: skip
    return found


@lru_cache(maxsize=64)
def _partitions(units: Units, element_bytes: float) -> tuple[Float64, Float64, Float64]:
    """Rows and columns of a tile, and the number of parts of the sum, shape (n_partitions, 1) each."""
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
    # A warp's outputs form about a square: its operands are two sides of it.
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


# Elements of a block of a kernel that only moves data: 256 threads of four elements each.
_STREAM_BLOCK_BYTES = 256 * 4 * 4.0


def stream_s(units: Units, *, read_bytes: Float64, written_bytes: Float64, flops: Float64 | float = 0.0) -> Float64:
    """Return the time of n kernels that read, compute a little, and write, seconds, shape (n,)."""
    blocks = np.maximum(np.ceil(np.maximum(read_bytes, written_bytes) / _STREAM_BLOCK_BYTES), 1.0)
    loads, stores = (amount / blocks / INSTRUCTION_BYTES for amount in (read_bytes, written_bytes))
    return kernel_s(
        units, blocks, loads=loads, shared=np.zeros(np.shape(blocks)), stores=stores,
        computes=np.asarray(flops / 2 / blocks / WARP_THREADS), moved_bytes=read_bytes + written_bytes,
    )  # fmt: skip
