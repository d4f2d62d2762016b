"""The data section of an Osiris chunk: simple entries and sub-batches.

    simple entry    u32     top bit 0: bytes of the body
                    body

    sub-batch       u8      1ccc0000, ccc = codec: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd
                    u16     records in it
                    u32     bytes of the body when uncompressed
                    u32     bytes of the body as stored
                    body    when uncompressed: u32 length and bytes, record after record

Record i of an entry has the offset of the entry plus i. A sub-batch keeps its stored bytes: what is decoded
and encoded again is the same, whatever compressor wrote it.

Most chunks of a fast publisher hold records of one length. Those are found in one step: numpy compares all
their length fields, and a record is cut when it is asked for. Only mixed lengths cost a loop.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, overload

import numpy as np

from forebay.errors import LimitExceeded
from forebay.formats._errors import Corrupt
from forebay.formats.osiris_codec import NONE, compress, decompress

__all__ = [
    "Entry",
    "EqualRecords",
    "SubBatch",
    "decode_entries",
    "decode_records",
    "encode_entries",
    "record_count",
    "sub_batch",
]

Bytes: TypeAlias = bytes | bytearray | memoryview

RECORD_BYTES_MAX: Final = (1 << 31) - 1
"""Longest simple entry: the top bit of the length tells entries from sub-batches."""
SUB_BATCH_RECORDS_MAX: Final = 0xFFFF
SUB_BATCH_BYTES_MAX: Final = 1 << 28
"""Longest sub-batch we unpack: a length field must not decide how much memory we take."""

_LENGTH: Final = struct.Struct(">I")
_SUB_BATCH: Final = struct.Struct(">BHII")
_SUB_BATCH_BIT: Final = 0x80
_WHAT: Final = "Osiris entries"


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Many records in one entry, compressed or not."""

    codec: int
    records: int
    unpacked_bytes: int
    body: bytes | memoryview
    """As stored."""

    def unpack(self) -> Sequence[memoryview]:
        """Its records."""
        return _cut(memoryview(self._unpacked()), self.records)

    def _unpacked(self) -> bytes | memoryview:
        if self.unpacked_bytes > SUB_BATCH_BYTES_MAX:
            raise Corrupt(_WHAT, 0, f"a sub-batch of {self.unpacked_bytes} bytes when unpacked")
        if self.codec == NONE:
            if len(self.body) != self.unpacked_bytes:
                raise Corrupt(_WHAT, 0, f"{len(self.body)} bytes stored for {self.unpacked_bytes}")
            return self.body
        return decompress(self.codec, self.body, self.unpacked_bytes)


Entry: TypeAlias = bytes | memoryview | SubBatch


def sub_batch(records: Sequence[Bytes], codec: int = NONE) -> SubBatch:
    """Put records into one entry, compressed with `codec`."""
    if not 1 <= len(records) <= SUB_BATCH_RECORDS_MAX:
        raise LimitExceeded(
            "SUB_BATCH_RECORDS_MAX",
            limit=SUB_BATCH_RECORDS_MAX,
            actual=len(records),
            hint="a sub-batch has at least one record and at most so many",
        )
    plain = _join(records)
    if len(plain) > SUB_BATCH_BYTES_MAX:
        raise LimitExceeded(
            "SUB_BATCH_BYTES_MAX", limit=SUB_BATCH_BYTES_MAX, actual=len(plain), hint="use smaller batches"
        )
    body = plain if codec == NONE else compress(codec, plain)
    return SubBatch(codec, len(records), len(plain), body)


def record_count(entries: Sequence[Entry]) -> int:
    """Records in these entries."""
    return sum([entry.records if isinstance(entry, SubBatch) else 1 for entry in entries])


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """The data section of a chunk."""
    pieces: list[Bytes] = []
    for entry in entries:
        if isinstance(entry, SubBatch):
            first = _SUB_BATCH_BIT | entry.codec << 4
            pieces += (_SUB_BATCH.pack(first, entry.records, entry.unpacked_bytes, len(entry.body)),)
            pieces += (entry.body,)
        else:
            if len(entry) > RECORD_BYTES_MAX:
                raise LimitExceeded(
                    "RECORD_BYTES_MAX", limit=RECORD_BYTES_MAX, actual=len(entry), hint="split the record"
                )
            pieces += (_LENGTH.pack(len(entry)), entry)
    return b"".join(pieces)


def decode_entries(data: Bytes, count: int) -> list[Entry]:
    """The entries of a data section, as views of it; exactly `count`, with nothing left over."""
    view = memoryview(data)
    fast = _cut_equal(view, count)
    if fast is not None:
        return list(fast)
    found: list[Entry] = []
    at, end = 0, len(view)
    for _ in range(count):
        if end - at < _LENGTH.size:
            raise Corrupt(_WHAT, at, f"{end - at} bytes are too short for an entry")
        if view[at] & _SUB_BATCH_BIT:
            entry, at = _decode_sub_batch(view, at)
            found.append(entry)
        else:
            body = at + _LENGTH.size
            at = body + _LENGTH.unpack_from(view, at)[0]
            if at > end:
                raise Corrupt(_WHAT, body, f"an entry of {at - body} bytes where {end - body} are left")
            found.append(view[body:at])
    if at != end:
        raise Corrupt(_WHAT, at, f"{end - at} bytes after the last of {count} entries")
    return found


def decode_records(data: Bytes, *, entries: int, records: int) -> Sequence[memoryview]:
    """Every record of a data section, sub-batches unpacked; exactly `records`, all bounds checked."""
    view = memoryview(data)
    if entries == records:
        fast = _cut_equal(view, entries)
        if fast is not None:
            return fast
    found: list[memoryview] = []
    for entry in decode_entries(view, entries):
        if isinstance(entry, SubBatch):
            found += entry.unpack()
        else:
            found.append(memoryview(entry))
    if len(found) != records:
        raise Corrupt(_WHAT, 0, f"{len(found)} records, the header names {records}")
    return found


def _decode_sub_batch(view: memoryview, at: int) -> tuple[SubBatch, int]:
    if len(view) - at < _SUB_BATCH.size:
        raise Corrupt(_WHAT, at, f"{len(view) - at} bytes are too short for a sub-batch")
    first, records, unpacked, stored = _SUB_BATCH.unpack_from(view, at)
    if first & 0x0F:
        raise Corrupt(_WHAT, at, f"a sub-batch begins with {first:#x}")
    body = at + _SUB_BATCH.size
    if stored > len(view) - body or records < 1:
        raise Corrupt(_WHAT, at, f"a sub-batch of {records} records in {stored} bytes")
    return SubBatch(first >> 4 & 7, records, unpacked, view[body : body + stored]), body + stored


def _join(records: Sequence[Bytes]) -> bytes:
    pieces: list[Bytes] = []
    for record in records:
        pieces += (_LENGTH.pack(len(record)), record)
    return b"".join(pieces)


def _cut(view: memoryview, count: int) -> Sequence[memoryview]:
    """Exactly `count` records, each behind its length."""
    fast = _cut_equal(view, count)
    if fast is not None:
        return fast
    found: list[memoryview] = []
    add, length, at, end = found.append, _LENGTH.unpack_from, 0, len(view)
    try:
        for _ in range(count):
            body = at + 4
            at = body + length(view, at)[0]
            add(view[body:at])
    except struct.error:
        raise Corrupt(_WHAT, at, f"record {len(found)} of {count} lies outside of {end} bytes") from None
    if at != end:
        raise Corrupt(_WHAT, at, f"{count} records end at byte {at} of {end}")
    return found


class EqualRecords(Sequence[memoryview]):
    """Records of one length, each behind its length field; a record is cut when it is asked for."""

    __slots__ = ("_count", "_step", "_view")

    def __init__(self, view: memoryview, count: int) -> None:
        self._view = view
        self._count = count
        self._step = len(view) // count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        at = range(self._count)[index] * self._step
        return self._view[at + _LENGTH.size : at + self._step]

    def __iter__(self) -> Iterator[memoryview]:
        view, step = self._view, self._step
        return (view[at + _LENGTH.size : at + step] for at in range(0, len(view), step))


def _cut_equal(view: memoryview, count: int) -> EqualRecords | None:
    """The records, if they all have the same length; None if not."""
    if count < 2 or len(view) % count:
        return None
    step = len(view) // count
    if step < _LENGTH.size or len(view) > RECORD_BYTES_MAX:
        return None
    heads = np.frombuffer(view, np.uint8).reshape(count, step)[:, :4]
    if not (heads == np.frombuffer(_LENGTH.pack(step - 4), np.uint8)).all():
        return None
    return EqualRecords(view, count)
