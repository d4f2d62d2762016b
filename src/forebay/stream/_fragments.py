"""Fragments in the bucket: their ends, their indexes, and putting a new one only where none is.

A fragment's key is its first offset alone, so two writers may want the same key for different cuts of the
same log, or, after a failover, for different logs. Nothing is ever overwritten: whoever finds the key taken
looks at the last chunk of what is there. Epoch, chunk id and checksum as in the local log: it is adopted as
it is, and the rest is cut anew from its end. Otherwise the timelines have diverged, which is reported and not
repaired by guessing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import ForebayError, FormatError, NotFound, OutcomeUnknown, PreconditionFailed
from forebay.formats import Corrupt, osiris_chunk
from forebay.formats import stream_filters as filters_format
from forebay.formats import stream_fragment as fmt
from forebay.formats.osiris_chunk import ChunkHeader
from forebay.formats.stream_filters import Filters
from forebay.formats.stream_fragment import Trailer
from forebay.kit.conditions import ABSENT
from forebay.stream._cache import BlockCache, store_name
from forebay.stream._calls import Calls
from forebay.stream._errors import Diverged
from forebay.stream._fragment_source import FragmentSource
from forebay.stream._keys import StreamKeys
from forebay.stream._manifest import FragmentInfo

__all__ = ["FragmentStore", "Identity", "LocalIdentity", "Tail"]

Identity: TypeAlias = tuple[int, int, int]
"""Epoch, chunk id and checksum of a chunk."""
LocalIdentity: TypeAlias = Callable[[int], Identity | None]
"""The identity of the local chunk with this id, or None where there is none."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a fragment: its trailer and the header of its last chunk."""

    trailer: Trailer
    last: ChunkHeader

    @property
    def info(self) -> FragmentInfo:
        """What the manifest needs of it."""
        return FragmentInfo.from_trailer(self.trailer)


class FragmentStore:
    """The fragments of one stream."""

    def __init__(self, calls: Calls, keys: StreamKeys, cache: BlockCache | None = None) -> None:
        self._calls = calls
        self._keys = keys
        self._cache = cache
        self.generation = 0
        """Of the record that the reader goes by: after a repair the same key may hold another fragment."""

    def cache_name(self, offset: int) -> str:
        """What the fragment at `offset` is called in a cache."""
        return f"{store_name(self._calls.store)}/{self.generation}/{self._keys.fragment(offset)}"

    async def trailer(self, offset: int) -> Trailer:
        """The trailer of the fragment at `offset`. Raises `NotFound`."""
        key = self._keys.fragment(offset)
        size = await self._calls.size(key)
        return (await self._trailer_and_record(key, size, offset))[0]

    async def tail(self, offset: int) -> Tail:
        """Trailer and last chunk header of the fragment at `offset`. Raises `NotFound`."""
        key = self._keys.fragment(offset)
        size = await self._calls.size(key)
        trailer, record = await self._trailer_and_record(key, size, offset)
        at = int(record["position"])
        if not fmt.DATA_AT <= at <= fmt.DATA_AT + trailer.data_bytes - osiris_chunk.HEADER_BYTES:
            raise Corrupt(key, size - fmt.TAIL_BYTES, f"the last chunk is said to be at {at}")
        last = osiris_chunk.decode_header(await self._calls.get_range(key, at, osiris_chunk.HEADER_BYTES))
        if last.next_id != trailer.next_offset or at + last.length != fmt.DATA_AT + trailer.data_bytes:
            raise Corrupt(key, at, f"the last chunk does not end at offset {trailer.next_offset}")
        return Tail(trailer, last)

    async def _trailer_and_record(self, key: str, size: int, offset: int) -> tuple[Trailer, Any]:
        if size < fmt.TAIL_BYTES:
            raise Corrupt(key, size, f"{size} bytes are too short for a fragment")
        data = await self._calls.get_range(key, size - fmt.TAIL_BYTES, fmt.TAIL_BYTES)
        trailer = fmt.decode_trailer(data, size)
        if trailer.first_offset != offset:
            raise Corrupt(key, size - fmt.TRAILER_BYTES, f"first offset {trailer.first_offset}")
        return trailer, np.frombuffer(data, fmt.INDEX_DTYPE, count=1)[0]

    async def index(self, offset: int, data_bytes: int) -> tuple[Trailer, npt.NDArray[Any]]:
        """Trailer and index of a fragment whose chunks have `data_bytes`: two requests."""
        key = self._keys.fragment(offset)
        start = fmt.DATA_AT + data_bytes
        if self._cache is None:
            data = await self._index_bytes(key, start)
        else:
            name = f"{self.cache_name(offset)}#index"
            data = await self._cache.get((name, start, 0), lambda: self._index_bytes(key, start))
        size = start + len(data)
        trailer = fmt.decode_trailer(data, size)
        if trailer.first_offset != offset or trailer.data_bytes != data_bytes:
            raise Corrupt(key, size - fmt.TRAILER_BYTES, f"its trailer tells of another fragment: {trailer}")
        return trailer, fmt.decode_index(memoryview(data)[: -fmt.TRAILER_BYTES], trailer)

    async def _index_bytes(self, key: str, start: int) -> bytes:
        size = await self._calls.size(key)
        if size - start < fmt.TAIL_BYTES:
            raise Corrupt(key, size, f"{size} bytes, with chunks up to {start}")
        return await self._calls.get_range(key, start, size - start)

    async def filters(self, offset: int, data_bytes: int) -> Filters | None:
        """The filters of a fragment, or None where there are none that tell of exactly this one."""
        key = self._keys.filters(offset)
        try:
            if self._cache is None:
                data = await self._calls.get(key)
            else:
                name = f"{self.cache_name(offset)}#filters"
                data = await self._cache.get((name, 0, 0), lambda: self._calls.get(key))
            found = filters_format.decode(data)
        except (NotFound, FormatError):
            return None
        return found if (found.first_offset, found.data_bytes) == (offset, data_bytes) else None

    async def _put_filters(self, source: FragmentSource) -> None:
        """Beside a fragment that this writer has just put; they only save work, so what fails is left out."""
        key = self._keys.filters(source.trailer.first_offset)
        try:
            found = source.filters()
            if found is None:
                return
            data = filters_format.encode(found)
            await self._calls.again(lambda: self._calls.store.put(key, data))
        except ForebayError:
            return

    async def first(self) -> int | None:
        """Offset of the first fragment in the bucket: one request."""

        async def look() -> int | None:
            async for page in self._calls.store.list_pages(f"{self._keys.prefix}data/", page_keys=16):
                for info in page:
                    name = self._keys.parse(info.key)
                    if name is not None and name.what == "fragment":
                        return name.offset
            return None

        return await self._calls.look(look)

    async def chain(self, offset: int) -> list[FragmentInfo]:
        """The fragments that follow from `offset` on, each found by the end of the one before it."""
        found: list[FragmentInfo] = []
        while True:
            try:
                trailer = await self.trailer(offset)
            except NotFound:
                return found
            found.append(FragmentInfo.from_trailer(trailer))
            offset = trailer.next_offset

    async def put(self, source: FragmentSource, local: LocalIdentity) -> FragmentInfo:
        """Store a fragment, or adopt the one that is there; what the manifest should hold of it."""
        own = source.trailer
        key = self._keys.fragment(own.first_offset)

        async def attempt() -> FragmentInfo:
            try:
                await self._calls.store.put_source(key, source, ABSENT)
            except PreconditionFailed:
                return await self._adopt(source, local)
            except OutcomeUnknown:
                if not await self._calls.exists(key):
                    raise
                return await self._adopt(source, local)
            return FragmentInfo.from_trailer(own)

        info = await self._calls.again(attempt)
        if (info.next_offset, info.data_bytes) == (own.next_offset, own.data_bytes):
            await self._put_filters(source)
        return info

    async def _adopt(self, source: FragmentSource, local: LocalIdentity) -> FragmentInfo:
        own = source.trailer
        there = await self.tail(own.first_offset)
        identity = local(there.last.chunk_id)
        if identity is None and there.trailer.next_offset > own.next_offset:
            identity = await self._identity_inside(source, there)
        if identity != there.last.identity:
            raise Diverged(
                self._keys.stream,
                offset=there.last.chunk_id,
                reason=f"the bucket has chunk {there.last.identity}, the local log {identity}",
            )
        return there.info

    async def _identity_inside(self, source: FragmentSource, there: Tail) -> Identity | None:
        """Where the bucket is ahead of the local log: is our last chunk in what it has?"""
        last = source.last()
        offset = source.trailer.first_offset
        _, index = await self.index(offset, there.trailer.data_bytes)
        found = np.flatnonzero(index["chunk_id"] == last.chunk_id)
        if len(found) == 0:
            return None
        key = self._keys.fragment(offset)
        at = int(index["position"][found[0]])
        header = osiris_chunk.decode_header(await self._calls.get_range(key, at, osiris_chunk.HEADER_BYTES))
        return there.last.identity if header.identity == last.identity else None

    async def read(self, offset: int, start: int, length: int) -> bytes:
        """Bytes of the fragment at `offset`. Raises `NotFound`."""
        return await self._calls.get_range(self._keys.fragment(offset), start, length)
