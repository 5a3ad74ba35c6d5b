"""The rules of docs/layout.md: who imports whom, and that a wheel holds what the tree holds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDING_PACKAGES = {"torch", "cupti", "cupy"}
# Packages of the distribution that live in folders of their own.
MAPPED = {"transforms": "whatif/transforms", "instrumentation": "whatif/instrumentation"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, with its level (0: absolute)."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.level))
    return found


@pytest.mark.parametrize("path", sources("whatif") + sources("transforms"), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_instrumentation_imports_what_records(path: Path) -> None:
    assert not RECORDING_PACKAGES & {name.split(".")[0] for name, _ in imports(path)}


@pytest.mark.parametrize("path", sources("whatif"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_imports_neither_transforms_nor_instrumentation(path: Path) -> None:
    assert not [name for name, _ in imports(path) if name.startswith(("whatif.transforms", "whatif.instrumentation"))]


@pytest.mark.parametrize("path", sources("instrumentation"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_inside_instrumentation_are_relative(path: Path) -> None:
    assert not [name for name, level in imports(path) if level == 0 and name.startswith("whatif.instrumentation")]


SCRIPTS = [path for path in sources("transforms") if path.name != "__init__.py"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_a_transform_is_a_page_that_names_its_source_its_model_and_its_effort(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^Source: ", doc, re.MULTILINE)
    assert re.search(r"^Model:  ", doc, re.MULTILINE)
    assert re.search(r"^Effort: (small|medium|large|none): \S", doc, re.MULTILINE)
    assert len(text.splitlines()) <= 80
    allowed = {"whatif", "numpy"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name, _ in imports(path)} <= allowed


def test_transforms_are_flat() -> None:
    assert {path.parent for path in sources("transforms")} == {ROOT / "transforms"}


def expected_files() -> set[str]:
    """What the tree says that a wheel has to hold."""
    files = set()
    for folder in ("whatif", *MAPPED):
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT).as_posix()
            page = (
                path.is_file()
                and path.parent.name in ("assets", "vendor", "fitted")
                and "__pycache__" not in path.parts
            )
            if path.suffix in (".py", ".toml") or path.name == "py.typed" or page:
                top, _, rest = relative.partition("/")
                files.add(f"{MAPPED.get(top, top)}/{rest}")
    return files


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the sdist, as an installer would do it."""
    pytest.importorskip("build") if os.environ.get("WHATIF_STRICT") != "1" else __import__("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected_files()


def test_every_folder_of_the_wheel_is_listed_as_a_package() -> None:
    """A folder of data that is not prints a page of warnings when one installs from source."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    folders = {name.rpartition("/")[0].replace("/", ".") for name in expected_files()}
    assert set(tools["setuptools"]["packages"]) == folders


def test_wheel_works_on_its_own(wheel: Path, tmp_path: Path, own_traces: Path) -> None:
    """Unpacked beside the dependencies and run from another folder, it finds its transforms and devices."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    trace = own_traces / "resnet18_cifar_cpu.json.gz"
    program = (
        "import whatif, whatif.hardware, pathlib;"
        f"assert pathlib.Path(whatif.__file__).is_relative_to({str(site)!r});"
        "assert len(whatif.hardware.gpu_names()) >= 32;"
        f"print(whatif.apply(whatif.read({str(trace)!r}), 'amp').speedup)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) > 1


def test_every_dependency_has_a_floor_and_no_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert not [d for d in named if "==" in d.partition(";")[0] or "<" in d.partition(";")[0]]
    assert not [d for d in project["dependencies"] if ">=" not in d]
