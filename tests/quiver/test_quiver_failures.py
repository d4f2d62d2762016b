"""Failures one after the other: nothing is lost, nothing comes back, and every file left is counted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import random
from collections.abc import Awaitable, Callable

import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import Closed, ForebayError, OutcomeUnknown, StorageFull
from forebay.kit.clock import Clock
from forebay.quiver import Quiver, QuiverConfig
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000, maintenance_interval_ms=3_600_000)


async def counted(world: World, quiver: Quiver, disk: SimDisk) -> None:
    await world.clock().sleep(2)
    assert quiver.stats().used_bytes == disk.used_bytes
    assert [name for name in disk.files() if name.endswith(".tmp")] == []


# One kind of failure at a time.


@pytest.mark.parametrize("operation", ["write", "sync", "protect", "rename", "sync_directory", "read"])
def test_segment_that_cannot_be_written_leaves_nothing_behind_however_often(operation: str) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            for number in range(3):
                await quiver.ingest(batch(number))
                disk.faults += [(operation, "segments", errno.ENOSPC)] * 4
                with pytest.raises(StorageFull):
                    await quiver.flush()
                await world.clock().sleep(10)
                assert not disk.faults
                await counted(world, quiver, disk)
            assert await drain(quiver, "a") == [0, 1, 2]

    simulate(scenario)


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "sync_directory", "remove"])
def test_checkpoint_that_fails_leaves_nothing_behind(operation: str) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            for number in range(4):
                await quiver.register(f"a{number}")
            for _ in range(3):
                name = "ack" if operation == "sync_directory" else ".ckpt"
                disk.faults.append((operation, name, errno.ENOSPC))
                with contextlib.suppress(StorageFull):
                    await quiver._acks.checkpoint()
                assert not disk.faults
                await counted(world, quiver, disk)
            await quiver._acks.checkpoint()
            await counted(world, quiver, disk)
            assert sum(name.endswith(".ckpt") for name in disk.files("ack/")) == 2

    simulate(scenario)


async def wants_a_file(quiver: Quiver) -> None:
    for number in range(20):
        with contextlib.suppress(ForebayError):
            await quiver.ingest(batch(number, 100))


async def drops_spares(quiver: Quiver) -> None:
    with pytest.raises(ForebayError):
        await quiver._wal.drop_spares()


@pytest.mark.parametrize(
    ("operation", "name", "work"),
    [("open", "spare", wants_a_file), ("remove", "spare", drops_spares), ("remove", ".wal", drops_spares)],
)
def test_spare_file_that_cannot_be_used_or_removed_is_counted(
    operation: str, name: str, work: Callable[[Quiver], Awaitable[None]]
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(0))
            await world.clock().sleep(1)
            disk.faults.append((operation, name, errno.EMFILE))
            await work(quiver)
            assert not disk.faults
            await quiver.flush()
            await counted(world, quiver, disk)
            await quiver.ingest(batch(1))
            await quiver.maintain()
            await counted(world, quiver, disk)

    simulate(scenario)


def test_rejected_segment_that_cannot_be_kept_whole_is_not_kept_in_part() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(0))
            await quiver.flush()
            delivery = await quiver.next("a", 1)
            assert delivery is not None
            for operation in ("write", "sync", "sync_directory"):
                disk.faults.append((operation, "dead", errno.ENOSPC))
                with pytest.raises(StorageFull):
                    await delivery.reject()
                await counted(world, quiver, disk)
                assert operation == "sync_directory" or not disk.files("dead/")
            assert await delivery.reject()
            await counted(world, quiver, disk)

    simulate(scenario)


# Any of them, in any order.


class Life:
    """One opening, with a producer and two readers, while operations fail at random."""

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        self.rng, self.clock = rng, clock
        self.number = 0
        self.durable: set[int] = set()
        self.unknown: set[int] = set()
        self.had: dict[str, set[int]] = {"a": set(), "b": set()}
        self.done: dict[str, set[int]] = {"a": set(), "b": set()}

    async def read(self, quiver: Quiver, name: str) -> None:
        while True:
            try:
                delivery = await quiver.next(name)
            except Closed:
                return
            except ForebayError:
                continue
            assert delivery is not None
            found = set(numbers(delivery))
            assert not found & self.done[name], "never after its acknowledgement was durable"
            self.had[name] |= found
            await self.clock.sleep(self.rng.choice([0, 0.01, 0.4]))
            outcome = self.rng.choice(["ack"] * 8 + ["nack", "reject"])
            with contextlib.suppress(ForebayError):
                if await getattr(delivery, outcome)() and outcome != "nack":
                    self.done[name] |= found

    async def write(self, quiver: Quiver, disk: SimDisk) -> None:
        for _ in range(self.rng.randint(20, 60)):
            if self.rng.random() < 0.3:
                for _ in range(self.rng.randint(1, 6)):
                    disk.faults.append(self._fault())
            try:
                await quiver.ingest(batch(self.number, self.rng.choice([1, 20, 150])))
                self.durable.add(self.number)
            except OutcomeUnknown:
                self.unknown.add(self.number)
            except ForebayError:
                pass
            self.number += 1
            await self.clock.sleep(self.rng.choice([0, 0.02, 0.3]))
        disk.faults.clear()

    def _fault(self) -> tuple[str, str, int]:
        operation = self.rng.choice(["write", "write", "open", "open", "rename", "read", "list", "protect"])
        place = self.rng.choice(["wal", "ack", "segments", "dead", "spare", "ckpt", ""])
        return operation, place, self.rng.choice([errno.ENOSPC, errno.EMFILE, errno.EIO])


def config(rng: random.Random) -> QuiverConfig:
    return dataclasses.replace(
        SMALL,
        segment_open_ms=rng.choice([20, 500]),
        lease_ms=rng.choice([200, 5_000]),
        headroom_bytes=rng.choice([0, 20_000]),
        wal_spare_files=rng.choice([0, 2, 4]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_failures_at_random_over_three_openings_lose_nothing_and_leave_nothing_uncounted(seed: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        rng = random.Random(seed)
        settings, life = config(rng), Life(rng, world.clock())
        for _ in range(3):
            quiver = await store(world, disk, settings).open()
            for name in life.had:
                await quiver.register(name)
            readers = [asyncio.create_task(life.read(quiver, name)) for name in life.had]
            await life.write(quiver, disk)
            if quiver._wal.failure is None and quiver._acks.log.failure is None:
                await world.clock().sleep(3)
                await counted(world, quiver, disk)
            for reader in readers:
                reader.cancel()
            gone = await asyncio.gather(*readers, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in gone), gone
            if rng.random() < 0.5:
                await quiver.close()
            else:
                disk.crashed, disk = True, disk.after_crash(power_loss=rng.random() < 0.7)
        async with store(world, disk, settings) as quiver:
            await quiver.flush()
            for name, had in life.had.items():
                had |= set(await drain(quiver, name, timeout_s=2))
                assert life.durable <= had <= life.durable | life.unknown
            assert quiver.stats().losses == {}

    simulate(scenario, seed=seed)
