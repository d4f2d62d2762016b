"""The local tier as somebody who only reads it sees it: a directory of segment and index files.

The files may be those of a running broker, so everything can change between two looks: chunks are appended,
segments roll, retention removes the oldest, a new epoch cuts the end off. Two rules make that safe:

* A chunk counts once it is complete in the segment and named in the index, because a broker that restarts
  drops what its index does not name. The end of a chunk is the position of the next; only the last one's
  header is read for it.
* A file that is gone is an event like any other: the caller looks again.

Indexes are fixed-size records and are held as arrays; each look reads only what was appended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.formats import Corrupt, osiris_chunk, osiris_file
from forebay.formats.osiris_chunk import HEADER_BYTES, ChunkHeader
from forebay.formats.osiris_file import FILE_HEADER_BYTES, INDEX_DTYPE, INDEX_RECORD_BYTES

__all__ = ["LocalLog", "Segment"]


@dataclass(slots=True)
class Segment:
    """One segment and what is known of it."""

    first_id: int
    path: Path
    records: npt.NDArray[Any]
    """Index records of its complete chunks."""
    end: int
    """Where the last complete chunk ends in the file."""
    next_id: int
    """The id that follows its last complete chunk."""
    last: bool = False
    """Whether it is the one being written."""
    settled: bool = False
    """Whether all of its file counts, so that it need not be looked at again once it is not the last."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Where its chunks begin, and where the last one ends: one more than there are chunks."""
        return np.append(self.records["position"].astype(np.int64), self.end)

    @property
    def data_bytes(self) -> int:
        """Bytes of complete chunks."""
        return self.end - FILE_HEADER_BYTES

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the segment file. Raises `FileNotFoundError`, or `Corrupt` where it has become shorter."""
        with self.opened() as file:
            data = os.pread(file, length, start)
            if len(data) < length:
                rest = bytearray(length - len(data))
                self.fill(file, memoryview(rest), start + len(data))
                data += rest
        return data

    def opened(self) -> AbstractContextManager[int]:
        """The segment file, open for reading. Raises `FileNotFoundError`."""
        return _opened(self.path)

    def fill(self, file: int, target: memoryview, start: int) -> None:
        """Fill `target` from the open segment file. Raises `Corrupt` where that has become shorter."""
        done = 0
        while done < len(target):
            more = os.preadv(file, [target[done:]], start + done)
            if not more:
                raise Corrupt(str(self.path.name), start + done, "the segment ends in a chunk")
            done += more

    def header(self, number: int) -> ChunkHeader:
        """The header of one of its chunks."""
        return osiris_chunk.decode_header(self.read(int(self.records["position"][number]), HEADER_BYTES))

    def find(self, offset: int) -> int:
        """The chunk that holds `offset`, which must not be below the first."""
        return int(np.searchsorted(self.records["chunk_id"], np.uint64(offset), side="right")) - 1


def _check_header(path: Path) -> None:
    """Raise `Corrupt` or `UnsupportedEncoding` unless it is a segment of the version we know."""
    with _opened(path) as file:
        osiris_file.check_segment_header(os.pread(file, FILE_HEADER_BYTES, 0))


def _without_zeros(records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The records without those at their end that a power cut left empty, as a broker drops them."""
    while len(records) and not int(records["position"][-1]):
        records = records[:-1]
    return records


def _plain(records: npt.NDArray[Any]) -> memoryview:
    """The bytes of records, which are joined ten times as fast as records are."""
    return records.view(np.uint8).data


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


class LocalLog:
    """The segments of one directory, as of the last `refresh`."""

    def __init__(self, path: Path, committed: Callable[[], int] | None = None) -> None:
        self.path = path
        self._committed = committed
        """Where the commit offset is known, nothing at or above it counts."""
        self._segments: dict[int, Segment] = {}
        self._indexes: dict[int, npt.NDArray[Any]] = {}
        """By first id: all records of an index file, also those whose chunks do not count yet."""

    def forget(self) -> None:
        """Take nothing for granted at the next `refresh`: a segment that was thought complete has changed."""
        self._segments.clear()
        self._indexes.clear()

    def refresh(self) -> None:
        """Look at the directory again."""
        names = [osiris_file.parse_file_name(entry.name) for entry in os.scandir(self.path)]
        found = sorted({name[0] for name in names if name is not None and name[1] == "segment"})
        kept = {first: self._segments[first] for first in found if first in self._segments}
        for first in found:
            known = kept.get(first)
            if known is None or known.last or not known.settled or first == found[-1]:
                segment = self._load(first, last=first == found[-1])
                if segment is None:
                    kept.pop(first, None)
                else:
                    kept[first] = segment
        self._segments = {first: kept[first] for first in found if first in kept}
        self._indexes = {first: self._indexes[first] for first in kept if first in self._indexes}

    def _load(self, first: int, *, last: bool) -> Segment | None:
        path = self.path / osiris_file.file_name(first, "segment")
        try:
            size = path.stat().st_size
            if first not in self._segments and size >= FILE_HEADER_BYTES:
                _check_header(path)
            records = self._index(first, path.with_suffix(".index"))
        except FileNotFoundError:
            return None
        if size < FILE_HEADER_BYTES or records is None:
            return Segment(first, path, np.empty(0, INDEX_DTYPE), FILE_HEADER_BYTES, first, last)
        if len(records) and int(records["position"][-1]) > size - HEADER_BYTES:
            records = records[: int(np.searchsorted(records["position"], size - HEADER_BYTES, side="right"))]
        if self._committed is not None:
            below = np.searchsorted(records["chunk_id"], np.uint64(self._committed()), side="left")
            records = records[: int(below)]
        segment = Segment(first, path, records, FILE_HEADER_BYTES, first, last)
        try:
            self._settle_end(segment, size)
        except FileNotFoundError:
            return None
        return segment

    def _index(self, first: int, path: Path) -> npt.NDArray[Any] | None:
        """All whole records of an index file, or None where it has not even a header yet.

        An index grows at its end, or a new epoch cuts its end off and goes on with records of its own. So
        where the last record that is known still stands in its place, all before it do, and only what follows
        is read.
        """
        try:
            return self._whole_index(first, path)
        except Corrupt as error:
            raise Corrupt(path.name, error.position, error.reason) from error

    def _whole_index(self, first: int, path: Path) -> npt.NDArray[Any] | None:
        known = self._indexes.get(first)
        with _opened(path) as file:
            count = (os.fstat(file).st_size - FILE_HEADER_BYTES) // INDEX_RECORD_BYTES
            if count < 0:
                return None
            if known is not None and 0 < len(known) <= count:
                at = FILE_HEADER_BYTES + (len(known) - 1) * INDEX_RECORD_BYTES
                tail = os.pread(file, (count - len(known) + 1) * INDEX_RECORD_BYTES, at)
                records = _without_zeros(
                    np.frombuffer(tail, INDEX_DTYPE, count=len(tail) // INDEX_RECORD_BYTES)
                )
                if len(records) and records[:1].tobytes() == known[-1:].tobytes():
                    if len(records) > 1:
                        osiris_file.check_order(records, len(known) - 1)
                        known = np.frombuffer(b"".join((_plain(known), _plain(records[1:]))), INDEX_DTYPE)
                    self._indexes[first] = known
                    return known
        self._indexes.pop(first, None)
        records = _without_zeros(osiris_file.decode_index(path.read_bytes()))
        osiris_file.check_index(records)
        self._indexes[first] = records
        return records

    def _settle_end(self, segment: Segment, size: int) -> None:
        """Leave out the last chunk if it is not complete yet."""
        while len(segment.records):
            header = segment.header(len(segment.records) - 1)
            record = segment.records[-1]
            end = int(record["position"]) + header.length
            if header.chunk_id != int(record["chunk_id"]) or header.epoch != int(record["epoch"]):
                raise Corrupt(segment.path.name, int(record["position"]), "the index names another chunk")
            if end <= size:
                segment.end, segment.next_id, segment.settled = end, header.next_id, end == size
                return
            segment.records = segment.records[:-1]

    @property
    def segments(self) -> list[Segment]:
        """By first id; those without any complete chunk are left out."""
        return [segment for segment in self._segments.values() if len(segment.records)]

    @property
    def empty(self) -> bool:
        """Whether there is no complete chunk."""
        return not self.segments

    @property
    def first_offset(self) -> int:
        """Offset of the first record. 0 where there is none."""
        segments = self.segments
        return int(segments[0].records["chunk_id"][0]) if segments else 0

    @property
    def next_offset(self) -> int:
        """Offset behind the last complete chunk; an empty segment says by its name where it goes on."""
        return max([segment.next_id for segment in self._segments.values()], default=0)

    @property
    def epoch(self) -> int:
        """Epoch of the last complete chunk."""
        segments = self.segments
        return int(segments[-1].records["epoch"][-1]) if segments else 0

    @property
    def first_timestamp(self) -> int:
        """Timestamp of the first chunk, or -1."""
        segments = self.segments
        return int(segments[0].records["timestamp"][0]) if segments else -1

    def segment_of(self, offset: int) -> Segment | None:
        """The segment that holds `offset`."""
        for segment in reversed(self.segments):
            if segment.first_id <= offset:
                return segment if offset < segment.next_id else None
        return None

    def identity(self, chunk_id: int) -> tuple[int, int, int] | None:
        """Epoch, id and checksum of the chunk with this id, or None where there is no such chunk."""
        segment = self.segment_of(chunk_id)
        if segment is None:
            return None
        number = segment.find(chunk_id)
        if int(segment.records["chunk_id"][number]) != chunk_id:
            return None
        return segment.header(number).identity

    def untiered(self, offset: int) -> tuple[int, int | None]:
        """Bytes of chunks from `offset` on, and the timestamp of the first of them."""
        size, oldest = 0, None
        for segment in self.segments:
            if segment.next_id <= offset:
                continue
            number = max(segment.find(offset), 0) if offset > segment.first_id else 0
            size += segment.end - int(segment.records["position"][number])
            if oldest is None:
                oldest = int(segment.records["timestamp"][number])
        return size, oldest
