"""A whole fragment of the bucket, some megabytes at a time: for who restores it, and for who proves it.

Its index says where the chunks are, so they are fetched in runs of whole ones, the next run while this one is
looked at. Every chunk is checked against its checksum and against the index, and the header of the fragment
comes with the first run: what was handed out is what was once cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.formats import Corrupt, osiris_chunk
from forebay.formats import stream_filters as filters_format
from forebay.formats.osiris_file import check_segment_header
from forebay.formats.stream_filters import Filters
from forebay.formats.stream_fragment import DATA_AT, Trailer
from forebay.stream._lookup import FragmentRef
from forebay.stream._view import RemoteView

__all__ = ["FragmentRuns", "Run", "blooms_of"]

RUN_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of a fragment that are fetched and looked at together. A longer chunk is fetched by itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks that follow each other."""

    first: int
    """Number of the first of them in the fragment."""
    stop: int
    data: memoryview
    positions: npt.NDArray[np.int64]
    """Where they begin in `data`."""
    headers: npt.NDArray[Any]


class FragmentRuns:
    """The chunks of one fragment."""

    def __init__(self, view: RemoteView, ref: FragmentRef, trailer: Trailer, index: npt.NDArray[Any]) -> None:
        self.trailer = trailer
        self.index = index
        self.ids = np.append(index["chunk_id"].astype(np.int64), trailer.next_offset)
        """Of its chunks, and what follows them."""
        self._view = view
        self._key = view.keys.fragment(ref.offset)
        self._edges = np.append(index["position"].astype(np.int64), DATA_AT + trailer.data_bytes)

    @classmethod
    async def open(cls, view: RemoteView, ref: FragmentRef) -> FragmentRuns:
        """Its trailer and index, checked against each other and against the manifest."""
        return cls(view, ref, *await view.fragments.index(ref.offset, ref.data_bytes))

    async def runs(self, count: int | None = None) -> AsyncGenerator[Run]:
        """Its chunks in order; the first `count` of them where that is given."""
        spans = list(self._spans(len(self.index) if count is None else count))
        coming = [asyncio.create_task(self._fetch(*span)) for span in spans[:1]]
        try:
            for number, span in enumerate(spans):
                data = await coming.pop()
                coming += [asyncio.create_task(self._fetch(*span)) for span in spans[number + 1 : number + 2]]
                yield self._checked(*span, data)
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    def _spans(self, count: int) -> Iterator[tuple[int, int]]:
        first = 0
        while first < count:
            limit = self._edges[first] + RUN_BYTES_MAX
            stop = int(np.searchsorted(self._edges, limit, side="right")) - 1
            stop = min(max(stop, first + 1), count)
            yield first, stop
            first = stop

    async def _fetch(self, first: int, stop: int) -> memoryview:
        start = int(self._edges[first]) if first else 0
        data = await self._view.calls.get_range(self._key, start, int(self._edges[stop]) - start)
        return memoryview(data)

    def _checked(self, first: int, stop: int, data: memoryview) -> Run:
        if first == 0:
            self._check_header(data)
            data = data[DATA_AT:]
        at = int(self._edges[first])
        positions = self._edges[first:stop] - at
        headers = osiris_chunk.check_run(data, positions, what=self._key, at=at)
        same = (
            (headers["chunk_id"] == self.index["chunk_id"][first:stop])
            & (headers["timestamp"] == self.index["timestamp"][first:stop])
            & (headers["records"] == np.diff(self.ids[first : stop + 1]))
        )
        if not same.all():
            raise Corrupt(self._key, at, "its index does not name the chunks that are in it")
        return Run(first, stop, data, positions, headers)

    def _check_header(self, data: memoryview) -> None:
        try:
            check_segment_header(data)
        except Corrupt as error:
            raise Corrupt(self._key, error.position, error.reason) from error

    def filters(self, runs: list[tuple[npt.NDArray[Any], list[bytes]]]) -> Filters | None:
        """The filters of its chunks, from what `blooms_of` says of each run; None where none has one."""
        headers = np.concatenate([headers for headers, _ in runs])
        if not headers["bloom_bytes"].any():
            return None
        records = np.empty(len(headers), filters_format.RECORD_DTYPE)
        records["chunk_id"], records["type"] = headers["chunk_id"], headers["type"]
        records["position"], records["filter_bytes"] = self.index["position"], headers["bloom_bytes"]
        blooms = tuple(bloom for _, found in runs for bloom in found)
        trailer = self.trailer
        return Filters(trailer.first_offset, trailer.next_offset, trailer.data_bytes, records, blooms)


def blooms_of(run: Run) -> tuple[npt.NDArray[Any], list[bytes]]:
    """The headers of a run and the filters of its chunks, without its data."""
    starts = (run.positions + osiris_chunk.HEADER_BYTES).tolist()
    sizes = run.headers["bloom_bytes"].tolist()
    return run.headers, [bytes(run.data[at : at + size]) for at, size in zip(starts, sizes, strict=True)]
