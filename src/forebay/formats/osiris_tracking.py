"""Tracking blocks: what a stream remembers of its producers and consumers.

    u8      kind: 0 sequence of a producer, 1 offset of a consumer, 2 timestamp of a consumer
    u8      bytes of the id
    id
    8       value: u64, for kind 2 i64
            in a snapshot kind 0 has 16 bytes instead: u64 chunk id, u64 sequence

A delta chunk and the trailer of a user chunk hold blocks of changes; a snapshot chunk, the first of a
segment, holds the whole state, so that a reader never goes back further than one segment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from forebay.errors import LimitExceeded
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = ["OFFSET", "SEQUENCE", "TIMESTAMP", "Track", "decode", "encode"]

Bytes: TypeAlias = bytes | bytearray | memoryview

SEQUENCE: Final = 0
OFFSET: Final = 1
TIMESTAMP: Final = 2
ID_BYTES_MAX: Final = 255
"""Longest id: its length has one byte. Osiris lets one more in and then cannot read it back."""

_UNSIGNED: Final = struct.Struct(">Q")
_SIGNED: Final = struct.Struct(">q")
_SNAPSHOT_SEQUENCE: Final = struct.Struct(">QQ")
_WHAT: Final = "Osiris tracking"


class Track(NamedTuple):
    """One remembered value."""

    kind: int
    id: bytes
    value: int
    chunk_id: int | None = None
    """Of a sequence in a snapshot: the chunk that brought it."""


def encode(tracks: Iterable[Track], *, snapshot: bool = False) -> bytes:
    """A block list."""
    pieces: list[bytes] = []
    for track in tracks:
        if len(track.id) > ID_BYTES_MAX:
            raise LimitExceeded(
                "ID_BYTES_MAX", limit=ID_BYTES_MAX, actual=len(track.id), hint="use a shorter name"
            )
        pieces += (bytes((track.kind, len(track.id))), track.id)
        if snapshot and track.kind == SEQUENCE:
            pieces.append(_SNAPSHOT_SEQUENCE.pack(track.chunk_id or 0, track.value))
        else:
            pieces.append((_SIGNED if track.kind == TIMESTAMP else _UNSIGNED).pack(track.value))
    return b"".join(pieces)


def decode(data: Bytes, *, snapshot: bool = False) -> list[Track]:
    """The blocks of a list; nothing may be left over."""
    view = memoryview(data)
    tracks: list[Track] = []
    at = 0
    while at < len(view):
        track, at = _decode_one(view, at, snapshot)
        tracks.append(track)
    return tracks


def _decode_one(view: memoryview, at: int, snapshot: bool) -> tuple[Track, int]:
    kind = view[at]
    if kind > TIMESTAMP:
        raise UnsupportedEncoding(_WHAT, f"kind {kind} at byte {at}")
    if len(view) - at < 2:
        raise Corrupt(_WHAT, at, "a block is cut short")
    value_at = at + 2 + view[at + 1]
    layout = _SNAPSHOT_SEQUENCE if snapshot and kind == SEQUENCE else _UNSIGNED
    if kind == TIMESTAMP:
        layout = _SIGNED
    if len(view) - value_at < layout.size:
        raise Corrupt(_WHAT, at, "a block is cut short")
    name = bytes(view[at + 2 : value_at])
    values = layout.unpack_from(view, value_at)
    chunk_id = values[0] if len(values) == 2 else None
    return Track(kind, name, values[-1], chunk_id), value_at + layout.size
