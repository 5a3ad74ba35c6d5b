"""Values of options as they are written on a command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif import WhatifError, load_transform
from whatif.questions.sweep.scaling import parse_workers
from whatif.questions.sweep.values import Varied, listed_values, parse_vary


def test_a_list_keeps_its_order_and_each_value_once() -> None:
    assert listed_values("25Gbps, 10Gbps,25Gbps", "--vary") == ("25Gbps", "10Gbps")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1..1024:11", tuple(str(2**k) for k in range(11))),
        ("1..3:9", ("1", "2", "3")),  # whole numbers stay whole, each once
        ("0.5..8:5", ("0.5", "1", "2", "4", "8")),
        ("1e-2..1:3", ("0.01", "0.1", "1")),  # no point, and yet no whole number
        ("1e1..1e3:3", ("10", "100", "1000")),
        ("1Gbps..100Gbps:3", ("1Gbps", "10Gbps", "100Gbps")),
        ("100Gbps..1Gbps:3", ("100Gbps", "10Gbps", "1Gbps")),
        ("100Mbps..10Gbps:3", ("100Mbps", "1Gbps", "10Gbps")),
        ("1GB/s..16Gbps:2", ("8Gbps", "16Gbps")),  # bytes and bits
        ("1MB..4MB:3", ("1MB", "2MB", "4MB")),
        ("512KiB..1MB:2", ("524288B", "1MB")),
    ],
)
def test_a_range_multiplies(text: str, values: tuple[str, ...]) -> None:
    assert listed_values(text, "--vary") == values


@pytest.mark.parametrize(
    "text",
    [
        "0..4:3",
        "-1..4:3",
        "1..4:1",
        "1..4:0",
        "1Gbps..4MB:3",
        "1..4MB:3",
        "1e999..2:3",
        "1..2:999999999",
        "a,,b",
        "1,2,4..64:3",
        "1,",
        "1e-308..1e308:3",
        "1..2:" + "9" * 5000,
    ],
)
def test_what_is_no_list_of_values_is_reported_in_a_sentence(text: str) -> None:
    with pytest.raises(WhatifError, match=r"^--vary: expected .*\.$"):
        listed_values(text, "--vary")


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.integers(2, 60))
def test_a_range_begins_and_ends_where_it_says(first: float, last: float, count: int) -> None:
    values = [float(value) for value in listed_values(f"{first:.4g}..{last:.4g}:{count}", "--vary")]
    assert values[0] == pytest.approx(float(f"{first:.4g}"), rel=1e-5)
    assert values[-1] == pytest.approx(float(f"{last:.4g}"), rel=1e-5)
    assert values == sorted(values, reverse=last < first)


def test_an_option_is_that_of_all_what_ifs_that_take_it() -> None:
    transforms = [load_transform("distributed"), load_transform("amp"), load_transform("p3")]
    assert parse_vary("workers=2,4", transforms) == Varied("workers", (0, 2), ("2", "4"))
    assert parse_vary("p3.workers=2,4", transforms).of == (2,)
    one, two, three = parse_vary("workers=2,4", transforms).put(transforms, "4")
    assert (one.options, two.options, three.options) == ({"workers": 4}, {}, {"workers": 4})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("workers", "expected option=a,b,c"),
        ("workers=", "expected option=a,b,c"),
        ("=3", "expected option=a,b,c"),
        ("worker=2", "did you mean 'workers'"),
        ("amp.workers=2", "got 'amp.workers'"),
        ("workers=two", "expected int, got 'two'"),
        ("bandwidth=25", "expected a bandwidth above 0 with its unit"),
        ("bandwidth=1e9GB/s", "of at most 1 PB/s, got"),
        ("bandwidth=1Gbps..2Gbps:1000000", "n from 2 to 100,000"),
    ],
)
def test_what_cannot_be_varied_is_reported_in_a_sentence(text: str, part: str) -> None:
    with pytest.raises(WhatifError, match=part):
        parse_vary(text, [load_transform("distributed")])


def test_numbers_of_workers() -> None:
    assert parse_workers("4,1,2,4") == (1, 2, 4)
    for text in ("0", "-1", "2.5", "many", "1,,2", "100001", "99999999"):
        with pytest.raises(WhatifError, match=r"^--workers: expected"):
            parse_workers(text)
