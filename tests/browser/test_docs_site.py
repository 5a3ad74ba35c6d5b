"""The documentation as a site: it builds without a warning, its links lead somewhere, its reference is whole."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from tests.helpers import need
from tests.pages.blocks import PAGES, blocks_of
from whatif.cli.main import COMMANDS
from whatif.prediction.transform import built_in_names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


class _Links(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.targets.append(values["href"])
        if tag in ("script", "img", "link") and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded += [values[name] for name in ("src", "href") if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {path: _Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 35
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # made to be served from the root of a host
            continue
        for target in page.targets:
            if re.match(r"[a-z]+:", target):
                continue
            file, place = urldefrag(unquote(target))
            found = (path.parent / file).resolve() if file else path
            found = found / "index.html" if found.is_dir() else found
            if not found.exists() or (place and place not in pages[found].places):
                dead.append(f"{path.name}: {target}")
    assert dead == []


def test_every_fence_became_a_block(site: Path) -> None:
    """One with an option that the site does not know would be shown with its backquotes, as text."""
    for page in DOCS.rglob("*.md"):
        blocks = [block for block in blocks_of(page.read_text(encoding="utf-8")) if block.language != "hidden"]
        html = (site / page.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
        assert html.count("<pre>") >= len(blocks), page.name
        assert "```" not in html, page.name


def test_the_site_loads_nothing_from_a_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [url for url in _Links(path.read_text(encoding="utf-8")).loaded if re.match(r"(https?:)?//", url)] == []


@pytest.mark.parametrize("text", ["gradient accumulation", "zx81"])
def test_search_works_from_disk(site: Path, browser: Any, text: str) -> None:
    by = need("selenium.webdriver.common.by").By
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('#__search').click()")
    browser.find_element(by.CSS_SELECTOR, ".md-search__input").send_keys(text)
    wait = need("selenium.webdriver.support.ui").WebDriverWait(browser, 30, poll_frequency=0.1)
    shown = ".md-search-result__meta"
    wait.until(lambda driver: re.search(r"\d|No match", driver.find_element(by.CSS_SELECTOR, shown).text))
    found = [link.get_attribute("href") for link in browser.find_elements(by.CSS_SELECTOR, ".md-search-result__link")]
    assert all(link.startswith(site.as_uri()) for link in found)
    assert any("gradient_accumulation" in link for link in found) == (text != "zx81")


def test_each_what_if_has_a_page_with_an_example_and_its_accuracy(site: Path) -> None:
    index = (site / "reference" / "what-ifs.html").read_text(encoding="utf-8")
    for name in built_in_names():
        page = (site / "reference" / "what-ifs" / f"{name}.html").read_text(encoding="utf-8")
        assert f'href="what-ifs/{name}.html"' in index
        assert "Accuracy so far" in page
        assert name in ("kernels", "metaflow") or re.search(rf"\$ whatif apply .*{name}", page)
    assert "median error" in (site / "reference" / "what-ifs" / "fused_adam.html").read_text(encoding="utf-8")


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in commands for name in COMMANDS)
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert "whatif.prediction.predict.apply" in python
    assert "Raises" in python or "raises" in python


# Pages that are read where they lie, and not on the site.
BESIDE = ["README.md", "CHANGELOG.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("[nte]*/**/README.md"))]
PLACES = "whatif|instrumentation|transforms|tests|benchmarks|docs|traces|examples|notebooks"


def test_links_beside_the_site_lead_somewhere() -> None:
    assert len(BESIDE) > 5
    for page in BESIDE:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_files_that_are_named_exist() -> None:
    """Of this repository, in text and in commands, by the path from its root."""
    gone, seen = [], 0
    for page in [*PAGES, *BESIDE]:
        for path in re.findall(rf"(?<![\w./-])(?:{PLACES})/[\w./-]*\w", (ROOT / page).read_text(encoding="utf-8")):
            seen += 1
            if not (ROOT / path).exists() and "MODEL" not in path:
                gone.append(f"{page}: {path}")
    assert seen > 150
    assert gone == []


def test_python_names_that_are_reported_exist() -> None:
    gone, seen = [], 0
    for page in PAGES:
        for name in re.findall(r"`(whatif(?:\.[A-Za-z]\w*)+)[`(]", (ROOT / page).read_text(encoding="utf-8")):
            seen += 1
            if name.startswith("whatif.instrumentation"):
                need("torch")
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                gone.append(f"{page}: {name}: {error}")
    assert seen > 20
    assert gone == []
