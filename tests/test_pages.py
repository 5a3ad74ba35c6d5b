"""Every command and every snippet of the README and of docs/ is run, page by page, and shows what it really prints.

The rules by which a page's blocks are read are in tests/pages/blocks.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import EXTRA_DATA, extra_data, need
from tests.pages.blocks import PAGES, ROOT, Block, blocks_of, needs, unclosed
from tests.pages.session import PageError, filled

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
BLOCKS = [(page, block) for page, text in TEXTS.items() for block in blocks_of(text)]
RUN = ("console", "sh", "python", "pycon", "hidden")
NETWORK = "it installs packages from a network"
# All that is not run, and why.
NOT_RUN = [
    ("README.md", NETWORK),
    ("docs/campaign.md", "it measures for hours"),
    ("docs/cupti.md", "it needs an NVIDIA GPU and cupti-python"),
    ("docs/cupti.md", NETWORK),
    ("docs/export.md", "tests/browser/test_perfetto.py runs it, in Perfetto"),
    ("docs/estimators.md", "it learns for hours, from a repository that it needs"),
    ("docs/first-answers.md", NETWORK),
    ("docs/how-to/validate-on-your-machine.md", "it measures for half an hour"),
    ("docs/how-to/validate-on-your-machine.md", "it is your own script, before and after your change"),
    ("docs/lab.md", "it needs root, and makes network namespaces"),
    ("docs/nsys.md", "it needs Nsight Systems and an NVIDIA GPU"),
    ("docs/operators.md", "it measures for a minute"),
    ("docs/compare.md", "it needs two branches of your repository"),
    ("docs/compare.md", "it runs on GitHub"),
    ("docs/recording.md", "it needs Lightning and Transformers"),
    ("docs/record-on-a-rented-gpu.md", "it downloads packages from a network"),
    ("docs/record-on-a-rented-gpu.md", "it needs a GPU"),
    ("docs/record-on-a-rented-gpu.md", "it needs a GPU"),
    ("docs/record-on-a-rented-gpu.md", "it needs the files of a GPU"),
    ("docs/performance.md", "it measures for minutes"),
    ("docs/predict.md", "it needs models in the local cache, and timm"),
    ("docs/profile.md", "it measures for minutes to hours"),
    ("docs/scale.md", "it needs several machines"),
    ("docs/scale.md", "it needs several machines"),
    ("docs/tutorial.md", NETWORK),
    ("docs/tutorial.md", NETWORK),
    ("docs/validate.md", "it measures for hours"),
    ("docs/why.md", "it records a script of yours"),
]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(TEXTS[page])])
def test_the_page_does_what_it_says(page: str) -> None:
    """Brought up to date by ``python -m tests.pages``, once one has looked at what became different."""
    for package in needs(TEXTS[page]):
        need(package)
    if EXTRA_DATA in TEXTS[page]:
        extra_data("traces")
    assert filled(page) == TEXTS[page]


def test_what_is_not_run_is_little_and_has_a_reason() -> None:
    assert sorted((page, block.not_run) for page, block in BLOCKS if block.not_run) == sorted(NOT_RUN)


def test_nothing_stands_in_a_fence_that_nobody_looks_at() -> None:
    assert [page for page, text in TEXTS.items() if unclosed(text)] == []
    found = [(page, block.line) for page, block in BLOCKS if not block.language]
    assert found == [], "say of each block what it is: console, sh, python, pycon, text, toml ..."


def test_data_is_read_by_what_is_run() -> None:
    """A file that a page shows is named by one of its commands or snippets, or a folder that one of them reads is."""
    unread = []
    for page, block in BLOCKS:
        if block.language in (*RUN, "text") and not block.file:
            continue
        if block.part_of:
            assert block.text in (ROOT / block.part_of).read_text(encoding="utf-8"), f"{page}:{block.line}"
        elif not block.not_run and not _is_read(block, page):
            unread.append(f"{page}:{block.line}")
    assert unread == []


def _is_read(block: Block, page: str) -> bool:
    if not block.file:
        return False
    names = {block.file, block.file.removesuffix(".py"), block.file.rpartition("/")[0] or "validate ."}
    texts = [
        text
        for of, other in BLOCKS
        if of == page and other.language in RUN and other != block and not other.not_run
        for text in other.commands() or [other.text]
    ]
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for text in texts for name in names)


# -- the rules themselves ------------------------------------------------------------------------------------------


def test_blocks_are_distinguished() -> None:
    text = (
        "<!-- $ cp a b -->\n\n```console\n$ whatif info b\nshown\n$ whatif explain b\n```\n"
        "<!-- not run: no GPU -->\n\n```sh\nwhatif apply x b  # said\n# alone\n```\n"
        '<!-- exits 1 -->\n```console\n$ false\n```\n```toml title="x.toml"\na = 1\n```\n```text\n$ no\n```\n'
    )
    found = blocks_of(text)
    assert [block.language for block in found] == ["hidden", "console", "sh", "console", "toml", "text"]
    assert [block.commands() for block in found] == [
        ["cp a b"], ["whatif info b", "whatif explain b"], ["whatif apply x b  # said"], ["false"], [], [],
    ]  # fmt: skip
    assert [block.not_run for block in found] == ["", "", "no GPU", "", "", ""]
    assert [block.exits for block in found] == [0, 0, 0, 1, 0, 0]
    assert [block.line for block in found] == [1, 4, 11, 16, 19, 22]
    assert found[4].file == "x.toml"
    assert [unclosed(page) for page in ("```\nx\n", "  ```sh\n  x\n  ```\n", text)] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```console\n$ whatif info nowhere.json\n```\n", "2: `whatif info nowhere.json` ended with 1 and not 0"),
        ("```sh\n\nfalse\n```\n", "`false` ended with 1 and not 0"),
        ("```sh\nwhatif --version | grep -A 1 'none'\n```\n", "finds no such line"),
        ("<!-- exits 1 -->\n```sh\ntrue\n```\n", "`true` ended with 0 and not 1"),
        ("```python\nx = 1 / 0\n```\n", "the snippet raised ZeroDivisionError"),
        ("```python\nx = 1\n```\n```pycon\n>>> x\n2\n```\n", "Expected:\n    2\nGot:\n    1"),
        ("```pycon\nx\n```\n", "a session needs lines that begin with >>>"),
    ],
)
def test_a_page_that_is_wrong_is_refused(text: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    with pytest.raises(PageError) as raised:
        filled(str(tmp_path / "page.md"))
    assert wrong in str(raised.value)


def test_outputs_are_filled_in(tmp_path: Path) -> None:
    text = (
        "```console\n$ whatif --version | head -1\nold\n$ whatif transforms tf32 | grep -A 0 'Source'\n```\n\nbehind\n"
    )
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    now = filled(str(tmp_path / "page.md")).splitlines()
    assert now[:2] == text.splitlines()[:2]
    assert now[2].startswith("whatif 0.")
    assert "Source" in now[4]
    assert now[-3:] == ["```", "", "behind"]
