"""The remote tier as a reader sees it: the current root, and the chunks of its fragments.

The root is read when somebody asks for it and kept until it turns out to be old: data is wanted beyond its
end, or an object that it names is gone. A root that cannot be read is an error, never an empty stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import numpy as np

from forebay.coordination import Coordinator
from forebay.formats import Corrupt, osiris_chunk
from forebay.formats.osiris_bloom import Matcher
from forebay.formats.osiris_chunk import HEADER_BYTES, Chunk, ChunkHeader
from forebay.formats.osiris_file import check_segment_header
from forebay.formats.stream_filters import Filters
from forebay.formats.stream_fragment import DATA_AT
from forebay.stream._blocks import Block, BlockReader
from forebay.stream._cache import BlockCache, BlockKey
from forebay.stream._calls import Calls
from forebay.stream._config import ReaderConfig
from forebay.stream._errors import RecordMissing, RootMissing, StreamDeleted, StreamMissing
from forebay.stream._fragments import FragmentStore
from forebay.stream._keys import StreamKeys
from forebay.stream._lookup import FragmentRef, Lookup
from forebay.stream._manifest import EMPTY, Manifest
from forebay.stream._nodes import NodeStore
from forebay.stream._pointer import CoordinatorPointer, Held, read_current

__all__ = ["RemoteView", "Skipped"]

ROOT_ATTEMPTS_MAX = 10
"""How often a root that vanished between two reads is looked up anew."""
_NONE = memoryview(b"")


class Skipped(NamedTuple):
    """Chunks that cannot match, and were not fetched."""

    chunk_id: int
    next_id: int
    type: int = -1
    """Of no kind that is delivered."""


class RemoteView:
    """One stream in the bucket, for reading."""

    def __init__(
        self,
        stream: str,
        calls: Calls,
        *,
        coordinator: Coordinator | None,
        cache: BlockCache,
        config: ReaderConfig,
    ) -> None:
        self.keys = StreamKeys(stream)
        self.calls = calls
        self.cache = cache
        self.manifest: Manifest = EMPTY
        self.held: Held | None = None
        self.nodes = NodeStore(calls, self.keys, cache)
        self.fragments = FragmentStore(calls, self.keys, cache)
        self.lookup = Lookup(self.nodes, self.fragments)
        self._pointer = None if coordinator is None else CoordinatorPointer(calls, self.keys, coordinator)
        self._config = config

    async def refresh(self) -> bool:
        """Read the record, and its root if it is another one. Whether anything changed."""
        for attempt in range(ROOT_ATTEMPTS_MAX):
            held = await self._record()
            if held is None:
                lost = await self.fragments.first() is not None
                raise RecordMissing(self.keys.stream) if lost else StreamMissing(self.keys.stream)
            if held.head.deleted:
                raise StreamDeleted(self.keys.stream)
            if self.held is not None and held.head == self.held.head:
                return False
            try:
                root = await self.nodes.root_or_error(held.head.root) if held.head.uid else EMPTY
            except RootMissing:
                if attempt + 1 == ROOT_ATTEMPTS_MAX:
                    raise
                await self.calls.clock.sleep(self.calls.policy.wait_s(attempt + 1, self.calls.random))
                continue
            self.held, self.manifest = held, root
            self.fragments.generation = held.head.generation
            return True
        raise AssertionError("unreachable")

    async def _record(self) -> Held | None:
        held = None if self._pointer is None else await self._pointer.read()
        return held or await read_current(self.calls, self.keys)

    # Places.

    async def chunk_at_offset(self, offset: int) -> int:
        """Id of the chunk that holds `offset`, or of the next one where it lies in a gap."""
        ref = await self.lookup.by_offset(self.manifest, offset)
        assert ref is not None
        if offset <= ref.offset:
            return ref.offset
        trailer, index = await self.lookup.index(ref)
        if offset >= trailer.next_offset:
            async for following in self.lookup.from_offset(self.manifest, offset):
                if following.offset > offset:
                    return following.offset
            return self.manifest.next_offset
        at = int(np.searchsorted(index["chunk_id"], np.uint64(max(offset, 0)), side="right")) - 1
        return int(index["chunk_id"][max(at, 0)])

    async def chunk_at_timestamp(self, timestamp: int) -> int | None:
        """Id of the first chunk at or after `timestamp`, or None where all are before it."""
        if not self.manifest.empty and timestamp <= self.manifest.first_timestamp:
            return self.manifest.first_offset
        ref = await self.lookup.by_timestamp(self.manifest, timestamp)
        if ref is None:
            return None
        _, index = await self.lookup.index(ref)
        later = np.flatnonzero(index["timestamp"] >= timestamp)
        return int(index["chunk_id"][later[0]]) if len(later) else None

    async def last_user_chunk(self, below: int) -> int | None:
        """Id of the last user chunk below an offset, or None where there is none."""
        while below > self.manifest.first_offset and not self.manifest.empty:
            ref = await self.lookup.by_offset(self.manifest, below - 1)
            assert ref is not None
            _, index = await self.lookup.index(ref)
            for record in index[index["chunk_id"] < below][::-1]:
                header = await self.lookup.header_at(ref, int(record["position"]))
                if header.type == osiris_chunk.USER:
                    return header.chunk_id
            below = ref.offset
        return None

    # Chunks.

    async def header_from(self, chunk_id: int) -> ChunkHeader | None:
        """The header of the first user chunk from a chunk on, by small requests. None where there is none."""
        async for ref in self.lookup.from_offset(self.manifest, chunk_id):
            start = DATA_AT if ref.offset >= chunk_id else await self._position(ref, chunk_id)
            while start < DATA_AT + ref.data_bytes:
                header = await self.lookup.header_at(ref, start)
                if header.type == osiris_chunk.USER:
                    return header
                start += header.length
        return None

    async def chunks(
        self, chunk_id: int, matcher: Matcher | None
    ) -> AsyncIterator[Chunk | ChunkHeader | Skipped]:
        """The chunks from `chunk_id` on to the end of the manifest; less where one cannot match.

        Raises `NotFound` where retention removed a fragment meanwhile.
        """
        ahead = None if matcher is not None else self.lookup.from_offset(self.manifest, chunk_id)
        blocks = BlockReader(self.cache, self.fetch_block, self._config, ahead)
        async for ref in self.lookup.from_offset(self.manifest, chunk_id):
            filters = None if matcher is None else await self.fragments.filters(ref.offset, ref.data_bytes)
            if filters is not None and matcher is not None:
                async for found in self._matching(ref, filters, chunk_id, matcher):
                    yield found
                continue
            start = DATA_AT
            if ref.offset < chunk_id:
                start = await self._position(ref, chunk_id)
            end = DATA_AT + ref.data_bytes
            while start < end:
                if matcher is None:
                    # A block at a time, without a coroutine for each chunk.
                    data = await self._rest(blocks, ref, start)
                    for whole in self._whole_chunks(data, ref, start):
                        start += whole.header.length
                        yield whole
                    if start == end:
                        break
                header, chunk = await self._chunk(blocks, ref, start, end, matcher)
                start += header.length
                yield header if chunk is None else chunk

    async def _rest(self, blocks: BlockReader, ref: FragmentRef, start: int) -> memoryview:
        """The rest of a block; where a fragment is entered, its header is looked at."""
        if start != DATA_AT:
            return await blocks.rest(ref, start)
        data = await blocks.rest(ref, 0)
        try:
            check_segment_header(data)
        except Corrupt as error:
            raise self._damaged(ref, 0, error) from error
        return data[DATA_AT:]

    def _whole_chunks(self, data: memoryview, ref: FragmentRef, start: int) -> Iterator[Chunk]:
        """The chunks from the beginning of `data` on, up to one that is not all in it."""
        at, last, check = 0, len(data) - HEADER_BYTES, self._config.check_crc
        try:
            while at <= last:
                chunk = osiris_chunk.decode_whole(data, at, check=check)
                if chunk is None:
                    return
                at += chunk.header.length
                yield chunk
        except Corrupt as error:
            raise self._damaged(ref, start, error) from error

    def _damaged(self, ref: FragmentRef, start: int, error: Corrupt) -> Corrupt:
        """Which object it is, and where in it."""
        return Corrupt(self.keys.fragment(ref.offset), start + error.position, error.reason)

    async def _matching(
        self, ref: FragmentRef, filters: Filters, chunk_id: int, matcher: Matcher
    ) -> AsyncIterator[Chunk | Skipped]:
        """Of one fragment only the chunks that may match are fetched, neighbours together."""
        ids = [*filters.chunks["chunk_id"].tolist(), filters.next_offset]
        edges = [*filters.chunks["position"].tolist(), DATA_AT + ref.data_bytes]
        place = max(chunk_id, ref.offset)
        for first, stop in _runs(filters, edges, place, matcher, self._config.block_bytes):
            if ids[first] > place:
                yield Skipped(place, ids[first])
            key, fetch = self.fetch_block(Block(ref, edges[first], edges[stop] - edges[first]))
            data = memoryview(await self.cache.get(key, fetch))
            for number in range(first, stop):
                try:
                    at = edges[number] - edges[first]
                    chunk = osiris_chunk.decode(data, at, check=self._config.check_crc)
                except Corrupt as error:
                    raise self._damaged(ref, edges[first], error) from error
                if chunk.header.chunk_id != ids[number]:
                    raise Corrupt(self.keys.fragment(ref.offset), edges[number], "the filters tell otherwise")
                yield chunk
            place = ids[stop]
        if place < filters.next_offset:
            yield Skipped(place, filters.next_offset)

    async def _position(self, ref: FragmentRef, chunk_id: int) -> int:
        _, index = await self.lookup.index(ref)
        later = np.flatnonzero(index["chunk_id"] >= chunk_id)
        return int(index["position"][later[0]]) if len(later) else DATA_AT + ref.data_bytes

    async def _chunk(
        self, blocks: Any, ref: FragmentRef, start: int, end: int, matcher: Matcher | None
    ) -> tuple[ChunkHeader, Chunk | None]:
        key = self.keys.fragment(ref.offset)
        if end - start < HEADER_BYTES:
            raise Corrupt(key, start, "the chunks end inside of a header")
        head = await blocks.read(ref, start, HEADER_BYTES)
        try:
            header = osiris_chunk.decode_header(head)
        except Corrupt as error:
            raise self._damaged(ref, start, error) from error
        if header.length > end - start:
            raise Corrupt(key, start, f"a chunk of {header.length} bytes where {end - start} are left")
        if matcher is not None and header.type == osiris_chunk.USER:
            bloom = _NONE
            if header.bloom_bytes:
                bloom = await blocks.read(ref, start + HEADER_BYTES, header.bloom_bytes)
            if not matcher.matches(bloom):
                return header, None
        data = await blocks.read(ref, start, header.length)
        try:
            return header, osiris_chunk.decode(data, check=self._config.check_crc)
        except Corrupt as error:
            raise self._damaged(ref, start, error) from error

    def fetch_block(self, block: Block) -> tuple[BlockKey, Any]:
        """The cache's name of a block, and how to get it."""
        key = self.keys.fragment(block.ref.offset)
        name = self.fragments.cache_name(block.ref.offset)
        return (name, block.start, block.length), lambda: self.calls.get_range(key, block.start, block.length)


def _runs(
    filters: Filters, edges: list[int], place: int, matcher: Matcher, bytes_max: int
) -> Iterator[tuple[int, int]]:
    """Neighbouring chunks from `place` on that may match, as numbers from and to, each run one request."""
    kinds = filters.chunks["type"].tolist()
    first = int(np.searchsorted(filters.chunks["chunk_id"], np.uint64(place)))
    wanted = [
        number
        for number in range(first, len(kinds))
        if kinds[number] == osiris_chunk.USER and matcher.matches(filters.blooms[number])
    ]
    while wanted:
        stop = 1
        while (
            stop < len(wanted)
            and wanted[stop] == wanted[stop - 1] + 1
            and edges[wanted[stop] + 1] - edges[wanted[0]] <= bytes_max
        ):
            stop += 1
        yield wanted[0], wanted[stop - 1] + 1
        wanted = wanted[stop:]
