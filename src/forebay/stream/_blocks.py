"""Bytes of fragments in order, through the shared cache, with the following blocks asked for ahead.

Blocks lie on a grid, so that all readers of a fragment want the same ones and each is fetched once. A reader
that has just attached does not know how much it will want: its first block is small, and blocks double until
they reach the grid. Where the whole block of the grid is here or on its way already, that one is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from forebay.formats.stream_fragment import DATA_AT
from forebay.stream._cache import BlockCache, BlockKey
from forebay.stream._config import ReaderConfig
from forebay.stream._lookup import FragmentRef

__all__ = ["Block", "BlockReader", "FetchBlock"]

AHEAD_REQUESTS_MAX = 32
"""Most range requests of one reader that are on their way: small fragments must not flood the store."""
FIRST_BLOCK_BYTES = 256 * 1024
"""Bytes of the first block of a reader that has just attached."""
_NONE = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Block:
    """A range of one fragment."""

    ref: FragmentRef
    start: int
    length: int

    @property
    def end(self) -> int:
        """Where it ends in the fragment."""
        return self.start + self.length


FetchBlock: TypeAlias = Callable[[Block], tuple[BlockKey, Callable[[], Awaitable[bytes]]]]
"""The cache's name of a block, and how to get it."""


class BlockReader:
    """Reads forward. With `ahead` of None it looks ahead in the fragment it is in and no further."""

    def __init__(
        self,
        cache: BlockCache,
        fetch: FetchBlock,
        config: ReaderConfig,
        ahead: AsyncIterator[FragmentRef] | None,
    ) -> None:
        self._cache = cache
        self._fetch = fetch
        self._block_bytes = config.block_bytes
        self._ahead_bytes = config.ahead_bytes
        self._refs = ahead
        self._entered: FragmentRef | None = None
        self._ramp: list[Block] = []
        self._planned: deque[Block] = deque()
        self._planned_bytes = 0
        self._plan_ended = False
        self._plan_ref: FragmentRef | None = None
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

    async def rest(self, ref: FragmentRef, start: int) -> memoryview:
        """What the block with the byte at `start` holds from there on."""
        await self._load(ref, start)
        return self._data[start - self._start :]

    async def _load(self, ref: FragmentRef, position: int) -> None:
        if ref == self._ref and 0 <= position - self._start < len(self._data):
            return
        if self._entered is None:
            self._entered = ref
            if not self._cache.knows(self._fetch(_on_grid(ref, position, self._block_bytes))[0]):
                self._ramp = list(_ramp(ref, position, self._block_bytes))
        block = self._block_at(ref, position)
        key, fetch = self._fetch(block)
        if self._ahead_bytes:
            await self._look_ahead(block)
        data = await self._cache.get(key, fetch)
        self._ref, self._start, self._data = ref, block.start, memoryview(data)

    def _block_at(self, ref: FragmentRef, position: int) -> Block:
        if ref == self._entered:
            for block in self._ramp:
                if block.start <= position < block.end:
                    return block
        return _on_grid(ref, position, self._block_bytes)

    def _blocks_from(self, ref: FragmentRef, position: int) -> Iterator[Block]:
        end = DATA_AT + ref.data_bytes
        while position < end:
            block = self._block_at(ref, position)
            yield block
            position = block.end

    async def _look_ahead(self, current: Block) -> None:
        """Ask for the blocks behind the current one, within bounds in bytes and in requests.

        What has arrived does not count as on its way, so a reader that is busy with a batch of blocks has the
        next batch coming meanwhile; as many bytes may wait for it as may be on their way.
        """
        self._drop_planned(current)
        self._cache.ahead(*self._fetch(current))
        await self._plan(current)
        coming = known = 0
        for block in self._planned:
            key, fetch = self._fetch(block)
            known += block.length
            if known > 2 * self._ahead_bytes:
                return
            if not self._cache.holds(key):
                coming += block.length
                if coming > self._ahead_bytes or not self._cache.ahead(key, fetch):
                    return

    async def _plan(self, current: Block) -> None:
        if self._plan_ref is None or (self._refs is None and self._plan_ref != current.ref):
            self._plan_ref = current.ref
            self._add(self._blocks_from(current.ref, current.end))
        while (
            self._refs is not None
            and not self._plan_ended
            and self._planned_bytes < 2 * self._ahead_bytes
            and len(self._planned) < AHEAD_REQUESTS_MAX
        ):
            ref = await anext(self._refs, None)
            self._plan_ended = ref is None
            if ref is not None and ref.offset > current.ref.offset:
                self._add(self._blocks_from(ref, 0))

    def _add(self, blocks: Iterator[Block]) -> None:
        for block in blocks:
            self._planned.append(block)
            self._planned_bytes += block.length

    def _drop_planned(self, current: Block) -> None:
        here = (current.ref.offset, current.start)
        while self._planned and (self._planned[0].ref.offset, self._planned[0].start) <= here:
            self._planned_bytes -= self._planned.popleft().length


def _on_grid(ref: FragmentRef, position: int, block_bytes: int) -> Block:
    start = position // block_bytes * block_bytes
    return Block(ref, start, min(block_bytes, DATA_AT + ref.data_bytes - start))


def _ramp(ref: FragmentRef, position: int, block_bytes: int) -> Iterator[Block]:
    """Blocks from `position` on that double, up to where the grid takes over."""
    size, end = FIRST_BLOCK_BYTES, DATA_AT + ref.data_bytes
    at = position // size * size
    while size < block_bytes and at < end:
        yield Block(ref, at, min(size, end - at))
        at += size
        while size < block_bytes and at % (2 * size) == 0:
            size *= 2
