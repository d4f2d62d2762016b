"""A flipped bit in every kind of file, and a disk that is full at every size."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from functools import partial

import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import ForebayError
from forebay.quiver import Quiver, QuiverConfig
from forebay.testing.world import World

CONFIG = dataclasses.replace(
    SMALL,
    segment_open_ms=86_400_000,
    maintenance_interval_ms=3_600_000,
    wal_bytes_max=131_072,
    wal_spare_files=4,
)
"""Spares enough that some are left beside the file that is written and the one that is ready."""
FLIPS = 24
"""Places tried in each file, besides its first and last byte."""


class Made:
    """A killed store with a file of every kind, and what must come out of it."""

    def __init__(self) -> None:
        self.disk: SimDisk
        self.durable: set[int] = set()
        self.resolved: set[int] = set()
        self.of_segment: dict[str, set[int]] = {}

    async def make(self, world: World, disk: SimDisk) -> None:
        async with store(world, disk, CONFIG) as quiver:
            await quiver.register("a")
            for number in range(40):
                await quiver.ingest(batch(number, 60))
                self.durable.add(number)
                if number == 10:
                    await quiver.flush()
                    delivery = await quiver.next("a", 1)
                    assert delivery is not None
                    await delivery.reject()
                    self.resolved |= set(numbers(delivery))
                if number in (20, 30):
                    await quiver.flush()
                    delivery = await quiver.next("a", 1)
                    assert delivery is not None
                    await delivery.ack()
                    self.resolved |= set(numbers(delivery))
                    await quiver.maintain()
                    await quiver._acks.checkpoint()
                if number == 36:
                    await quiver.flush()
                    await quiver.maintain()
            for number, view in [(each.segment, each) async for each in quiver.read()]:
                self.of_segment[f"{number:016d}"] = set(view.table()["number"].to_pylist())
            self.disk = disk.after_crash(power_loss=False)


def made() -> Made:
    result = Made()
    simulate(result.make)
    return result


def kind_of(name: str) -> str:
    directory, _, file = name.partition("/")
    return f"{directory} {file.rpartition('.')[2]}"


MADE = made()
KINDS = sorted({kind_of(name) for name in MADE.disk.files()})


def test_every_kind_of_file_is_in_the_matrix() -> None:
    assert {"ack ckpt", "ack log", "segments arrow", "wal spare", "wal wal", "dead arrow"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bit_costs_at_most_what_it_lies_in(kind: str) -> None:
    rng = random.Random(kind)
    for name, data in MADE.disk.files().items():
        if kind_of(name) != kind:
            continue
        places = {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(FLIPS))}
        for place in sorted(places):
            simulate(partial(flipped, name=name, place=place))


async def flipped(world: World, _: SimDisk, *, name: str, place: int) -> None:
    disk = MADE.disk.after_crash(power_loss=False)
    disk.clock = world.clock()
    disk.flip(name, place)
    async with store(world, disk, CONFIG) as quiver:
        await quiver.register("a")
        await quiver.flush()
        found = await drain(quiver, "a")
        where = f"{name} at {place}: {quiver.report}"
        lost = MADE.durable - MADE.resolved - set(found)
        if name.startswith("segments/"):
            assert lost <= MADE.of_segment[name[9:25]], where
        elif name.startswith("wal/") and name.endswith(".wal"):
            assert len(lost) <= 1, where
            # The last frame of a file cannot be told from a torn one.
            assert not lost or quiver.report.damaged_ranges or quiver.report.torn_bytes or place, where
        else:
            assert not lost, where
        again = MADE.resolved & set(found)
        assert not again or quiver.report.redelivery_possible, where
        assert len(found) == len(set(found)), where
        # The store goes on: new data comes through, and everything read is given back.
        await quiver.ingest(batch(1_000))
        await quiver.flush()
        assert await drain(quiver, "a") == [1_000], where
        await quiver.maintain()
        assert quiver.stats().segments == 0, where


class Full:
    """A life on a disk of some size, that grows in the end."""

    def __init__(self, world: World, disk: SimDisk, config: QuiverConfig) -> None:
        self.world, self.disk, self.config = world, disk, config
        self.durable: set[int] = set()
        self.seen: list[int] = []

    async def open(self) -> Quiver:
        try:
            return await store(self.world, self.disk, self.config).open()
        except ForebayError:
            self.disk.capacity = None
            return await store(self.world, self.disk, self.config).open()

    async def ingest(self, quiver: Quiver, number: int) -> None:
        try:
            await quiver.ingest(batch(number, 20))
            self.durable.add(number)
        except ForebayError:
            await self.world.clock().sleep(0.1)

    async def take(self, quiver: Quiver) -> None:
        if (delivery := await quiver.next("a", 0.1)) is not None:
            try:
                if await delivery.ack():
                    self.seen += numbers(delivery)
            except ForebayError:
                delivery.release()

    async def run(self) -> None:
        quiver = await self.open()
        with contextlib.suppress(ForebayError):
            await quiver.register("a")
        for number in range(24):
            await self.ingest(quiver, number)
            if number % 5 == 4 and quiver.has_subscriber("a"):
                await self.take(quiver)
            if number == 16:
                self.disk.capacity = None
        await quiver.register("a")
        await self.ingest(quiver, 100)
        assert 100 in self.durable


async def full(world: World, disk: SimDisk, *, config: QuiverConfig, capacity: int, power_loss: bool) -> None:
    disk.capacity = capacity
    life = Full(world, disk, config)
    await life.run()
    left = disk.after_crash(power_loss=power_loss)
    disk.crashed = True
    async with store(world, left, config) as quiver:
        assert quiver.report.is_clean
        await quiver.register("a")
        found = life.seen + await drain(quiver, "a")
    assert life.durable <= set(found)
    assert len(found) == len(set(found)), "something came twice after its ack"


@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize("spares", [0, 2])
def test_disk_that_is_full_at_any_size_loses_and_repeats_nothing(share: int, spares: int) -> None:
    config = dataclasses.replace(SMALL, wal_spare_files=spares, segment_open_ms=20)
    for capacity in range(200 + 997 * share, 40_000, 4 * 997):
        simulate(partial(full, config=config, capacity=capacity, power_loss=share % 2 == 0))
