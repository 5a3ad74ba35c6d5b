"""Quantities with units, as options of a transform and by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import STREAM, Build
from whatif import WhatifError, load_transform
from whatif.report.transforms_text import describe
from whatif.units import Bandwidth, Size

SCRIPT = '''"""Mine: what I think."""
from whatif.units import Bandwidth, Size
LINK, PIECE = Bandwidth("10Gbps"), Size("4MB")
def transform(graph, *, link: Bandwidth = LINK, piece: Size = PIECE, other: Bandwidth | None = None):
    return graph.note(f"{link.byte_s:g} {piece.size_bytes} {other}")
'''


@pytest.mark.parametrize(
    ("text", "byte_s"),
    [("25Gbps", 25e9 / 8), ("25Gb/s", 25e9 / 8), ("25 Gbit/s", 25e9 / 8), ("3.2GB/s", 3.2e9), ("100Mbps", 12.5e6),
     ("12.5MBps", 12.5e6), ("1Tbps", 125e9), ("64kbps", 8e3), ("64kb/s", 8e3), ("1GiB/s", 2.0**30), ("8bps", 1.0),
     ("1e3MB/s", 1e9), (".5GB/s", 5e8), ("25gbps", 25e9 / 8)],
)  # fmt: skip
def test_a_small_b_is_a_bit_and_a_large_one_a_byte(text: str, byte_s: float) -> None:
    assert Bandwidth(text).byte_s == pytest.approx(byte_s)
    assert str(Bandwidth(text)) == text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4MB", 4_000_000), ("512KiB", 524_288), ("1.5GB", 1_500_000_000), ("200kB", 200_000), ("1B", 1), ("2MiB", 2**21)],
)
def test_sizes_are_bytes_with_decimal_or_binary_prefixes(text: str, size_bytes: int) -> None:
    assert Size(text).size_bytes == size_bytes


@pytest.mark.parametrize(
    "text",
    ["25", "", "Gbps", "25G", "25GB", "-1Gbps", "0Gbps", "1e-9bps", "nan", "infGbps", "1e300GB/s", "25 Gb ps", "1e"],
)  # fmt: skip
def test_a_bandwidth_without_its_unit_is_one_sentence_with_both_spellings(text: str) -> None:
    with pytest.raises(WhatifError) as error:
        Bandwidth(text)
    assert "25Gbps (bits)" in str(error.value)
    assert "3.2GB/s (bytes)" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["4", "4M", "4Mb", "0MB", "-1MB", "4MB/s", "1e300MB", "0.1B"])
def test_a_size_without_its_unit_is_refused(text: str) -> None:
    with pytest.raises(WhatifError, match="expected a size"):
        Size(text)


@given(st.text(max_size=20))
def test_any_text_is_a_quantity_or_a_sentence(text: str) -> None:
    for kind in (Bandwidth, Size):
        try:
            found = str(kind(text))
        except WhatifError as error:
            found = str(error)
        assert found == text or found.startswith("expected a")


def test_what_is_too_much_is_said_to_be() -> None:
    with pytest.raises(WhatifError, match=r"expected a size .* of at most 1 PB, got '1e9GB'"):
        Size("1e9GB")
    with pytest.raises(WhatifError, match=r"expected a bandwidth .* of at most 1 PB/s, got '1e9GB/s'"):
        Bandwidth("1e9GB/s")


def test_equal_rates_are_equal_however_they_are_spelled() -> None:
    assert Bandwidth("8Gbps") == Bandwidth("1GB/s")
    assert Size("1MB") == Size("1000kB")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SCRIPT)
    return str(tmp_path / "mine.py")


def test_options_read_quantities(path: str) -> None:
    build = Build(STREAM)
    build.task(0, 1)
    graph = build.graph()
    assert load_transform(path)(graph).notes == ("1.25e+09 4000000 None",)
    assert load_transform(f"{path}:link=3GB/s,piece=512KiB,other=1Gbps")(graph).notes == ("3e+09 524288 1Gbps",)
    assert load_transform(path, link="1Gbps", other=None)(graph).notes == ("1.25e+08 4000000 None",)
    assert load_transform(path, link=Bandwidth("1Gbps"))(graph).notes == ("1.25e+08 4000000 None",)


@pytest.mark.parametrize("options", [{"link": 25}, {"link": 2.5e9}, {"piece": 4}, {"link": None}, {"other": 1}])
def test_bare_numbers_from_python_are_refused_as_well(path: str, options: dict[str, object]) -> None:
    with pytest.raises(WhatifError, match=r"^mine:\w+: expected a (bandwidth|size)"):
        load_transform(path, **options)


def test_a_bare_number_on_the_command_line_names_the_option(path: str) -> None:
    with pytest.raises(WhatifError, match=r"^mine:link: expected a bandwidth above 0 with its unit, as 25Gbps"):
        load_transform(f"{path}:link=25")


def test_transforms_shows_type_and_default_as_text(path: str) -> None:
    options = describe(load_transform(path))["options"]
    assert options == [
        {"name": "link", "type": "bandwidth", "default": "10Gbps"},
        {"name": "piece", "type": "size", "default": "4MB"},
        {"name": "other", "type": "bandwidth | none", "default": None},
    ]
    assert json.dumps(options)
