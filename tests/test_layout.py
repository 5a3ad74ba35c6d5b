"""The rules of docs/layout.md: who imports whom, and that a wheel holds what the tree holds."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.helpers import LOOP_FILES, need
from whatif.cli.demo import SHIPPED

ROOT = Path(__file__).resolve().parent.parent
RECORDING_PACKAGES = {"torch", "cupti", "cupy"}
# Packages of the distribution that live in folders of their own.
MAPPED = {"transforms": "whatif/transforms", "instrumentation": "whatif/instrumentation"}
# Recordings that a wheel holds: those of `whatif demo`.
PACKED = {f"whatif/traces/{shipped}" for shipped, _, _ in SHIPPED.values()}


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


# The folders of whatif/, lowest first: each imports only from those before it. Beside them lie files that everybody
# may import; the package itself stands above the folders whose public names it lists.
FOLDERS = (
    "runtime", "graph", "simulation", "hardware", "ingest", "opdb", "models", "prediction", "from_module", "questions",
    "report", "cli",
)  # fmt: skip
MOST_ENTRIES, MOST_LEVELS, MOST_GRAPH_MODULES = 16, 12, 16


def modules() -> dict[str, Path]:
    """Every module of the distribution, by its import name."""
    found = {}
    for folder, package in {
        "whatif": "whatif",
        **{top: path.replace("/", ".") for top, path in MAPPED.items()},
    }.items():
        for path in sources(folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package.replace("/", "."), *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def module_of(name: str) -> str:
    """The module that a dotted name lies in; "" where it is not ours."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imported(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Our modules that one imports, with the line: at its top, in functions, for types only, and by name as text."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((module_of(alias.name), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module_of(f"{base}.{alias.name}"), node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield (node.value if node.value in MODULES else ""), node.lineno


def entry_of(module: str) -> str:
    """The node of a module in the overview picture: an entry of whatif/, or another top-level folder."""
    parts = MODULES[module].relative_to(ROOT).parts
    return parts[0] if parts[0] != "whatif" else f"whatif/{parts[1]}"


def room_of(module: str) -> str:
    """A folder inside a folder of whatif/; "" for a module that lies in none."""
    parts = MODULES[module].relative_to(ROOT).parts
    return "/".join(parts[:3]) if parts[0] == "whatif" and len(parts) > 3 else ""


@cache
def arrows() -> list[tuple[str, str, int]]:
    """Imports between modules, with their lines; computed on first use, since every test run collects this file."""
    return sorted(
        (module, found, line)
        for module, path in MODULES.items()
        for found, line in imported(module, ast.parse(path.read_text(encoding="utf-8")))
        # Commands load these by name: nothing in whatif/ imports them (tested below), and some have no torch.
        if found and found != module and not (entry_of(module).startswith("whatif/") and entry_of(found) in MAPPED)
    )


def levels(arrows: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How deep each thing stands on others, 1 for what imports nothing. Fails on a cycle, and names it."""
    below: dict[str, set[str]] = {}
    for importer, found in arrows:
        below.setdefault(importer, set()).add(found)
        below.setdefault(found, set())
    try:
        order = list(TopologicalSorter(below).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")
    level: dict[str, int] = {}
    for name in order:
        level[name] = 1 + max((level[other] for other in below[name]), default=0)
    return level


def test_imports_run_down_the_list_of_folders() -> None:
    # The package itself lists names of all folders, so that none of them may import it.
    order = [*(f"whatif/{name}" for name in FOLDERS), "whatif/__init__.py"]
    upward = [
        f"{MODULES[importer].relative_to(ROOT)}:{line} imports {found}"
        for importer, found, line in arrows()
        if entry_of(importer) in order[:-1] and entry_of(found) in order[order.index(entry_of(importer)) + 1 :]
    ]
    assert not upward


def test_no_cycle_between_folders_and_few_levels(capsys: pytest.CaptureFixture[str]) -> None:
    level = levels((entry_of(a), entry_of(b)) for a, b, _ in arrows() if entry_of(a) != entry_of(b))
    with capsys.disabled():
        print(f"\nimports: {max(level.values())} levels over {len(level)} folders and files")
    assert max(level.values()) <= MOST_LEVELS


def test_no_cycle_between_the_rooms_of_a_folder() -> None:
    for folder in FOLDERS:
        inside = [
            (room_of(a), room_of(b))
            for a, b, _ in arrows()
            if room_of(a).startswith(f"whatif/{folder}/") and room_of(b).startswith(f"whatif/{folder}/")
        ]
        levels((a, b) for a, b in inside if a != b)


def test_few_things_lie_directly_in_whatif_and_in_graph() -> None:
    entries = [path for path in (ROOT / "whatif").iterdir() if path.name != "__pycache__"]
    assert {path.name for path in entries if path.is_dir()} == set(FOLDERS)
    assert len(entries) <= MOST_ENTRIES
    modules = {path.stem for path in (ROOT / "whatif" / "graph").glob("*.py")} - {"__init__"}
    assert len(modules) <= MOST_GRAPH_MODULES


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


# Modules that scripts in transforms/ still import besides `whatif` and `whatif.models`. The list only gets shorter:
# names of durations and of collectives move to whatif.models in the issues that rework them.
DEEP_IMPORTS = {
    # Durations.
    "whatif.models.durations.estimator", "whatif.models.durations.half_precision",
    "whatif.models.durations.measured", "whatif.models.durations.other_device",
    "whatif.models.durations.precision", "whatif.models.exchange.more_passes",
    # Collectives, parallel training, DTS.
    "whatif.hardware.cluster.network", "whatif.models.dts.options", "whatif.models.exchange.buckets",
    "whatif.models.exchange.collective_tasks", "whatif.models.exchange.compression",
    "whatif.models.exchange.contention", "whatif.models.exchange.data_parallel",
    "whatif.models.exchange.hierarchy", "whatif.models.exchange.network_options",
    "whatif.models.exchange.parameter_server", "whatif.models.exchange.priority",
    "whatif.models.exchange.replicate", "whatif.models.exchange.stragglers", "whatif.models.parallel.other_workers",
    "whatif.models.parallel.pipeline",
    "whatif.models.parallel.pipeline_plan", "whatif.models.parallel.pipeline_schedule",
    "whatif.models.parallel.sharding", "whatif.models.parallel.stage_gradients",
    "whatif.models.parallel.tensor_parallel", "whatif.simulation.transfers",
    # What only one or two what-ifs need: their own models.
    "whatif.graph.kernels", "whatif.graph.task_graph", "whatif.hardware.gpu", "whatif.models.kernels.attention",
    "whatif.models.kernels.autocast", "whatif.models.kernels.channels_last", "whatif.models.kernels.fp8",
    "whatif.models.kernels.fusion", "whatif.models.kernels.mixed_precision", "whatif.models.kernels.optimizer",
    "whatif.models.kernels.stored_weights",
    "whatif.models.layers.encodings", "whatif.models.layers.feature_maps", "whatif.models.layers.offload",
    "whatif.models.layers.policy", "whatif.questions.balance",
}  # fmt: skip
MOST_NAMES = 40


def test_transforms_import_the_public_surface() -> None:
    found = {name for path in SCRIPTS for name, _ in imports(path) if name.startswith("whatif.")}
    assert found - {"whatif.models"} == DEEP_IMPORTS, "export the name in whatif.models, or shorten the list"


def test_the_public_names_of_models_are_few_and_documented() -> None:
    import whatif.models

    names = whatif.models.__all__
    assert len(names) == len(set(names)) <= MOST_NAMES
    undocumented = [name for name in names if not (inspect.getdoc(getattr(whatif.models, name)) or "").strip()]
    assert not undocumented
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        whatif.models.nothing  # noqa: B018


def test_importing_the_public_names_of_models_costs_nothing() -> None:
    program = "import sys, whatif.models; print('numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split() == ["False"], run.stderr


def test_a_clone_is_whole_for_python_in_its_root() -> None:
    """There the folder `whatif` comes before an installed package, and holds neither transforms nor instrumentation."""
    code = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]; "
        "import whatif.transforms.amp, whatif.instrumentation; print(whatif.transforms.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "transforms" / "__init__.py"


def test_transforms_are_flat() -> None:
    assert {path.parent for path in sources("transforms")} == {ROOT / "transforms"}


def expected_files() -> set[str]:
    """What the tree says that a wheel has to hold."""
    files = set(PACKED)
    for folder in ("whatif", *MAPPED):
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT).as_posix()
            page = (
                path.is_file()
                and path.parent.name in ("assets", "vendor", "fitted")
                and "__pycache__" not in path.parts
            )
            if path.suffix in (".py", ".toml", ".txt", ".json") or path.name == "py.typed" or page:
                top, _, rest = relative.partition("/")
                files.add(f"{MAPPED.get(top, top)}/{rest}")
    return files


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the sdist, as an installer would do it; its compiler takes no time to optimize."""
    need("build")
    folder = tmp_path_factory.mktemp("dist")
    compiler = folder / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n', encoding="utf-8")
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    environment = {**os.environ, **({"CC": str(compiler)} if shutil.which("cc") and "CC" not in os.environ else {})}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in held if name.endswith(EXTENSION_SUFFIXES[0])}
    assert held - compiled == expected_files()
    if compiled or os.environ.get("WHATIF_STRICT") == "1":  # anyone else's machine may have no compiler
        sources = [path.relative_to(ROOT).with_suffix("").as_posix() for path in LOOP_FILES]
        assert compiled == {f"{source}_aot{EXTENSION_SUFFIXES[0]}" for source in sources}


def test_every_folder_of_the_wheel_is_listed_as_a_package() -> None:
    """A folder of data that is not prints a page of warnings when one installs from source."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    folders = {name.rpartition("/")[0].replace("/", ".") for name in expected_files()}
    assert set(tools["setuptools"]["packages"]) == folders


@pytest.mark.slow
def test_wheel_works_on_its_own(wheel: Path, tmp_path: Path, own_traces: Path) -> None:
    """Unpacked beside the dependencies and run from another folder, it finds its transforms and devices."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    trace = own_traces / "resnet18_cifar_cpu.json.gz"
    program = (
        "import whatif, whatif.hardware.gpu, pathlib;"
        f"assert pathlib.Path(whatif.__file__).is_relative_to({str(site)!r});"
        "assert len(whatif.hardware.gpu.gpu_names()) >= 32;"
        f"print(whatif.apply(whatif.read({str(trace)!r}), 'amp').speedup)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) > 1
    demo = [sys.executable, "-m", "whatif", "demo", "cpu"]
    run = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "transformer_cpu.html").stat().st_size > 100_000


def test_every_dependency_has_a_floor_and_no_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert not [d for d in named if "==" in d.partition(";")[0] or "<" in d.partition(";")[0]]
    assert not [d for d in project["dependencies"] if ">=" not in d]
