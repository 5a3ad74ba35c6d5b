"""Damage every other kind of input: saved graphs, nsys reports, ONNX, clusters, policies, tables, op databases.

    python -m tests.trust.fuzz_inputs [SECONDS] [SEED]

Prints what crashes, hangs, or prints a number that is none, once for each kind of fault, and the counts at the end.
"""

from __future__ import annotations

import base64
import collections
import json
import os
import random
import re
import shutil
import sqlite3
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.ingest import nsys_report
from tests.opdb.builders import database, origin, some_rows
from tests.test_fuzz import SEED as EVENTS
from tests.trust.common import ROOT, Outcome, call, small_traces, written
from whatif.ingest.kineto import read_kineto  # what tests.ingest.nsys_report makes a report of

HALVE = ("apply", "scale:kind=all,factor=0.5")
NUMBERS = [
    b"-1", b"0", b"1e308", b"99999999999999999999", b"nan", b"inf", b"-0.0", b"0.5", b"true", b'"x"',
    b"9223372036854775807", b"[]", b"{}",
]  # fmt: skip
PIECES = [b"\xff\xfe", b'"', b"[", b"}", b"\x00" * 9, b"nan", b"1e999", b"-", b"9" * 25, b"null", b"\n"]
# Keys of a graph as `whatif export` saves it, behind the timeline's events.
GRAPH_KEY = "whatif_graph"
POLICY = {
    "remove": ["stem"],
    "scale": [{"layers": ["head"], "factor": 0.5}, {"layers": "body", "sizes": {"out_channels": 128}}],
    "merge": [{"layers": ["one", "two"], "factor": 0.9}],
}

Job = Callable[[random.Random], tuple[bytes, Outcome]]


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return the data with a few bytes or numbers changed."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        if not changed:
            break
        place, kind = dice.randrange(len(changed)), dice.choice(["flip", "cut", "insert", "repeat", "zero", "number"])
        if kind == "flip":
            changed[place] ^= 1 << dice.randrange(8)
        elif kind == "cut":
            del changed[place : place + dice.choice([1, 4, 200, 10**9])]
        elif kind == "insert":
            changed[place:place] = dice.choice(PIECES)
        elif kind == "repeat":
            start = dice.randrange(len(changed))
            changed[place:place] = changed[start : start + dice.choice([3, 60])]
        elif kind == "zero":
            changed[place : place + 9] = bytes(len(changed[place : place + 9]))
        else:
            found = list(re.finditer(rb"-?\d+\.?\d*", bytes(changed[:200_000])))
            if found:
                number = dice.choice(found)
                changed[number.start() : number.end()] = dice.choice(NUMBERS)
    return bytes(changed)


def jobs() -> dict[str, Job]:
    """Return what damages each kind of input and runs a command on it; writes the inputs into the current folder."""
    Path("events.json").write_bytes(written({"traceEvents": EVENTS}))
    Path("cpu.json").write_bytes(written(small_traces()["CPU"]))
    assert call("export", "events.json", "scale:kind=gpu,factor=0.5", "-o", "saved.json", "--quiet").status == 0
    saved = Path("saved.json").read_bytes()
    nsys_report.from_kineto(read_kineto(Path("events.json")), gpu="Tesla V100-SXM2-16GB").write(Path("report.sqlite"))
    clusters = [path.read_bytes() for path in sorted((ROOT / "whatif").rglob("presets/*.toml"))]
    tables = [path.read_bytes()[:6000] for path in sorted((ROOT / "tests" / "data").glob("nccl*.csv"))]
    assert clusters
    assert tables
    database(Path("db"), (some_rows(1, 300), origin()))
    result: dict[str, Job] = {
        "saved graph": _file("graph.json", lambda dice: damaged(saved, dice), [*HALVE, "graph.json", "--json"]),
        "fields of a saved graph": _file(
            "graph.json", lambda dice: _changed_graph(json.loads(saved), dice), [*HALVE, "graph.json", "--json"]
        ),
        "nsys report": _file("bytes.sqlite", _changed_report, [*HALVE, "bytes.sqlite", "--json"]),
        "tables of an nsys report": _file("tables.sqlite", _changed_tables, [*HALVE, "tables.sqlite", "--json"]),
        "cluster": _file(
            "cluster.toml",
            lambda dice: damaged(dice.choice(clusters), dice),
            ["apply", "distributed:cluster=cluster.toml", "cpu.json", "--json"],
        ),
        "policy": _file(
            "policy.json",
            lambda dice: damaged(json.dumps(POLICY).encode(), dice),
            ["apply", "metaflow:policy=policy.json", "cpu.json", "--json"],
        ),
        "measured collectives": _file(
            "table.csv",
            lambda dice: damaged(dice.choice(tables), dice),
            ["apply", "distributed:workers=4,bandwidth=10Gbps,table=table.csv", "cpu.json", "--json"],
        ),
        "op database": _database,
    }
    model = _onnx_model()
    if model:
        words = ["predict", "model.onnx", "--device", "A100-SXM-80", "--db", "db", "--json"]
        result["ONNX"] = _file("model.onnx", lambda dice: damaged(model, dice), words)
    return result


def _file(name: str, make: Callable[[random.Random], bytes], words: list[str]) -> Job:
    def job(dice: random.Random) -> tuple[bytes, Outcome]:
        data = make(dice)
        Path(name).write_bytes(data)
        return data, call(*words, seconds=20)

    return job


def _changed_graph(trace: dict[str, Any], dice: random.Random) -> bytes:
    graph = trace[GRAPH_KEY]
    group = dice.choice(["columns", "dependencies", "waits", "attached", "info", "threads", "names", "n_tasks"])
    value = dice.choice([0, -1, 2**31 - 1, 2**63, None, [], {}, "x", 1e308, float("nan"), True])
    if group in ("columns", "dependencies", "waits", "attached") and graph[group]:
        _change_column(graph[group][dice.choice(list(graph[group]))], value, dice)
    elif group == "info":
        graph["info"][dice.choice(list(graph["info"]))] = value
    elif group == "threads":
        thread = dice.choice(graph["threads"])
        thread[dice.choice(list(thread))] = value
    else:
        graph[group] = value
    # As the export writes it: the graph comes last, on a line of its own.
    head = json.dumps({key: entry for key, entry in trace.items() if key != GRAPH_KEY})[:-2]
    return f'{head}\n],\n"{GRAPH_KEY}":{json.dumps(graph)}}}'.encode()


def _change_column(column: dict[str, Any], value: Any, dice: random.Random) -> None:
    kind = dice.choice(["dtype", "count", "data", "values", "values", "values"])
    if kind == "dtype":
        column["dtype"] = dice.choice(["<f8", "|O", "<i8", "|S9", "<m8[ns]", "|V3", [["a", "<i4"]], "<f2", value])
    elif kind == "count":
        column["count"] = dice.choice([0, 1, 2**31 - 1, -1, value])
    elif kind == "data":
        zeros = base64.b64encode(zlib.compress(bytes(10**8))).decode()
        column["data"] = dice.choice(["", "AAAA", zeros, value])
    else:
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(column["data"])), np.dtype(column["dtype"])).copy()
        if len(numbers):
            whole = numbers.dtype.kind in "iu"
            ends = [np.iinfo(numbers.dtype).max, np.iinfo(numbers.dtype).min, -1, 100] if whole else []
            for _ in range(dice.choice([1, 3])):
                numbers[dice.randrange(len(numbers))] = np.array(dice.choice([0, 1, *ends])).astype(numbers.dtype)
            column["data"] = base64.b64encode(zlib.compress(numbers.tobytes())).decode()


def _changed_report(dice: random.Random) -> bytes:
    data = bytearray(Path("report.sqlite").read_bytes())
    for _ in range(dice.choice([1, 4, 30])):
        data[dice.randrange(dice.choice([200, len(data)]))] = dice.randrange(256)
    if dice.random() < 0.2:
        del data[dice.randrange(len(data)) :]
    return bytes(data)


def _changed_tables(dice: random.Random) -> bytes:
    shutil.copy("report.sqlite", "copy.sqlite")
    with sqlite3.connect("copy.sqlite") as report:
        tables = [row[0] for row in report.execute("select name from sqlite_master where type='table'")]
        table = dice.choice(tables)
        column = dice.choice([row[1] for row in report.execute(f'pragma table_info("{table}")')])
        value = dice.choice([None, -1, 2**62, -(2**62), 2**63 - 1, 1.5, "x", b"\xff" * 100_000, "y" * 10**6, 0])
        endless = "with recursive q(x) as (select 1 union all select x+1 from q)"
        statements = dice.choice(
            [
                *[[f'update or ignore "{table}" set "{column}"=? where rowid % {dice.choice([1, 2, 7])} = 0']] * 3,
                [f'drop table "{table}"'],
                [f'alter table "{table}" drop column "{column}"'],
                [
                    f'alter table "{table}" rename to zz',
                    f'create view "{table}" as {endless} select q.x as "{column}", zz.* from q, zz',
                ],
                [f'insert or ignore into "{table}" select * from "{table}"'],
                [f'alter table "{table}" add column gx integer generated always as (abs(randomblob(1000000000)))'],
                [f'drop table "{table}"', f'create virtual table "{table}" using fts5(start,end)'],
            ]
        )
        try:
            for statement in statements:
                report.execute(statement, (value,) if "?" in statement else ())
        except sqlite3.Error:  # some changes do not fit some tables
            report.rollback()
    report.close()
    return Path("copy.sqlite").read_bytes()


def _database(dice: random.Random) -> tuple[bytes, Outcome]:
    shutil.rmtree("damaged", ignore_errors=True)
    shutil.copytree("db", "damaged")
    file = dice.choice(sorted(path for path in Path("damaged").rglob("*") if path.is_file()))
    data = damaged(file.read_bytes(), dice)
    file.write_bytes(data)
    query = ["opdb", "query", "linear:m=512,n=1024,k=1024,dtype=fp32", "--device", "V100-PCIE-16", "--json"]
    commands = [[*query, "--db", "damaged"], ["opdb", "check", "--db", "damaged"]]
    if dice.random() < 0.3:
        shutil.rmtree("merged", ignore_errors=True)
        commands.append(["opdb", "merge", "damaged", "--db", "merged"])
    outcomes = [call(*words, seconds=20) for words in commands]
    return data, next((outcome for outcome in outcomes if not outcome.is_sound), outcomes[0])


def _onnx_model() -> bytes | None:
    try:
        from onnx import TensorProto, helper
    except ImportError:
        return None
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.1] * 64)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("x", "z")]
    return bytes(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])).SerializeToString())


def fault(outcome: Outcome) -> str | None:
    """Say what is wrong with an outcome, if anything is."""
    if not outcome.is_sound:
        return outcome.err.strip()[-600:] or f"status {outcome.status}"
    return "NaN in the output" if re.search(r"\bNaN\b|\bInfinity\b", outcome.out) else None


def rounds(dice: random.Random, allowed: Callable[[int], bool]) -> tuple[collections.Counter[str], list[str]]:
    """Damage each input in turn for as long as allowed; give the counts by status, and the faults."""
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            done, inputs = 0, jobs()
            while allowed(done):
                done += 1
                for name, job in inputs.items():
                    data, outcome = job(dice)
                    counts[f"{name}: status {outcome.status}"] += 1
                    wrong = fault(outcome)
                    if wrong:
                        faults.append(f"{name} ({len(data)} bytes): {wrong}")
        finally:
            os.chdir(home)
    return counts, faults


def main(seconds: float = 120, seed: int = 3) -> None:
    """Print the faults, each kind once, and the counts."""
    end_s = time.monotonic() + seconds
    counts, faults = rounds(random.Random(seed), lambda _: time.monotonic() < end_s)
    for text in {text.splitlines()[-1][:80]: text for text in reversed(faults)}.values():
        print(text)
    print(dict(sorted(counts.items())), f"{len(faults)} faults")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]))
