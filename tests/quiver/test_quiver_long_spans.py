"""Data of different days does not share a segment: whoever asks for a day relies on it."""

from __future__ import annotations

import dataclasses

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.kit.clock import Clock
from forebay.quiver import Forwarder, Quiver, Selection, read_forwarded
from forebay.storage import MemoryStore
from forebay.testing.world import World

DAY_MS = 86_400_000
SLOW = dataclasses.replace(SMALL, segment_open_ms=DAY_MS, maintenance_interval_ms=3_600_000)


class Stepped:
    """A clock whose wall time can be set."""

    def __init__(self, inner: Clock, ahead_ms: int) -> None:
        self._inner = inner
        self.ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return self._inner.now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return self._inner.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def test_batches_that_wait_in_the_wal_for_days_hide_no_new_ones_in_a_bucket() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        quiver = await store(world, disk, SLOW).open()
        await quiver.ingest(batch(1))
        left = disk.after_crash(power_loss=True)
        disk.crashed = True
        await clock.sleep(5 * DAY_MS / 1000)
        bucket = MemoryStore()
        async with store(world, left, SLOW) as quiver:
            begin = clock.now_ms()
            await quiver.ingest(batch(2))
            await quiver.flush()
            sender = Forwarder(quiver, bucket, source="edge")
            await sender.register()
            await sender.run(timeout_s=0)
            wanted = Selection(ingested_ms=(begin, None))
            found = [
                wanted.rows(view)["number"][0].as_py()
                async for view in read_forwarded(bucket, selection=wanted)
            ]
            assert found == [2]

    simulate(scenario)


@pytest.mark.parametrize("step_ms", [-5 * DAY_MS, 5 * DAY_MS])
def test_step_of_the_clock_ends_a_segment(step_ms: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = Stepped(world.clock(), 100 * DAY_MS)
        async with Quiver(disk, SLOW, clock=clock) as quiver:
            for number in range(3):
                await quiver.ingest(batch(number))
            clock.ahead_ms += step_ms
            for number in range(3, 6):
                await quiver.ingest(batch(number))
            await quiver.flush()
            views = [view async for view in quiver.read()]
            found = [sorted(set(view.table()["number"].to_pylist())) for view in views]
            assert found == [[0, 1, 2], [3, 4, 5]]
            assert all(last - first < DAY_MS for first, last in (view.meta.ingested_ms for view in views))

    simulate(scenario)


def test_step_of_the_clock_backwards_drops_nothing_and_makes_no_age_negative() -> None:
    config = dataclasses.replace(SMALL, retain_ms=DAY_MS)

    async def scenario(world: World, disk: SimDisk) -> None:
        clock = Stepped(world.clock(), 100 * DAY_MS)
        quiver = await Quiver(disk, config, clock=clock).open()
        await quiver.register("a")
        await quiver.ingest(batch(1))
        clock.ahead_ms -= 5 * DAY_MS
        await quiver.ingest(batch(2))
        await clock.sleep(2)
        assert quiver.stats().subscribers[0].oldest_pending_ms == 0
        left = disk.after_crash(power_loss=True)
        disk.crashed = True
        async with Quiver(left, config, clock=clock) as quiver:
            assert await drain(quiver, "a") == [1, 2]
            assert quiver.stats().losses == {}
            await quiver.ingest(batch(3))
            clock.ahead_ms += 5 * DAY_MS  # set right again: expiry waits, in case it is not
            await clock.sleep(60)
            assert await drain(quiver, "a") == [3]

    simulate(scenario)
