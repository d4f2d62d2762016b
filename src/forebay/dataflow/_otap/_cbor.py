"""CBOR (RFC 8949), as far as lists and maps of attributes need it.

    major type   0 and 1: integers   2: bytes   3: text   4: list   5: map   6: tag, passed over
                 7: false, true, null, undefined, floats of 2, 4 and 8 bytes
    length       0 to 23 in the first byte; 24, 25, 26, 27: in the 1, 2, 4, 8 bytes after it; 31: to a break

Keys of maps are texts. Depth and number of values are limited: what is decoded here becomes OTLP, and
protobuf refuses messages of more than 100 levels, of which a map takes three.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from forebay.errors import FormatError

__all__ = ["Reader", "write_value"]

DEPTH_MAX: Final = 28
"""Deepest nesting of lists and maps in a value."""
VALUES_MAX: Final = 250_000
"""Values inside of lists and maps, in one batch."""
_BREAK: Final = 0xFF
_INDEFINITE: Final = 31
_LENGTHS: Final = {
    24: struct.Struct(">B"),
    25: struct.Struct(">H"),
    26: struct.Struct(">I"),
    27: struct.Struct(">Q"),
}
_FLOATS: Final = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1


class Reader:
    """Reads values into messages `AnyValue`; the limits are for all that one reader reads."""

    def __init__(self) -> None:
        self._left = VALUES_MAX
        self._data = memoryview(b"")
        self._at = 0

    def read(self, data: bytes, into: Any) -> None:
        """One value. Raises `FormatError`."""
        self._data, self._at = memoryview(data), 0
        try:
            self._value(into, DEPTH_MAX)
        except (IndexError, struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise FormatError(f"CBOR: {str(error)[:100]}", hint="lists and maps as CBOR") from error
        if self._at != len(data):
            raise FormatError("CBOR: bytes after the value", hint="one value each")

    def _value(self, into: Any, depth: int) -> None:
        self._left -= 1
        if depth < 0 or self._left < 0:
            raise ValueError(f"deeper than {DEPTH_MAX} or more than {VALUES_MAX} values")
        major, info = self._head()
        while major == 6:
            self._length(info)
            major, info = self._head()
        if major <= 1:
            number = self._length(info)
            into.int_value = _integer(-1 - number if major else number)
        elif major == 2:
            into.bytes_value = self._string(2, info)
        elif major == 3:
            into.string_value = self._string(3, info).decode()
        elif major == 4:
            into.array_value.SetInParent()
            values = into.array_value.values
            for _ in self._entries(info):
                self._value(values.add(), depth - 1)
        elif major == 5:
            into.kvlist_value.SetInParent()
            pairs = into.kvlist_value.values
            for _ in self._entries(info):
                value = pairs.add(key=self._key()).value
                value.SetInParent()
                self._value(value, depth - 1)
        else:
            self._simple(into, info)

    def _simple(self, into: Any, info: int) -> None:
        if info in (20, 21):
            into.bool_value = info == 21
        elif info in _FLOATS:
            into.double_value = self._unpack(_FLOATS[info])
        elif info not in (22, 23):
            raise ValueError(f"simple value {info}")

    def _key(self) -> str:
        major, info = self._head()
        if major != 3:
            raise ValueError("a key that is not a text")
        return self._string(3, info).decode()

    def _entries(self, info: int) -> Any:
        if info != _INDEFINITE:
            count = self._length(info)
            if count > len(self._data) - self._at:
                raise ValueError("more entries than bytes")
            yield from range(count)
            return
        while self._data[self._at] != _BREAK:
            yield
        self._at += 1

    def _string(self, major: int, info: int) -> bytes:
        if info != _INDEFINITE:
            return self._take(self._length(info))
        parts = []
        while (head := self._head()) != (7, _INDEFINITE):
            if head[0] != major or head[1] == _INDEFINITE:
                raise ValueError("a part of another kind in a string")
            parts.append(self._take(self._length(head[1])))
        return b"".join(parts)

    def _head(self) -> tuple[int, int]:
        first = self._data[self._at]
        self._at += 1
        return first >> 5, first & 31

    def _length(self, info: int) -> int:
        if info < 24:
            return info
        if info not in _LENGTHS:
            raise ValueError(f"length {info}")
        return int(self._unpack(_LENGTHS[info]))

    def _unpack(self, layout: struct.Struct) -> Any:
        [value] = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _take(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError("a string beyond the end")
        found = bytes(self._data[self._at : self._at + length])
        self._at += length
        return found


def write_value(value: Any, out: bytearray) -> None:
    """A message `AnyValue`."""
    kind = value.WhichOneof("value")
    if kind == "string_value":
        _text(value.string_value, out)
    elif kind == "int_value":
        number = value.int_value
        _write_head(1 if number < 0 else 0, -1 - number if number < 0 else number, out)
    elif kind == "bool_value":
        out.append(0xF5 if value.bool_value else 0xF4)
    elif kind == "double_value":
        out += b"\xfb" + struct.pack(">d", value.double_value)
    elif kind == "bytes_value":
        _write_head(2, len(value.bytes_value), out)
        out += value.bytes_value
    elif kind == "array_value":
        _write_head(4, len(value.array_value.values), out)
        for each in value.array_value.values:
            write_value(each, out)
    elif kind == "kvlist_value":
        _write_head(5, len(value.kvlist_value.values), out)
        for pair in value.kvlist_value.values:
            _text(pair.key, out)
            write_value(pair.value, out)
    else:
        out.append(0xF6)


def _text(text: str, out: bytearray) -> None:
    data = text.encode()
    _write_head(3, len(data), out)
    out += data


def _write_head(major: int, number: int, out: bytearray) -> None:
    if number < 24:
        out.append(major << 5 | number)
        return
    info = 24 if number < 1 << 8 else 25 if number < 1 << 16 else 26 if number < 1 << 32 else 27
    out.append(major << 5 | info)
    out += _LENGTHS[info].pack(number)


def _integer(number: int) -> int:
    if not _INT_MIN <= number <= _INT_MAX:
        raise ValueError("an integer of more than 64 bits")
    return number
