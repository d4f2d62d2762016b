"""Whoever gives up in the middle leaves no phantom behind: spares, checkpoints, desks, locks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver import LocalDisk, Quiver
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
"""Segments are cut by hand."""


async def given_up(work: asyncio.Task[Any]) -> None:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


def test_subscriber_whose_removal_was_not_waited_for_starts_anew() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.register("pins")
            await quiver.ingest(batch(1))
            await quiver.flush()
            assert await drain(quiver, "a") == [1]
            removing = asyncio.ensure_future(quiver.unregister("a"))
            while not quiver._acks.log.pending_bytes:
                await world.clock().sleep(0.000_01)
            await given_up(removing)
            while quiver.has_subscriber("a"):
                await world.clock().sleep(0.001)
            await quiver.register("a")
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


def test_spares_that_go_after_nobody_waits_for_it_are_not_used_again() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver._wal.prepare()
            spares = {each for each in disk.files("wal/") if each.endswith("spare")}
            assert spares
            disk.delays["files"] = 1.0
            dropping = asyncio.ensure_future(quiver._wal.drop_spares())
            await world.clock().sleep(0.1)
            await given_up(dropping)
            await world.clock().sleep(10)
            disk.delays.clear()
            assert not spares & disk.files("wal/").keys()
            assert quiver._wal.spare_bytes == sum(
                len(data) for name, data in disk.files("wal/").items() if name.endswith("spare")
            )
            for number in range(40):
                await quiver.ingest(batch(number))

    simulate(scenario)


def test_checkpoints_that_nobody_waits_for_are_counted_and_go() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            disk.delays["segments"] = 1.0
            for _ in range(5):
                writing = asyncio.ensure_future(quiver._acks.checkpoint())
                await world.clock().sleep(0.1)
                await given_up(writing)
            await world.clock().sleep(10)
            disk.delays.clear()
            await quiver._acks.checkpoint()
            checkpoints = [each for each in disk.files("ack/") if each.endswith(".ckpt")]
            assert len(checkpoints) == 2
            assert quiver._acks.bytes == sum(map(len, disk.files("ack/").values()))

    simulate(scenario)


class Slow(LocalDisk):
    """Its threads need a while to end, or so it seems."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()

    async def close(self) -> None:
        self.ending.set()
        await self.may_end.wait()
        await super().close()


async def test_closing_that_is_given_up_at_its_end_lets_the_directory_go(tmp_path: Path) -> None:
    disk = Slow(tmp_path / "q")
    quiver = await Quiver(disk, SMALL).open()
    await quiver.ingest(batch(1))
    closing = asyncio.create_task(quiver.close())
    await disk.ending.wait()
    closing.cancel()
    await asyncio.sleep(0)
    disk.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with Quiver(tmp_path / "q", SMALL) as again:
        assert again.report.is_clean


def test_dead_letter_that_nobody_waits_for_is_counted() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            await quiver.flush()
            delivery = await quiver.next("a")
            assert delivery is not None
            disk.delays["reads"] = 1.0
            rejecting = asyncio.ensure_future(delivery.reject())
            await world.clock().sleep(0.1)
            await given_up(rejecting)
            await world.clock().sleep(10)
            assert quiver._deliveries.aside_bytes == sum(map(len, disk.files("dead/").values())) > 0

    simulate(scenario)
