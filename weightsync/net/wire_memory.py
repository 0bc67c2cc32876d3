"""An upper bound of a message's memory, computed from its bytes before any object is made."""

from __future__ import annotations

_SLOT = 8
"""Size of a pointer: each value has one in its container."""
_SHORT, _INTEGER, _LONG, _FLOAT, _ARRAY, _EMPTY_MAP, _SMALL_MAP, _MAP, _ENTRY = 28, 32, 36, 24, 56, 64, 248, 184, 64
_SMALL = 5
"""Most entries of a map with the smallest table: up to here every map has the same size."""
_ASCII, _WIDE = 49, 76
_SPECIAL = 0
_STEP = [1] * 256
"""Encoded bytes of a value, by its first byte. Only the head of an array or a map counts. `_SPECIAL`: computed."""
_COST = [_SLOT] * 256
"""Bytes of memory of a value in CPython, by its first byte. CPython shares the integers from -5 to 256: no memory."""
_STRINGS, _MAPS = {0xD9: 1, 0xDA: 2, 0xDB: 4}, {0xDE: 2, 0xDF: 4}
"""Bytes of the length field after the first byte."""

for _first in range(0x80, 0xA0):
    _COST[_first] += _ARRAY if _first >= 0x90 else _MAP + _ENTRY * (_first & 15)
for _first in range(0x80, 0x81 + _SMALL):
    _COST[_first] = _SLOT + (_SMALL_MAP if _first > 0x80 else _EMPTY_MAP)
for _first in (*range(0xA0, 0xC0), *_STRINGS, *_MAPS):
    _STEP[_first] = _SPECIAL
for _first, (_step, _cost) in {
    0xCA: (5, _FLOAT),
    0xCB: (9, _FLOAT),
    0xCC: (2, 0),
    0xCD: (3, _SHORT),
    0xCE: (5, _INTEGER),
    0xCF: (9, _LONG),
    0xD0: (2, _INTEGER),
    0xD1: (3, _INTEGER),
    0xD2: (5, _INTEGER),
    0xD3: (9, _LONG),
    0xDC: (3, _ARRAY),
    0xDD: (5, _ARRAY),
    **dict.fromkeys(range(0xE0, 0xFB), (1, _INTEGER)),
}.items():
    _STEP[_first] = _step
    _COST[_first] += _cost


def memory_bytes(body: bytes, most_bytes: int) -> int:
    """Return an upper bound of the memory that these msgpack values take in CPython. Stops once over `most_bytes`.

    Types that no message has, such as byte strings, are not parsed. Each of their bytes counts as a value.
    """
    at, total, end = 0, 0, len(body)
    while at < end and total <= most_bytes:
        first = body[at]
        total += _COST[first]
        if step := _STEP[first]:
            at += step
            continue
        at += 1
        if first in _MAPS:
            size = int.from_bytes(body[at : at + _MAPS[first]], "big")
            at += _MAPS[first]
            total += _MAP + _ENTRY * size
            continue
        size = first & 31
        if first in _STRINGS:
            size = int.from_bytes(body[at : at + _STRINGS[first]], "big")
            at += _STRINGS[first]
        text = body[at : at + size]
        if size > 1:  # CPython shares the strings of one character
            total += _ASCII + size if text.isascii() else _WIDE + 4 * size
        at += size
    return total
