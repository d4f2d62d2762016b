"""Segment files: how ingested batches become one, and how one is read.

**Order of a write.** Temporary name, data, sync, rename, sync of the directory, then the footer is read back
and compared. Only then is the segment registered; until then its batches stay in memory and in the WAL. A
crash before the rename leaves a `.tmp`, which opening removes; after it, a whole segment whose footer names
the WAL entries in it, so that they are not replayed.

**Dictionaries** are unified by value over the whole segment, and small batches are joined into record batches
of some 256 KiB. Where the union of the values does not fit the index type, or where nested dictionaries
differ, the batches are split over several segments: a type never changes. Batches are joined, encoded and
written some megabytes at a time: a segment is never in memory as a whole a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import FormatError
from forebay.formats import quiver_segment
from forebay.formats.quiver_ack import Runs
from forebay.formats.quiver_segment import Encoding, SegmentMeta, Source
from forebay.formats.quiver_wal import has_dictionary
from forebay.quiver._disk import Disk, Piece, write_file
from forebay.quiver._runs import RunSet

__all__ = [
    "Batch",
    "NotEncodable",
    "SegmentInfo",
    "described",
    "encoded",
    "info_of",
    "read_meta",
    "runs_of",
    "segment_name",
    "write",
]

JOINED_BYTES: Final = 256 * 1024
"""Logical bytes up to which small batches are joined into one record batch."""
ALONE_BYTES: Final = 32 * 1024
"""Logical bytes from which a batch is large enough to be left alone, and is not copied."""
AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Bytes of a segment that are encoded before any of them is written. In one go the disk has them sooner than
bit by bit, and syncs of the WAL have it for themselves for longer: a tenth for large batches."""
SOURCES_MAX: Final = 100_000
"""Ingested batches in one segment. The open segment is finalized when it has so many."""


class Batch(msgspec.Struct, gc=False):
    """One ingested batch, with its place in the WAL. Nothing in it leads back to it, so that no garbage
    collection needs to look at the thousands of them that an open segment holds."""

    sequence: int
    time_ms: int
    batch: pa.RecordBatch
    context: dict[str, str]
    size: int
    """Logical bytes, asked for once: Arrow counts them anew each time."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the store keeps in memory of a finished segment."""

    segment: int
    signal: str
    schema_hash: bytes
    rows: int
    raw_bytes: int
    file_bytes: int
    ingested_ms: tuple[int, int]
    event_ns: tuple[int, int] | None
    entries: Runs


class NotEncodable(Exception):
    """These batches cannot be put into one segment. Its cause says why."""


def segment_name(segment: int) -> str:
    """The name of its file."""
    return f"segments/{segment:016d}.arrow"


class _Joined:
    """The record batches of a segment, each made when it is asked for, and the range of their event times."""

    def __init__(self, batches: Sequence[Batch], event_time_column: str) -> None:
        self._chunks, self._counts = _grouped(batches)
        self.schema = self._chunks[0].schema
        self._times = _EventTimes(self.schema, event_time_column)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        at = 0
        for count in self._counts:
            chunks = self._chunks[at : at + count]
            at += count
            joined = chunks[0] if count == 1 else pa.concat_batches(chunks)
            self._times.add(joined)
            yield joined

    @property
    def event_ns(self) -> tuple[int, int] | None:
        """Of those that were asked for."""
        return self._times.range()


def _grouped(batches: Sequence[Batch]) -> tuple[list[pa.RecordBatch], list[int]]:
    """Record batches with one dictionary for all, and how many in a row become one."""
    chunks = [each.batch for each in batches]
    counts = _group_counts([each.size for each in batches])
    if len(chunks) == 1 or not any(has_dictionary(each.type) for each in chunks[0].schema):
        return chunks, counts
    try:
        unified = pa.Table.from_batches(chunks).unify_dictionaries().to_batches()
    except pa.ArrowException:
        # It cannot unify these: batches that share a dictionary go together, others are split.
        return chunks, [1] * len(chunks)
    if len(unified) == len(chunks):
        return unified, counts
    # Empty batches vanish.
    unified = [each for each in unified if each.num_rows] or chunks[:1]
    return unified, _group_counts([each.nbytes for each in unified])


def _group_counts(sizes: list[int]) -> list[int]:
    """How many batches in a row become one: small ones are joined, larger ones stay as they are."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if counts and size < ALONE_BYTES and size <= room:
            counts[-1] += 1
            room -= size
            continue
        counts.append(1)
        room = JOINED_BYTES - size if size < ALONE_BYTES else 0
    return counts


def described(batches: Sequence[Batch], template: SegmentMeta, event_time_column: str) -> SegmentMeta:
    """What a segment of these batches will say of itself, but for where they lie in the file."""
    times = _EventTimes(batches[0].batch.schema, event_time_column)
    for each in batches:
        times.add(each.batch)
    return _described(batches, template, times.range())


def _described(
    batches: Sequence[Batch], template: SegmentMeta, event_ns: tuple[int, int] | None
) -> SegmentMeta:
    contexts: dict[tuple[tuple[str, str], ...], int] = {}
    sources = [
        Source(
            each.batch.num_rows,
            each.time_ms,
            contexts.setdefault(tuple(sorted(each.context.items())) if each.context else (), len(contexts)),
        )
        for each in batches
    ]
    times = [each.time_ms for each in batches]
    return msgspec.structs.replace(
        template,
        entries=runs_of([each.sequence for each in batches]),
        rows=sum([each.rows for each in sources]),
        raw_bytes=sum([each.size for each in batches]),
        ingested_ms=(min(times), max(times)),
        event_ns=event_ns,
        sources=sources,
        contexts=[dict(key) for key in contexts],
    )


def runs_of(sequences: list[int]) -> Runs:
    """Sequences, mostly without a hole, as runs."""
    if sequences[-1] - sequences[0] + 1 == len(sequences):
        return [(sequences[0], sequences[-1])]
    return RunSet((each, each) for each in sequences).runs()


class _EventTimes:
    """The range of one column, where there is one such column and it holds times."""

    _SCALES: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

    def __init__(self, schema: pa.Schema, name: str) -> None:
        self._scale = 0
        self._ends: list[int] = []
        if schema.names.count(name) == 1:
            self._index = schema.names.index(name)
            kind = schema.field(self._index).type
            if pa.types.is_timestamp(kind):
                self._scale = self._SCALES[kind.unit]
            elif pa.types.is_signed_integer(kind):
                self._scale = 1

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at a batch."""
        if not self._scale:
            return
        column = batch.column(self._index)
        found = pc.min_max(column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column)
        if found["min"].is_valid:
            self._ends += [found["min"].as_py() * self._scale, found["max"].as_py() * self._scale]

    def range(self) -> tuple[int, int] | None:
        """Lowest and highest. Times beyond what nanoseconds in 64 bits can say are given no range, rather
        than a wrong one."""
        if not self._ends:
            return None
        low, high = min(self._ends), max(self._ends)
        return (low, high) if low >= -(1 << 63) and high < 1 << 63 else None


def write(
    disk: Disk, batches: Sequence[Batch], *, template: SegmentMeta, event_time_column: str
) -> SegmentInfo:
    """Make a segment of these batches durable under its name, and look whether it is there. Runs in a thread.

    Raises `NotEncodable` where it is the batches that do not go together.
    """
    name = segment_name(template.segment)
    temporary = f"{name}.tmp"
    encoding = _encoding(batches, template, event_time_column)
    try:
        write_file(disk, temporary, _pieces(encoding), is_aside=True)
    except FileExistsError:
        # An earlier attempt at this number could not take it back. The next one has it out of the way.
        disk.remove(temporary)
        raise
    try:
        disk.protect(temporary)
        disk.rename(temporary, name)
    except BaseException:
        disk.remove(temporary)
        raise
    try:
        disk.sync_directory("segments")
        found = read_meta(disk, name, encoding.size)
        if found != encoding.meta:
            raise FormatError(f"{name}: what was read back is not what was written", hint="see to the disk")
    except BaseException:
        # The batches will be written again under another number. Should this file come back all the same,
        # recovery knows it by the WAL entries it shares with the other.
        disk.remove(name)
        raise
    return info_of(found, encoding.size)


def encoded(batches: Sequence[Batch], *, template: SegmentMeta, event_time_column: str) -> bytes:
    """The file that `write` would write. Raises `NotEncodable`."""
    return b"".join(_pieces(_encoding(batches, template, event_time_column)))


def _encoding(batches: Sequence[Batch], template: SegmentMeta, event_time_column: str) -> Encoding:
    try:
        joined = _Joined(batches, event_time_column)
        return Encoding(
            joined,
            joined.schema,
            template.codec,
            lambda: _described(batches, template, joined.event_ns),
        )
    except Exception as error:
        raise NotEncodable from error


def _pieces(encoding: Encoding) -> Iterator[Piece]:
    """Some megabytes are made ahead. Whatever goes wrong in here is the batches' fault, not the disk's."""
    ahead: list[Piece] = []
    size = 0
    try:
        for piece in encoding:
            ahead.append(piece)
            size += len(piece)
            if size >= AHEAD_BYTES:
                yield from ahead
                ahead, size = [], 0
        yield from ahead
    except Exception as error:
        raise NotEncodable from error


def info_of(meta: SegmentMeta, file_bytes: int) -> SegmentInfo:
    """What is kept in memory."""
    return SegmentInfo(
        meta.segment,
        meta.signal,
        meta.schema_hash,
        meta.rows,
        meta.raw_bytes,
        file_bytes,
        meta.ingested_ms,
        meta.event_ns,
        meta.entries,
    )


def read_meta(disk: Disk, name: str, size: int) -> SegmentMeta:
    """The footer of a segment, in one or two reads. Raises `FormatError` or `OSError`."""
    need = min(size, quiver_segment.TAIL_BYTES)
    while True:
        tail = disk.read_range(name, size - need, need)
        more = min(size, quiver_segment.footer_range(tail, size))
        if more <= need:
            return quiver_segment.decode_meta(tail, size)
        need = more
