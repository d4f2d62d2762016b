"""A fragment as it is read from its segment file, on its way into the bucket.

    "OSIL" | chunks, straight from the segment | index | trailer

It is never in memory as a whole: some chunks at a time are read, checked and handed on, into the same buffer
again and again. Every chunk is compared with its record in the index as it was when the fragment was cut
(id, timestamp, epoch, type, where it begins and ends), and its data with its checksum. The index of the
fragment comes last, so damage is found while there is nothing yet that a store could take for an object.

The file is a broker's, who may remove it, or cut its end off and go on with another epoch, at any moment.
That is not damage: `SegmentChanged` says to look at the log again and to cut anew. Damage is what does not
fit an index that still says the same.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import FormatError
from forebay.formats import Corrupt, osiris_chunk, osiris_file, stream_fragment
from forebay.formats import stream_filters as filters_format
from forebay.formats.osiris_chunk import ChunkHeader
from forebay.formats.osiris_file import FILE_HEADER_BYTES, INDEX_RECORD_BYTES, SEGMENT_HEADER
from forebay.formats.stream_filters import Filters
from forebay.formats.stream_fragment import Trailer
from forebay.storage import Source
from forebay.stream._cutter import Cut
from forebay.stream._errors import SegmentChanged

__all__ = ["FragmentSource"]


class FragmentSource(Source):
    """The object that a cut becomes."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._records = cut.segment.records[cut.start : cut.stop]
        self._starts = np.append(self._records["position"].astype(np.int64), cut.end)
        self._ids = np.append(self._records["chunk_id"].astype(np.int64), cut.next_offset)
        self._blooms: list[bytes] = []
        self._bloom_bytes: list[int] = []
        tail = self._tail()
        self.size = FILE_HEADER_BYTES + cut.data_bytes + len(tail)
        self.trailer: Trailer = stream_fragment.decode_trailer(tail, self.size)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Header, chunks, index and trailer. Raises `Corrupt`, or `SegmentChanged`."""
        self._blooms, self._bloom_bytes = [], []
        yield SEGMENT_HEADER
        buffer = memoryview(bytearray(self.piece_bytes))
        try:
            with self._cut.segment.opened() as file:
                start = 0
                while start < len(self._records):
                    stop = self._whole_chunks(start)
                    if stop > start:
                        yield self._some(file, buffer, start, stop)
                    else:
                        stop = start + 1
                        yield from self._long(file, buffer, start)
                    start = stop
        except (FileNotFoundError, FormatError) as error:
            raise self._explained(error) from error
        yield self._tail()

    def filters(self) -> Filters | None:
        """The filters of its chunks, as last read, or read now; None where no chunk has one."""
        if len(self._bloom_bytes) < len(self._records):
            collections.deque(self.pieces(), maxlen=0)
        sizes = np.array(self._bloom_bytes, np.int64)
        if not sizes.any():
            return None
        records = np.empty(len(self._records), filters_format.RECORD_DTYPE)
        records["chunk_id"], records["type"] = self._records["chunk_id"], self._records["type"]
        records["position"] = self._starts[:-1] - self._starts[0] + stream_fragment.DATA_AT
        records["filter_bytes"] = sizes
        trailer = self.trailer
        return Filters(
            trailer.first_offset, trailer.next_offset, trailer.data_bytes, records, tuple(self._blooms)
        )

    def last(self) -> ChunkHeader:
        """The header of its last chunk. Raises as `pieces` does."""
        try:
            header = self._cut.segment.header(self._cut.stop - 1)
        except (FileNotFoundError, FormatError) as error:
            raise self._explained(error) from error
        if (header.chunk_id, header.epoch) != (int(self._ids[-2]), int(self._records["epoch"][-1])):
            raise self._explained(self._disagree(len(self._records) - 1))
        return header

    def _tail(self) -> bytes:
        return stream_fragment.encode_tail(
            self._cut.data_bytes,
            self._records,
            next_offset=self._cut.next_offset,
            sequence=self._cut.sequence,
            chunks_before=self._cut.start,
            segment_position=int(self._starts[0]),
        )

    def _whole_chunks(self, start: int) -> int:
        """The number of the first chunk that does not fit into a piece that begins with `start`."""
        limit = self._starts[start] + self.piece_bytes
        return int(np.searchsorted(self._starts, limit, side="right")) - 1

    def _some(self, file: int, buffer: memoryview, start: int, stop: int) -> memoryview:
        """Whole chunks in one piece."""
        begin = int(self._starts[start])
        piece = buffer[: int(self._starts[stop]) - begin]
        self._cut.segment.fill(file, piece, begin)
        positions = self._starts[start:stop] - begin
        headers = osiris_chunk.check_run(piece, positions, what=self._cut.segment.path.name, at=begin)
        self._check_headers(headers, start)
        self._note_blooms(piece, positions, headers)
        return piece

    def _long(self, file: int, buffer: memoryview, number: int) -> Iterator[memoryview]:
        """One chunk in several pieces: its checksum is carried on from one to the next."""
        at, end = int(self._starts[number]), int(self._starts[number + 1])
        piece = buffer[: min(len(buffer), end - at)]
        self._cut.segment.fill(file, piece, at)
        headers = osiris_chunk.gather_headers(piece, np.zeros(1, np.int64))
        self._check_headers(headers, number)
        self._note_blooms(piece, np.zeros(1, np.int64), headers)
        data_at = at + osiris_chunk.HEADER_BYTES + int(headers["bloom_bytes"][0])
        data_end = data_at + int(headers["data_bytes"][0])
        found = 0
        while True:
            found = zlib.crc32(piece[max(data_at - at, 0) : max(data_end - at, 0)], found)
            if at + len(piece) >= data_end and found != int(headers["crc"][0]):
                raise Corrupt(self._cut.segment.path.name, int(self._starts[number]), "its checksum is wrong")
            yield piece
            at += len(piece)
            if at == end:
                return
            piece = buffer[: min(len(buffer), end - at)]
            self._cut.segment.fill(file, piece, at)

    def _check_headers(self, headers: npt.NDArray[Any], start: int) -> None:
        """Every chunk is the one that the index names, at its place, and the next one follows it."""
        stop = start + len(headers)
        records = self._records[start:stop]
        lengths = osiris_chunk.HEADER_BYTES + sum(
            headers[name].astype(np.int64) for name in ("bloom_bytes", "data_bytes", "trailer_bytes")
        )
        wrong = (lengths != np.diff(self._starts[start : stop + 1])) | (
            headers["records"] != np.diff(self._ids[start : stop + 1])
        )
        for name in ("chunk_id", "timestamp", "epoch", "type"):
            wrong |= headers[name] != records[name]
        if wrong.any():
            raise self._disagree(start + int(np.argmax(wrong)))

    def _note_blooms(
        self, piece: memoryview, positions: npt.NDArray[np.int64], headers: npt.NDArray[Any]
    ) -> None:
        sizes = headers["bloom_bytes"].tolist()
        self._bloom_bytes += sizes
        if any(sizes):
            starts = (positions + osiris_chunk.HEADER_BYTES).tolist()
            pairs = zip(starts, sizes, strict=True)
            self._blooms += [bytes(piece[at : at + size]) for at, size in pairs]
        else:
            self._blooms += [b""] * len(sizes)

    def _disagree(self, number: int) -> Corrupt:
        at = int(self._starts[number])
        return Corrupt(self._cut.segment.path.name, at, "chunks and index disagree")

    def _explained(self, error: Exception) -> Exception:
        """`error`, unless the files are not the ones any more that this was cut from."""
        segment = self._cut.segment
        first = FILE_HEADER_BYTES + self._cut.start * INDEX_RECORD_BYTES
        try:
            size = segment.path.stat().st_size
            with segment.path.with_suffix(".index").open("rb") as index:
                index.seek(first)
                records = index.read(len(self._records) * INDEX_RECORD_BYTES)
        except FileNotFoundError:
            return SegmentChanged(segment.path.name, "it is gone")
        if size < self._cut.end or records != osiris_file.encode_index(self._records)[FILE_HEADER_BYTES:]:
            return SegmentChanged(segment.path.name, "its end was cut off, or written anew")
        return error
