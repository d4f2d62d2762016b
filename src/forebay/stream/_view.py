"""The remote tier as a reader sees it: the current root, and the chunks of its fragments.

The root is read when somebody asks for it and kept until it turns out to be old: data is wanted beyond its
end, or an object that it names is gone. A root that cannot be read is an error, never an empty stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.coordination import Coordinator
from forebay.formats import Corrupt, osiris_chunk
from forebay.formats.osiris_bloom import Matcher
from forebay.formats.osiris_chunk import HEADER_BYTES, Chunk, ChunkHeader
from forebay.formats.stream_fragment import DATA_AT
from forebay.stream._cache import BlockCache, BlockKey
from forebay.stream._calls import Calls
from forebay.stream._config import ReaderConfig
from forebay.stream._errors import RootMissing, StreamDeleted, StreamMissing
from forebay.stream._fragments import FragmentStore
from forebay.stream._keys import StreamKeys
from forebay.stream._lookup import FragmentRef, Lookup
from forebay.stream._manifest import EMPTY, Manifest
from forebay.stream._nodes import NodeStore
from forebay.stream._pointer import CoordinatorPointer, Held, read_current

__all__ = ["RemoteView"]

ROOT_ATTEMPTS_MAX = 10
"""How often a root that vanished between two reads is looked up anew."""
AHEAD_REQUESTS_MAX = 32
"""Most range requests of one reader that are on their way: small fragments must not flood the store."""
_NONE = memoryview(b"")


@dataclass(frozen=True, slots=True)
class _Block:
    ref: FragmentRef
    start: int
    length: int


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
                raise StreamMissing(self.keys.stream)
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

    async def chunks(self, chunk_id: int, matcher: Matcher | None) -> AsyncIterator[Chunk | ChunkHeader]:
        """The chunks from `chunk_id` on to the end of the manifest; the header alone where one cannot match.

        Raises `NotFound` where retention removed a fragment meanwhile.
        """
        blocks = _BlockReader(self, self._config, chunk_id)
        async for ref in self.lookup.from_offset(self.manifest, chunk_id):
            start = DATA_AT
            if ref.offset < chunk_id:
                start = await self._position(ref, chunk_id)
            end = DATA_AT + ref.data_bytes
            while start < end:
                header, chunk = await self._chunk(blocks, ref, start, end, matcher)
                start += header.length
                yield header if chunk is None else chunk

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
        header = osiris_chunk.decode_header(await blocks.read(ref, start, HEADER_BYTES))
        if header.length > end - start:
            raise Corrupt(key, start, f"a chunk of {header.length} bytes where {end - start} are left")
        if matcher is not None and header.type == osiris_chunk.USER:
            bloom = _NONE
            if header.bloom_bytes:
                bloom = await blocks.read(ref, start + HEADER_BYTES, header.bloom_bytes)
            if not matcher.matches(bloom):
                return header, None
        data = await blocks.read(ref, start, header.length)
        return header, osiris_chunk.decode(data, check=self._config.check_crc)

    def fetch_block(self, block: _Block) -> tuple[BlockKey, Any]:
        """The cache's name of a block, and how to get it."""
        key = self.keys.fragment(block.ref.offset)
        name = self.fragments.cache_name(block.ref.offset)
        return (name, block.start, block.length), lambda: self.calls.get_range(key, block.start, block.length)


class _BlockReader:
    """Bytes of fragments in order, through the cache, with the following blocks asked for ahead."""

    def __init__(self, view: RemoteView, config: ReaderConfig, chunk_id: int) -> None:
        self._view = view
        self._block_bytes = config.block_bytes
        self._ahead_bytes = config.ahead_bytes
        self._refs = view.lookup.from_offset(view.manifest, chunk_id)
        self._planned: deque[_Block] = deque()
        self._planned_bytes = 0
        self._plan_ended = False
        self._ref: FragmentRef | None = None
        self._start = 0
        self._data = _NONE

    async def read(self, ref: FragmentRef, start: int, length: int) -> memoryview:
        """Bytes of one fragment: a view of one block, or a join of several."""
        at = start - self._start
        if ref == self._ref and at >= 0 and at + length <= len(self._data):
            return self._data[at : at + length]
        pieces: list[memoryview] = []
        end = start + length
        while start < end:
            await self._load(ref, start)
            piece = self._data[start - self._start : end - self._start]
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    async def _load(self, ref: FragmentRef, position: int) -> None:
        if ref == self._ref and 0 <= position - self._start < len(self._data):
            return
        block = _block_of(ref, position, self._block_bytes)
        key, fetch = self._view.fetch_block(block)
        if self._ahead_bytes:
            await self._look_ahead(block)
        data = await self._view.cache.get(key, fetch)
        self._ref, self._start, self._data = ref, block.start, memoryview(data)

    async def _look_ahead(self, current: _Block) -> None:
        """Ask for the blocks behind the current one, within bounds in bytes and in requests.

        What has arrived does not count as on its way, so a reader that is busy with a batch of blocks has the
        next batch coming meanwhile; as many bytes may wait for it as may be on their way.
        """
        self._drop_planned(current)
        self._view.cache.ahead(*self._view.fetch_block(current))
        while (
            not self._plan_ended
            and self._planned_bytes < 2 * self._ahead_bytes
            and len(self._planned) < AHEAD_REQUESTS_MAX
        ):
            ref = await anext(self._refs, None)
            if ref is None:
                self._plan_ended = True
                return
            for block in _blocks_of(ref, self._block_bytes):
                if (block.ref.offset, block.start) > (current.ref.offset, current.start):
                    self._planned.append(block)
                    self._planned_bytes += block.length
        cache, coming, known = self._view.cache, 0, 0
        for block in self._planned:
            key, fetch = self._view.fetch_block(block)
            known += block.length
            if known > 2 * self._ahead_bytes:
                return
            if not cache.holds(key):
                coming += block.length
                if coming > self._ahead_bytes or not cache.ahead(key, fetch):
                    return

    def _drop_planned(self, current: _Block) -> None:
        here = (current.ref.offset, current.start)
        while self._planned and (self._planned[0].ref.offset, self._planned[0].start) <= here:
            self._planned_bytes -= self._planned.popleft().length


def _block_of(ref: FragmentRef, position: int, block_bytes: int) -> _Block:
    start = position // block_bytes * block_bytes
    return _Block(ref, start, min(block_bytes, DATA_AT + ref.data_bytes - start))


def _blocks_of(ref: FragmentRef, block_bytes: int) -> list[_Block]:
    end = DATA_AT + ref.data_bytes
    return [_block_of(ref, start, block_bytes) for start in range(0, end, block_bytes)]
