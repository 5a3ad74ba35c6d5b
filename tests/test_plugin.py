"""A third-party package adds a transform through its entry point: built and installed by pip, used by the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "plugin"
HEADER = '"""Mine: what I think."""\n'

# Another package, all of whose transforms are of no use, each in a way of its own.
BROKEN = {
    "raises": ("broken_package.raises", "raise RuntimeError('no such library')"),
    "exits": ("broken_package.exits", "import sys\nsys.exit(3)"),
    "no_transform": ("broken_package.no_transform", "x = 1"),
    "positional": ("broken_package.positional", "def transform(graph, factor): return graph"),
    "missing": ("broken_package.nowhere", ""),
    "function": ("broken_package.function:transform", "def transform(graph): return graph"),
    "scale": ("broken_package.scale", "def transform(graph): return graph"),
    "layer_drop": ("broken_package.layer_drop", "def transform(graph): return graph"),
}


def install(project: Path, folder: Path) -> Path:
    """Build and install a project into a folder of its own, without a network."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", str(folder), str(project),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the package of examples/plugin is installed."""
    need("setuptools")
    folder = tmp_path_factory.mktemp("plugin")
    # From a copy: setuptools builds beside the sources.
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    return install(Path(shutil.copytree(EXAMPLE, folder / "project", ignore=ignored)), folder / "site")


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a package of broken transforms is installed."""
    need("setuptools")
    folder = tmp_path_factory.mktemp("broken")
    project = folder / "project"
    package = project / "broken_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, (target, body) in BROKEN.items():
        if name != "missing":
            (package / f"{target.partition(':')[0].partition('.')[2]}.py").write_text(HEADER + body + "\n")
    points = "\n".join(f'{name} = "{target}"' for name, (target, _) in BROKEN.items())
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "broken-package"\nversion = "1"\n'
        f'[project.entry-points."whatif.transforms"]\n{points}\n'
        '[tool.setuptools]\npackages = ["broken_package"]\n'
    )
    return install(project, folder / "site")


def whatif(words: Sequence[str], *installed: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with packages installed beside what is there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, installed), str(ROOT)]), "COLUMNS": "300"}
    command = [sys.executable, "-m", "whatif", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=installed[0])


def listed(*installed: Path) -> list[dict[str, Any]]:
    run = whatif(["transforms", "--json"], *installed)
    assert run.returncode == 0, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout)["transforms"]
    return found


def refused(words: Sequence[str], *installed: Path) -> str:
    """The one sentence with which the command refuses."""
    run = whatif(words, *installed)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    return run.stderr.strip()


def test_an_installed_package_adds_a_transform(example: Path, own_traces: Path) -> None:
    run = whatif(["transforms"], example)
    assert run.returncode == 0, run.stderr
    assert "layer_drop (plug-in)" in run.stdout
    assert "LayerDrop: what if only a part of the blocks took part in each step?" in run.stdout
    run = whatif(["transforms", "layer_drop"], example)
    assert "whatif apply 'layer_drop:" in run.stdout
    trace = str(own_traces / "transformer_cpu.json.gz")
    run = whatif(["apply", "layer_drop:every=2", trace, "--json"], example)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["transforms"] == [{"name": "layer_drop", "options": {"every": 2}, "changed": True}]
    # Two of four blocks; the update and the head stay.
    assert 0.5 * found["baseline_ms"] < found["predicted_ms"] < 0.9 * found["baseline_ms"]
    both = whatif(["apply", "layer_drop", "scale:factor=0.5", trace], example)
    assert both.returncode == 0, both.stderr


def test_without_the_package_the_name_is_unknown(tmp_path: Path, own_traces: Path) -> None:
    sentence = refused(["apply", "layer_drop", str(own_traces / "transformer_cpu.json.gz")], tmp_path)
    assert "there is no transform 'layer_drop'" in sentence


def test_the_example_obeys_the_rules_of_a_transform(example: Path) -> None:
    text = (EXAMPLE / "whatif_example" / "layer_drop.py").read_text(encoding="utf-8")
    assert all(f"\n{section}" in text for section in ("Source: ", "Model:  ", "Effort: "))
    assert (example / "whatif_example" / "layer_drop.py").read_text(encoding="utf-8") == text
    sentence = refused(["apply", "layer_drop:every=0", str(ROOT / "traces" / "transformer_cpu.json.gz")], example)
    assert sentence == "whatif: layer_drop: expected every=1 or more, got 0."


def test_broken_plug_ins_are_named_and_hide_nothing(example: Path, broken: Path) -> None:
    found = listed(example, broken)
    built_in = [entry["name"] for entry in found if entry["origin"] == "built-in"]
    assert {"amp", "scale", "fused_adam"} <= set(built_in)
    assert all(entry["summary"] for entry in found if entry["origin"] == "built-in")
    errors = {entry["name"]: entry["error"] for entry in found if entry["summary"] is None}
    assert set(errors) == set(BROKEN)
    assert all("'broken-package'" in error for error in errors.values())
    run = whatif(["transforms"], example, broken)
    assert run.returncode == 0
    assert "cannot be used: transform 'raises' of the package 'broken-package': it cannot be imported" in run.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "it cannot be imported: RuntimeError: no such library; update or uninstall the package."),
        ("exits", "it cannot be imported: SystemExit: 3; update"),
        ("missing", "it cannot be imported: ModuleNotFoundError: No module named 'broken_package.nowhere'; update"),
        ("function", "expected its entry point to name a module, got function; update"),
        ("no_transform", "expected a function transform(graph, *, options) -> TaskGraph, found none; update"),
        ("positional", "got transform(graph, factor); options are keyword-only, annotated and have defaults; update"),
    ],
)
def test_a_broken_plug_in_is_one_sentence_with_its_package(name: str, reason: str, broken: Path) -> None:
    sentence = refused(["transforms", name], broken)
    assert sentence.startswith(f"whatif: transform {name!r} of the package 'broken-package': ")
    assert reason in sentence


def test_a_name_that_two_packages_offer_is_nobodys(example: Path, broken: Path) -> None:
    assert refused(["transforms", "layer_drop"], example, broken) == (
        "whatif: transform 'layer_drop': the packages 'broken-package' and 'whatif-example-plugin' offer one of this "
        "name; uninstall all but one."
    )


def test_a_built_in_keeps_its_name(broken: Path) -> None:
    run = whatif(["transforms", "scale", "--json"], broken)
    assert json.loads(run.stdout)["source"] == str(ROOT / "transforms" / "scale.py")
    one, other = [entry for entry in listed(broken) if entry["name"] == "scale"]
    assert (one["origin"], other["origin"]) == ("built-in", "plug-in")
    assert other["error"] == (
        "the package 'broken-package' gives it the name of a built-in transform, which takes precedence"
    )
