"""A coordinator that counts what is asked of it, by operation. Closing it closes the one inside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from forebay.coordination import Coordinator, Operation, Record, Session, Watch, WriteResult
from forebay.kit.metrics import MetricsRegistry

__all__ = ["CountingCoordinator"]

_OPERATIONS = ("get", "write", "scan", "list", "lookup", "session", "watch")


class CountingCoordinator(Coordinator):
    """Counts into `coordination.requests`. A watch counts once, when it begins."""

    def __init__(self, inner: Coordinator, metrics: MetricsRegistry) -> None:
        self.url = inner.url
        self._inner = inner
        family = metrics.counter("coordination.requests", "Round trips to the coordinator", ("operation",))
        self._counts = {name: family.labels(name) for name in _OPERATIONS}
        self._operations = metrics.counter("coordination.write_operations", "Operations of all writes")

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """As the one inside."""
        self._counts["get"].inc()
        return await self._inner.get(key, partition_key=partition_key)

    async def get_many(self, keys: Sequence[tuple[str, str | None]]) -> Sequence[Record | None]:
        """As the one inside."""
        self._counts["get"].inc()
        return await self._inner.get_many(keys)

    async def get_and_ceiling(
        self, key: str, start: str, *, partition_key: str
    ) -> tuple[Record | None, Record | None]:
        """As the one inside."""
        self._counts["lookup"].inc()
        return await self._inner.get_and_ceiling(key, start, partition_key=partition_key)

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        """As the one inside."""
        self._counts["write"].inc()
        self._operations.inc(len(operations))
        return await self._inner.write(operations)

    async def range_scan(
        self, start: str, end: str, *, limit: int = 1_000, partition_key: str | None = None
    ) -> list[Record]:
        """As the one inside."""
        self._counts["scan"].inc()
        return await self._inner.range_scan(start, end, limit=limit, partition_key=partition_key)

    async def ceiling(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """As the one inside."""
        self._counts["lookup"].inc()
        return await self._inner.ceiling(key, partition_key=partition_key)

    async def floor(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """As the one inside."""
        self._counts["lookup"].inc()
        return await self._inner.floor(key, partition_key=partition_key)

    async def higher(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """As the one inside."""
        self._counts["lookup"].inc()
        return await self._inner.higher(key, partition_key=partition_key)

    async def lower(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """As the one inside."""
        self._counts["lookup"].inc()
        return await self._inner.lower(key, partition_key=partition_key)

    async def open_session(self, timeout_ms: int = 15_000) -> Session:
        """As the one inside."""
        self._counts["session"].inc()
        return await self._inner.open_session(timeout_ms)

    def watch(self, directory: str) -> AbstractAsyncContextManager[Watch]:
        """As the one inside."""
        self._counts["watch"].inc()
        return self._inner.watch(directory)

    async def close(self) -> None:
        """Close the one inside."""
        await self._inner.close()

    async def list(
        self, start: str, end: str, *, limit: int = 1_000, partition_key: str | None = None
    ) -> list[str]:
        """As the one inside."""
        self._counts["list"].inc()
        return await self._inner.list(start, end, limit=limit, partition_key=partition_key)
