"""A registration is in two files: one flipped bit must not make a store forget whom its data is for."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.formats.quiver_ack import Floor
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000, checkpoint_interval_ms=86_400_000)
"""Segments are cut by hand, and no timer writes a checkpoint."""


async def left_by_two(world: World, disk: SimDisk) -> SimDisk:
    """A store killed with a segment that `a` has had, and `late` has not."""
    quiver = await store(world, disk, SLOW).open()
    await quiver.register("a")
    await quiver.register("late")
    await quiver.ingest(batch(1))
    await quiver.flush()
    assert await drain(quiver, "a") == [1]
    left = disk.after_crash(power_loss=True)
    disk.crashed = True
    return left


async def comes_out(world: World, disk: SimDisk) -> list[int]:
    async with store(world, disk, SLOW) as quiver:
        await quiver.maintain()
        await quiver.register("late")
        return await drain(quiver, "late")


def test_flipped_bit_in_any_byte_of_the_registration_costs_its_subscriber_nothing() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        left = await left_by_two(world, disk)
        [(name, data)] = [
            each for each in left.files("ack/").items() if b"late" in each[1] and "log" in each[0]
        ]
        middle = data.index(b"late")
        for place in range(middle - 40, middle + 20):
            damaged = left.after_crash(power_loss=False)
            damaged.flip(name, place)
            assert await comes_out(world, damaged) == [1], place

    simulate(scenario)


@pytest.mark.parametrize("place", [0, 30, -1])
def test_flipped_bit_in_a_checkpoint_of_a_registration_costs_its_subscriber_nothing(place: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        left = await left_by_two(world, disk)
        names = [each for each in left.files("ack/") if each.endswith(".ckpt")]
        assert len(names) == 2
        for name in names:
            damaged = left.after_crash(power_loss=False)
            damaged.flip(name, place % len(damaged.files()[name]))
            assert await comes_out(world, damaged) == [1], name

    simulate(scenario)


def test_registration_succeeds_without_its_checkpoint_which_is_tried_again() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
        async with store(world, disk, config) as quiver:
            disk.faults.append(("open", ".ckpt", errno.ENOSPC))
            await quiver.register("a")
            assert quiver.has_subscriber("a")
            assert not [each for each in disk.files("ack/") if each.endswith(".ckpt")]
            await world.clock().sleep(2)
            assert [each for each in disk.files("ack/") if each.endswith(".ckpt")]

    simulate(scenario)


def test_checkpoints_that_are_asked_for_together_leave_two_files() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await asyncio.gather(*(quiver._acks.checkpoint() for _ in range(4)))
            assert len([each for each in disk.files("ack/") if each.endswith(".ckpt")]) == 2

    simulate(scenario)


def test_checkpoints_that_are_asked_for_together_make_no_spare_that_is_not_there() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            for _ in range(2):
                for number in range(200):
                    await quiver._acks.commit([Floor(1, number + 1)])
                assert len(quiver._acks.log.files) > 2
                await quiver._acks.log.drop_spares()
                disk.delays["files"] = 0.1
                await asyncio.gather(*(quiver._acks.checkpoint() for _ in range(5)))
                disk.delays.clear()
                spares = {each for each in disk.files("ack/") if each.endswith("spare")}
                assert {f"ack/{each}" for each in quiver._acks.log._files._spares} == spares

    simulate(scenario)
