"""The GitHub action: its steps are run as a runner runs them, with its inputs in the environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.runtime.files import VERSION

yaml = need("yaml")
ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())


def run_action(folder: Path, **given: str) -> tuple[int, str, str, str]:
    """Run the steps with some inputs; return status, output, the job's summary and the outputs."""
    inputs = {name: declared.get("default", "") for name, declared in ACTION["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    assert all(inputs[name] for name, declared in ACTION["inputs"].items() if declared.get("required"))
    (folder / "bin").mkdir()
    (folder / "bin" / "whatif").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whatif "$@"\n')
    (folder / "bin" / "whatif").chmod(0o755)
    summary, outputs = folder / "summary.md", folder / "outputs"
    said = ""
    for step in ACTION["runs"]["steps"]:
        condition = re.fullmatch(r"inputs\.([\w-]+) != ''", step.get("if", ""))
        if condition and not inputs[condition[1]]:
            continue
        filled = {
            key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
            for key, value in step["env"].items()
        }
        environment = {
            **os.environ, **filled, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(outputs),
        }  # fmt: skip
        # As GitHub starts `shell: bash`.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        said += ended.stdout + ended.stderr
        if ended.returncode:
            break
    return ended.returncode, said, summary.read_text(), outputs.read_text()


def test_a_step_that_is_no_slower_passes(tmp_path: Path, own_traces: Path) -> None:
    trace = str(own_traces / "transformer_cpu.json.gz")
    status, said, summary, outputs = run_action(tmp_path, baseline=trace, trace=trace, install="")
    assert (status, outputs) == (0, "passed=true\n"), said
    assert summary.strip() in said
    assert "|" in summary


def test_a_slower_step_fails_and_the_summary_says_why(tmp_path: Path, own_traces: Path) -> None:
    fused, foreach = (str(own_traces / f"transformer_cpu{name}.json.gz") for name in ("_fused", "_foreach"))
    status, _, summary, outputs = run_action(
        tmp_path, baseline=fused, trace=foreach, max_regress="1%", options="--clock mark", install=""
    )
    assert (status, outputs) == (1, "passed=false\n")
    assert "**Regressed: a step takes" in summary


def test_an_error_is_in_the_summary(tmp_path: Path) -> None:
    status, _, summary, outputs = run_action(tmp_path, baseline="none.json", trace="none.json", install="")
    assert (status, outputs) == (1, "passed=false\n")
    assert "expected a readable trace file" in summary


@pytest.mark.parametrize("tag", [f"v{VERSION}", "v9.9.9"])
def test_only_the_tag_of_the_version_is_published(tag: str) -> None:
    publish = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
    step = next(step for step in publish["jobs"]["build"]["steps"] if step.get("name", "").startswith("The tag"))
    ended = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=ROOT,
        env={**os.environ, "GITHUB_REF_NAME": tag},
        check=False,
    )
    assert (ended.returncode == 0) == (tag == f"v{VERSION}")
