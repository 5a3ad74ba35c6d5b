# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator, import-untyped"
"""Scan trace events from bytes to numbers, without an object per event; stop at anything unusual.

Every event that is accepted is valid for the decoder of ``kineto_fields.RawEvent``, and its numbers are those that
``kineto_columns`` makes of it. Anything else (odd types, wide numbers, duplicate keys, damage) is odd here, and left to
these two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import cython
else:
    from whatif.runtime import uncompiled as cython

COMPILED = cython.compiled
if cython.compiled:
    from cython.cimports.libc.string import memcpy


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _word(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t) -> cython.ulonglong:
    """Return eight bytes, little-endian. Compiled it is one load, which gcc does not make of single bytes."""
    word: cython.ulonglong = 0
    byte: cython.ulonglong
    i: cython.int
    if cython.compiled:
        memcpy(cython.address(word), cython.address(buf[at]), 8)
    else:
        for i in range(8):
            byte = buf[at + i]
            word |= byte << (8 * i)
    return word


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _hex(c: cython.uchar) -> cython.bint:
    return 48 <= c <= 57 or 65 <= c <= 70 or 97 <= c <= 102


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _escape(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the place after an escape whose backslash is at ``at``; -1: cut off, -2: none, or a lone surrogate."""
    c: cython.uchar
    if at + 1 >= stop:
        return -1
    c = buf[at + 1]
    if c == 117:
        if at + 5 >= stop:
            return -1
        if not (_hex(buf[at + 2]) and _hex(buf[at + 3]) and _hex(buf[at + 4]) and _hex(buf[at + 5])):
            return -2
        # d8 to df: half of a pair.
        if (buf[at + 2] | 32) == 100 and not 48 <= buf[at + 3] <= 55:
            return -2
        return at + 6
    if c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116:
        return at + 2
    return -2


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _string(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """From after the opening quote: 4 times the place of the closing one, + 1 with escapes, + 2 beyond ASCII.

    -1: it does not end before ``stop``, -2: not JSON.
    """
    # A literal of more than 31 bits is a Python int to Cython until it has a name with a type.
    ones: cython.ulonglong = 0x0101010101010101
    tops: cython.ulonglong = 0x8080808080808080
    all_bits: cython.ulonglong = 0xFFFFFFFFFFFFFFFF
    x: cython.ulonglong
    q: cython.ulonglong
    b: cython.ulonglong
    high: cython.ulonglong = 0
    flags: cython.Py_ssize_t = 0
    c: cython.uchar
    while True:
        if at + 8 <= stop:
            x = _word(buf, at)
            q = x ^ (ones * 34)
            b = x ^ (ones * 92)
            # The top bit of each byte that is a quote, a backslash or below 32; above the lowest such byte, it may err.
            q = (((q - ones) & ~q) | ((b - ones) & ~b) | ((x - ones * 32) & ~x)) & tops
            if q == 0:
                high |= x
                at += 8
                continue
            # All bits below the lowest one, of which each whole byte counts one.
            q = ((q & (~q + 1)) >> 7) - 1
            high |= x & q
            at += (((q & ones) * ones) & all_bits) >> 56
        elif at >= stop:
            return -1
        c = buf[at]
        if c == 34:
            if high & tops:
                flags |= 2
            return at * 4 + flags
        if c == 92:
            flags |= 1
            at = _escape(buf, at, stop)
            if at < 0:
                return at
            continue
        if c < 32:
            return -2
        high |= c
        at += 1


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _blank(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    while at < stop and (buf[at] == 32 or buf[at] == 10 or buf[at] == 13 or buf[at] == 9):
        at += 1
    return at


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _number(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the place after a JSON number; -1: cut off, -2: none."""
    first: cython.Py_ssize_t
    if buf[at] == 45:
        at += 1
        if at >= stop:
            return -1
    first = at
    while at < stop and 48 <= buf[at] <= 57:
        at += 1
    if at >= stop:
        return -1
    if at == first or (buf[first] == 48 and at > first + 1):
        return -2
    if buf[at] == 46:
        at += 1
        first = at
        while at < stop and 48 <= buf[at] <= 57:
            at += 1
        if at >= stop:
            return -1
        if at == first:
            return -2
    if buf[at] == 101 or buf[at] == 69:
        at += 1
        if at < stop and (buf[at] == 43 or buf[at] == 45):
            at += 1
        first = at
        while at < stop and 48 <= buf[at] <= 57:
            at += 1
        if at >= stop:
            return -1
        if at == first:
            return -2
    return at


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _scalar(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return 4 times the place after a string, a number, true, false or null, plus a string's flags; -1, -2."""
    end: cython.Py_ssize_t
    c: cython.uchar = buf[at]
    if c == 34:
        end = _string(buf, at + 1, stop)
        return end if end < 0 else end + 4
    if c == 45 or 48 <= c <= 57:
        end = _number(buf, at, stop)
        return end if end < 0 else end * 4
    if c != 116 and c != 102 and c != 110:
        return -2
    if at + 5 > stop:
        return -1
    if c == 116 and buf[at + 1] == 114 and buf[at + 2] == 117 and buf[at + 3] == 101:
        return (at + 4) * 4
    if c == 110 and buf[at + 1] == 117 and buf[at + 2] == 108 and buf[at + 3] == 108:
        return (at + 4) * 4
    if c == 102 and buf[at + 1] == 97 and buf[at + 2] == 108 and buf[at + 3] == 115 and buf[at + 4] == 101:
        return (at + 5) * 4
    return -2


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _nested(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the place after an array or an object that begins at ``at``; -1: cut off, -2: not JSON, or too deep."""
    objects: cython.ulonglong = 0  # a bit for each open bracket, the innermost lowest
    depth: cython.int = 0
    # What may come: 0 a value, 1 that or the end of an array, 2 a key or the end of an object, 3 a key, 4 comma or end.
    expected: cython.int = 0
    c: cython.uchar
    while True:
        at = _blank(buf, at, stop)
        if at >= stop:
            return -1
        c = buf[at]
        if expected == 4 and c == 44:
            expected = 3 if objects & 1 else 0
            at += 1
        elif (c == 93 and not objects & 1 and (expected == 4 or expected == 1)) or (
            c == 125 and objects & 1 and (expected == 4 or expected == 2)
        ):
            at += 1
            depth -= 1
            if depth == 0:
                return at
            objects >>= 1
            expected = 4
        elif expected == 4:
            return -2
        elif expected >= 2:
            if c != 34:
                return -2
            at = _string(buf, at + 1, stop)
            if at < 0:
                return at
            at = _blank(buf, (at >> 2) + 1, stop)
            if at >= stop:
                return -1
            if buf[at] != 58:
                return -2
            at += 1
            expected = 0
        elif c == 91 or c == 123:
            if depth == 60:
                return -2
            depth += 1
            objects = (objects << 1) | (c == 123)
            expected = 2 if c == 123 else 1
            at += 1
        else:
            at = _scalar(buf, at, stop)
            if at < 0:
                return at
            at >>= 2
            expected = 4


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _is_utf8(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.bint:
    c: cython.uchar
    more: cython.int
    low: cython.int
    high: cython.int
    while at < end:
        c = buf[at]
        at += 1
        if c < 128:
            continue
        low = 128
        high = 191
        if 194 <= c <= 223:
            more = 1
        elif 224 <= c <= 239:
            more = 2
            if c == 224:
                low = 160
            elif c == 237:
                high = 159
        elif 240 <= c <= 244:
            more = 3
            if c == 240:
                low = 144
            elif c == 244:
                high = 143
        else:
            return False
        while more > 0:
            if at >= end or not low <= buf[at] <= high:
                return False
            low = 128
            high = 191
            at += 1
            more -= 1
    return True


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _field(
    buf: cython.const[cython.uchar][::1],
    key: cython.Py_ssize_t,
    n: cython.Py_ssize_t,
    level: cython.int,
    slot: cython.const[cython.schar][::1],
    keys: cython.const[cython.uchar][::1],
    key_len: cython.const[cython.int][::1],
    factors: cython.const[cython.int][::1],
) -> cython.int:
    """Return which of the known keys this is, -1 for none."""
    f: cython.int
    i: cython.Py_ssize_t
    if n == 0:
        return -1
    f = slot[
        level * 256
        + (
            (
                buf[key] * factors[0]
                + buf[key + n - 1] * factors[1]
                + buf[key + (n * 5 >> 3)] * factors[2]
                + n * factors[3]
            )
            & 255
        )
    ]
    if f < 0 or key_len[f] != n:
        return -1
    for i in range(n):
        if buf[key + i] != keys[f * 64 + i]:
            return -1
    return f


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _hash(buf: cython.const[cython.uchar][::1], begin: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.ulonglong:
    all_bits: cython.ulonglong = 0xFFFFFFFFFFFFFFFF
    mix: cython.ulonglong = 0xFF51AFD7ED558CCD
    salt: cython.ulonglong = 0x9E3779B1
    one: cython.ulonglong = 1
    rest: cython.ulonglong
    byte: cython.ulonglong
    i: cython.Py_ssize_t
    n: cython.ulonglong = end - begin
    h: cython.ulonglong = n * salt
    at: cython.Py_ssize_t = begin
    while at + 8 <= end:
        h = ((h ^ _word(buf, at)) * mix) & all_bits
        h ^= h >> 32
        at += 8
    if at < end:
        rest = 0
        if at + 8 <= len(buf):
            rest = _word(buf, at) & ((one << (8 * (end - at))) - 1)
        else:
            for i in range(end - at):
                byte = buf[at + i]
                rest |= byte << (8 * i)
        h = ((h ^ rest) * mix) & all_bits
        h ^= h >> 32
    return h ^ (h >> 29)


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _text(
    buf: cython.const[cython.uchar][::1],
    begin: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    table: cython.int[::1],
    texts: cython.longlong[::1],
    arena: cython.uchar[::1],
    state: cython.longlong[::1],
) -> cython.longlong:
    """Return the number of a text, by its first occurrence; -1 if the arena is full.

    Text i is ``arena[texts[i] : texts[i + 1]]``.
    """
    n: cython.Py_ssize_t = end - begin
    mask: cython.ulonglong = len(table) - 1
    at: cython.Py_ssize_t = _hash(buf, begin, end) & mask
    other: cython.Py_ssize_t
    i: cython.Py_ssize_t
    code: cython.longlong
    while True:
        code = table[at] - 1
        if code < 0:
            break
        other = texts[code]
        if texts[code + 1] - other == n:
            i = 0
            while i + 8 <= n and _word(buf, begin + i) == _word(arena, other + i):
                i += 8
            if i + 8 > n:
                while i < n and buf[begin + i] == arena[other + i]:
                    i += 1
                if i == n:
                    return code
        at = (at + 1) & mask
    code = state[3]
    other = texts[code]
    if other + n > len(arena):
        return -1
    for i in range(n):
        arena[other + i] = buf[begin + i]
    texts[code + 1] = other + n
    state[3] = code + 1
    table[at] = code + 1
    return code


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _pair(
    one: cython.longlong,
    two: cython.longlong,
    table: cython.int[::1],
    pairs: cython.longlong[::1],
    state: cython.longlong[::1],
) -> cython.longlong:
    """Return the number of a pair of codes, by its first occurrence: pair i is pairs[2 i], pairs[2 i + 1]."""
    all_bits: cython.ulonglong = 0xFFFFFFFFFFFFFFFF
    mix: cython.ulonglong = 0x9E3779B97F4A7C15
    mask: cython.ulonglong = len(table) - 1
    h: cython.ulonglong = (((one << 32) ^ two) * mix) & all_bits
    at: cython.Py_ssize_t = (h >> 32) & mask
    code: cython.longlong
    while True:
        code = table[at] - 1
        if code < 0:
            break
        if pairs[2 * code] == one and pairs[2 * code + 1] == two:
            return code
        at = (at + 1) & mask
    code = state[4]
    pairs[2 * code] = one
    pairs[2 * code + 1] = two
    state[4] = code + 1
    table[at] = code + 1
    return code


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _us_as_ns(buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.longlong:
    """Return the nanoseconds of a plain decimal number of us, half to even; -(2 ** 63 - 1) for anything else."""
    x: cython.longlong = 0
    digits: cython.int = 0
    decimals: cython.int = 0
    divisor: cython.longlong = 1
    most: cython.longlong = 4611686018427386  # 2 ** 62 ns
    rest: cython.longlong
    negative: cython.bint = False
    odd: cython.longlong = -9223372036854775807
    if at < end and buf[at] == 34:
        at += 1
        end -= 1
    if at < end and buf[at] == 45:
        negative = True
        at += 1
    while at < end and 48 <= buf[at] <= 57 and digits < 17:
        x = x * 10 + (buf[at] - 48)
        digits += 1
        at += 1
    if digits == 0 or x > most:
        return odd
    if at < end and buf[at] == 46:
        at += 1
        while at < end and 48 <= buf[at] <= 57 and (decimals < 3 or digits + decimals < 18):
            x = x * 10 + (buf[at] - 48)
            decimals += 1
            at += 1
    if at != end:
        return odd
    while decimals < 3:
        x *= 10
        decimals += 1
    if decimals > 3:
        while decimals > 3:
            divisor *= 10
            decimals -= 1
        rest = x % divisor
        x = x // divisor
        if rest > divisor - rest or (rest == divisor - rest and x & 1):
            x += 1
    return -x if negative else x


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _integer(
    buf: cython.const[cython.uchar][::1], at: cython.Py_ssize_t, end: cython.Py_ssize_t, absent: cython.longlong
) -> cython.longlong:
    """Return a whole number of at most 18 digits, in quotes or not; ``absent`` for null; else -(2 ** 63 - 1)."""
    x: cython.longlong = 0
    digits: cython.int = 0
    negative: cython.bint = False
    odd: cython.longlong = -9223372036854775807
    if buf[at] == 110:
        return absent
    if buf[at] == 34:
        at += 1
        end -= 1
        if at == end:  # "": there, and no number
            return -1
    if at < end and buf[at] == 45:
        negative = True
        at += 1
    while at < end and 48 <= buf[at] <= 57 and digits < 19:
        x = x * 10 + (buf[at] - 48)
        digits += 1
        at += 1
    if at != end or digits == 0 or digits > 18:
        return odd
    return -x if negative else x


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _is_plain(
    buf: cython.const[cython.uchar][::1], begin: cython.Py_ssize_t, end: cython.Py_ssize_t, flags: cython.longlong
) -> cython.bint:
    """Whether a value is a whole number of at most 18 digits, true, false, null or a sound string."""
    at: cython.Py_ssize_t = begin
    if buf[at] == 34:
        return flags < 2 or _is_utf8(buf, begin, end)
    if buf[at] == 110 or buf[at] == 116 or buf[at] == 102:
        return True
    if end - begin > 18:
        return False
    if buf[at] == 45:
        at += 1
    while at < end and 48 <= buf[at] <= 57:
        at += 1
    return at == end


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _is(
    buf: cython.const[cython.uchar][::1],
    begin: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    texts: cython.longlong[::1],
    arena: cython.uchar[::1],
    code: cython.Py_ssize_t,
) -> cython.bint:
    """Whether a value is equal to the known text of ``code``."""
    i: cython.Py_ssize_t
    other: cython.Py_ssize_t = texts[code]
    if texts[code + 1] - other != end - begin:
        return False
    for i in range(end - begin):  # noqa: SIM110 - a generator would be a Python object
        if buf[begin + i] != arena[other + i]:
            return False
    return True


def scan(
    buf: cython.const[cython.uchar][::1],
    stop: cython.Py_ssize_t,
    slot: cython.const[cython.schar][::1],
    keys: cython.const[cython.uchar][::1],
    key_len: cython.const[cython.int][::1],
    factors: cython.const[cython.int][::1],
    begin: cython.longlong[::1],
    end: cython.longlong[::1],
    flags: cython.longlong[::1],
    rows: cython.longlong[::1],
    flows: cython.longlong[::1],
    allocations: cython.longlong[::1],
    python: cython.longlong[::1],
    ranges: cython.longlong[::1],
    table: cython.int[::1],
    texts: cython.longlong[::1],
    arena: cython.uchar[::1],
    pair_table: cython.int[::1],
    pairs: cython.longlong[::1],
    state: cython.longlong[::1],
) -> int:
    """Scan events from state[0] on; ``scanned.py`` describes the arrays.

    ``state`` is (place after the last complete event, rows, ranges, texts, pairs, flows, the place of the start, what
    there was no room for: 0 rows, 1 texts, 2 pairs, 3 their bytes; allocations, Python functions). Returns why it
    stopped: 0: the text ends within an event, 1: no room, 2: something odd.
    """
    odd: cython.longlong = -9223372036854775807
    none: cython.longlong = -9223372036854775806
    at: cython.Py_ssize_t = state[0]
    n_rows: cython.Py_ssize_t = state[1]
    n_ranges: cython.Py_ssize_t = state[2]
    n_flows: cython.Py_ssize_t = state[5]
    n_allocations: cython.Py_ssize_t = state[8]
    n_python: cython.Py_ssize_t = state[9]
    most_rows: cython.Py_ssize_t = len(rows) // 16
    most_ranges: cython.Py_ssize_t = len(ranges) // 3
    most_texts: cython.Py_ssize_t = len(texts) - 16
    most_pairs: cython.Py_ssize_t = len(pairs) // 2 - 8
    most_flows: cython.Py_ssize_t = len(flows) // 4
    most_allocations: cython.Py_ssize_t = len(allocations) // 6
    most_python: cython.Py_ssize_t = len(python) // 2
    event: cython.Py_ssize_t
    key: cython.Py_ssize_t
    n_key: cython.Py_ssize_t
    value: cython.Py_ssize_t
    place: cython.Py_ssize_t
    seen: cython.ulonglong
    one: cython.ulonglong = 1
    rare: cython.ulonglong = 0xFFFFFFFF00000000  # the keys from 32 on
    untold: cython.ulonglong = 0xFFFFFFFF84FFFE00  # all keys of args but bytes, Bytes and 27 to 30
    large: cython.longlong = 17592186044416  # 2 ** 44
    level: cython.int
    f: cython.int
    i: cython.Py_ssize_t
    k: cython.Py_ssize_t
    track: cython.longlong
    start: cython.longlong
    is_python: cython.bint
    status: cython.int = 0
    ph: cython.uchar
    c: cython.uchar
    number: cython.longlong
    other: cython.longlong
    with cython.nogil:
        while True:
            # Between two events a comma, once; before the first one the caller has skipped it.
            event = _blank(buf, at, stop)
            if at > state[6]:
                if event < stop and buf[event] == 44:
                    event = _blank(buf, event + 1, stop)
                elif event < stop:
                    status = 2
                    break
            if event >= stop:
                status = 0
                break
            if buf[event] != 123:
                status = 2
                break
            if (
                n_rows == most_rows
                or n_ranges == most_ranges
                or n_flows == most_flows
                or n_allocations == most_allocations
                or n_python == most_python
            ):
                state[7] = 0
                status = 1
                break
            if state[3] >= most_texts or state[4] >= most_pairs:
                state[7] = 1 if state[3] >= most_texts else 2
                status = 1
                break
            seen = 0
            level = 0
            status = -1
            place = _blank(buf, event + 1, stop)
            while True:
                if place >= stop:
                    status = 0
                    break
                if buf[place] != 34:
                    status = 2
                    break
                key = place + 1
                place = _string(buf, key, stop)
                if place < 0 or place & 1:  # an escape may spell a key that is known
                    status = 0 if place == -1 else 2
                    break
                n_key = (place >> 2) - key
                place = _blank(buf, (place >> 2) + 1, stop)
                if place >= stop:
                    status = 0
                    break
                if buf[place] != 58:
                    status = 2
                    break
                place = _blank(buf, place + 1, stop)
                if place >= stop:
                    status = 0
                    break
                f = _field(buf, key, n_key, level, slot, keys, key_len, factors)
                if f >= 0:
                    if seen >> f & 1:
                        status = 2
                        break
                    seen |= one << f
                c = buf[place]
                if f == 8:
                    if c != 123:
                        status = 2
                        break
                    place = _blank(buf, place + 1, stop)
                    if place >= stop:
                        status = 0
                        break
                    if buf[place] != 125:
                        level = 1
                        continue
                    place += 1
                else:
                    value = place
                    if c == 123 or c == 91:
                        # Of these only raw values may be arrays: shapes, launches and call stacks.
                        if 0 <= f < 17 or 22 < f < 26 or 26 < f < 31:
                            status = 2
                            break
                        place = _nested(buf, place, stop)
                        if place >= 0:
                            place *= 4
                    else:
                        place = _scalar(buf, place, stop)
                    if place < 0:
                        status = 0 if place == -1 else 2
                        break
                    if f >= 0:
                        begin[f] = value
                        end[f] = place >> 2
                        flags[f] = place & 3
                    place >>= 2
                # After a value.
                while True:
                    place = _blank(buf, place, stop)
                    if place >= stop:
                        status = 0
                        break
                    c = buf[place]
                    place += 1
                    if c == 44:
                        place = _blank(buf, place, stop)
                        break
                    if c != 125:
                        status = 2
                        break
                    if level == 0:
                        status = 3
                        break
                    level = 0
                if status >= 0:
                    break
            if status != 3:
                break
            status = 2
            if not seen & 1 or end[0] - begin[0] != 3 or buf[begin[0]] != 34 or flags[0]:
                break
            ph = buf[begin[0] + 1]
            for i in range(1, 8):
                if seen >> i & 1 and i != 5 and i != 6 and not _is_plain(buf, begin[i], end[i], flags[i]):
                    break
            else:
                status = -1
            if status == 2:
                break
            if ph == 88:
                if seen & 0x60 != 0x60:
                    status = 2
                    break
                # Codes: of an absent text that of "null", which is the first one.
                for i in range(3, 5):
                    begin[40 + i] = 0
                    if seen >> i & 1:
                        begin[40 + i] = _text(buf, begin[i], end[i], table, texts, arena, state)
                if begin[43] < 0 or begin[44] < 0:
                    state[7] = 3
                    status = 1
                    break
                track = _pair(begin[43], begin[44], pair_table, pairs, state)
                start = _us_as_ns(buf, begin[5], end[5])
                if start == odd:
                    status = 2
                    break
                is_python = seen >> 1 & 1 and _is(buf, begin[1], end[1], texts, arena, 3)
                if is_python:
                    python[n_python] = start
                    python[most_python + n_python] = track
                    # That is all, but for modules: these begin with an n, or with an escape.
                    c = buf[begin[2] + 1] if seen >> 2 & 1 else 110
                    if c != 110 and c != 92 and not seen >> 9:
                        n_python += 1
                        at = place
                        continue
                for i in range(1, 3):
                    begin[40 + i] = 0
                    if seen >> i & 1:
                        begin[40 + i] = _text(buf, begin[i], end[i], table, texts, arena, state)
                for i in range(17, 23):
                    number = 0
                    if seen >> i & 1:
                        number = _text(buf, begin[i], end[i], table, texts, arena, state)
                    begin[40 + i] = number
                begin[63] = 0
                if seen >> 31 & 1:
                    begin[63] = _text(buf, begin[31], end[31], table, texts, arena, state)
                for i in range(1, 24):
                    if (i < 3 or i > 16) and begin[40 + i] < 0:
                        status = 1
                if status == 1:
                    state[7] = 3
                    break
                rows[n_rows] = begin[41]
                rows[most_rows + n_rows] = begin[42]
                rows[2 * most_rows + n_rows] = track
                rows[3 * most_rows + n_rows] = start
                rows[4 * most_rows + n_rows] = other = _us_as_ns(buf, begin[6], end[6])
                if other < 0:
                    status = 2
                    break
                # Two spellings: correlation, External id, and at last bytes.
                for i in range(3):
                    k = 9 + 2 * i if i < 2 else 24
                    number = _integer(buf, begin[k], end[k], -1) if seen >> k & 1 else -1
                    other = _integer(buf, begin[k + 1], end[k + 1], -1) if seen >> (k + 1) & 1 else -1
                    if number == odd or other == odd:
                        status = 2
                    rows[(5 + i) * most_rows + n_rows] = other if number == -1 else number
                # Stream, device, sequence number, forward thread, registers.
                for i in range(5):
                    k = 13 + i if i < 4 else 23
                    other = none if i < 2 else -1
                    number = _integer(buf, begin[k], end[k], other) if seen >> k & 1 else other
                    if number == odd:
                        status = 2
                    rows[(8 + i) * most_rows + n_rows] = number
                if status == 2:
                    break
                # Of the two spellings of the shapes the second is taken if the first is absent.
                number = begin[57] if seen >> 17 & 1 else begin[58]
                other = 0
                if seen >> 17 & 1 or seen >> 18 & 1 or seen >> 19 & 1:
                    # Absent is not null here: codes are shifted by one.
                    number = number + 1 if seen >> 17 & 1 or seen >> 18 & 1 else 0
                    other = begin[59] + 1 if seen >> 19 & 1 else 0
                    number = _pair(number, other, pair_table, pairs, state)
                    other = begin[60] + 1 if seen >> 20 & 1 else 0
                    number = _pair(number, other, pair_table, pairs, state)
                    other = begin[63] + 1 if seen >> 31 & 1 else 0
                    other = _pair(number, other, pair_table, pairs, state) + 1
                rows[13 * most_rows + n_rows] = other
                number = begin[61] + 1 if seen >> 21 & 1 else 0
                other = begin[62] + 1 if seen >> 22 & 1 else 0
                rows[14 * most_rows + n_rows] = _pair(number, other, pair_table, pairs, state)
                number = 0
                if seen >> 26 & 1 and end[26] - begin[26] > 2:
                    number = 1
                    for i in range(begin[26], end[26]):
                        number += buf[i] == 59
                rows[15 * most_rows + n_rows] = number
                for i in range(27, 31):
                    if seen >> i & 1 and not _is_plain(buf, begin[i], end[i], flags[i]):
                        status = 2
                if status == 2:
                    break
                if seen & rare:
                    ranges[n_ranges] = event
                    ranges[most_ranges + n_ranges] = place
                    ranges[2 * most_ranges + n_ranges] = n_rows
                    n_ranges += 1
                n_rows += 1
                n_python += is_python
            elif (seen >> 1 & 1 and flags[1] & 1) or (seen >> 2 & 1 and flags[2] & 1):
                status = 2  # an escape may spell a name that is known
                break
            elif ph == 105 and seen >> 2 & 1 and _is(buf, begin[2], end[2], texts, arena, 1):
                # Of its args only those needed: bytes, address, total and device.
                if seen & untold or not seen >> 5 & 1:
                    status = 2
                    break
                number = _us_as_ns(buf, begin[5], end[5])
                other = _integer(buf, begin[25], end[25], -1) if seen >> 25 & 1 else -1
                if other == -1 and seen >> 24 & 1:
                    other = _integer(buf, begin[24], end[24], -1)
                if number == odd or other >= large or other <= -large:
                    status = 2
                    break
                allocations[n_allocations] = number
                allocations[most_allocations + n_allocations] = other
                for i in range(4):
                    other = _integer(buf, begin[27 + i], end[27 + i], -1) if seen >> (27 + i) & 1 else -1
                    if other == odd:
                        status = 2
                    allocations[(2 + i) * most_allocations + n_allocations] = other
                if status == 2:
                    break
                n_allocations += 1
            elif seen >> 9 or ph == 66:
                status = 2
                break
            elif (ph == 115 or ph == 102) and seen >> 1 & 1 and _is(buf, begin[1], end[1], texts, arena, 2):
                if not seen >> 5 & 1:
                    status = 2
                    break
                number = _us_as_ns(buf, begin[5], end[5])
                other = none
                if seen >> 7 & 1 and buf[begin[7]] != 110:
                    other = odd if buf[begin[7]] == 34 else _integer(buf, begin[7], end[7], none)
                if number == odd or other == odd:
                    status = 2
                    break
                if other != none:
                    for i in range(3, 5):
                        begin[40 + i] = 0
                        if seen >> i & 1:
                            begin[40 + i] = _text(buf, begin[i], end[i], table, texts, arena, state)
                    if begin[43] < 0 or begin[44] < 0:
                        state[7] = 3
                        status = 1
                        break
                    flows[n_flows] = ph
                    flows[most_flows + n_flows] = number
                    flows[2 * most_flows + n_flows] = other
                    flows[3 * most_flows + n_flows] = _pair(begin[43], begin[44], pair_table, pairs, state)
                    n_flows += 1
            at = place
        state[0] = at
        state[1] = n_rows
        state[2] = n_ranges
        state[5] = n_flows
        state[8] = n_allocations
        state[9] = n_python
    return status


def number_texts(
    table: cython.int[::1],
    texts: cython.const[cython.longlong][::1],
    arena: cython.const[cython.uchar][::1],
    n_texts: cython.Py_ssize_t,
) -> None:
    """Fill an empty table with the known texts, after it has grown."""
    mask: cython.ulonglong = len(table) - 1
    code: cython.Py_ssize_t
    at: cython.Py_ssize_t
    for code in range(n_texts):
        at = _hash(arena, texts[code], texts[code + 1]) & mask
        while table[at]:
            at = (at + 1) & mask
        table[at] = code + 1


def number_pairs(table: cython.int[::1], pairs: cython.const[cython.longlong][::1], n_pairs: cython.Py_ssize_t) -> None:
    """Fill an empty table with the known pairs, after it has grown."""
    all_bits: cython.ulonglong = 0xFFFFFFFFFFFFFFFF
    mix: cython.ulonglong = 0x9E3779B97F4A7C15
    mask: cython.ulonglong = len(table) - 1
    h: cython.ulonglong
    code: cython.Py_ssize_t
    at: cython.Py_ssize_t
    for code in range(n_pairs):
        h = (((pairs[2 * code] << 32) ^ pairs[2 * code + 1]) * mix) & all_bits
        at = (h >> 32) & mask
        while table[at]:
            at = (at + 1) & mask
        table[at] = code + 1
