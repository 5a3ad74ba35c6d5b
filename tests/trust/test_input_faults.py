"""Inputs that once ended in an unexpected error, in no end, or in the wrong file: each is answered or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trust.common import CPU_RECORDING, Outcome, call, small_traces, written
from tests.trust.crashes import TRACE
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import check_file_pattern, read_at_most


def refused(outcome: Outcome, why: str) -> None:
    assert outcome.is_sound, outcome.err
    assert outcome.status == 1
    assert why in outcome.err
    assert len(outcome.err) < 1100
    assert outcome.err.count("\n") == 1


def test_a_step_whose_forward_pass_runs_on_another_thread() -> None:
    for words in (["info"], ["explain"], ["apply", "scale:kind=gpu,factor=0.5"]):
        outcome = call(*words, TRACE)
        assert outcome.status == 0, outcome.err


@pytest.mark.parametrize("command", ["info", "explain", "memory", "anonymize", "report", "export"])
def test_no_path_and_one_that_is_too_long(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_bytes(CPU_RECORDING.read_bytes())  # "" is not this folder
    output = ["-o", "out"] if command in ("report", "export") else []
    refused(call(command, "", *output), "got an empty string")
    refused(call(command, "x" * 5000, *output), "File name too long")


@pytest.mark.parametrize("value", [2**31, 2**40, 2**63, 10**30, -5])
@pytest.mark.parametrize("field", ["rank", "device", "stream"])
def test_a_saved_graph_with_a_number_that_no_thread_has(tmp_path: Path, field: str, value: int) -> None:
    trace, saved = tmp_path / "gpu.json", tmp_path / "saved.json"
    trace.write_bytes(written(small_traces()["by hand"]))
    assert call("export", trace, "-o", saved).status == 0
    head, at, tail = saved.read_text().partition('"whatif_graph":')
    graph = json.loads(tail.rstrip()[:-1])
    graph["threads"][0][field] = value
    saved.write_text(head + at + json.dumps(graph) + "}")
    refused(call("apply", "scale:kind=gpu,factor=0.5", saved), "expected the graph of a timeline")


@pytest.mark.parametrize("name", ["policy.toml", "policy.json"])
def test_a_policy_that_never_ends_is_not_read_to_its_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    refused(call("apply", f"metaflow:policy={tmp_path / name}", CPU_RECORDING), "a file of at most 17 MB")


def test_other_files_that_never_end(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="at most 1 MB"):
        read_at_most("/dev/zero", 1 << 20)
    (tmp_path / "pairs.toml").symlink_to("/dev/zero")
    assert call("validate", tmp_path).is_sound


SLOW = [
    "(a+)+$",
    "(a|a)*b",
    "(.*)" * 8 + "x",
    "(?=a)b",
    r"(a)\1",
    "a?" * 40 + "a" * 40,
    "(a|b)(a|b)" * 20,
    "(a{1,9}){1,9}",
]
FAST = [
    "layers.0.attn",
    r"encoder\.layer\.(0|2|4)\.attention",
    r"stages\.\d+\..*norm.*",
    "[a-z]+",
    "Conv.d",
    "a{2}",
    "x?",
]


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_of_files_that_may_take_long_are_never_run(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(WhatifError, match="fast to match"):
        check_file_pattern(pattern, "the file", longest=200)
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"remove": [pattern]}))
    outcome = call("apply", f"metaflow:policy={policy}", CPU_RECORDING, seconds=10)
    assert outcome.is_sound
    assert outcome.status == 1
    pairs = {"baseline": "a.json", "changed": "b.json", "what_if": f"scale:layer={pattern},factor=2"}
    rows = "\n".join(f"{key} = {json.dumps(value)}" for key, value in pairs.items())
    (tmp_path / "pairs.toml").write_text(f"[[pair]]\n{rows}\n")
    outcome = call("validate", tmp_path, seconds=10)
    assert outcome.is_sound
    assert outcome.status == 1


@pytest.mark.parametrize("pattern", FAST)
def test_patterns_of_files_that_cannot_take_long_are_run(pattern: str) -> None:
    check_file_pattern(pattern, "the file", longest=100)
