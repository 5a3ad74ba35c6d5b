"""What CONTRIBUTING.md and CI say is what there is, and nothing depends on files outside the clone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import EXTRA_DATA, extra_data

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
OUTSIDE = re.compile(r"\.\./shared\b|(?<![\w/])shared/(traces|opdata|truth|repro)\b|[\"']shared[\"'] / ")
TEXTS = {".py", ".md", ".toml", ".ipynb", ".yml"}


def test_the_guide_is_short_and_its_commands_and_links_exist() -> None:
    assert len(GUIDE.splitlines()) <= 120
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", GUIDE, re.MULTILINE)) <= targets
    assert [link for link in re.findall(r"\]\(([^)#]+)\)", GUIDE) if not (ROOT / link).exists()] == []


def test_ci_runs_everything() -> None:
    assert re.findall(r"^make (.+)$", CI, re.MULTILINE) == ["lint", "test-all"]
    assert "WHATIF_STRICT=1" in CI
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"-m (\"not slow\"|slow)", MAKEFILE) == ['"not slow"', "slow", '"not slow"']


def test_nothing_but_ci_names_a_folder_beside_the_clone() -> None:
    folders = ("whatif", "transforms", "instrumentation", "benchmarks", "tests", "docs", "examples", "notebooks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    files += [path for path in (*ROOT.iterdir(), *(ROOT / "traces").iterdir()) if path.suffix in TEXTS]
    assert len(files) > 500
    found = [str(path.relative_to(ROOT)) for path in files if OUTSIDE.search(path.read_text(encoding="utf-8"))]
    assert found == []
    assert all(OUTSIDE.search(text) for text in (CI, "/".join(("cp shared", "traces"))))  # it can be found


@pytest.mark.parametrize("strict", ["0", "1"])
def test_data_by_others_is_required_only_where_it_is_announced(
    strict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHATIF_STRICT", strict)
    monkeypatch.delenv(EXTRA_DATA, raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{EXTRA_DATA} is not set"):
        extra_data("traces")
    monkeypatch.setenv(EXTRA_DATA, str(tmp_path))
    wrong = pytest.fail.Exception if strict == "1" else pytest.skip.Exception
    with pytest.raises(wrong, match="there is no"):
        extra_data("traces", "hta")
    (tmp_path / "traces").mkdir()
    assert extra_data("traces") == tmp_path / "traces"
