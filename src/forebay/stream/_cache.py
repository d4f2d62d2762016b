"""One cache of byte ranges for all readers of a process, with one budget.

A block is fetched once, however many readers want it: whoever comes second waits for the same request. Bytes
on their way count against the budget like bytes that are here. Where the budget is full of blocks on their
way, read-ahead is refused and a reader that needs a block waits its turn, so memory stays bounded by one
number whatever the number of readers. A block in use may outlive its place in the cache by as long as its
reader holds it: one block per reader.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from forebay.errors import UsageError
from forebay.storage import ObjectStore

__all__ = ["BlockCache", "shared_cache", "store_name"]

BLOCK_CACHE_BYTES_DEFAULT = 64 * 1024 * 1024
"""Budget of the cache that readers share unless they are given another. A larger one costs fresh memory for
each block of a long sequential read, which is slower than the read itself."""

BlockKey: TypeAlias = tuple[str, int, int]
"""Object, first byte, length. A length of 0: not known before it is here."""
Fetch: TypeAlias = Callable[[], Awaitable[bytes]]


class BlockCache:
    """Blocks by object and place, least recently used first to go."""

    def __init__(self, bytes_max: int = BLOCK_CACHE_BYTES_DEFAULT) -> None:
        if bytes_max < 1:
            raise UsageError(f"a cache of {bytes_max} bytes", hint="give it at least one byte")
        self.bytes_max = bytes_max
        self.held_bytes = 0
        """Bytes of the blocks that are here."""
        self.coming_bytes = 0
        """Bytes of the blocks that are on their way."""
        self.peak_bytes = 0
        """Most bytes of both that there ever were."""
        self.fetched_bytes = 0
        """Bytes that were asked for of the store."""
        self.hits = 0
        self._blocks: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._coming: dict[BlockKey, asyncio.Task[bytes]] = {}

    async def get(self, key: BlockKey, fetch: Fetch) -> bytes:
        """The block; `fetch` is called only where it is neither here nor on its way."""
        while True:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                self.hits += 1
                return block
            task = self._coming.get(key)
            if task is not None:
                self.hits += 1
                # Shielded: a reader that goes away must not cancel what others wait for.
                return await asyncio.shield(task)
            if self.coming_bytes == 0 or self.coming_bytes + key[2] <= self.bytes_max:
                return await asyncio.shield(self._begin(key, fetch))
            await asyncio.wait(set(self._coming.values()), return_when=asyncio.FIRST_COMPLETED)

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is here."""
        return key in self._blocks

    def knows(self, key: BlockKey) -> bool:
        """Whether the block is here or on its way."""
        return key in self._blocks or key in self._coming

    def ahead(self, key: BlockKey, fetch: Fetch) -> bool:
        """Begin to fetch a block that will be wanted. False where there is no room for it now."""
        if key in self._blocks or key in self._coming:
            return True
        if self.coming_bytes + key[2] > self.bytes_max // 2:
            return False
        _ = self._begin(key, fetch)
        return True

    def _begin(self, key: BlockKey, fetch: Fetch) -> asyncio.Task[bytes]:
        self.coming_bytes += key[2]
        self._evict(self.bytes_max - self.coming_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + self.coming_bytes)
        task = asyncio.ensure_future(self._fetch(key, fetch))
        self._coming[key] = task
        task.add_done_callback(_look_at)
        return task

    async def _fetch(self, key: BlockKey, fetch: Fetch) -> bytes:
        try:
            block = await fetch()
        except (Exception, asyncio.CancelledError):
            self._arrived(key)
            raise
        self._arrived(key)
        self.fetched_bytes += len(block)
        self._blocks[key] = block
        self.held_bytes += len(block)
        self._evict(self.bytes_max - self.coming_bytes)
        return block

    def _arrived(self, key: BlockKey) -> None:
        self.coming_bytes -= key[2]
        self._coming.pop(key, None)

    def _evict(self, room: int) -> None:
        while self._blocks and self.held_bytes > room:
            _, block = self._blocks.popitem(last=False)
            self.held_bytes -= len(block)

    async def close(self) -> None:
        """Let go of everything, requests under way included."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._blocks.clear()
        self.held_bytes = 0


def _look_at(task: asyncio.Task[bytes]) -> None:
    # A failed read-ahead is nobody's error: the reader that needs the block asks again and is told.
    if not task.cancelled():
        task.exception()


_shared: dict[int, BlockCache] = {}
_stores: weakref.WeakKeyDictionary[ObjectStore, int] = weakref.WeakKeyDictionary()
_store_numbers = itertools.count()


def store_name(store: ObjectStore) -> str:
    """What tells the objects of one store from those of another in a cache that both share."""
    number = _stores.get(store)
    if number is None:
        number = _stores[store] = next(_store_numbers)
    return str(number)


def shared_cache() -> BlockCache:
    """The cache of this process and event loop."""
    loop = asyncio.get_running_loop()
    for known in [key for key in _shared if key != id(loop)]:
        # A loop that is over leaves its cache behind; its blocks are of no use to another.
        del _shared[known]
    return _shared.setdefault(id(loop), BlockCache())
