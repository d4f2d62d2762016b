"""Numbers of segments that a crash takes back, or brings back, and subscribers that had counted on them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver._segment_file import segment_name
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
"""Segments are cut by hand."""


def test_newcomer_at_latest_gets_what_comes_behind_a_crash_while_a_segment_was_written() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.ingest(batch(1))
        disk.delays["segments"] = 10.0
        flushing = asyncio.ensure_future(quiver.flush())
        while not quiver._finalizer.is_writing:
            await world.clock().sleep(0.001)
        registering = asyncio.ensure_future(quiver.register("late", "latest"))
        while not quiver.has_subscriber("late"):
            await world.clock().sleep(0.001)
        left = disk.after_crash(power_loss=False)
        disk.crashed = True
        assert not left.files("segments/")
        async with store(world, left, SLOW) as again:
            await again.register("late", "latest")
            await again.ingest(batch(2))
            await again.flush()
            assert 2 in await drain(again, "late")
        for each in (flushing, registering):
            each.cancel()

    simulate(scenario)


def test_segment_that_comes_back_after_its_write_failed_is_delivered() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        await quiver.ingest(batch(1))
        disk.faults.append(("sync_directory", "segments", errno.EIO))
        flushing = asyncio.ensure_future(quiver.flush())
        while quiver._finalizer.problem is None:
            await world.clock().sleep(0.001)
        # A checkpoint says that nobody waits for the number of that attempt.
        await quiver.register("b")
        assert quiver._finalizer.problem is not None
        lefts = [disk.after_crash(power_loss=True) for _ in range(20)]
        disk.crashed = True
        assert any(segment_name(1) in left.names for left in lefts)
        for left in lefts:
            async with store(world, left, SLOW) as again:
                await again.flush()
                for name in ("a", "b"):
                    assert await drain(again, name) == [1]
        flushing.cancel()

    simulate(scenario)
