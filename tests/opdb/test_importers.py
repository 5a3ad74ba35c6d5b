"""Importers: what each source's numbers mean, by hand; damage is counted or one sentence."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import Event, launched, mark, op, write_trace
from tests.opdb.builders import V100, database, origin, some_rows, timed
from whatif.ingest.operator_calls import describe, describe_other
from whatif.opdb.exporting import export_csv
from whatif.opdb.importers.found import Found
from whatif.opdb.importing import KINDS, add_found, read_foreign
from whatif.opdb.provenance import Method
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError


def told(found: Found) -> list[dict[str, Any]]:
    """Every row of what was found, as a person reads it."""
    return [
        {**rows.ops.described(n), "t_us": round(float(rows.t_s[n]) * 1e6, 6), "device": where.device.name}
        for rows, where in found.contributions
        for n in range(len(rows))
    ]


# -- NeuSight -------------------------------------------------------------------------------------------------------

_HEAD = "OPName,Latency,Device,Torch Version,CUDNN Version,Kernel Name,CUDA Version,Kernels,"
_V100 = "Tesla V100-PCIE-32GB,p2.1.0,8902,k,cu121,;a;b,"
TABLES = {
    "collect/linear/p2.1.0/Tesla V100-PCIE-32GB.csv": f"{_HEAD}B,M,N,K\nlinear,0.5,{_V100}1,58,13,141\n",
    "collect/bmm/p2.1.0/Tesla V100-PCIE-32GB.csv": f"{_HEAD}B,M,N,K\nbmm,0.25,{_V100}7,27,15,29\n",
    "collect/conv/p2.1.0/x.csv": f"{_HEAD}B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding\n"
    f"conv,0.75,{_V100}38,893,326,3,5,1,1\n",
    "collect/addu/p2.1.0/x.csv": f"{_HEAD}B,H\naddu,0.125,{_V100}127,168\n",
    "collect/ln/p2.1.0/x.csv": f"{_HEAD}B,H\nln,0.0625,{_V100}60,272\nln,nan,{_V100}60,272\nln,0.1,{_V100}0,272\n",
    "collect/addu.csv": f"{_HEAD}B,H\naddu,9,{_V100}127,168\n",  # all devices once more: not read
    "collect/notes/p2.1.0/x.csv": "hello\n",
    "collect/odd/p2.1.0/x.csv": f"{_HEAD}B,H\nteleport,1,{_V100}1,2\n",
}


@pytest.fixture(params=["folder", "archive"])
def neusight(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "folder":
        for name, text in TABLES.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path / "collect"
    path = tmp_path / "collect.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in TABLES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_neusight_by_hand(neusight: Path) -> None:
    """Its (B, M, N, K) multiplies (M, N) by (N, K), milliseconds: 32x128 tiles of 58x141 need its 5 blocks."""
    found = read_foreign("neusight", neusight)
    rows = {row["name"]: row for row in told(found)}
    matmul = {"family": "matmul", "phase": "fwd", "dtype": "fp32", "layout": "", "device": "V100-PCIE-32"}
    assert rows["linear"] == {**matmul, "name": "linear", "batch": 1, "m": 58, "n": 141, "k": 13, "t_us": 500.0}
    assert rows["bmm"] == {**matmul, "name": "bmm", "batch": 7, "m": 27, "n": 29, "k": 15, "t_us": 250.0}
    conv = rows["conv2d"]
    assert (conv["in_channels"], conv["out_channels"], conv["kernel_w"], conv["in_h"], conv["padding_h"]) == (
        893, 326, 3, 5, 1,
    )  # fmt: skip
    added = rows["add_scalar"]
    assert (added["elements"], added["tensors"], added["t_us"]) == (127 * 168, 1, 125.0)
    assert (rows["layer_norm"]["rows"], rows["layer_norm"]["columns"]) == (60, 272)
    assert len(told(found)) == 5
    # A time that is none, no rows, a table of another tool, an unknown operator.
    assert sum(found.dropped.values()) == 4
    where = found.contributions[0][1]
    assert where.method == Method(name="event_pair", includes_launch=True)
    assert (where.environment.framework_version, where.environment.cudnn) == ("2.1.0", "8902")
    assert where.source.licence == "MIT"
    assert found.contributions[0][0].kernels.decoded()[0] == "a;b"


def test_neusights_are_none_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar.gz").write_text("no archive")
    for name in ("empty", "text.tar.gz", "missing"):
        with pytest.raises(WhatifError, match="expected"):
            read_foreign("neusight", tmp_path / name)


# -- nccl-tests -----------------------------------------------------------------------------------------------------

NCCL = """# nccl-tests version 2.17.1 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  11 on     node1 device  0 [0000:05:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  11 on     node2 device  0 [0000:33:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     0.11    0.00    0.00       0     0.10    0.00    0.00       0
        8192          2048     float     sum      -1    35.15    0.23    0.23       0    30.33    0.27    0.27       0
     8388608       2097152      half     sum      -1    91.10   92.08  161.14       0      N/A     N/A     N/A     N/A
# Out of bounds values : 0 OK
"""


def test_nccl_tests_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(NCCL)
    found = read_foreign("nccl-tests", path, author="me")
    columns = ("name", "dtype", "bytes", "ranks", "nodes", "layout", "t_us")
    assert [tuple(row[c] for c in columns) for row in told(found)] == [
        ("all_reduce", "fp32", 8192, 2, 2, "out_of_place", 35.15),
        ("all_reduce", "fp32", 8192, 2, 2, "in_place", 30.33),
        ("all_reduce", "fp16", 8388608, 2, 2, "out_of_place", 91.1),
    ]
    where = found.contributions[0][1]
    assert (where.device.name, where.environment.nccl, where.source.author) == ("H100-SXM-80", "2.28.7", "me")


def test_an_old_output_needs_the_collectives_name(tmp_path: Path) -> None:
    """Before 2022: no root, `error` instead of `#wrong`, and nothing names the collective but the file."""
    old = "\n".join(
        line.replace("    root", "").replace("      -1", "").replace("#wrong", "error")
        for line in NCCL.splitlines()
        if "starting" not in line
    )
    path = tmp_path / "run.log"
    path.write_text(old)
    with pytest.raises(WhatifError, match="--operator"):
        read_foreign("nccl-tests", path)
    assert told(read_foreign("nccl-tests", path, operator="all_gather"))[0]["name"] == "all_gather"
    named = tmp_path / "reduce_scatter_perf.log"
    named.write_text(old)
    assert told(read_foreign("nccl-tests", named))[2]["name"] == "reduce_scatter"


def test_elements_taken_for_bytes_are_refused(tmp_path: Path) -> None:
    """The published trap: 2,097,152 elements of two bytes in 91.10 us are not 92.08 GB/s."""
    path = tmp_path / "run.log"
    path.write_text(NCCL.replace("     8388608", "     2097152"))
    with pytest.raises(WhatifError, match=r"line 14: expected a rate of 23\.02 GB/s"):
        read_foreign("nccl-tests", path)


NO_OUTPUT = ["", "hello", NCCL.split("#       size")[0], NCCL.replace("Rank", "Bank"), "\x00" * 100]


@pytest.mark.parametrize("text", NO_OUTPUT)
def test_other_texts_are_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "all_reduce_perf.txt"
    path.write_text(text)
    with pytest.raises(WhatifError, match="expected"):
        read_foreign("nccl-tests", path)


# -- a recording ----------------------------------------------------------------------------------------------------

SHAPES: dict[str, Any] = {"Input Dims": [[30, 20], [20, 7]], "Input type": ["float"] * 2, "Concrete Inputs": ["", ""]}
OTHER: dict[str, Any] = {"Input Dims": [[30, 20]], "Input type": ["float"], "Concrete Inputs": [""]}
DEVICE = [{"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34089730048}]


def gpu_step() -> list[Event]:
    """Two products of 30x20 by 20x7, each two kernels, and an operator of no family.

    CPU    |-- aten::mm --| |-- aten::mm --| |-- aten::cumsum --|
    GPU        |40||10|         |60||10|          |5|
    """
    events = [mark("ProfilerStep#0", 0, 1000)]
    for number, (name, at, times) in enumerate(
        [("aten::mm", 10, (40, 10)), ("aten::mm", 210, (60, 10)), ("aten::cumsum", 410, (5,))]
    ):
        events.append(op(name, at, 100, **(SHAPES if name == "aten::mm" else OTHER)))
        for piece, time in enumerate(times):
            start = at + 20 + 70 * piece
            events += launched(f"kernel_{piece}", at + 5 + 20 * piece, 4, start, time, 10 * number + piece + 1)
    return events


def test_a_gpus_operators_take_what_their_kernels_do(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", gpu_step(), deviceProperties=DEVICE)
    found = read_foreign("recording", path)
    by_name = {row["name"]: row for row in told(found)}
    product = by_name["mm"]
    assert (product["m"], product["k"], product["n"], product["t_us"]) == (30, 20, 7, 60.0)  # median of 50 and 70
    assert product["device"] == "V100-SXM2-32"
    assert by_name["aten::cumsum"]["t_us"] == 5.0
    assert json.loads(by_name["aten::cumsum"]["layout"]) == [[[30, 20]], ["float"], [""]]
    [rows] = [rows for rows, _ in found.contributions if rows.family == "matmul"]
    assert rows.repeats.tolist() == [2]
    assert rows.t_low_s.tolist() == pytest.approx([52e-6])  # 10 % of the way from 50 to 70
    assert rows.kernels.decoded() == ["kernel_0;kernel_1"]
    assert found.contributions[0][1].method == Method(name="trace", includes_launch=False)


def test_a_cpus_operators_take_their_own_time(tmp_path: Path) -> None:
    """`linear` calls `addmm`: the inner one is measured, and what allocates inside belongs to it."""
    linear = {"Input Dims": [[30, 20], [7, 20], [7]], "Input type": ["float"] * 3, "Concrete Inputs": ["", "", ""]}
    addmm = {"Input Dims": [[7], [30, 20], [20, 7], [], []], "Input type": ["float"] * 3 + ["Scalar"] * 2,
             "Concrete Inputs": ["", "", "", "1", "1"]}  # fmt: skip
    events = [
        mark("ProfilerStep#0", 0, 1000),
        op("aten::linear", 10, 100, **linear),
        op("aten::addmm", 20, 70, **addmm),
        op("aten::empty", 25, 5, **OTHER),
        op("aten::relu", 200, 30, **OTHER),
    ]
    alone = [{"op": "aten::mm", "dims": [[3, 4], [4, 5]], "types": ["float", "float"], "concrete": ["", ""],
              "ns": {"recorded": 2000.0, "bf16": 9000.0, "batch_x2": 1.0}, "spread": {"recorded": 0.1}}]  # fmt: skip
    metadata = {"version": 1, "cpu": "AMD EPYC", "threads": 4, "torch": "2.13.0", "operator_times": alone}
    path = write_trace(tmp_path / "trace.json.gz", events, whatif=metadata)
    found = read_foreign("recording", path)
    assert {(r["name"], r["dtype"], r["t_us"], r["device"]) for r in told(found)} == {
        ("linear", "fp32", 70.0, "cpu:AMD EPYC x4"),
        ("relu", "fp32", 30.0, "cpu:AMD EPYC x4"),
        ("mm", "fp32", 2.0, "cpu:AMD EPYC x4"),
        ("mm", "bf16", 9.0, "cpu:AMD EPYC x4"),
    }
    assert {where.method.name for _, where in found.contributions} == {"trace", "chain_difference"}


def test_a_recording_without_shapes_or_device_is_one_sentence(tmp_path: Path) -> None:
    bare = [{**event, "args": {k: v for k, v in event["args"].items() if not k.startswith(("Input", "Concrete"))}}
            for event in gpu_step()]  # fmt: skip
    with pytest.raises(WhatifError, match="record_shapes"):
        read_foreign("recording", write_trace(tmp_path / "bare.json", bare, deviceProperties=DEVICE))
    nameless = write_trace(tmp_path / "nameless.json", gpu_step())
    with pytest.raises(WhatifError, match="--device"):
        read_foreign("recording", nameless)
    assert told(read_foreign("recording", nameless, device="T4"))[0]["device"] == "T4"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aten::mm", (None, None, None)),
        ("aten::mm", ([[1, 2], [3, 4]], ["float", "float"], [])),
        ("aten::mm", ([[1, -2], [3, 4]], ["float", "float"], [])),
        ("aten::mm", ([[1, 2**60], [2**60, 4]], ["float", "float"], [])),
        ("aten::mm", ([[1.5, 2], [2, 4]], ["float", "float"], [])),
        ("aten::mm", ([[True, 2], [2, 4]], ["float", "float"], [])),
        ("aten::convolution", ([[1, 3, 8, 8], [4, 3, 3, 3]], ["float", "float"], [""] * 9)),
        ("aten::conv2d", ([[1, 3, 8, 8], [4, 3, 3, 3]], ["float"] * 2, ["", "", "", "[1, 1]", "[x]", "[1]"])),
        ("aten::_softmax", ([[4, 5]], ["float"], ["", "no number"])),
        ("aten::native_layer_norm", ([[4, 5]], ["float"], ["", "[0]"])),
        (None, ([], [], [])),
        ("aten::unheard_of", ([], [], [])),
    ],
)
def test_calls_that_tell_no_shape_are_no_operators(name: Any, said: tuple[Any, Any, Any]) -> None:
    assert describe(name, *said) is None


def test_a_call_of_no_family_is_told_apart_by_all_of_it() -> None:
    one = describe_other("aten::cumsum", [[3]], ["float"], ["0"])
    assert one is not None
    assert (one.family, one.dtype) == ("other", "fp32")
    assert one != describe_other("aten::cumsum", [[3]], ["float"], ["1"])
    assert describe_other("aten::cat", [[3]] * 5000, ["float"], []) is None
    assert describe_other("aten::cat", object(), [], []) is None


# -- a table of one's own -------------------------------------------------------------------------------------------


def test_a_table_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "name,dtype,m,n,k,t_us,t_low_us,t_high_us,repeats,device\n"
        "linear,fp16,8,16,32,12.5,12,13,100,NVIDIA H100 80GB HBM3\n"
        "linear,fp99,8,16,32,12.5,,,,T4\n"
        "mm,fp16,8,16.5,32,12.5,,,,T4\n"
    )
    found = read_foreign("csv", path, method=Method(name="kernel", includes_launch=False))
    assert told(found) == [
        {"family": "matmul", "name": "linear", "phase": "fwd", "dtype": "fp16", "layout": "", "batch": 1, "m": 8,
         "n": 16, "k": 32, "t_us": 12.5, "device": "H100-SXM-80"},
    ]  # fmt: skip
    assert sum(found.dropped.values()) == 2
    assert found.contributions[0][0].t_low_s.tolist() == pytest.approx([12e-6])


@pytest.mark.parametrize(
    "text",
    [
        "", "a,b\n1,2\n", "name,dtype,t_us\nmm,fp32,1\n", "name,dtype,m,n,k,t_us,t_ms,device\nmm,fp32,1,1,1,1,1,T4\n",
        "name,dtype,m,n,k,t_us\nmm,fp32,1,1,1,1\n", "name,dtype,m,n,k,t_us,device\nmm,fp32,1,1,1,nan,T4\n",
        "name,dtype,m,n,t_us,device\nmm,fp32,1,1,1,T4\n", "\x00\x01\x02", 'name,dtype\n"', "PAR1",
        "name,dtype,m,n,k,t_us,device\nmm,fp32,1,1,1,1,T4,5,6\n",
    ],
)  # fmt: skip
def test_bad_tables_are_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(WhatifError, match="expected") as error:
        read_foreign("csv", path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_is_no_table(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / ("t.csv" if pack is bytes else "t.csv.gz")
    path.write_bytes(pack(json.dumps([{"name": "aten::mm", "dur": 1}] * 300_000).encode()))
    with pytest.raises(WhatifError, match="got a line of over 10,000"):
        read_foreign("csv", path)


def test_a_table_that_was_exported_comes_back(tmp_path: Path) -> None:
    rows = some_rows().canonical()
    store = database(tmp_path / "db", (rows, origin()), (timed([1], [5.0], name="linear"), origin("T4")))
    path = tmp_path / "out.csv"
    assert export_csv(store, path, device=V100) == 20
    [(back, where)] = read_foreign("csv", path, method=origin().method).contributions
    assert back.canonical().sha256() == rows.sha256()
    assert where.device.name == V100
    assert export_csv(store, path) == 21
    with pytest.raises(WhatifError, match="--family"):
        export_csv(store, path, family="conv")


# -- aiconfigurator -------------------------------------------------------------------------------------------------


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
    rows = told(found)
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
    assert told(found) == [prompt, prompt | image, prompt | token]
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


# -- DeepBench ------------------------------------------------------------------------------------------------------

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
    assert told(found) == [
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
    rows = told(found)
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


# -- all of them ----------------------------------------------------------------------------------------------------


def test_importing_twice_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(NCCL)
    store = Store.open(tmp_path / "db", create=True)
    first = add_found(read_foreign("nccl-tests", path), store)
    second = add_found(read_foreign("nccl-tests", path), store)
    assert (len(first.added), first.rows) == (1, 3)
    assert (second.added, second.present, second.rows) == ([], first.added, 0)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("m", "x", "no device can have"), ("m", None, "no device can have"), ("m", 1.5, "no device can have"),
     ("m", float("inf"), "no device can have"), ("k", 2**63 - 1, "no device can have"),
     ("latency", "a", "no device can have"), ("device", None, "no device, or"),
     ("framework", None, "no device, or"), ("gemm_dtype", 3, "no word for")],
)  # fmt: skip
def test_a_table_of_aiconfigurator_with_a_wrong_cell_is_counted(
    tmp_path: Path, column: str, value: object, reason: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row: dict[str, object] = {
        "framework": "X", "device": "NVIDIA H100 80GB HBM3", "op_name": "gemm", "gemm_dtype": "bfloat16", "m": 1,
        "n": 2, "k": 3, "latency": 0.1,
    }  # fmt: skip
    pq.write_table(pa.table({k: [v] for k, v in (row | {column: value}).items()}), tmp_path / "gemm_perf.parquet")
    with pytest.raises(WhatifError, match=f"got none: 1 row left out: .*{reason}"):
        read_foreign("aiconfigurator", tmp_path)


def test_rows_without_a_device_are_counted_and_belong_to_none(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,dtype,m,n,k,t_us,device\nmm,fp32,1,2,3,9,T4\nmm,fp32,1,2,3,10,\n,fp32,1,2,3,10,T4\n")
    found = read_foreign("csv", path)
    assert [r["device"] for r in told(found)] == ["T4"]
    assert sum(found.dropped.values()) == 2
    path.write_text("OPName,Latency,Device,B,H\nadd,1,T4,2,3\nadd,1,,2,3\nadd,1,T4,1099511627775,549755813889\n")
    found = read_foreign("neusight", path)
    assert [(r["device"], r["elements"]) for r in told(found)] == [("T4", 6)]
    assert sum(found.dropped.values()) == 2


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 30])
def test_sizes_that_no_number_holds_are_counted(tmp_path: Path, size: str) -> None:
    path = tmp_path / "run.log"
    path.write_text(NCCL + f"{size} 2 float sum -1 10 1 1 0 10 1 1 0\n")
    assert sum(read_foreign("nccl-tests", path).dropped.values()) >= 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", KINDS)
def test_what_never_ends_and_what_is_no_text_is_one_sentence(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WhatifError, match="expected a file or folder"):
        read_foreign(kind, tmp_path / "pipe")
    with pytest.raises(WhatifError, match="UTF-8"):
        read_foreign(kind, tmp_path, author="\udcff")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, kind: str) -> None:
    with pytest.raises(WhatifError, match="no such file"):
        read_foreign(kind, tmp_path / "nothing")
