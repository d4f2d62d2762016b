"""Files that cannot be deleted for a while: nothing spins, and nothing more is dropped for nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver import Quiver, QuiverFull
from forebay.testing.world import World

CONFIG = dataclasses.replace(
    SMALL, size_cap_bytes=262_144, wal_spare_files=0, maintenance_interval_ms=3_600_000
)


class Stubborn(SimDisk):
    """Segments cannot be removed while `is_stuck`."""

    is_stuck = False

    def remove(self, name: str) -> None:
        if self.is_stuck and name.startswith("segments/"):
            raise OSError(errno.EACCES, "Permission denied", name)
        super().remove(name)


async def refusals(quiver: Quiver, world: World, numbers: range) -> int:
    """Ingest; how many batches were refused."""
    refused = 0
    for number in numbers:
        try:
            await asyncio.wait_for(quiver.ingest(batch(number, 60)), 30)
        except QuiverFull:
            refused += 1
            await world.clock().sleep(0.01)
    return refused


@pytest.mark.parametrize("subscribers", [0, 2])
def test_drop_oldest_drops_no_further_segment_while_none_can_be_deleted(subscribers: int) -> None:
    config = dataclasses.replace(CONFIG, size_cap_policy="drop_oldest")

    async def scenario(world: World, disk: SimDisk) -> None:
        assert isinstance(disk, Stubborn)
        async with store(world, disk, config) as quiver:
            for number in range(subscribers):
                await quiver.register(f"s{number}")
            disk.is_stuck = True
            assert await refusals(quiver, world, range(400)) > 100
            assert quiver.stats().losses["segments.size"] == 1
            disk.is_stuck = False
            assert await refusals(quiver, world, range(400, 500)) == 0
            await quiver.register("late")
            await quiver.flush()
            assert (await drain(quiver, "late"))[-1] == 499

    simulate(scenario, disk=Stubborn())


def test_expired_segment_that_cannot_be_deleted_is_counted_once() -> None:
    config = dataclasses.replace(CONFIG, retain_ms=10_000, segment_open_ms=1_000_000)

    async def scenario(world: World, disk: SimDisk) -> None:
        assert isinstance(disk, Stubborn)
        async with store(world, disk, config) as quiver:
            await quiver.ingest(batch(1))
            await quiver.flush()
            disk.is_stuck = True
            await world.clock().sleep(11)
            for _ in range(5):
                await quiver.maintain()
            assert quiver._metrics.segment_dropped.labels().value == 1
            assert quiver.stats().losses["segments.expired"] == 1
            disk.is_stuck = False
            await quiver.maintain()
            assert quiver.stats().segments == 0

    simulate(scenario, disk=Stubborn())
