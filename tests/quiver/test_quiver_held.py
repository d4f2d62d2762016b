"""Segments that subscribers get before they are files."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import random

import msgspec
import pytest
from tests.quiver.crash_matrix import HELD, crash_once
from tests.quiver.harness import batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import StorageFull
from forebay.formats.quiver_segment import SegmentMeta
from forebay.quiver import Delivery, Quiver, SegmentView
from forebay.quiver._finalizer import HELD_SEGMENTS
from forebay.testing.world import World, seeds

LONG = dataclasses.replace(
    HELD, segment_bytes=2_048, segment_hold_ms=10_000, maintenance_interval_ms=3_600_000
)
"""A batch of a hundred rows is a segment, and is held for as long as a test takes."""


async def segment(quiver: Quiver, number: int) -> None:
    """Ingest what becomes a segment by its size."""
    await quiver.ingest(batch(number, 100, plain=True))


async def following(quiver: Quiver, *names: str) -> None:
    """Let subscribers be there, with nothing before them."""
    for name in names:
        await quiver.register(name)
        quiver.activate(name)


async def got(quiver: Quiver, name: str) -> Delivery:
    delivery = await quiver.next(name, 5.0)
    assert delivery is not None
    return delivery


def files(disk: SimDisk) -> list[str]:
    return sorted(disk.files("segments/"))


def test_segment_that_all_acknowledge_is_never_a_file() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a", "b")
            for number in range(5):
                await segment(quiver, number)
                for name in ("a", "b"):
                    delivery = await got(quiver, name)
                    assert numbers(delivery) == [number]
                    assert delivery.view.meta.rows == delivery.view.num_rows == 100
                    assert files(disk) == []
                    assert await delivery.ack()
                await quiver.maintain()
                assert quiver.stats().segments == quiver.stats().open_bytes == 0
            assert quiver._metrics.spared.labels().value == 5
        assert files(disk) == []
        async with store(world, disk, LONG) as quiver:
            assert quiver.report.is_clean
            assert quiver.report.entries_replayed == 0
            assert await drain(quiver, "a") == []
            assert quiver.stats().next_segment == 6

    simulate(scenario)


def test_segment_that_somebody_does_not_acknowledge_in_time_is_written() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a", "b")
            await segment(quiver, 0)
            assert await (await got(quiver, "a")).ack()
            slow = await got(quiver, "b")
            await world.clock().sleep(9.0)
            assert files(disk) == []
            await world.clock().sleep(2.0)
            assert files(disk) == ["segments/0000000000000001.arrow"]
            assert numbers(slow) == [0]
            assert quiver.stats().open_bytes == 0
            assert quiver.stats().segment_bytes == len(disk.files("segments/")[files(disk)[0]])
            slow.release()
            again = await got(quiver, "b")
            assert numbers(again) == [0]
            assert await quiver.next("a", 0) is None
            assert await again.ack()
            await quiver.maintain()
            assert files(disk) == []

    simulate(scenario)


def test_segment_that_is_refused_is_written_at_once() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await segment(quiver, 0)
            assert await (await got(quiver, "a")).nack()
            await world.clock().sleep(0.05)
            assert len(files(disk)) == 1
            # One that is behind gets no more from memory.
            await segment(quiver, 1)
            await world.clock().sleep(0.05)
            assert len(files(disk)) == 2

    simulate(scenario)


def test_rejected_segment_leaves_a_dead_letter_that_can_be_read() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await segment(quiver, 7)
            assert await (await got(quiver, "a")).reject()
        [letter] = disk.files("dead/").values()
        view = SegmentView(memoryview(letter))
        assert set(view.table()["number"].to_pylist()) == {7}
        assert view.meta.segment == 1
        assert not view.bad_parts

    simulate(scenario)


def test_flush_and_pressure_make_files_of_what_is_held() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await segment(quiver, 0)
            await got(quiver, "a")
            await quiver.flush()
            assert len(files(disk)) == 1
            assert quiver.stats().open_bytes == 0

    simulate(scenario)


@pytest.mark.parametrize("why", ["headroom", "inactive", "behind", "dictionary", "nobody", "off"])
def test_segment_is_written_at_once_where_nobody_would_have_it_in_time(why: str) -> None:
    config = {
        "headroom": dataclasses.replace(LONG, headroom_bytes=65_536),
        "off": dataclasses.replace(LONG, segment_hold_ms=0),
    }.get(why, LONG)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            if why == "behind":
                await segment(quiver, 5)
                await quiver.flush()
            if why != "nobody":
                await quiver.register("a")
            if why != "inactive":
                await (following(quiver, "a") if why != "nobody" else asyncio.sleep(0))
            await quiver.ingest(batch(0, 100, plain=why != "dictionary"))
            await world.clock().sleep(0.1)
            assert len(files(disk)) == 1 + (why == "behind")

    simulate(scenario)


def test_memory_for_what_is_held_is_bounded() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(LONG, segment_bytes=8_192)
        async with store(world, disk, config) as quiver:
            await following(quiver, "a")
            for number in range(40):
                await segment(quiver, number)
                await world.clock().sleep(0.06)
                assert quiver.stats().open_bytes <= (HELD_SEGMENTS + 1) * (config.segment_bytes + 2_864)
            assert len(files(disk)) > 30
            assert await drain(quiver, "a") == list(range(40))

    simulate(scenario)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["log", "checkpoint"])
def test_crash_leaves_the_same_segment_for_those_who_did_not_acknowledge(
    power_loss: bool, checkpoint: bool
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, LONG).open()
        await following(quiver, "a", "b")
        for number in range(2):
            await segment(quiver, number)
        await world.clock().sleep(0.1)
        first, second = await got(quiver, "a"), await got(quiver, "a")
        # Out of order: the second alone is acknowledged, by one of the two.
        assert await second.ack()
        if checkpoint:
            await quiver._acks.checkpoint()
        told = (first.view.meta, second.view.meta)
        left = disk.after_crash(power_loss=power_loss)
        left.clock = world.clock()
        quiver = await store(world, left, LONG).open()
        assert quiver.report.is_clean
        assert quiver.report.entries_replayed == 2
        assert [numbers(await got(quiver, "b")) for _ in range(2)] == [[0], [1]]
        again = await got(quiver, "a")
        assert (again.segment, numbers(again)) == (1, [0])
        assert dataclasses_equal(again.view.meta, told[0])
        assert await again.ack()
        assert await quiver.next("a", 0) is None
        await quiver.flush()
        assert files(left) == ["segments/0000000000000002.arrow"] or len(files(left)) == 2
        await quiver.close()
        async with store(world, left, LONG) as quiver:
            assert await quiver.next("a", 0) is None
            assert await drain(quiver, "b") == [0, 1]

    simulate(scenario)


def dataclasses_equal(one: SegmentMeta, other: SegmentMeta) -> bool:
    """But for what only a file has."""
    bare = [msgspec.structs.replace(each, parts=[], arrow_footer_crc=0) for each in (one, other)]
    return bare[0] == bare[1]


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
def test_crash_after_everybody_acknowledged_brings_nothing_back(power_loss: bool) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, LONG).open()
        await following(quiver, "a", "b")
        await segment(quiver, 0)
        for name in ("a", "b"):
            assert await (await got(quiver, name)).ack()
        left = disk.after_crash(power_loss=power_loss)
        left.clock = world.clock()
        async with store(world, left, LONG) as quiver:
            assert quiver.report.is_clean
            assert quiver.report.entries_replayed == 0
            await segment(quiver, 1)
            await quiver.flush()
            assert [await drain(quiver, name) for name in ("a", "b")] == [[1], [1]]
            assert quiver.stats().next_segment == 3

    simulate(scenario)


def test_one_who_comes_while_a_segment_is_held_gets_it() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await segment(quiver, 0)
            held = await got(quiver, "a")
            await quiver.register("late")
            assert await held.ack()
            await quiver.maintain()
            assert await drain(quiver, "late") == [0]
            # And one that comes behind it does not.
            await quiver.maintain()
            await quiver.register("later")
            assert await quiver.next("later", 0) is None

    simulate(scenario)


def test_held_segment_whose_entries_are_damaged_is_lost_and_told() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, LONG).open()
        await following(quiver, "a", "b")
        await segment(quiver, 0)
        assert await (await got(quiver, "a")).ack()
        left = disk.after_crash(power_loss=False)
        left.clock = world.clock()
        [(wal, data)] = [(name, data) for name, data in left.files("wal/").items() if b"word 1" in data]
        left.flip(wal, data.index(b"word 1"))
        async with store(world, left, LONG) as quiver:
            assert quiver.report.segments_lost == [1]
            assert await drain(quiver, "b") == []
            stats = {each.name: each for each in quiver.stats().subscribers}
            assert stats["b"].dropped == {"lost": 1}
            assert stats["a"].dropped == {}
            assert quiver.stats().losses["segments.lost"] == 1
            assert stats["b"].high_water == 1

    simulate(scenario)


def test_segment_that_cannot_be_written_is_kept_and_tried_again() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await segment(quiver, 0)
            held = await got(quiver, "a")
            disk.fail_at = (disk.operations + 1, errno.ENOSPC)
            with pytest.raises(StorageFull):
                await quiver.flush()
            assert await held.ack()
            await world.clock().sleep(1.0)
            await quiver.flush()
            assert files(disk) == []

    simulate(scenario)


def test_no_more_is_dropped_than_the_cap_asks_for() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(
            LONG, size_cap_policy="drop_oldest", wal_file_bytes=4_096, wal_spare_files=0
        )
        async with store(world, disk, config) as quiver:
            await following(quiver, "a")
            # Each has a WAL file of its own.
            for number in range(2):
                await segment(quiver, number)
                await world.clock().sleep(0.1)
            retention = quiver._retention
            free = config.size_cap_bytes - retention.projected_bytes(0)
            # Over the cap by more than a segment in memory, and by less than that with its WAL file.
            await retention.admit((free + 4_000) // 2)
            [reader] = quiver.stats().subscribers
            assert reader.dropped == {"size": 1}
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


# The crash matrix.

OPERATIONS = crash_once(0, 10**9, power_loss=False, held=True)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("share", range(4))
def test_crash_before_any_operation_loses_and_repeats_nothing(share: int, power_loss: bool) -> None:
    assert OPERATIONS > 100
    for crash_at in range(1 + share, OPERATIONS + 1, 4 * 2):
        crash_once(crash_at, crash_at, power_loss=power_loss, held=True)


def test_crash_while_recovering_from_a_crash_loses_nothing() -> None:
    for seed in seeds(30):
        rng = random.Random(seed)
        at, again_at = rng.randrange(20, OPERATIONS), rng.randrange(1, 120)
        crash_once(seed, at, power_loss=seed % 3 != 0, again_at=again_at, held=True)


def test_sectors_that_survive_in_any_order_lose_and_repeat_nothing() -> None:
    for seed in seeds(30):
        rng = random.Random(seed)
        at, again_at = rng.randrange(20, OPERATIONS), rng.choice([None, rng.randrange(1, 200)])
        crash_once(seed, at, power_loss=True, again_at=again_at, tears_sectors=True, held=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_error_of_any_operation_loses_and_repeats_nothing(number: int) -> None:
    for at in range(1, OPERATIONS + 1, 4):
        crash_once(at, 10**9, power_loss=at % 2 == 0, fail_at=(at, number), held=True)


@pytest.mark.nightly
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
def test_crash_before_every_operation_under_many_seeds(power_loss: bool) -> None:
    for seed in range(5):
        for crash_at in range(1, OPERATIONS + 1):
            crash_once(seed, crash_at, power_loss=power_loss, held=True)
