"""Time retention under a wall clock that is wrong: at an opening, since the last one, or for a while."""

from __future__ import annotations

import dataclasses

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver._retention import CLOCK_PAUSE_S, DROPPED_AT_ONCE_MAX
from forebay.testing.world import World

HOUR_MS = 3_600_000
CONFIG = dataclasses.replace(
    SMALL, retain_ms=72 * HOUR_MS, lease_ms=86_400_000, maintenance_interval_ms=5_000
)


async def left_by_a_crash(world: World, disk: SimDisk) -> SimDisk:
    """A segment with the batches 0 and 1, and 2 in the WAL alone."""
    quiver = await store(world, disk, CONFIG).open()
    await quiver.register("a")
    await quiver.ingest(batch(0))
    await quiver.ingest(batch(1))
    await quiver.flush()
    disk.faults += [("open", "segments", 28)] * 1_000
    await quiver.ingest(batch(2))
    left = disk.after_crash(power_loss=True)
    disk.crashed = True
    return left


def test_clock_that_is_far_ahead_at_an_opening_takes_nothing_if_it_is_set_right() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        left = await left_by_a_crash(world, disk)
        clock.step(1_000 * HOUR_MS)
        async with store(world, left, CONFIG) as quiver:
            assert quiver.report.entries_expired == 0
            await clock.sleep(CLOCK_PAUSE_S / 2)
            clock.step(-1_000 * HOUR_MS)
            await clock.sleep(CLOCK_PAUSE_S)
            assert await drain(quiver, "a") == [0, 1, 2]
            assert quiver.stats().losses == {}

    simulate(scenario)


def test_store_that_nobody_had_open_for_longer_than_the_retention_expires_after_a_pause() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        left = await left_by_a_crash(world, disk)
        clock.step(73 * HOUR_MS)
        async with store(world, left, CONFIG) as quiver:
            await clock.sleep(CLOCK_PAUSE_S - 10)
            assert quiver.stats().segments == 2
            await clock.sleep(20)
            assert quiver.stats().segments == 0, (
                "also where the monotonic clock is younger than the retention"
            )
            assert quiver.stats().losses["segments.expired"] == 2
            assert await drain(quiver, "a") == []

    simulate(scenario)


def test_batches_that_came_in_under_a_clock_far_behind_live_as_long_as_all_others() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        clock.step(-1_000 * HOUR_MS)
        async with store(world, disk, dataclasses.replace(CONFIG, retain_ms=2 * HOUR_MS)) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(0))
            await quiver.flush()
            clock.step(1_000 * HOUR_MS)
            await clock.sleep(7_000)
            assert quiver.stats().segments == 1
            await clock.sleep(300)
            assert quiver.stats().losses["segments.expired"] == 1

    simulate(scenario)


def test_batches_of_the_wal_are_as_old_as_they_say_although_their_segment_is_new() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        left = await left_by_a_crash(world, disk)
        clock.step(71 * HOUR_MS)
        async with store(world, left, CONFIG) as quiver:
            await clock.sleep(2 * 3_600)
            assert quiver.stats().losses["segments.expired"] == 2

    simulate(scenario)


@pytest.mark.parametrize("subscribers", [0, 3])
def test_segments_that_expire_together_share_their_syncs(subscribers: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        config = dataclasses.replace(
            CONFIG, segment_bytes=1_024, retain_ms=HOUR_MS // 2, maintenance_interval_ms=HOUR_MS
        )
        count = 2 * DROPPED_AT_ONCE_MAX + 1
        async with store(world, disk, config) as quiver:
            for name in "abc"[:subscribers]:
                await quiver.register(name)
            for number in range(count):
                await quiver.ingest(batch(number, 80))
            await quiver.flush()
            assert quiver.stats().segments == count
            if subscribers:
                assert (held := await quiver.next("a", 1)) is not None
                assert await held.ack(), "one of them needs a segment less"
            await clock.sleep(3_000)
            before = len(disk.history)
            await quiver.maintain()
            assert quiver.stats().segments == 0
            syncs = [line for line in disk.history[before:] if line == "sync_directory segments"]
            assert len(syncs) <= 4
            assert quiver.stats().losses["segments.expired"] == count
            dropped = [each.dropped["expired"] for each in quiver.stats().subscribers]
            assert dropped == [count - 1, count, count][:subscribers]
            assert all(each.gap_set_size == 0 for each in quiver.stats().subscribers)

    simulate(scenario)
