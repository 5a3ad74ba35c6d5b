"""Text tables on narrow pages: numbers stay whole, names wrap, what does not fit stands below."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from whatif.report.columns import wrapped
from whatif.report.layout import bar, rate, report, significant


def shown(
    capsys: pytest.CaptureFixture[str],
    width: int,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    **how: int | bool,
) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        with report() as out:
            out.table(None, headers, rows, **how)  # type: ignore[arg-type]
    return capsys.readouterr().out


ROWS = [
    ("batch_size:factor=0.5", "36.64 GiB", "-45.5 %", "1,179.71", "0.5 x samples"),
    ("amp", "22.84 GiB", "-37.7 %", "218.04", ""),
]
HEADERS = ("", "peak memory", "change", "step ms", " ")


@pytest.mark.parametrize("width", [100, 80, 60, 50, 40, 30])
def test_no_number_is_ever_cut(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, width, HEADERS, ROWS, wraps=True)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for row in ROWS:
        for number in row[1:4]:
            assert number in text
    assert "factor=0.5" in re.sub(r"\s", "", text)


def test_headers_wrap_before_names_do(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("one name of some length", "1.0", "2.0")]
    assert shown(capsys, 42, ("", "critical ms", "GPU ms"), rows) == (
        "                            critical   GPU\n"
        "                                  ms    ms\n"
        "  one name of some length        1.0   2.0\n"
    )


def test_what_does_not_fit_stands_below_with_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ("8", "100Gbps", *(f"{n}1,111.11" for n in range(4))),
        ("16", "25Gbps", *(f"{n}2,222.22" for n in range(4))),
    ]
    headers = ("workers", "bandwidth", "a", "b", "c", "d")
    assert shown(capsys, 48, headers, rows, text_columns=0, keys=2) == (
        "  workers   bandwidth           a           b\n"
        "        8     100Gbps   01,111.11   11,111.11\n"
        "       16      25Gbps   02,222.22   12,222.22\n"
        "\n"
        "  workers   bandwidth           c           d\n"
        "        8     100Gbps   21,111.11   31,111.11\n"
        "       16      25Gbps   22,222.22   32,222.22\n"
    )


def test_bars_shrink_and_then_go(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a name", "1.00", bar(1, 1)), ("another", "0.50", bar(0.5, 1))]

    def cells(width: int) -> list[int]:
        return [line.count("█") for line in shown(capsys, width, ("", "ms", " "), rows).splitlines()]  # type: ignore[arg-type]

    assert cells(60) == [0, 20, 10]
    assert cells(36) == [0, 12, 6]
    assert cells(26) == [0, 0, 0]


def test_kernel_names_are_cut_and_wide_characters_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, 40, ("", "ms"), [("核" * 40, "1.25"), ("triton_" * 20, "3.75")])
    assert [cell_len(line) <= 40 and line.endswith(("ms", "1.25", "3.75")) for line in text.splitlines()] == [True] * 3
    assert text.count("…") == 2


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z", "M")) | st.just(" "), max_size=80),
    st.integers(2, 30),
)
def test_nothing_is_lost_where_text_wraps(text: str, width: int) -> None:
    lines = wrapped(text, width).split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_word_is_broken_only_where_it_has_to_be() -> None:
    assert wrapped("amp + fused_adam + compile", 12) == "amp +\nfused_adam +\ncompile"
    assert wrapped("compile:mode=reduce-overhead", 15) == "compile:mode=\nreduce-overhead"
    assert wrapped("gradientaccumulation", 12) == "gradientaccu\nmulation"


def test_rates_keep_their_digits() -> None:
    """0.068 samples/s of a large model was 0.1, or 0, and 65,000 of a small one 6.5e+04."""
    assert [rate(value) for value in (0.067789, 2.948, 81.26, 65_123.4)] == ["0.0678", "2.95", "81.3", "65,123.4"]
    assert [significant(value) for value in (0.067789, 70.531, 1029.2, 65_123.4)] == [
        "0.06779", "70.53", "1,029", "65,123"
    ]  # fmt: skip
