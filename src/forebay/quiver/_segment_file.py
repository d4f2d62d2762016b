"""Segment files: how ingested batches become one, and how one is read.

**Order of a write.** Temporary name, data, sync, rename, sync of the directory, then the footer is read back
and compared. Only then is the segment registered; until then its batches stay in memory and in the WAL. A
crash before the rename leaves a `.tmp`, which opening removes; after it, a whole segment whose footer names
the WAL entries in it, so that they are not replayed.

**Dictionaries** are unified by value over the whole segment, and small batches are joined into record batches
of some 256 KiB. Where the union of the values does not fit the index type, or where nested dictionaries
differ, the batches are split over several segments: a type never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import FormatError
from forebay.formats import quiver_segment
from forebay.formats.quiver_ack import Runs
from forebay.formats.quiver_segment import SegmentMeta, Source
from forebay.formats.quiver_wal import has_dictionary
from forebay.quiver._disk import Disk, Piece
from forebay.quiver._runs import RunSet

__all__ = [
    "Batch",
    "Built",
    "SegmentInfo",
    "build",
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


@dataclass(frozen=True, slots=True)
class Built:
    """A segment ready to be written."""

    meta: SegmentMeta
    pieces: list[Piece]
    batches: list[Batch]


def segment_name(segment: int) -> str:
    """The name of its file."""
    return f"segments/{segment:016d}.arrow"


def build(batches: list[Batch], *, template: SegmentMeta, event_time_column: str) -> list[Built]:
    """Segments with these batches, mostly one, numbered from `template.segment` on. Runs in a thread.

    What cannot go into one segment is split. A batch that cannot be written at all is in none of them; raises
    its error where that is true of every one.
    """
    try:
        joined = _joined(batches)
        meta, pieces = quiver_segment.encode(_meta(batches, joined, template, event_time_column), joined)
        return [Built(meta, pieces, batches)]
    except Exception:
        if len(batches) == 1:
            raise
    built: list[Built] = []
    problem: Exception | None = None
    half = len(batches) // 2
    for part in (batches[:half], batches[half:]):
        numbered = msgspec.structs.replace(template, segment=template.segment + len(built))
        try:
            built += build(part, template=numbered, event_time_column=event_time_column)
        except Exception as error:
            problem = error
    if problem is not None and not built:
        raise problem
    return built


def _joined(batches: list[Batch]) -> list[pa.RecordBatch]:
    chunks = [each.batch for each in batches]
    if len(chunks) == 1:
        return chunks
    counts = _group_counts([each.size for each in batches])
    if any(has_dictionary(each.type) for each in chunks[0].schema):
        try:
            unified = pa.Table.from_batches(chunks).unify_dictionaries().to_batches()
        except pa.ArrowException:
            # It cannot unify these: batches that share a dictionary go together, others are split.
            return chunks
        if len(unified) != len(chunks):  # empty batches vanish
            unified = [each for each in unified if each.num_rows]
            counts = _group_counts([each.nbytes for each in unified])
        chunks = unified or chunks[:1]
        counts = counts or [1]
    joined, at = [], 0
    for count in counts:
        joined.append(chunks[at] if count == 1 else pa.concat_batches(chunks[at : at + count]))
        at += count
    return joined


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


def _meta(
    batches: list[Batch], joined: list[pa.RecordBatch], template: SegmentMeta, event_time_column: str
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
    return SegmentMeta(
        segment=template.segment,
        entries=runs_of([each.sequence for each in batches]),
        signal=template.signal,
        schema_hash=template.schema_hash,
        rows=sum(each.num_rows for each in joined),
        codec=template.codec,
        raw_bytes=sum(each.size for each in batches),
        ingested_ms=(min(times), max(times)),
        event_ns=_event_range(joined, event_time_column),
        sources=sources,
        contexts=[dict(key) for key in contexts],
        parts=[],
    )


def runs_of(sequences: list[int]) -> Runs:
    """Sequences, mostly without a hole, as runs."""
    if sequences[-1] - sequences[0] + 1 == len(sequences):
        return [(sequences[0], sequences[-1])]
    return RunSet((each, each) for each in sequences).runs()


def _event_range(joined: list[pa.RecordBatch], name: str) -> tuple[int, int] | None:
    if name not in joined[0].schema.names or joined[0].schema.names.count(name) > 1:
        return None
    kind = joined[0].schema.field(name).type
    if not (pa.types.is_timestamp(kind) or pa.types.is_signed_integer(kind)):
        return None
    column = pa.chunked_array([each.column(name) for each in joined])
    if pa.types.is_timestamp(kind):
        scale = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[kind.unit]
        column = column.cast(pa.int64())
    else:
        scale = 1
    found = pc.min_max(column)
    if not found["min"].is_valid:
        return None
    low, high = found["min"].as_py() * scale, found["max"].as_py() * scale
    # Times beyond what nanoseconds in 64 bits can say are given no range, rather than a wrong one.
    return (low, high) if low >= -(1 << 63) and high < 1 << 63 else None


def write(disk: Disk, built: Built) -> SegmentInfo:
    """Make it durable under its name, and look whether it is there. Runs in a thread."""
    meta = built.meta
    name = segment_name(meta.segment)
    temporary = f"{name}.tmp"
    file = disk.open(temporary, create=True)
    try:
        file.write_aside(0, built.pieces)
        file.sync()
    except BaseException:
        file.close()
        disk.remove(temporary)
        raise
    file.close()
    disk.protect(temporary)
    disk.rename(temporary, name)
    try:
        disk.sync_directory("segments")
        size = sum(map(len, built.pieces))
        found = read_meta(disk, name, size)
        if found != meta:
            raise FormatError(f"{name}: what was read back is not what was written", hint="see to the disk")
    except BaseException:
        # The batches will be written again under another number. Should this file come back all the same,
        # recovery knows it by the WAL entries it shares with the other.
        disk.remove(name)
        raise
    return info_of(found, size)


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
