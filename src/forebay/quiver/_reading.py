"""Finished segments as readers see them: mapped, checked once, and not copied; or as they lie in memory, for
subscribers that get them before they are files.

A bounded number of segments stays mapped. Each part is compared with its checksum at the first read; parts
that fail are left out and counted, the others are handed out. With dictionaries the first part holds their
values, so damage there takes the whole segment.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import FormatError
from forebay.formats import Corrupt, quiver_segment
from forebay.formats.quiver_segment import SegmentMeta
from forebay.formats.quiver_wal import has_dictionary
from forebay.quiver._disk import Disk
from forebay.quiver._segment_file import Batch, segment_name

__all__ = ["HeldView", "SegmentReader", "SegmentView"]


class SegmentView:
    """A segment that can be read. It stays readable while it is held, even when its file is gone.

    Raises `FormatError` where nothing of it can be read.
    """

    def __init__(self, data: memoryview, *, check: bool = True) -> None:
        self.meta: SegmentMeta = quiver_segment.decode_meta(data, len(data))
        """What the segment says of itself."""
        self._data = data
        self.bad_parts: list[int] = []
        """Record batches whose checksum does not match."""
        if check:
            for index, part in enumerate(self.meta.parts):
                try:
                    quiver_segment.check_part(data, part)
                except Corrupt:
                    self.bad_parts.append(index)
        try:
            self._file = pa.ipc.open_file(pa.py_buffer(data))
        except pa.ArrowException as error:
            raise FormatError(f"segment {self.meta.segment}: {error}", hint="it is damaged") from error
        if 0 in self.bad_parts and any(has_dictionary(each.type) for each in self._file.schema):
            self.bad_parts = list(range(len(self.meta.parts)))

    @property
    def data(self) -> memoryview:
        """The whole file, mapped."""
        return self._data

    @property
    def segment(self) -> int:
        """Its number."""
        return self.meta.segment

    @property
    def schema(self) -> pa.Schema:
        """The schema of its batches."""
        return self._file.schema

    @property
    def num_rows(self) -> int:
        """Rows of `batches`, known without a look at them."""
        return sum(part.rows for index, part in enumerate(self.meta.parts) if index not in self.bad_parts)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches, without those that are damaged."""
        for index in range(len(self.meta.parts)):
            if index not in self.bad_parts:
                yield self._file.get_batch(index)

    def row_indices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which rows of the segment as it was written are those of `batches`: all, unless it is damaged."""
        kept = np.ones(self.meta.rows, bool)
        begin = 0
        for index, part in enumerate(self.meta.parts):
            if index in self.bad_parts:
                kept[begin : begin + part.rows] = False
            begin += part.rows
        return np.flatnonzero(kept)

    def release_pages(self) -> None:
        """Give the memory of the map back to the system; a later look brings the pages in again.

        Without it a process would seem to hold every segment that it keeps mapped.
        """
        if isinstance(self._data.obj, mmap.mmap):
            self._data.obj.madvise(mmap.MADV_DONTNEED)

    def table(self) -> pa.Table:
        """All batches as one table."""
        return pa.Table.from_batches(self.batches(), self.schema)


class HeldView(SegmentView):
    """A segment that is no file: the batches as they were ingested. `encode` makes the file of them."""

    def __init__(self, meta: SegmentMeta, batches: Sequence[Batch], encode: Callable[[], bytes]) -> None:
        self.meta = meta
        self.bad_parts = []
        self._batches = batches
        self._encode = encode

    @property
    def data(self) -> memoryview:
        """What the file would be, encoded anew each time."""
        return memoryview(self._encode())

    @property
    def schema(self) -> pa.Schema:
        """The schema of its batches."""
        return self._batches[0].batch.schema

    @property
    def num_rows(self) -> int:
        """Rows of `batches`."""
        return self.meta.rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches, one for each that was ingested."""
        for each in self._batches:
            yield each.batch

    def release_pages(self) -> None:
        """There are none to give back."""


class SegmentReader:
    """Opens segments, and keeps the last ones open."""

    def __init__(self, disk: Disk, maps_max: int) -> None:
        self._disk = disk
        self._maps_max = maps_max
        self._views: OrderedDict[int, SegmentView] = OrderedDict()
        self.held: dict[int, HeldView] = {}
        """Segments that are no files."""

    async def open(self, segment: int) -> SegmentView:
        """Raises `OSError` or `FormatError`."""
        if (held := self.held.get(segment)) is not None:
            return held
        view = self._views.get(segment)
        if view is None:
            view = await self._disk.run("reads", lambda: self._load(segment))
            self._views[segment] = view
            while len(self._views) > self._maps_max:
                self._views.popitem(last=False)
        else:
            self._views.move_to_end(segment)
        return view

    def forget(self, segment: int) -> None:
        """Let go of a segment that is deleted, or became a file."""
        self._views.pop(segment, None)
        self.held.pop(segment, None)

    def _load(self, segment: int) -> SegmentView:
        return SegmentView(self._disk.read(segment_name(segment)))
