"""What the way through a store does not cost: modules nobody asked for, and workers that wake for nothing."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from tests.dataflow.otlp_kit import logs

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Parcel, record_batch
from forebay.dataflow._pump import WORKERS, Pump
from forebay.kit.clock import SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import Delivery, Quiver

THROUGH_A_STORE = """
import asyncio, sys
from forebay.dataflow._parcels import Parcel, parcel_of, record_batch
from forebay.quiver import Quiver

async def through(path):
    async with Quiver(path) as quiver:
        await quiver.register("out")
        parcel = Parcel("logs", (b"abc", b"de"), 5, 5)
        await quiver.ingest(record_batch([parcel, parcel]), signal="logs")
        await quiver.flush()
        async with await quiver.next("out") as delivery:
            found = parcel_of(delivery.view, "store")
            assert [bytes(each) for each in found.requests] == [b"abc", b"de"] * 2
            assert (found.items, found.size) == (10, 10)
            await delivery.ack()

asyncio.run(through(sys.argv[1]))
assert "pandas" not in sys.modules
"""


def test_a_request_passes_through_a_store_without_pandas(tmp_path: Path) -> None:
    # Importing it takes half a second, in which the first request, and whoever came after it, would wait.
    subprocess.run([sys.executable, "-c", THROUGH_A_STORE, str(tmp_path)], check=True)


class WatchedQuiver(Quiver):
    """Counts who waits for a segment."""

    waiting = waiting_most = 0

    async def next(self, name: str, timeout_s: float | None = None) -> Delivery | None:
        self.waiting += 1
        self.waiting_most = max(self.waiting, self.waiting_most)
        try:
            return await super().next(name, timeout_s)
        finally:
            self.waiting -= 1


class AllAtOnce:
    """Takes a parcel when all workers have brought one."""

    def __init__(self) -> None:
        self._barrier = asyncio.Barrier(WORKERS)

    async def take(self, parcel: Parcel) -> None:
        await self._barrier.wait()


async def test_one_worker_waits_for_a_segment_and_all_of_them_carry(tmp_path: Path) -> None:
    async with WatchedQuiver(tmp_path) as quiver:
        await quiver.register("out")
        pump = Pump(
            quiver,
            "out",
            "store",
            AllAtOnce(),
            clock=SystemClock(),
            randomness=random.Random(1),
            metrics=DataflowMetrics(MetricsRegistry()),
            on_failure=lambda error: None,
        )
        pump.start()
        data = logs("a")
        for _ in range(WORKERS):
            await quiver.ingest(record_batch([Parcel("logs", (data,), 1, len(data))]), signal="logs")
            await quiver.flush()
        while quiver.stats().subscribers[0].lag_segments:
            pump.changed.clear()
            await pump.changed.wait()
        await pump.stop()
        assert quiver.waiting_most == 1
