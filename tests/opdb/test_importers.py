"""Importers: what each source's numbers mean, by hand; damage is counted or one sentence."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Event, launched, mark, op, write_trace
from tests.opdb.builders import V100, database, origin, some_rows, timed
from tests.opdb.imported import rows_of
from whatif.ingest.operator_calls import describe, describe_other
from whatif.opdb.exporting import export_csv
from whatif.opdb.importing import KINDS, add_found, read_foreign
from whatif.opdb.provenance import Method
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

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
    rows = {row["name"]: row for row in rows_of(found)}
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
    assert len(rows_of(found)) == 5
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
    assert [tuple(row[c] for c in columns) for row in rows_of(found)] == [
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
    assert rows_of(read_foreign("nccl-tests", path, operator="all_gather"))[0]["name"] == "all_gather"
    named = tmp_path / "reduce_scatter_perf.log"
    named.write_text(old)
    assert rows_of(read_foreign("nccl-tests", named))[2]["name"] == "reduce_scatter"


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
    by_name = {row["name"]: row for row in rows_of(found)}
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
    assert {(r["name"], r["dtype"], r["t_us"], r["device"]) for r in rows_of(found)} == {
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
    assert rows_of(read_foreign("recording", nameless, device="T4"))[0]["device"] == "T4"


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
def test_calls_of_unknown_shape_are_no_operators(name: Any, said: tuple[Any, Any, Any]) -> None:
    assert describe(name, *said) is None


def test_a_call_of_no_family_is_distinguished_by_all_of_it() -> None:
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
    assert rows_of(found) == [
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
    with pytest.raises(WhatifError, match="got over 10,000 columns"):
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


def test_a_table_keeps_how_its_rows_were_measured_and_equal_rows_apart(tmp_path: Path) -> None:
    """Times with and without a launch came back as one kind, and two contributions of one time as one row."""
    kinds = [origin(), origin(author="b"), origin(method="kernel", launch=False)]
    store = database(
        tmp_path / "db", *((timed([1, other], [5.0, 6.0 + other]), kind) for other, kind in enumerate(kinds, 2))
    )
    path = tmp_path / "out.csv"
    assert export_csv(store, path) == 6
    found = read_foreign("csv", path)
    assert sorted(where.basis for _, where in found.contributions) == sorted(kind.basis for kind in kinds)
    assert add_found(found, Store.open(tmp_path / "again", create=True)).rows == 6
    [one] = {where.basis for _, where in read_foreign("csv", path, method=Method(name="wall")).contributions}
    assert (one.method, one.launch) == ("wall", "unknown")
    path.write_text("name,dtype,m,n,k,t_us,device,method\nmm,fp32,1,1,1,9,T4,guess\nmm,fp32,1,1,1,9,T4,wall\n")
    assert sum(read_foreign("csv", path).dropped.values()) == 1


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
     ("latency", "a", "no device can have"), ("device", None, "no device, framework"),
     ("framework", None, "no device, framework"), ("gemm_dtype", 3, "cannot describe")],
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
    assert [r["device"] for r in rows_of(found)] == ["T4"]
    assert sum(found.dropped.values()) == 2
    path.write_text("OPName,Latency,Device,B,H\nadd,1,T4,2,3\nadd,1,,2,3\nadd,1,T4,1099511627775,549755813889\n")
    found = read_foreign("neusight", path)
    assert [(r["device"], r["elements"]) for r in rows_of(found)] == [("T4", 6)]
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
    with pytest.raises(WhatifError, match="valid Unicode"):
        read_foreign(kind, tmp_path, author="\udcff")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, kind: str) -> None:
    with pytest.raises(WhatifError, match="no such file"):
        read_foreign(kind, tmp_path / "nothing")
