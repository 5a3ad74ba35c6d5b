"""The tables of aiconfigurator and the outputs of DeepBench, by hand."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from tests.opdb.imported import rows_of
from whatif.opdb.importing import read_foreign
from whatif.runtime.errors import WhatifError


def test_aiconfigurators_elements_become_bytes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    gemm = tmp_path / "h100_sxm" / "gemm" / "vllm" / "0.24.0"
    nccl = tmp_path / "h100_sxm" / "comm" / "nccl" / "2.27.3"
    for folder in (gemm, nccl):
        folder.mkdir(parents=True)
    h100 = ["NVIDIA H100 80GB HBM3"] * 2
    pq.write_table(
        pa.table({"framework": ["VLLM"] * 2, "version": ["0.24.0"] * 2, "device": h100, "op_name": ["gemm"] * 2,
                  "gemm_dtype": ["bfloat16", "fp8_block"], "m": [4353, 1], "n": [65536, 1], "k": [51200, 1],
                  "latency": [39.301023, 1.0]}),
        gemm / "gemm_perf.parquet",
    )  # fmt: skip
    pq.write_table(
        pa.table({"framework": ["X"] * 3, "version": ["2.27.3"] * 3, "device": [*h100, h100[0]],
                  "nccl_dtype": ["half", "int8", "float"], "op_name": ["all_gather"] * 3, "num_gpus": [8, 4, 4],
                  "message_size": [512, 512, 512], "latency": [0.005, 0.006, 0.007]}),
        nccl / "nccl_perf.parquet",
    )  # fmt: skip
    found = read_foreign("aiconfigurator", tmp_path)
    rows = rows_of(found)
    assert [(r["name"], r["dtype"], r.get("bytes"), r["t_us"]) for r in rows if r["family"] == "collective"] == [
        ("all_gather", "fp16", 1024, 5.0),
        ("all_gather", "int8", 512, 6.0),
        ("all_gather", "fp32", 2048, 7.0),
    ]
    sources = [where for rows_, where in found.contributions if rows_.family == "collective"]
    assert {where.environment.nccl for where in sources} == {"2.27.3"}
    nccl.rename(nccl.with_name("2.29.2"))  # now folder and table contradict one another
    moved = [w for r, w in read_foreign("aiconfigurator", tmp_path).contributions if r.family == "collective"]
    assert [w.environment.nccl for w in moved] == [None]
    assert "2.29.2 by its folder, 2.27.3 by its table" in str(moved[0].source.note)
    [product] = [r for r in rows if r["family"] == "matmul"]
    assert (product["dtype"], product["m"], product["n"], product["k"], product["t_us"]) == (
        "bf16", 4353, 65536, 51200, 39301.023,
    )  # fmt: skip
    assert sum(found.dropped.values()) == 1
    (gemm / "gemm_perf.parquet").write_bytes(b"PAR1")
    with pytest.raises(WhatifError, match="expected"):
        read_foreign("aiconfigurator", tmp_path)


def test_aiconfigurators_attention_by_hand(tmp_path: Path) -> None:
    """A prompt of 8 new tokens after 24 that are cached, one token after 99, and an encoder without a cache."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "h100_sxm" / "attention" / "vllm" / "0.24.0"
    folder.mkdir(parents=True)
    row: dict[str, object] = {
        "framework": "VLLM", "version": "0.24.0", "device": "NVIDIA H100 80GB HBM3", "op_name": "context_attention",
        "kernel_source": "fa3", "batch_size": 2, "isl": 8, "num_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "beam_width": 1, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "step": 24, "latency": 0.125,
    }  # fmt: skip
    one = {"op_name": "generation_attention", "isl": 1, "step": 99, "kv_cache_dtype": "fp8", "window_size": 64}
    beams = {"op_name": "generation_attention", "beam_width": 4}
    encoder = {k: v for k, v in row.items() if k not in ("num_key_value_heads", "beam_width", "kv_cache_dtype", "step")}
    tables = {
        "context_attention_perf": [row, row | {"step": -1}, row | {"attn_dtype": "fp6"}],
        "generation_attention_perf": [row | one, row | beams | {"window_size": 0}],
        "encoder_attention_perf": [encoder | {"op_name": "encoder_attention"}],
    }
    for name, rows in tables.items():
        pq.write_table(pa.table({k: [r[k] for r in rows] for k in rows[0]}), folder / f"{name}.parquet")
    found = read_foreign("aiconfigurator", tmp_path)
    prompt = {"family": "attention", "name": "attention", "phase": "fwd", "dtype": "bf16", "layout": "", "batch": 2,
              "query_length": 8, "key_length": 32, "heads": 16, "kv_heads": 4, "head_size": 128, "causal": 1,
              "t_us": 125.0, "device": "H100-SXM-80"}  # fmt: skip
    token = {"query_length": 1, "key_length": 100, "causal": 0, "layout": "window=64 cache=fp8"}
    image = {"key_length": 8, "kv_heads": 16, "causal": 0}
    assert rows_of(found) == [prompt, prompt | image, prompt | token]
    assert sum(found.dropped.values()) == 3  # a negative step, an unknown format, four beams
    where = found.contributions[0][1]
    assert (where.environment.framework, where.environment.framework_version) == ("vllm", "0.24.0")
    assert found.contributions[0][0].kernels.decoded() == ["fa3"]


def test_foreign_and_damaged_tables_of_aiconfigurator_are_one_sentence(tmp_path: Path) -> None:
    """Every truncation, flipped bytes, columns of other types, and one long text a million times."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "gemm_perf.parquet"
    row = {"framework": ["X"], "device": ["T4"], "op_name": ["gemm"], "gemm_dtype": ["bfloat16"], "m": [1], "n": [2],
           "k": [3], "latency": [0.1]}  # fmt: skip
    pq.write_table(pa.table(row), path)
    whole = path.read_bytes()
    damaged = [whole[:end] for end in range(0, len(whole), 97)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(0, len(whole), 61)]
    for content in damaged:
        path.write_bytes(content)
        with contextlib.suppress(WhatifError):  # a flipped bit may leave a table
            read_foreign("aiconfigurator", tmp_path)
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, dtype=np.int32)), pa.array(["x" * 1_000_000]))
    many = {name: pa.array(np.repeat(values, 1_000_000)) for name, values in row.items() if name != "device"}
    for table in (
        pa.table({**many, "device": long.cast(pa.dictionary(pa.int32(), pa.string()))}),
        pa.table({**row, "latency": [[1.0]]}), pa.table({**row, "m": [None]}),
    ):  # fmt: skip
        pq.write_table(table, path, store_schema=False)
        with pytest.raises(WhatifError, match="expected"):
            read_foreign("aiconfigurator", tmp_path)


GEMM_BENCH = """                  Running training benchmark
                         Times
----------------------------------------------------------------------------------------
    m       n      k      a_t     b_t      precision        time (usec)
   1760     16   1760      0      0        float                  36
   3072   1500   1024      1      0        float                 751
   3072   1500   1024      0      0        float       Not Supported
"""


CONV_BENCH = """                  Running training benchmark
                         Times
------------------------------------------------------------------------------
   w      h      c      n      k      f_w    f_h  pad_w  pad_h    stride_w  stride_h    precision  fwd_time (usec)  \
bwd_inputs_time (usec)  bwd_params_time (usec)  total_time (usec) pad_kerenels     fwd_algo
------------------------------------------------------------------------------
  700    161      1      4     32     20      5      0       0         2         3      half            187\
                     278                     397                862              1     IMPLICIT_PRECOMP_GEMM
   14     14    128    256    256      3      3      1       1         1         1      half            100\
                       0                     300                400              0     WINOGRAD
""".replace("\\\n", "")


def test_deepbenchs_products_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "gemm.log"
    path.write_text(GEMM_BENCH)
    found = read_foreign("deepbench", path, device="Tesla V100-SXM2-16GB")
    product = {"family": "matmul", "name": "mm", "phase": "fwd", "dtype": "fp32", "batch": 1, "device": "V100-SXM2-16"}
    assert rows_of(found) == [
        product | {"m": 1760, "n": 16, "k": 1760, "layout": "", "t_us": 36.0},
        product | {"m": 3072, "n": 1500, "k": 1024, "layout": "tn", "t_us": 751.0},
    ]
    assert sum(found.dropped.values()) == 1
    [(_, where)] = found.contributions
    assert (where.method.name, where.source.tool) == ("wall", "DeepBench")


def test_deepbenchs_convolutions_by_hand(tmp_path: Path) -> None:
    """Its width comes first; one input channel was padded to eight; a gradient of 0 us cannot be."""
    path = tmp_path / "conv.log"
    path.write_text(CONV_BENCH)
    found = read_foreign("deepbench", path, device="T4")
    rows = rows_of(found)
    assert [(r["in_channels"], r["phase"], r["t_us"]) for r in rows] == [
        (8, "fwd", 187.0), (8, "dgrad", 278.0), (8, "wgrad", 397.0), (128, "fwd", 100.0), (128, "wgrad", 300.0),
    ]  # fmt: skip
    first = {"in_w": 700, "in_h": 161, "kernel_w": 20, "kernel_h": 5, "stride_w": 2, "stride_h": 3, "dtype": "fp16"}
    assert {name: rows[0][name] for name in first} == first
    assert rows[0]["batch"] == 4
    assert sum(found.dropped.values()) == 1


@pytest.mark.parametrize("text", ["", "hello", GEMM_BENCH.replace("precision", "mood"), "\x00" * 1000])
def test_what_is_no_output_of_deepbench_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(text)
    with pytest.raises(WhatifError, match=r"expected the tables that gemm_bench or conv_bench print"):
        read_foreign("deepbench", path, device="T4")
    with pytest.raises(WhatifError, match="--device"):
        read_foreign("deepbench", path)
