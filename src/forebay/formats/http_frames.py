"""The body of a produce request with ready frames, as the buffers it consists of: no record is copied for it.

    {"topic_partitions": [{..., "frame": bin}, ...]}        msgpack, as `ProduceRequestPacked` has it

Encoding the message as a whole would copy every frame into it, after each frame was put together from its
sections by another copy. Here the encoder writes what is around the frames, with an empty one in each entry,
whose two bytes are replaced by the header of the real one. `frame` is the last field of an entry, so they are
its last two bytes; a test compares the result with the encoder's own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from forebay.formats.bytes_batch import Frame
from forebay.formats.http_messages import ProducePartitionPacked, ProduceRequestPacked

__all__ = ["request_of_frames"]

_EMPTY: Final = memoryview(b"")
_EMPTY_BIN: Final = b"\xc4\x00"
_BIN_32: Final = struct.Struct(">BI")
_ARRAY_32: Final = struct.Struct(">BI")
_encode = msgspec.msgpack.Encoder().encode
_OPENING: Final = _encode(ProduceRequestPacked([])).removesuffix(b"\x90")
"""The map and its key, without the empty list behind it."""


def request_of_frames(
    entries: Sequence[tuple[ProducePartitionPacked, Frame]],
) -> list[bytes | memoryview]:
    """The body for these batches, each with its frame, which its entry does not hold."""
    parts: list[bytes | memoryview] = [_OPENING + _ARRAY_32.pack(0xDD, len(entries))]
    for entry, frame in entries:
        entry.frame = _EMPTY
        around = _encode(entry)
        assert around.endswith(_EMPTY_BIN), "`frame` is not the last field"
        parts.append(around[: -len(_EMPTY_BIN)] + _BIN_32.pack(0xC6, frame.size))
        parts += frame.parts
    return parts
