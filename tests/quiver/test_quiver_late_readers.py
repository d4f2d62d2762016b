"""A segment that others settle, or that goes, while a reader is about to get it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest
from tests.quiver.harness import SMALL, batch, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver import Quiver, SegmentView
from forebay.quiver._reading import SegmentReader
from forebay.testing.world import World

ONE_MAP = dataclasses.replace(SMALL, segment_open_ms=1_000_000, maps_max=1)
"""Segments are cut by hand, and only one stays mapped."""


def test_segment_that_is_acknowledged_while_another_reader_opens_it_is_not_delivered() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, ONE_MAP) as quiver:
            await quiver.register("a")
            await quiver.register("pins")
            for number in (1, 2):
                await quiver.ingest(batch(number))
                await quiver.flush()
            first = await quiver.next("a")
            assert first is not None
            await quiver.next("a")
            await world.clock().sleep(6)  # both leases lapse
            disk.delays["reads"] = 1.0
            second = asyncio.ensure_future(quiver.next("a"))
            await world.clock().sleep(0.1)
            assert await first.ack()
            delivery = await second
            assert delivery is not None
            assert numbers(delivery) == [2]
            assert quiver.stats().subscribers[0].in_flight == 1

    simulate(scenario)


async def test_segment_that_goes_while_it_is_opened_does_not_stay_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()
    load = SegmentReader._load

    def held(reader: SegmentReader, segment: int) -> SegmentView:
        view = load(reader, segment)
        entered.set()
        assert released.wait(60)
        return view

    async with Quiver(tmp_path / "q", SMALL) as quiver:
        await quiver.ingest(batch(1))
        await quiver.flush()
        monkeypatch.setattr(SegmentReader, "_load", held)
        views = quiver.read()
        reading = asyncio.ensure_future(anext(views))
        assert await asyncio.to_thread(entered.wait, 60)
        await quiver.register("a", "latest")
        await quiver.maintain()
        assert quiver.stats().segments == 0
        released.set()
        assert (await reading).meta.rows == 10
        assert not quiver._deliveries.reader._views


@pytest.mark.parametrize("is_deleted", [True, False])
def test_rejection_that_is_overtaken_by_another_outcome_says_that_it_changed_nothing(
    is_deleted: bool,
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, ONE_MAP) as quiver:
            await quiver.register("a")
            if not is_deleted:
                await quiver.register("pins")
            await quiver.ingest(batch(1))
            await quiver.flush()
            first = await quiver.next("a")
            await world.clock().sleep(6)  # the lease lapses
            second = await quiver.next("a")
            assert first is not None
            assert second is not None
            disk.delays["reads"] = 1.0
            rejecting = asyncio.ensure_future(second.reject())
            await world.clock().sleep(0.1)
            assert await first.ack()
            assert await rejecting is False
            assert quiver.stats().subscribers[0].in_flight == 0
            assert quiver.stats().subscribers[0].dropped == {}

    simulate(scenario)
