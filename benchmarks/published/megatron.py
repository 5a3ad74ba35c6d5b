"""Iterations of Megatron-LM on many A100s, predicted from the model alone: `whatif predict` and parallel what-ifs.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published.megatron

Prints each row, the gap between the kinds of recomputation, and how well the plans of each model are ordered;
`python -m benchmarks.published megatron` summarises.

Sources of the tables: VIA-Research/vTrain, ground_truth_multi.csv (MIT; Bang et al., MICRO 2024): fp16, full
recomputation; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, table 5.
Nothing was fitted to either table, and one thing was chosen on vTrain's: how many of a node's four network cards its
data-parallel groups with several members in a node share (``CARDS``), all, two or one. The same number fits the other
models best, whichever model is left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.extra_data import extra_data
from benchmarks.published.scores import Row, Scores, rank_correlation, summary
from benchmarks.published.steps import training_step
from whatif.prediction.predict import Baseline, apply

DEVICE = "A100-SXM-80"
MODEL = f"{Path(__file__).with_name('gpt.py')}:GPT"
VTRAIN_CLUSTER = str(Path(__file__).with_name("a100_800g.toml"))
# The preset's rate of a network card, and how many of them the data-parallel groups of a node share, by the number of
# tensor-parallel workers. With eight workers a group has one member in a node.
CARD_GBYTE_S = 24
CARDS = {1: 2, 2: 1, 4: 1}
# Selective recomputation repeats the core of the attention.
CORE = r"activation_checkpoint:layers=blocks\.[0-9]+\.attention\.core"


@cache
def micro_batch(width: int, layers: int, heads: int, sequence: int, samples: int) -> Baseline:
    """Return the predicted step of a GPT on one A100 at one micro-batch, fp16."""
    shape = {"width": width, "layers": layers, "heads": heads, "context": sequence}
    inputs = [("", (samples, sequence), "int64")]
    return training_step(MODEL, inputs, DEVICE, keywords=shape, dtype="fp16", loss="cross_entropy")


def what_ifs(
    ways: dict[str, int], cluster: str, *, selective: bool = False, chunks: int = 1, shared_cards: bool = False
) -> list[str]:
    """Return the what-ifs that turn a micro-batch into an iteration: ``ways`` has the columns of either table.

    ``selective``: the attention's core is recomputed, with sequence parallelism; else all of it. ``shared_cards``:
    data-parallel groups with several members in a node of eight GPUs share ``CARDS``.
    """
    tensor, data, stages = ways["tensor"], ways["data"], ways["pipeline"]
    passes = ways["global_batch"] // (data * ways["micro_batch"])
    found = []
    if tensor > 1:
        sequence = ",sequence_parallel=true" if selective else ""
        found.append(f"tensor_parallel:workers={tensor},cluster={cluster},vocabulary=true{sequence}")
    found.append(CORE if selective else "activation_checkpoint")  # of each block, not of embedding and head
    if stages > 1:
        mode = f",schedule=interleaved,chunks={chunks}" if chunks > 1 else ""
        found.append(
            f"pipeline:stages={stages},micro_batches={passes},micro_batch={ways['micro_batch']},even=true{mode},"
            f"cluster={cluster}"
        )
    elif passes > 1:
        found.append(f"gradient_accumulation:passes={passes}")
    if data > 1:
        # Megatron-LM exchanges gradients after the backward pass.
        late = "" if stages > 1 else ",overlap=false"
        rate = f",bandwidth={CARDS[tensor] * CARD_GBYTE_S}GB/s" if shared_cards and tensor in CARDS else ""
        found.append(f"distributed:workers={data},cluster={cluster}{rate}{late}")
    return found


def _row(group: str, what: str, ways: dict[str, int], specs: list[str], measured_ms: float) -> Row:
    shape = (ways[name] for name in ("hidden", "layers", "heads", "sequence", "micro_batch"))
    found = apply(micro_batch(*shape), *specs)
    return Row(group, what, found.predicted_ms, measured_ms, found.low_ms, found.high_ms)


def _numbers(row: dict[str, str], names: str) -> dict[str, int]:
    return {name: int(row[name]) for name in names.split()}


_COLUMNS = "global_batch micro_batch hidden heads layers sequence tensor data pipeline"


def _rows(path: Path) -> Iterator[tuple[dict[str, str], dict[str, int]]]:
    """Yield the rows of a table, as text and with their integers parsed."""
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield row, _numbers(row, _COLUMNS)


def score_vtrain(truth: Path) -> list[Row]:
    """Score vTrain's iterations on 64 to 512 GPUs."""
    rows = []
    for row, ways in _rows(truth / "vtrain_a100_multi_node.csv"):
        size = f"{row['parameters_billion']} B"
        what = f"{size}, t {ways['tensor']} d {ways['data']} p {ways['pipeline']}, micro-batch {ways['micro_batch']}"
        specs = what_ifs(ways, VTRAIN_CLUSTER, shared_cards=True)
        rows.append(_row(f"vTrain, {size}", what, ways, specs, float(row["iteration_ms"])))
    return rows


def score_megatron(truth: Path) -> list[Row]:
    """Score the iterations with full and with selective recomputation."""
    rows = []
    for row, ways in _rows(truth / "megatron_iteration_seconds.csv"):
        selective = row["recomputation"].startswith("selective")
        specs = what_ifs(ways, "dgx-a100", selective=selective, chunks=int(row["virtual_stages"]))
        what = f"{row['model']}, {row['recomputation']}"
        group = f"Korthikanti et al., {row['model'].rpartition('-')[2]}"
        rows.append(_row(group, what, ways, specs, 1e3 * float(row["iteration_s"])))
    return rows


def score(data: Path) -> Scores:
    """Score both tables."""
    truth = data / "truth"
    return Scores("Megatron-LM on 8 to 512 A100s", "ms", (*score_megatron(truth), *score_vtrain(truth)))


def main() -> None:
    """Print the rows of both tables and their summaries."""
    truth = extra_data("truth")
    for rows in (score_megatron(truth), score_vtrain(truth)):
        for row in rows:
            print(f"{row.what:60} {row.predicted:10,.1f} {row.measured:10,.1f} {100 * row.error:+7.1f} %")
        if "full" in rows[0].what:
            for full, selective in zip(rows[::2], rows[1::2], strict=True):
                difference = (1 + selective.error) / (1 + full.error) - 1
                print(f"{selective.group}: selective over full {100 * difference:+.1f} %")
        else:
            for group in dict.fromkeys(row.group for row in rows):
                plans = [row for row in rows if row.group == group]
                print(f"{group}: rank correlation of {len(plans)} plans {rank_correlation(plans):.2f}")
        one = summary("all", rows)
        print(
            f"{one.rows} rows: mean {one.mean_pct:.1f} %, median {one.median_pct:.1f} %, bias {one.bias_pct:+.1f} %\n"
        )


if __name__ == "__main__":
    main()
