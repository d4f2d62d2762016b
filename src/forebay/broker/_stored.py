"""What the log takes up in the store, and what that costs per month: a listing now and then.

A listing has a price (a request per thousand objects), so nobody lists unasked: only where somebody reads the
metrics, and the last listing is older than `storage_scan_ms`, a new one begins. It runs beside the answer,
which shows what the one before it found. Every broker of a deployment sees the same objects: take the maximum
over brokers, never the sum.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from forebay.errors import ForebayError
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.log._keys import ROOT
from forebay.storage import ObjectStore

__all__ = ["Stored"]

DOLLARS_PER_GIB_MONTH: Final = 0.023
"""US dollars per GiB and month, of the same list as the prices of requests."""
SCAN_OBJECTS_MAX: Final = 5_000_000
"""Objects that one scan looks at; a larger log is shown as `complete: false`, with what was seen."""


class Stored:
    """The last listing of the log, and when to make the next."""

    def __init__(
        self, store: ObjectStore, metrics: MetricsRegistry, *, clock: Clock, interval_ms: int
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._interval_s = interval_ms / 1000
        self._begun_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.found: dict[str, Any] | None = None
        """Bytes, objects and dollars; None before the first scan has ended."""
        self._failures = metrics.counter(
            "billing.scan_failures", "Listings of the store that failed"
        ).labels()

    def look(self) -> None:
        """Begin a scan, if the last one is too old."""
        now = self._clock.monotonic()
        if self._interval_s <= 0 or self._task is not None or now - self._begun_at < self._interval_s:
            return
        self._begun_at = now
        self._task = asyncio.get_running_loop().create_task(self._scan(), name="forebay stored bytes")

    async def close(self) -> None:
        """End a scan that is under way."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _scan(self) -> None:
        size = objects = 0
        try:
            async for page in self._store.list_pages(f"{ROOT}/"):
                objects += len(page)
                size += sum([info.size for info in page])
                if objects >= SCAN_OBJECTS_MAX:
                    break
        except ForebayError:
            self._failures.inc()
        else:
            self._show(size, objects)
        finally:
            self._task = None

    def _show(self, size: int, objects: int) -> None:
        dollars = size / (1 << 30) * DOLLARS_PER_GIB_MONTH
        self.found = {
            "stored_bytes": size,
            "stored_objects": objects,
            "storage_dollars_per_month": dollars,
            "complete": objects < SCAN_OBJECTS_MAX,
            "scanned_at_ms": self._clock.now_ms(),
        }
        gauge = self._metrics.gauge
        gauge("billing.stored_bytes", "Bytes of the log in the store; take the maximum over brokers").set(
            size
        )
        gauge("billing.stored_objects", "Objects of the log; take the maximum over brokers").set(objects)
        gauge("billing.storage_dollars_per_month", "What these bytes cost, estimated").set(dollars)
