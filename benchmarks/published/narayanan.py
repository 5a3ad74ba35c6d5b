"""Megatron-LM's weak scaling and its comparison with ZeRO-3, predicted from the model alone.

    python -m benchmarks.published.narayanan

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
tables 1 and 2: GPTs of 2,048 tokens and 51,200 words on DGX A100s, fp16, activations recomputed; operations by its
equation 3. Table 1 does not give micro-batches: of 1, 2, 4 the one that is predicted to be the fastest and fits 80 GB,
or 1 with more than two stages, as in table 2. ZeRO-3 is DeepSpeed's of 2021, whose steps of 175 B take 67 s for one
or two samples per GPU: it gathers and scatters at 16 GB/s, less than the rate of one of a node's eight network cards.
``fsdp`` does not model that. Nothing was fitted to either table.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published.megatron import micro_batch, what_ifs
from benchmarks.published.scores import Row, rank_correlation, summary
from whatif.graph.memory import peak
from whatif.prediction.predict import apply

SEQUENCE, VOCABULARY, CLUSTER, GPU_BYTES = 2048, 51_200, "dgx-a100", 80 * 10**9


class Trained(NamedTuple):
    """A row of either table; ``micro`` 0: not published, ``zero_3``: all state sharded, no other parallelism."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflop_s: float
    micro: int = 0
    zero_3: bool = False


TABLE_1 = (
    Trained(1.7, 24, 2304, 24, 1, 1, 32, 512, 137), Trained(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    Trained(7.5, 32, 4096, 36, 4, 1, 128, 512, 142), Trained(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    Trained(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), Trained(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Trained(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), Trained(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    Trained(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163), Trained(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)  # fmt: skip
GPT_3, TURING = (174.6, 96, 12288, 96), (529.6, 128, 20480, 105)
TABLE_2 = (
    Trained(*GPT_3, 1, 1, 384, 1536, 144, 4, zero_3=True), Trained(*GPT_3, 1, 1, 768, 1536, 88, 2, zero_3=True),
    Trained(*GPT_3, 1, 1, 1536, 1536, 44, 1, zero_3=True), Trained(*GPT_3, 8, 12, 384, 1536, 153, 1),
    Trained(*GPT_3, 8, 12, 768, 1536, 149, 1), Trained(*GPT_3, 8, 12, 1536, 1536, 141, 1),
    Trained(*TURING, 1, 1, 640, 2560, 138, 4, zero_3=True), Trained(*TURING, 1, 1, 1120, 2240, 98, 2, zero_3=True),
    Trained(*TURING, 1, 1, 2240, 2240, 48, 1, zero_3=True), Trained(*TURING, 8, 35, 560, 2240, 171, 1),
    Trained(*TURING, 8, 35, 1120, 2240, 167, 1), Trained(*TURING, 8, 35, 2240, 2240, 159, 1),
)  # fmt: skip


def predicted(row: Trained, micro: int) -> tuple[float, float, float, int]:
    """Return TFLOP/s of a GPU, its range, and the peak in bytes."""
    data = row.gpus // row.tensor // row.pipeline
    if row.zero_3:
        passes = row.batch // data // micro
        specs = [f"gradient_accumulation:passes={passes}"] if passes > 1 else []
        specs = ["activation_checkpoint", *specs, f"fsdp:workers={data},cluster={CLUSTER}"]
    else:
        columns = {"tensor": row.tensor, "data": data, "pipeline": row.pipeline, "global_batch": row.batch,
                "micro_batch": micro}  # fmt: skip
        specs = what_ifs(columns, CLUSTER)
    found = apply(micro_batch(row.hidden, row.layers, row.heads, SEQUENCE, micro), *specs)
    # Equation 3.
    leading = 96 * row.batch * SEQUENCE * row.layers * row.hidden**2
    flops = leading * (1 + SEQUENCE / (6 * row.hidden) + VOCABULARY / (16 * row.layers * row.hidden))
    rate = [flops / row.gpus / (ms / 1e3) / 1e12 for ms in (found.predicted_ms, found.high_ms, found.low_ms)]
    memory = found.graph.info.memory
    return *rate, peak(memory).total if memory is not None else 0


def _row(table: int, row: Trained) -> Row:
    data = row.gpus // row.tensor // row.pipeline
    known = [row.micro] if row.micro else [1] if row.pipeline > 2 else [1, 2, 4]
    sizes = [micro for micro in known if row.batch % (data * micro) == 0]
    ways = {micro: predicted(row, micro) for micro in sizes}
    fitting = [micro for micro in sizes if ways[micro][3] <= GPU_BYTES] or sizes[:1]
    micro = max(fitting, key=lambda micro_batch: ways[micro_batch][0])
    rate, low, high, _ = ways[micro]
    plan = "ZeRO-3" if row.zero_3 else f"t {row.tensor} p {row.pipeline}"
    scheme = "ZeRO-3" if row.zero_3 else "PTD-P"
    group = "table 1" if table == 1 else f"table 2, {row.billions} B, {scheme}"
    return Row(group, f"{row.billions} B, {row.gpus:,} GPUs, {plan}, micro-batch {micro}", rate, row.tflop_s, low, high)


def main() -> None:
    """Print the rows, TFLOP/s of a GPU, and the rank correlation of each group."""
    rows = []
    for number, table in ((2, TABLE_2), (1, TABLE_1)):
        for rows_of_table in table:
            row = _row(number, rows_of_table)
            rows.append(row)
            print(f"{row.what:60} {row.predicted:7.1f} {row.measured:7.1f} {100 * row.error:+6.1f} %", flush=True)
    for group in dict.fromkeys(row.group for row in rows):
        of_group = [row for row in rows if row.group == group]
        total = summary(group, of_group)
        print(
            f"{group}: rank correlation {rank_correlation(of_group):.2f}, mean error {total.mean_pct:.1f} %, "
            f"median {total.median_pct:.1f} %, bias {total.bias_pct:+.1f} %"
        )


if __name__ == "__main__":
    main()
