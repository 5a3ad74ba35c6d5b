"""Exact nanoseconds from the microsecond numbers of a trace, which a float64 cannot hold."""

from __future__ import annotations

import decimal
import re
from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

# Half of int64, so that the sum of two accepted times cannot overflow; as an epoch it is the year 2116.
MAX_ABS_NS = 2**62

# Longer numbers are not times; the cap bounds the work that one hostile number can cause.
_MAX_NUMBER_CHARS = 200
_NUMBER = re.compile(rb"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")

_NEWLINE, _MINUS, _DOT, _ZERO, _NINE = b"\n-.09"


class TimeStatus(IntEnum):
    """The result of parsing one time."""

    OK = 0
    ABSENT = 1  # the field is missing or null
    UNREADABLE = 2  # something that is not a finite number
    OUT_OF_RANGE = 3


def parse_us_as_ns(texts: Sequence[msgspec.Raw | bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """Parse JSON numbers of microseconds into whole nanoseconds, half to even, exactly.

    ``texts`` are the raw JSON values; numbers inside JSON strings count as numbers. Returns int64 nanoseconds and
    int8 ``TimeStatus``, both of shape (len(texts),); the nanoseconds are 0 where the status is not OK.
    """
    n_texts = len(texts)
    ns = np.zeros(n_texts, np.int64)
    status = np.full(n_texts, TimeStatus.OK, np.int8)
    if n_texts == 0:
        return ns, status
    blob = b"\n".join(texts) + b"\n"
    plain = _plain_numbers(blob, n_texts)
    if not plain.all():
        for index in np.flatnonzero(~plain).tolist():
            ns[index], status[index] = _parse_one(bytes(texts[index]))
        blob = b"".join([bytes(texts[index]) + b"\n" for index in np.flatnonzero(plain).tolist()])
    if blob:
        plain_ns, plain_ok = _parse_plain(blob)
        ns[plain] = plain_ns
        status[plain] = np.where(plain_ok, TimeStatus.OK, TimeStatus.OUT_OF_RANGE)
    return ns, status


def _plain_numbers(blob: bytes, n_texts: int) -> npt.NDArray[np.bool_]:
    """Find the lines that are a sign, digits and at most one dot, with few enough digits for an int64."""
    chars = np.frombuffer(blob, np.uint8)
    ends = np.flatnonzero(chars == _NEWLINE)
    if len(ends) != n_texts:  # a list or object of several lines is in the place of a number
        return np.zeros(n_texts, np.bool_)
    starts = np.concatenate(([0], ends[:-1] + 1))
    negative = chars[starts] == _MINUS
    first_digit = chars[starts + negative]

    is_digit = (chars >= _ZERO) & (chars <= _NINE)
    n_digits = np.add.reduceat(is_digit, starts, dtype=np.int64)
    n_dots = np.add.reduceat(chars == _DOT, starts, dtype=np.int64)
    only_these = n_digits + n_dots + negative == ends - starts
    # Every number of 18 digits fits in an int64, and so does one of 19 digits that does not begin with 9.
    fits = (n_digits <= 18) | ((n_digits == 19) & (first_digit < _NINE))
    plain: npt.NDArray[np.bool_] = only_these & (n_digits > 0) & (n_dots <= 1) & fits
    return plain


def _parse_plain(blob: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Scale lines of plain numbers by 1000: returns the nanoseconds and whether they are in range."""
    chars = np.frombuffer(blob, np.uint8)
    ends = np.flatnonzero(chars == _NEWLINE)
    digits = np.fromstring(blob.replace(b".", b""), dtype=np.int64, sep="\n")  # sep makes this the text parser
    n_decimals = np.zeros(len(ends), np.int64)
    dots = np.flatnonzero(chars == _DOT)
    dot_line = np.searchsorted(ends, dots)
    n_decimals[dot_line] = ends[dot_line] - dots - 1

    factor = 10 ** np.maximum(3 - n_decimals, 0)
    # Digits finer than a nanosecond are divided away: a tenth of any int64 is in range.
    in_range = (np.abs(digits) <= MAX_ABS_NS // factor) | (n_decimals > 3)
    ns = np.where(in_range, digits, 0) * factor
    finer = np.flatnonzero(in_range & (n_decimals > 3))
    if len(finer):
        divisor = 10 ** (n_decimals[finer] - 3)
        quotient, rest = np.divmod(ns[finer], divisor)  # floored, so the rest is never negative
        # Compared as rest > divisor - rest, since twice the rest may overflow.
        up = (rest > divisor - rest) | ((rest == divisor - rest) & (quotient % 2 == 1))
        ns[finer] = quotient + up
    return ns, in_range


def _parse_one(text: bytes) -> tuple[int, TimeStatus]:
    text = text.strip(b'" \t\r\n')
    if text in (b"", b"null"):
        return 0, TimeStatus.ABSENT
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return 0, TimeStatus.UNREADABLE
    # Precision above the number's own length, or the context would round it before we do.
    exact = decimal.Context(prec=_MAX_NUMBER_CHARS + 10, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])
    value_us = exact.create_decimal(text.decode("ascii"))
    if not value_us.is_finite() or (value_us and value_us.adjusted() > 18):
        return 0, TimeStatus.OUT_OF_RANGE
    # Below half a nanosecond is 0 either way, and an exponent of -1e9 would cost memory to write out.
    if not value_us or value_us.adjusted() < -6:
        return 0, TimeStatus.OK
    ns = int(value_us.scaleb(3, exact).to_integral_value(decimal.ROUND_HALF_EVEN, exact))
    return (ns, TimeStatus.OK) if abs(ns) <= MAX_ABS_NS else (0, TimeStatus.OUT_OF_RANGE)
