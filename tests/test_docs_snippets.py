"""The guide to what-ifs and the page on the graph, beyond what tests/test_pages.py runs: complete, tidy, and right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import whatif
import whatif.models
from tests.pages.blocks import ROOT, blocks_of
from whatif import Phase, TaskGraph, WhatifError, load_transform, simulate
from whatif.graph.columns import TASK_COLUMNS

GUIDE, REFERENCE = (
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("writing-a-transform.md", "graph.md")
)
FILES = {block.file: block.text for text in (GUIDE, REFERENCE) for block in blocks_of(text) if block.file}
SCRIPTS = ("urgent_first.py", "lora.py", "sequence_packing.py")
# A reader adds a what-if in minutes.
MOST_GUIDE_LINES, MOST_SCRIPT_LINES = 250, 60


def named(table: str, column: int) -> list[str]:
    """The names in backquotes in a column of a table."""
    rows = [re.split(r"(?<!\\)\|", line)[column] for line in table.splitlines() if line.startswith("|")]
    return re.findall(r"`(\w+)`", "\n".join(rows))


def test_the_table_names_every_column() -> None:
    table = REFERENCE[REFERENCE.index("| column | what it holds |") : REFERENCE.index("## Select")]
    assert sorted(named(table, 1)) == sorted(TASK_COLUMNS)


def test_the_table_names_every_public_name_of_models_by_topic() -> None:
    table = GUIDE[GUIDE.index("| topic | names |") : GUIDE.index("## LoRA")]
    assert sorted(named(table, 2)) == sorted(whatif.models.__all__)


def test_every_edit_of_the_table_is_one_of_the_graph() -> None:
    table = GUIDE[GUIDE.index("| edit | example |") : GUIDE.index("Edits take")]
    edits = [name for name in re.findall(r"^\| `(\w+)`", table, re.MULTILINE) if name != "priority"]
    assert len(edits) >= 9
    assert [edit for edit in edits if not callable(getattr(TaskGraph, edit, None))] == []


def test_the_guide_is_short() -> None:
    assert len(GUIDE.splitlines()) <= MOST_GUIDE_LINES
    assert max(len(FILES[script].splitlines()) for script in SCRIPTS) <= MOST_SCRIPT_LINES


@pytest.mark.parametrize("file", ["drawn.py", "test_my_idea.py", "test_packing.py", *SCRIPTS])
def test_files_are_tidy(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(FILES[file], encoding="utf-8")
    # In this folder it is unknown which import is whose, so their order is not checked.
    rules = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "I001,B905"]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *rules, file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", SCRIPTS)
def test_the_scripts_of_the_pages_have_the_sections_of_one(file: str) -> None:
    assert all(f"\n{section}" in FILES[file] for section in ("Source: ", "Model:  ", "Effort: "))


@pytest.mark.parametrize("file", ["lora.py", "sequence_packing.py"])
def test_the_scripts_of_the_guide_import_public_names_only(file: str) -> None:
    modules = re.findall(r"^(?:from|import) (\S+)", FILES[file], re.MULTILINE)
    assert set(modules) <= {"whatif", "whatif.models", "numpy", "dataclasses"}


@pytest.fixture(scope="module", params=["transformer_cpu", "transformer_cpu_foreach"])
def graph(request: pytest.FixtureRequest) -> TaskGraph:
    return whatif.read(str(ROOT / "traces" / f"{request.param}.json.gz"))


@pytest.fixture
def script(tmp_path: Path) -> dict[str, str]:
    """The paths of the guide's scripts, by name."""
    for file in SCRIPTS:
        (tmp_path / file).write_text(FILES[file], encoding="utf-8")
    return {file.removesuffix(".py"): str(tmp_path / file) for file in SCRIPTS}


def phase_ns(graph: TaskGraph, phase: Phase) -> int:
    return int(graph.duration_ns[graph.on_cpu & (graph.phase == phase)].sum())


def test_lora(graph: TaskGraph, script: dict[str, str]) -> None:
    changed = load_transform(script["lora"])(graph).check()
    assert phase_ns(changed, Phase.FORWARD) > phase_ns(graph, Phase.FORWARD)
    assert phase_ns(changed, Phase.BACKWARD) < 0.8 * phase_ns(graph, Phase.BACKWARD)
    assert phase_ns(changed, Phase.UPDATE) < 0.2 * phase_ns(graph, Phase.UPDATE)
    adapters = changed.select(name="^adapter$")
    # Four attention layers, two products forward and four backward, in each step.
    assert np.bincount(changed.phase[adapters], minlength=5)[[Phase.FORWARD, Phase.BACKWARD]].tolist() == [
        4 * 2 * graph.info.n_steps,
        4 * 4 * graph.info.n_steps,
    ]
    assert not whatif.models.weight_gradients(changed).any()
    before, after = graph.info.memory, changed.info.memory
    assert before is not None
    assert after is not None
    assert after.gradients < 0.05 * before.gradients
    assert after.optimizer_state < 0.05 * before.optimizer_state
    assert before.parameters < after.parameters < 1.05 * before.parameters


def test_lora_predicts_a_shorter_step_and_more_rank_is_never_faster(graph: TaskGraph, script: dict[str, str]) -> None:
    steps = [simulate(load_transform(script["lora"], rank=rank)(graph)).makespan_ns for rank in (1, 16, 64, 128)]
    assert steps == sorted(steps)
    assert steps[-1] < simulate(graph).makespan_ns


def test_lora_refuses_layers_that_are_not_there(graph: TaskGraph, script: dict[str, str]) -> None:
    with pytest.raises(WhatifError, match="expected linear layers with recorded shapes that match 'nothing', got none"):
        load_transform(script["lora"], layers="nothing")(graph)


def test_packing_without_padding_changes_nothing(graph: TaskGraph, script: dict[str, str]) -> None:
    changed = load_transform(script["sequence_packing"], padding=0.0)(graph).check()
    for column in ("duration_ns", "low_ns", "high_ns"):
        assert (getattr(changed, column) == getattr(graph, column)).all()
    assert changed.info.memory == graph.info.memory


def test_packing_shortens_attention_more_than_the_rest(graph: TaskGraph, script: dict[str, str]) -> None:
    changed = load_transform(script["sequence_packing"], padding=0.5)(graph).check()
    ratio = changed.duration_ns / np.maximum(graph.duration_ns, 1)
    family = whatif.models.KernelFamily
    tasks = whatif.models.batch_tasks(graph) & (graph.duration_ns > 100_000)
    attention, products = (ratio[tasks & (graph.family == one)] for one in (family.ATTENTION, family.GEMM))
    assert attention.tolist() == pytest.approx([(0.25 + 0.5) / 2] * len(attention), abs=1e-4)
    assert len(attention)
    assert products.min() > 0.5
    assert phase_ns(changed, Phase.UPDATE) == phase_ns(graph, Phase.UPDATE)


def test_more_padding_is_never_slower(graph: TaskGraph, script: dict[str, str]) -> None:
    packing = load_transform(script["sequence_packing"])
    steps = [simulate(packing.with_options({"padding": share})(graph)).makespan_ns for share in (0.0, 0.2, 0.4, 0.8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


@pytest.mark.parametrize("padding", [-0.1, 1.0, float("nan")])
def test_packing_refuses_a_share_that_is_none(graph: TaskGraph, script: dict[str, str], padding: float) -> None:
    with pytest.raises(WhatifError, match="expected a share of padding from 0 to below 1"):
        load_transform(script["sequence_packing"], padding=padding)(graph)
