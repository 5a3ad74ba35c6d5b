"""Times of any spelling against decimal.Decimal."""

from __future__ import annotations

import decimal
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.ingest.decimal_ns import MAX_ABS_NS, TimeStatus, parse_us_as_ns


def exact_ns(text: str) -> int:
    """The obvious way: the decimal times 1000, half to even."""
    with decimal.localcontext() as context:
        context.prec = 500
        return int((decimal.Decimal(text) * 1000).to_integral_value(decimal.ROUND_HALF_EVEN))


def parse(texts: list[str]) -> tuple[list[int], list[int]]:
    ns, status = parse_us_as_ns([text.encode() for text in texts])
    assert ns.dtype == np.int64
    assert ns.shape == status.shape == (len(texts),)
    return ns.tolist(), status.tolist()


def test_nanoseconds_of_epoch_microseconds_are_exact() -> None:
    ns, status = parse(["1683564902805798.123", "1683564902805798.124", "1683564902805798"])
    assert ns == [1683564902805798123, 1683564902805798124, 1683564902805798000]
    assert status == [TimeStatus.OK] * 3


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("0", 0),
        ("-0", 0),
        ("-1.5", -1500),
        ("5.", 5000),
        (".5", 500),
        ("1e3", 1_000_000),
        ("1.25E-2", 12),
        ("12345.6789", 12345679),
        ("0.0005", 0),  # half to even
        ("0.0015", 2),
        ("-0.0005", 0),
        ("-0.0015", -2),
        ('"123.4"', 123400),
        ("1e-999999999", 0),
        ("0e999999999", 0),
        ("0.00000000000000000000000000000000000001", 0),
        ("2629566661865.129000000000000000000000000001", 2629566661865129),
    ],
)
def test_spellings(text: str, expected_ns: int) -> None:
    assert parse([text]) == ([expected_ns], [TimeStatus.OK])
    # Among plain numbers, whose fast path it must not disturb.
    assert parse(["1.001", text, "7"]) == ([1001, expected_ns, 7000], [TimeStatus.OK] * 3)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", TimeStatus.ABSENT),
        ("null", TimeStatus.ABSENT),
        ('""', TimeStatus.ABSENT),
        ("true", TimeStatus.UNREADABLE),
        ("[1,\n2]", TimeStatus.UNREADABLE),
        ("{}", TimeStatus.UNREADABLE),
        ('"NaN"', TimeStatus.UNREADABLE),
        ('"1_000"', TimeStatus.UNREADABLE),
        ("1.2.3", TimeStatus.UNREADABLE),
        ("--1", TimeStatus.UNREADABLE),
        ("-", TimeStatus.UNREADABLE),
        ("1" * 300, TimeStatus.UNREADABLE),
        ("1e400", TimeStatus.OUT_OF_RANGE),
        ("1e999999999", TimeStatus.OUT_OF_RANGE),
        ("1" * 25, TimeStatus.OUT_OF_RANGE),
        ("999999999999999999", TimeStatus.OUT_OF_RANGE),
        ("-9999999999999999999", TimeStatus.OUT_OF_RANGE),
    ],
)
def test_what_is_no_time_is_named(text: str, status: TimeStatus) -> None:
    assert parse([text]) == ([0], [status])
    assert parse(["1.001", text, "7"]) == ([1001, 0, 7000], [TimeStatus.OK, status, TimeStatus.OK])


numbers = st.one_of(
    st.integers(-(10**21), 10**21).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**18), max_value=10**18).map(str),
    st.from_regex(r"-?[0-9]{1,19}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True).map(
        lambda text: re.sub("[^0-9.eE+-]", "0", text)
    ),
)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_any_mixture_equals_decimal(texts: list[str]) -> None:
    for text, ns, status in zip(texts, *parse(texts), strict=True):
        expected = exact_ns(text)
        if abs(expected) <= MAX_ABS_NS:
            assert (ns, status) == (expected, TimeStatus.OK), text
        else:
            assert (ns, status) == (0, TimeStatus.OUT_OF_RANGE), text


def test_nothing_in_nothing_out() -> None:
    assert parse([]) == ([], [])
