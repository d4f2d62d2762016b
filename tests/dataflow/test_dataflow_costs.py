"""What the way through a store does not cost: modules nobody asked for, and workers that wake for nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.dataflow.pump_kit import WatchedQuiver, add_segment, pump_to

from forebay.dataflow._parcels import Parcel
from forebay.dataflow._pump import WORKERS

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


class AllAtOnce:
    """Takes a parcel when all workers have brought one."""

    def __init__(self) -> None:
        self._barrier = asyncio.Barrier(WORKERS)

    async def take(self, parcel: Parcel) -> None:
        await self._barrier.wait()


async def test_one_worker_waits_for_a_segment_and_all_of_them_carry(tmp_path: Path) -> None:
    async with WatchedQuiver(tmp_path) as quiver:
        await quiver.register("out")
        pump = pump_to(AllAtOnce(), quiver)
        pump.start()
        for _ in range(WORKERS):
            await add_segment(quiver)
        while quiver.stats().subscribers[0].lag_segments:
            pump.changed.clear()
            await pump.changed.wait()
        await pump.stop()
        assert quiver.waiting_most == 1
