"""What a store would cost: requests counted where they are made, priced by a table.

A wrapper around the store counts; nothing is listed in here to learn what is stored, since a listing costs as
much per request as a PUT (a broker does it now and then). Prices are the public list of one class and region,
for orientation only: they change, and discounts do not show here.

    store = CountingStore(store, metrics)       counts into `log.store_requests` and `log.store_bytes`
    estimate(metrics)                           {"requests": {...}, "request_dollars": ...}
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from forebay.kit.metrics import MetricsRegistry
from forebay.storage import ANY, DeleteResult, ObjectInfo, ObjectStore, StoredObject
from forebay.storage._api import LIST_PAGE_KEYS, Buffer, Range, When

__all__ = ["PRICES_PER_1000", "PRICE_BASIS", "CountingStore", "estimate"]

PRICES_PER_1000: Final = {
    "put": 0.005,
    "list": 0.005,
    "get": 0.0004,
    "range_get": 0.0004,
    "head": 0.0004,
    "delete": 0.0,
}
"""US dollars per 1,000 requests."""
PRICE_BASIS: Final = "S3 Standard, us-east-1, list prices"
GET_RANGES_PER_REQUEST: Final = 1
"""Ranges that one request fetches: S3 answers one range per GET."""


class CountingStore(ObjectStore):
    """A store that counts what is asked of it. Closing it closes the store inside."""

    def __init__(self, inner: ObjectStore, metrics: MetricsRegistry, *, counts_puts: bool = True) -> None:
        """`counts_puts`: False where the caller counts its own; their bytes and price are added here."""
        self._counts_puts = counts_puts
        self.url = inner.url
        self.gathers = inner.gathers
        self._inner = inner
        requests = metrics.counter("log.store_requests", "Requests to the store", labels=("operation",))
        size = metrics.counter("log.store_bytes", "Bytes to and from the store", labels=("direction",))
        self._requests = {name: requests.labels(name) for name in PRICES_PER_1000}
        self._sent, self._received = size.labels("sent"), size.labels("received")
        self._dollars = metrics.counter(
            "log.store_request_cost_dollars", f"Estimated cost of the requests: {PRICE_BASIS}"
        ).labels()

    def _count(self, operation: str, requests: int = 1) -> None:
        if operation != "put" or self._counts_puts:
            self._requests[operation].inc(requests)
        self._dollars.inc(requests * PRICES_PER_1000[operation] / 1000)

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """As the store inside."""
        self._count("put")
        self._sent.inc(len(data))
        return await self._inner.put(key, data, when)

    async def put_parts(self, key: str, parts: Sequence[bytes | memoryview], when: When = ANY) -> str:
        """As the store inside."""
        self._count("put")
        self._sent.inc(sum([len(part) for part in parts]))
        return await self._inner.put_parts(key, parts, when)

    async def get(self, key: str) -> StoredObject:
        """As the store inside."""
        self._count("get")
        found = await self._inner.get(key)
        self._received.inc(len(found.data))
        return found

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        """As the store inside."""
        self._count("get")
        found = await self._inner.get_if_changed(key, version)
        if found is not None:
            self._received.inc(len(found.data))
        return found

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """As the store inside."""
        self._count("range_get", max(1, len(ranges) // GET_RANGES_PER_REQUEST))
        pieces = await self._inner.get_ranges(key, ranges)
        self._received.inc(sum(len(piece) for piece in pieces))
        return pieces

    async def head(self, key: str) -> ObjectInfo:
        """As the store inside."""
        self._count("head")
        return await self._inner.head(key)

    async def list_pages(
        self, prefix: str = "", *, after: str = "", page_keys: int = LIST_PAGE_KEYS
    ) -> AsyncIterator[list[ObjectInfo]]:
        """As the store inside."""
        self._count("list")
        async for page in self._inner.list_pages(prefix, after=after, page_keys=page_keys):
            yield page
            if len(page) >= page_keys:
                self._count("list")

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """As the store inside."""
        self._count("delete")
        return await self._inner.delete(keys)

    async def close(self) -> None:
        """Close the store inside."""
        await self._inner.close()


def estimate(metrics: MetricsRegistry) -> dict[str, Any]:
    """Requests so far and what they would cost. Sums over processes are fine."""
    family = metrics.counter("log.store_requests", "Requests to the store", labels=("operation",))
    counts = {labels[0]: int(series.value) for labels, series in family.series()}
    dollars = sum(PRICES_PER_1000.get(name, 0.0) * count / 1000 for name, count in counts.items())
    return {"requests": counts, "request_dollars": dollars, "basis": PRICE_BASIS}
