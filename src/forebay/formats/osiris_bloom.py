"""The bloom filter of a chunk: which filter values its entries carry.

    bit n = mask 0x80 >> (n & 7) of byte n >> 3, of 16 to 255 bytes
    bit 0 = some entry has no filter value
    a value sets bits 1 + phash2(value, bits - 1) and 1 + phash2([value], bits - 1)

`phash2` is Erlang's portable hash, Bob Jenkins' mixing of three words: it must be the same here, since
brokers and clients compute it on both sides. A chunk without any filter value carries no filter and matches
only those who also want unfiltered entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from forebay.errors import UsageError

__all__ = ["Matcher", "build", "positions"]

Bytes: TypeAlias = bytes | bytearray | memoryview

BYTES_MIN: Final = 16
"""Smallest filter."""
BYTES_MAX: Final = 255
"""Largest filter: its size has one byte."""
_MASK: Final = 0xFFFFFFFF
_GOLDEN: Final = 0x9E3779B9
_SHIFTS: Final = ((13, -8, 13), (12, -16, 5), (3, -10, 15))


def positions(value: bytes, size: int) -> tuple[int, int]:
    """The two bits of a non-empty value in a filter of `size` bytes."""
    if not value:
        raise UsageError("the empty filter value is never hashed", hint="it stands for unfiltered entries")
    bits = 8 * size - 1
    hashed = _hash_bytes(value)
    return 1 + hashed % bits, 1 + _hash_list(hashed) % bits


def build(values: Iterable[bytes], size: int) -> bytes:
    """The filter of a chunk whose entries have these values; empty where none has one."""
    if not BYTES_MIN <= size <= BYTES_MAX:
        raise UsageError(f"a bloom filter of {size} bytes", hint="it has 16 to 255 bytes")
    distinct = set(values)
    if not distinct - {b""}:
        return b""
    bloom = bytearray(size)
    for value in distinct:
        for bit in positions(value, size) if value else (0,):
            bloom[bit >> 3] |= 0x80 >> (bit & 7)
    return bytes(bloom)


class Matcher:
    """What a reader asks for; remembers its bits for every filter size it meets."""

    def __init__(self, values: Iterable[bytes] = (), *, match_unfiltered: bool = False) -> None:
        self._values = tuple(dict.fromkeys(value for value in values if value))
        self._match_unfiltered = match_unfiltered
        self._wanted: dict[int, list[tuple[int, ...]]] = {}

    def matches(self, bloom: Bytes) -> bool:
        """Whether a chunk with this filter may hold what is asked for. Without values everything matches."""
        if not self._values:
            return True
        if len(bloom) == 0:
            return self._match_unfiltered
        return any(
            all(bloom[bit >> 3] & 0x80 >> (bit & 7) for bit in bits) for bits in self._bits(len(bloom))
        )

    def _bits(self, size: int) -> list[tuple[int, ...]]:
        wanted = self._wanted.get(size)
        if wanted is None:
            wanted = [positions(value, size) for value in self._values]
            if self._match_unfiltered:
                wanted.append((0,))
            self._wanted[size] = wanted
        return wanted


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for first, second, third in _SHIFTS:
        a = (a - b - c & _MASK) ^ c >> first
        b = (b - c - a & _MASK) ^ (a << -second & _MASK)
        c = (c - a - b & _MASK) ^ b >> third
    return a, b, c


def _hash_bytes(value: bytes) -> int:
    a = b = _GOLDEN
    c = 13 * _GOLDEN & _MASK
    whole = len(value) // 12 * 12
    for at in range(0, whole, 12):
        one, two, three = (int.from_bytes(value[at + part : at + part + 4], "little") for part in (0, 4, 8))
        a, b, c = _mix(a + one & _MASK, b + two & _MASK, c + three & _MASK)
    tail = value[whole:]
    a += int.from_bytes(tail[:4], "little")
    b += int.from_bytes(tail[4:8], "little")
    # The lowest byte of the third word belongs to the length.
    c += len(value) + (int.from_bytes(tail[8:], "little") << 8)
    return _mix(a & _MASK, b & _MASK, c & _MASK)[2]


def _hash_list(hashed: int) -> int:
    return _mix(2 * _GOLDEN + 2 & _MASK, 2 * _GOLDEN & _MASK, hashed)[2]
