"""Copies to share: nothing of who and where is left in their bytes, and they give the same graph and prediction."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.cli.test_commands import training
from tests.helpers import mark, need, op, write_trace
from whatif import TaskGraph, WhatifError
from whatif.cli.main import main
from whatif.graph.columns import TASK_COLUMNS
from whatif.ingest.anonymize.anonymize import STACK_FRAMES, anonymize
from whatif.ingest.anonymize.text import LayerNames, Scrubber
from whatif.ingest.read_events import read_events

ROOT = Path(__file__).resolve().parent.parent
OWN = sorted(path.name for path in (ROOT / "traces").glob("*.json.gz"))
# One of each kind: bare array with old categories, stacks and AMD, compiled on H100, collectives, no operators.
SHARED = (
    "kineto-resnet50-v100/num_workers_0.2020-12.pt.trace.json.gz",
    "tracelens-h100-mi300/mi300.resnet_act_checkpoint_ddp_train.json.gz",
    "modded-nanogpt-8xh100/current.rank0.json.gz",
    "hta/a100_dlrm_rank0of16.json.gz",
    "edls-a4000/torch_profiler_trace.json.gz",
)

RECORD_WITH_STACKS = """
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = _ExperimentalConfig(verbose=True)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, with_modules=True,
             experimental_config=config) as profiler:
    for step in range(5):
        with record_function(f"reading {__file__} for jane_doe@example.com"):
            loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        profiler.step()
profiler.export_chrome_trace("trace.json")
"""


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def same(a: TaskGraph, b: TaskGraph, *, words: bool = True) -> None:
    """Equal but for the words of names, which may have stand-ins, one for each."""
    for column in TASK_COLUMNS:
        assert np.array_equal(getattr(a, column), getattr(b, column)), column
    assert (a.names == b.names) if words else (len(a.names) == len(b.names))
    assert a.threads == b.threads
    assert a.info.measured_step_ns == b.info.measured_step_ns
    assert a.info.untraced_step_ns == b.info.untraced_step_ns
    assert a.info.gpu == b.info.gpu


def predicted_ms(graph: TaskGraph) -> tuple[float, float, float]:
    prediction = whatif.apply(graph, "scale:kind=all,factor=0.5")
    return prediction.predicted_ms, prediction.low_ms, prediction.high_ms


@pytest.mark.parametrize("name", OWN)
def test_own_recordings_give_the_same_prediction(name: str, own_traces: Path, tmp_path: Path) -> None:
    result = anonymize(own_traces / name, tmp_path)
    before, after = whatif.read(own_traces / name), whatif.read(result.path)
    assert result.path == tmp_path / name
    same(before, after)
    assert after.layers == before.layers
    assert after.info.recorded == before.info.recorded
    assert predicted_ms(after) == predicted_ms(before)
    assert len(result.path.read_bytes()) < 1.5 * (own_traces / name).stat().st_size


@pytest.mark.parametrize("name", SHARED)
def test_other_peoples_traces_give_the_same_graph(name: str, shared_traces: Path, tmp_path: Path) -> None:
    result = anonymize(shared_traces / name, tmp_path / "copy.json")
    before, after = whatif.read(shared_traces / name), whatif.read(result.path)
    same(before, after, words=False)
    assert predicted_ms(after) == predicted_ms(before)
    assert b"/home/" not in content(result.path)


@pytest.fixture(scope="module")
def with_stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("torch")
    folder = tmp_path_factory.mktemp("jane_doe") / "secret project"
    folder.mkdir()
    script = folder / "hidden_training.py"
    script.write_text(RECORD_WITH_STACKS, encoding="utf-8")
    subprocess.run([sys.executable, str(script), "--token=hunter2"], cwd=folder, check=True, capture_output=True)
    return folder / "trace.json"


def test_no_path_user_or_host_is_left_of_a_trace_with_stacks(with_stacks: Path, tmp_path: Path) -> None:
    raw = with_stacks.read_bytes()
    planted = [b"jane_doe", b"secret project", b"hidden_training", b"example.com", str(with_stacks.parent).encode()]
    machine = [str(ROOT).encode(), sys.prefix.encode(), b"hunter2"]
    # A short name of a host is part of many words.
    machine += [name.encode() for name in (socket.gethostname(),) if len(name) > 5]
    assert all(word in raw for word in planted)
    assert b'"host_name"' in raw
    result = anonymize(with_stacks, tmp_path / "copy.json.gz")
    copy = content(result.path)
    assert [word for word in (*planted, *machine, b"host_name") if word in copy] == []
    assert re.search(rb"(?<![\w.)\]>*&])/\w+/\w+|\.py\b|[A-Z]:\\\\", copy) is None
    assert result.removed[STACK_FRAMES] > 100
    assert result.removed["fields named 'Call stack'"] > 10
    assert result.removed["texts with a path"] == 1
    assert result.removed["fields named 'host_name'"] == 1
    before, after = whatif.read(with_stacks), whatif.read(result.path)
    for column in set(TASK_COLUMNS) - {"name"}:
        assert np.array_equal(getattr(before, column), getattr(after, column)), column
    assert predicted_ms(after) == predicted_ms(before)


def test_layers_are_numbered_everywhere_and_their_tree_stays(own_traces: Path, tmp_path: Path) -> None:
    trace = own_traces / "transformer_cpu.json.gz"
    result = anonymize(trace, tmp_path, rename_layers=True)
    copy = content(result.path)
    assert b"mlp" in content(trace)
    assert b"mlp" not in copy
    assert b"whatif::layer::blocks" not in copy
    before, after = whatif.read(trace), whatif.read(result.path)
    same_shape = {name.count(".") for name in before.layers} == {name.count(".") for name in after.layers}
    assert same_shape
    assert len(set(after.layers)) == len(set(before.layers))
    assert np.array_equal(before.layer, after.layer)
    assert predicted_ms(after) == predicted_ms(before)
    table = {layer.name for layer in after.info.recorded.layers}
    assert set(after.layers) - {""} <= table
    parameters = {gradient.name.rpartition(".")[0] for gradient in after.info.recorded.gradients}
    assert parameters <= table
    types = [layer.type for layer in before.info.recorded.layers]
    assert [layer.type for layer in after.info.recorded.layers] == types
    words = {word for layer in before.info.recorded.layers for word in layer.name.split(".")} - {"(root)"}
    assert result.renamed_words == len({word for word in words if not word.isdecimal()})


def test_layer_words_keep_their_number() -> None:
    number = LayerNames()
    assert number("encoder.0.attention") == "layer1.0.layer2"
    assert number("encoder.1.attention.weight") == "layer1.1.layer2.weight"
    assert number("(root)") == "(root)"
    assert len(number) == 2


def test_layer_names_in_every_table_of_a_recording() -> None:
    scrubber = Scrubber(rename_layers=True)
    clean = scrubber.value(
        {
            "layers": [{"name": "layers.0", "type": "Linear", "shapes": {"weight": [2, 2], "secret": [2]}}],
            "grad_ready_order": [{"name": "layers.0.weight", "bytes": 16}],
            "ddp": {"source": "rule", "buckets": [{"bytes": 16, "parameters": ["layers.0.weight"]}]},
            "flops": {"forward": 8, "layers": {"layers.0": 8}},
            "optimizer": {"type": "Adam", "foreach": None},
        }
    )
    assert clean == {
        "layers": [{"name": "layer1.0", "type": "Linear", "shapes": {"weight": [2, 2], "layer2": [2]}}],
        "grad_ready_order": [{"name": "layer1.0.weight", "bytes": 16}],
        "ddp": {"source": "rule", "buckets": [{"bytes": 16, "parameters": ["layer1.0.weight"]}]},
        "flops": {"forward": 8, "layers": {"layer1.0": 8}},
        "optimizer": {"type": "Adam", "foreach": None},
    }


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("load /home/jane doe/data set/x.bin", "load (path)"),
        ("'/scratch'", "'(path)"),
        (r"C:\Users\jane\x", "(path)"),
        (r"\\server\share", "(path)"),
        ("~/data", "(path)"),
        ("file:///a/b", "(path)"),
        ("see src/train.py(12): step", "see (path)"),
        ("mail jane.doe@example.org now", "mail (address) now"),
        ("rank at 10.11.12.13:29500", "rank at (address):29500"),
        ("epoch of host-7 done", "epoch of (name) done"),
    ],
)
def test_what_is_private_goes(text: str, clean: str) -> None:
    assert Scrubber(["host-7"]).text(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "Torch-Compiled Region: 0/0",
        "encoder/layer_1/attention",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, std::array<char*, 1>)",
        "Memcpy HtoD (Pageable -> Device)",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "autograd::engine::evaluate_function: AddBackward0",
        "aten::div", "a / b", "N/A", "memcpy@@GLIBC_2.2.5", "triton_poi_fused__to_copy_0", "cuDNN 9.1.0", "2.13.0+cpu",
        "Intel(R) Xeon(R) Processor @ 2.60GHz", "bhqd,bhkd->bhqk", "resnet50--baseline.trace.json.gz",
    ],
)  # fmt: skip
def test_what_is_content_stays(text: str) -> None:
    assert Scrubber(["host-7"]).text(text) == text


@pytest.mark.parametrize("piece", ["a", "/", "a.b", "1.2.3.", "-._", "x@"])
def test_a_text_as_long_as_a_file_is_read_once(piece: str) -> None:
    """Trying each place of it anew would take hours."""
    text = piece * (600_000 // len(piece))
    assert Scrubber().text(text) == text


def test_names_of_the_machine_are_replaced_in_what_the_user_named_only(tmp_path: Path) -> None:
    events = [mark("step of gpubox7", 0, 10), op("custom::gpubox7_op", 1, 2), op("aten::mm", 4, 2)]
    trace = write_trace(tmp_path / "a.json", events, host_name="gpubox7")
    copy = json.loads(content(anonymize(trace, tmp_path / "b.json").path))
    assert [event["name"] for event in copy["traceEvents"]] == ["step of (name)", "custom::anonb7_op", "aten::mm"]
    assert "host_name" not in copy


def test_text_that_nobody_knows_goes_and_numbers_stay(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "Input Dims": [[2, 3], []], "Concrete Inputs": ["1.5", "/home/jane/x", "[3, 3]"], "Input type": ["float", ""],
        "Command": "python /x", "grid": "[1, 2, 3]", "peer": "10.0.0.1", "/home/jane": 3, "Ev Idx": 7,
        "ratio": 0.125,
    }  # fmt: skip
    trace = write_trace(tmp_path / "a.json", [op("aten::mm", 0, 1, **arguments)], environment={"HOME": "/x"}, answer=42)
    result = anonymize(trace, tmp_path / "b.json")
    copy = json.loads(content(result.path))
    kept = copy["traceEvents"][0]["args"]
    assert kept["Concrete Inputs"] == ["1.5", "", "[3, 3]"]
    assert set(kept) == set(arguments) - {"Command", "peer", "/home/jane"}
    assert {key: kept[key] for key in ("Input Dims", "grid", "ratio")} == {
        key: arguments[key] for key in ("Input Dims", "grid", "ratio")
    }
    assert "environment" not in copy
    assert copy["answer"] == 42
    assert {"fields named 'Command'", "fields named 'peer'", "fields named 'environment'"} <= set(result.removed)


# -- secrets of all kinds in all places ----------------------------------------------------------------------------

SECRETS = (
    "sk-proj-a8Fk2LmQ9xTz71BvWc", "AKIAIOSFODNN7EXAMPLE", "ghp_R2d4x9KqLw83nVbYtZ", "hf_aBqDeFwHiJzLmNoPqRsT",
    "eyJhbGciOiJIUzI1NiJ9", "hunter2swordfish", "Pa55w0rd-of-jane", "4b825dc642cb6eb9a060e54bf8d69288",
    "123e4567-e89b-12d3-a456-426614174000", "nightingale", "AcmeSecretNet", "acme_corp", "OhneNamenGmbH", "jane.doe",
    "jane.doe@acme.example", "gpu-node-07", "ip-10-21-32-43", "trainer17.acme.internal", "vault.acme.io",
    "10.21.32.43", "2001:db8:85a3::8a2e:370:7334", "fe80::1ff:fe23:4567:890a", "00:1b:44:11:3a:b7",
    "https://vault.acme.io/v1/kv", "s3://acme-models/run7", "gs://acme/x", "ssh://git@acme.io/r.git",
    "postgres://jane:pw@db/x", "/home/jane/acme/train.py", "/mnt/acme-data/x.bin", r"C:\\Users\\jane\\acme.py",
    r"\\\\fileserver\\acme", "~/acme/notes.txt", "train_acme_v7.py", "Zürich-Süd", "проект-сокол", "秘密计划",
    "DE89370400440532013000", "xoxb-2948-acmeToken",
)  # fmt: skip
_TEXT_KEYS = (
    "Input type", "Concrete Inputs", "Collective name", "dtype", "Process Group Name", "Process Group Description",
    "kind", "kernel", "src", "dst", "cuda_sync_kind", "stream", "Device Type", "kernel_backend", "labels", "group",
    "Process Group Ranks", "an unknown argument",
)  # fmt: skip


def planted(secret: str) -> dict[str, Any]:
    """A recording in every place of which a secret stands."""
    base = {"ph": "X", "pid": 1, "tid": 1, "dur": 1}
    names = (
        ("user_annotation", f"load {secret} now"), ("user_annotation", secret), ("cpu_op", f"mine::{secret}"),
        ("cpu_op", secret), ("kernel", f"void {secret}_kernel<float>"), ("cuda_runtime", secret),
        ("python_function", f"train.py(3): {secret}"), ("python_function", f"nn.Module: {secret}_0"),
        ("user_annotation", f"whatif::layer::blocks {secret}"), ("gpu_memcpy", secret), (secret, "aten::mm"),
        ("user_annotation", f"Optimizer.step#{secret}.step"),
        ("cpu_op", f"autograd::engine::evaluate_function: {secret}Backward0"),
    )  # fmt: skip
    events: list[dict[str, Any]] = [
        {**base, "cat": cat, "name": name, "ts": 10 + 2 * number} for number, (cat, name) in enumerate(names)
    ]
    arguments = [{key: secret} for key in _TEXT_KEYS] + [{key: [secret, [secret]]} for key in _TEXT_KEYS]
    arguments += [{secret: 1}, {secret: secret}, {"dtype": {secret: secret}}]
    events += [
        {**base, "cat": "cpu_op", "name": "aten::mm", "ts": 100 + 2 * number, "args": args}
        for number, args in enumerate(arguments)
    ]
    events += [{**base, "cat": "cpu_op", "name": "aten::mm", "ts": 300 + number, key: secret}
               for number, key in enumerate(("pid", "tid", "id", "s", "bp", "args", "ph", secret))]  # fmt: skip
    events += [{**base, "cat": "cpu_op", "name": "aten::mm", "ts": secret}]
    events += [{"ph": "M", "name": name, "pid": 1, "tid": 2, "ts": 0, "args": {key: secret}}
               for name, key in (("process_name", "name"), ("thread_name", "name"), ("process_labels", "labels"),
                                 (secret, "name"), ("thread_name", secret))]  # fmt: skip
    recorded = {
        "layers": [{"name": f"blocks {secret}", "type": secret}], "optimizer": {"type": secret}, secret: 3,
        "note": f"of {secret}", "modules": {secret: {"shapes": {secret: [2]}}}, "grad_ready_order": [{"name": secret}],
    }  # fmt: skip
    return {
        "traceEvents": events, "whatif": recorded, "traceName": secret, secret: 1, "comment": secret,
        "deviceProperties": [{"id": 0, "name": f"NVIDIA {secret}", "owner": secret}],
        "distributedInfo": {"backend": "nccl", "pg_config": [{"pg_name": secret, "pg_desc": secret}]},
    }  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("rename_layers", [False, True])
def test_no_secret_is_left_wherever_it_stands(secret: str, rename_layers: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(planted(secret), ensure_ascii=False), encoding="utf-8")
    copy = content(anonymize(path, tmp_path / "b.json", rename_layers=rename_layers).path).decode()
    found = [part for part in (secret, *re.split(r"[^\w]+|_", secret)) if len(part) > 5 and part in copy]
    if rename_layers and secret == "10.21.32.43":
        return  # a layer's name may be four numbers
    # Words of torch's own say nothing: what is left of "trainer17.acme.internal" is "(address)".
    assert not [part for part in found if part not in ("models", "internal")]


def test_secrets_change_no_prediction(own_traces: Path, tmp_path: Path) -> None:
    """A real recording with a secret in each annotation, class and argument predicts as it did before."""
    trace = json.loads(gzip.decompress((own_traces / "transformer_cpu.json.gz").read_bytes()))
    for number, event in enumerate(trace["traceEvents"]):
        secret = SECRETS[number % len(SECRETS)]
        if event.get("cat") == "cpu_op" and isinstance(event.get("args"), dict):
            event["args"]["Process Group Description"] = secret
            event["args"].setdefault("Concrete Inputs", []).append(secret)
        if event.get("cat") == "user_annotation" and "#" not in event["name"] and "whatif::" not in event["name"]:
            event["name"] += f" of {secret}"
    path = tmp_path / "a.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    copy = anonymize(path, tmp_path / "b.json").path
    assert not [secret for secret in SECRETS if secret in content(copy).decode()]
    assert predicted_ms(whatif.read(copy)) == predicted_ms(whatif.read(path))


def test_the_free_text_that_stays_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        mark("load batch", 0, 30), mark("ProfilerStep#1", 0, 30), op("mine::attention", 1, 2), op("aten::mm", 4, 2),
        mark("whatif::layer::encoder.acme", 0, 9),
    ]  # fmt: skip
    trace = write_trace(tmp_path / "a.json", events)
    kept = anonymize(trace, tmp_path / "b.json").kept
    assert kept["annotations"] == ("load batch",)
    assert kept["layers and classes"] == ("encoder.anonc",) or kept["layers and classes"][0].startswith("encoder.anon")
    assert main(["anonymize", str(trace), "-o", str(tmp_path / "c.json")]) == 0
    assert "load batch" in capsys.readouterr().out


def test_labels_of_tracks_say_no_command_line(tmp_path: Path) -> None:
    def label(kind: str, key: str, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": 1, "tid": 2, "ts": 0, "args": {key: text}}

    labels = [
        label("process_name", "name", "python train.py --key=hunter2"), label("process_labels", "labels", "GPU 0"),
        label("thread_name", "name", "thread 12 (jane's)"), label("thread_name", "name", "thread 13 (pt_autograd_0)"),
        label("thread_name", "name", "stream 7 "), label("process_labels", "labels", "box.example.com"),
    ]  # fmt: skip
    trace = write_trace(tmp_path / "a.json", [*labels, op("aten::mm", 0, 1)])
    result = anonymize(trace, tmp_path / "b.json")
    copy = json.loads(content(result.path))["traceEvents"]
    shown = [next(iter(event["args"].values())) for event in copy if event["ph"] == "M"]
    assert shown == ["python", "GPU 0", "thread 12", "thread 13 (pt_autograd_0)", "stream 7", ""]
    assert result.removed["names of processes and threads"] == 3


def test_a_record_of_a_campaign_keeps_what_failed_and_loses_where(tmp_path: Path) -> None:
    record = {
        "schema": 1, "name": "bert--compile", "model": "bert", "variant": "compile", "status": "failed",
        "failure": 'Traceback\n  File "/home/jane/run.py", line 3\nRuntimeError: no compiler at /home/jane/bin',
        "machine": {"hostname": "box7", "torch": "2.13.0+cpu", "gpu": {"name": "H200", "uuid": "GPU-1"}},
        "trace": {"file": "bert--compile.trace.json.gz"},
    }  # fmt: skip
    path = tmp_path / "bert--compile.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "out").mkdir()
    result = anonymize(path, tmp_path / "out")
    assert result.path == tmp_path / "out" / path.name
    copy = json.loads(content(result.path))
    assert copy["failure"] == "RuntimeError: no compiler at (path)"
    assert copy["machine"] == {"torch": "2.13.0+cpu", "gpu": {"name": "H200"}}
    assert copy["trace"] == record["trace"]
    assert {"fields named 'hostname'", "fields named 'uuid'"} <= set(result.removed)


@pytest.mark.parametrize("link", ["", "link", "hard"])
def test_the_input_is_never_overwritten(link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "a.json", training())
    before = trace.read_bytes()
    other = tmp_path / "b.json" if link else trace
    if link == "link":
        other.symlink_to(trace)
    elif link == "hard":
        os.link(trace, other)
    assert main(["anonymize", str(trace), "-o", str(other)]) == 1
    assert "never overwritten" in capsys.readouterr().err
    assert trace.read_bytes() == before
    assert main(["anonymize", str(trace), "-o", str(tmp_path)]) == 1


def test_the_copy_lies_beside_the_input_by_default(tmp_path: Path) -> None:
    for name, copy in (
        ("a.trace.json.gz", "a.anonymous.json.gz"),
        ("b.json", "b.anonymous.json"),
        ("c", "c.anonymous.json"),
    ):
        trace = write_trace(tmp_path / name, training())
        assert anonymize(trace).path == tmp_path / copy
        assert len(whatif.read(tmp_path / copy)) == len(whatif.read(trace))


def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = tmp_path / "report.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("create table StringIds (id integer, value text)")
    text = tmp_path / "notes.json"
    text.write_text("hello", encoding="utf-8")
    for path, reason in (
        (database, "SQLite"),
        (text, "expected JSON"),
        (tmp_path / "none", "check the path"),
        (tmp_path, "folder"),
    ):
        assert main(["anonymize", str(path), "-o", str(tmp_path / "out.json")]) == 1
        message = capsys.readouterr().err
        assert reason in message
        assert message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.json", "report.sqlite"]


def test_damage_is_reported_and_the_rest_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "a.json", training())
    whole = trace.read_bytes()
    trace.write_bytes(whole[: len(whole) * 3 // 4])
    assert main(["anonymize", str(trace), "-o", str(tmp_path / "b.json.gz")]) == 0
    assert f"the file ends early at byte {len(whole) * 3 // 4}" in capsys.readouterr().out
    assert len(read_events(tmp_path / "b.json.gz")) == len(read_events(trace))


def test_a_copy_of_a_copy_is_the_same(own_traces: Path, tmp_path: Path) -> None:
    first = anonymize(own_traces / "transformer_cpu.json.gz", tmp_path / "first.json.gz")
    second = anonymize(first.path, tmp_path / "second.json.gz")
    assert second.removed == {}
    assert second.path.read_bytes() == first.path.read_bytes()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(WhatifError, match="cannot be read twice"):
        anonymize(pipe, tmp_path / "out.json")


def test_what_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.json", [op("aten::mm", 0, 1, **{"Concrete Inputs": "deep"})])
    trace.write_text(trace.read_text().replace('"deep"', "[" * 900 + '"/x"' + "]" * 900), encoding="utf-8")
    limit = sys.getrecursionlimit()
    # Since Python 3.12 a list in a list takes one frame of two, and the limit is no longer that of reading JSON.
    sys.setrecursionlimit(limit if sys.version_info < (3, 12) else 600)
    try:
        with pytest.raises(WhatifError, match="nested"):
            anonymize(trace, tmp_path / "out.json")
    finally:
        sys.setrecursionlimit(limit)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]


def test_a_timeline_of_export_is_refused(own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its saved graph would reveal all names, and without that graph the file could not be read."""
    exported = tmp_path / "out.json"
    assert main(["export", str(own_traces / "transformer_cpu.json.gz"), "-o", str(exported), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["anonymize", str(exported), "-o", str(tmp_path / "shared.json")]) == 1
    assert "anonymize its recording and export the copy" in capsys.readouterr().err
    assert not (tmp_path / "shared.json").exists()
