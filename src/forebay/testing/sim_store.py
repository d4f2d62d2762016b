"""One actor's view of the simulated bucket.

The bucket is a real `MemoryStore`, the same for all actors; this class puts the actor's wire before it. The
memory store never waits, so each of its coroutines is run to its end in one go at the moment of effect.

Operations, as faults, latencies and counters name them: `put`, `get`, `get_if_changed`, `get_ranges`, `head`,
`list` (one per page) and `delete`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from forebay.errors import Closed
from forebay.kit.conditions import ANY
from forebay.storage import DeleteResult, MemoryStore, ObjectInfo, ObjectStore, StoredObject
from forebay.storage._api import LIST_PAGE_KEYS, Buffer, Range, When, copy_of
from forebay.testing.sim_link import Link
from forebay.testing.sim_loop import SimulationError

__all__ = ["SimStore", "at_once"]

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise SimulationError(f"{coroutine!r} waits for something; it cannot be one step of the simulation")


class SimStore(ObjectStore):
    """An `ObjectStore` over a shared `MemoryStore` and the wire of one actor."""

    def __init__(self, bucket: MemoryStore, link: Link) -> None:
        self.url = f"sim://{link.actor}"
        self.link = link
        """The wire: its faults, latencies and partitions."""
        self._bucket = bucket
        self.closed = False
        """Whether it refuses further use."""

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """Store `data`. May raise `OutcomeUnknown` whether it was done or not."""
        self._check_open()
        body = copy_of(data)
        return await self.link.call(
            "put", key, lambda: at_once(self._bucket.put(key, body, when)), write=True, sent=len(body)
        )

    async def get(self, key: str) -> StoredObject:
        """The whole object."""
        self._check_open()
        found = await self.link.call("get", key, lambda: at_once(self._bucket.get(key)), write=False)
        self._received("get", len(found.data))
        return found

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        """The object unless it is still at `version`."""
        self._check_open()
        found = await self.link.call(
            "get_if_changed", key, lambda: at_once(self._bucket.get_if_changed(key, version)), write=False
        )
        self._received("get_if_changed", len(found.data) if found else 0)
        return found

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Several ranges of one object."""
        self._check_open()
        wanted = list(ranges)
        found = await self.link.call(
            "get_ranges", key, lambda: at_once(self._bucket.get_ranges(key, wanted)), write=False
        )
        self._received("get_ranges", sum(map(len, found)))
        return found

    async def head(self, key: str) -> ObjectInfo:
        """Size, version and time."""
        self._check_open()
        return await self.link.call("head", key, lambda: at_once(self._bucket.head(key)), write=False)

    def list_pages(
        self, prefix: str = "", *, after: str = "", page_keys: int = LIST_PAGE_KEYS
    ) -> AsyncIterator[list[ObjectInfo]]:
        """One request per page, each from its own moment."""
        self._check_open()
        self._bucket.list_pages(prefix, after=after, page_keys=page_keys)  # wrong usage shows at once
        return self._pages(prefix, after, page_keys)

    async def _pages(self, prefix: str, after: str, page_keys: int) -> AsyncIterator[list[ObjectInfo]]:
        while True:
            self._check_open()
            effect = partial(self._page, prefix, after, page_keys)
            page = await self.link.call("list", prefix, effect, write=False)
            if page:
                after = page[-1].key
                yield page
            if len(page) < page_keys:
                return

    def _page(self, prefix: str, after: str, page_keys: int) -> list[ObjectInfo]:
        async def first() -> list[ObjectInfo]:
            pages = self._bucket.list_pages(prefix, after=after, page_keys=page_keys)
            async for page in pages:
                await pages.aclose()  # type: ignore[attr-defined]  # it is a generator
                return page
            return []

        return at_once(first())

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Delete many objects with one request."""
        self._check_open()
        wanted = list(keys)
        subject = wanted[0] if len(wanted) == 1 else f"{len(wanted)} keys"
        return await self.link.call(
            "delete", subject, lambda: at_once(self._bucket.delete(wanted)), write=True
        )

    async def close(self) -> None:
        """Refuse further use of this view."""
        self.closed = True

    def _received(self, operation: str, size: int) -> None:
        self.link.counter(operation)[2] += size

    def _check_open(self) -> None:
        if self.closed:
            raise Closed(f"the store {self.url} was closed", hint="ask the world for a new view")
