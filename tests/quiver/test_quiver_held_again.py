"""Held segments when a store ends or runs short, and what is said of them to others than subscribers."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.quiver.harness import batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk
from tests.quiver.test_quiver_held import LONG, files, following, got, segment

from forebay.errors import ForebayError
from forebay.formats.quiver_segment import SegmentMeta
from forebay.quiver import DirectoryView, Forwarder, Quiver, _segment_file
from forebay.storage import MemoryStore
from forebay.testing.world import World


async def sealed(quiver: Quiver, number: int) -> None:
    """Ingest a segment, and wait until it is there: held, where everybody keeps up."""
    there = len(quiver._segments)
    await segment(quiver, number)
    while len(quiver._segments) == there:
        await quiver._finalizer.changed()


@pytest.mark.parametrize("is_sealed", [False, True], ids=["open", "sealed"])
async def test_reader_of_what_was_replayed_is_not_shown_later_batches(
    tmp_path: Path, is_sealed: bool
) -> None:
    """The WAL file in which it lies is written over once the segment is a file."""
    config = dataclasses.replace(LONG, segment_open_ms=86_400_000, segment_hold_ms=60_000)
    async with Quiver(tmp_path / "1", config) as quiver:
        await following(quiver, "a")
        await (sealed(quiver, 7) if is_sealed else quiver.ingest(batch(7, plain=True)))
        assert bool(quiver._finalizer.held) == is_sealed
        shutil.copytree(tmp_path / "1", tmp_path / "2")
    async with Quiver(tmp_path / "2", dataclasses.replace(config, segment_open_ms=50)) as quiver:
        quiver.activate("a")
        slow = await got(quiver, "a")
        assert numbers(slow) == [7]
        await quiver.flush()
        for number in range(100, 150):
            await segment(quiver, number)
            await quiver.maintain()
        assert numbers(slow) == [7]


@pytest.mark.parametrize("hold_ms", [0, 60_000], ids=["file", "held"])
@pytest.mark.parametrize("start", ["earliest", 1])
def test_one_who_comes_while_the_only_segment_gets_its_number_gets_it(start: str | int, hold_ms: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, dataclasses.replace(LONG, segment_hold_ms=hold_ms)) as quiver:
            await following(quiver, "a")
            disk.delays["segments"] = 0.5
            await segment(quiver, 7)
            await world.clock().sleep(0.1)
            assert quiver._finalizer.is_writing
            await quiver.register("late", start)
            assert await drain(quiver, "late") == [7]

    simulate(scenario)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
def test_held_segment_that_was_dropped_for_nobody_does_not_come_back(power_loss: bool) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(
            LONG, retain_ms=1_000, segment_open_ms=500, checkpoint_interval_ms=86_400_000
        )
        quiver = await store(world, disk, config).open()
        await following(quiver, "a")
        await sealed(quiver, 7)
        await quiver.unregister("a")
        await world.clock().sleep(2.0)
        # It keeps the file of the WAL that has the others.
        await quiver.ingest(batch(8, plain=True))
        await quiver.maintain()
        assert quiver.stats().segments == 0
        assert quiver.stats().losses["segments.expired"] == 1
        left = disk.after_crash(power_loss=power_loss)
        left.clock = world.clock()
        async with store(world, left, config) as quiver:
            assert quiver.report.is_clean
            await quiver.register("b")
            assert await drain(quiver, "b") == [8]
            assert quiver.stats().losses["segments.expired"] == 1
            assert quiver.stats().losses["rows.expired"] == 100

    simulate(scenario)


def test_segment_that_is_made_again_has_its_place_among_the_others() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, LONG).open()
        await following(quiver, "a")
        await sealed(quiver, 0)
        # One that is not there: the next segment is a file.
        await quiver.register("b")
        await sealed(quiver, 1)
        assert len(files(disk)) == 1
        left = disk.after_crash(power_loss=False)
        left.clock = world.clock()
        async with store(world, left, LONG) as quiver:
            assert [each.segment async for each in quiver.read()] == [1, 2]

    simulate(scenario)


def test_held_segment_is_written_in_time_beside_one_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = _segment_file._encoding

    def picky(batches: list[_segment_file.Batch], template: SegmentMeta, column: str) -> Any:
        if template.signal == "bad":
            raise _segment_file.NotEncodable from ValueError("bad")
        return encoding(batches, template, column)

    monkeypatch.setattr(_segment_file, "_encoding", picky)

    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, LONG).open()
        await following(quiver, "a")
        await sealed(quiver, 7)
        await quiver.ingest(batch(8, 100), signal="bad")
        await world.clock().sleep(LONG.segment_hold_ms / 1000 + 2)
        assert quiver._finalizer.problem is not None
        assert len(files(disk)) == 1

    simulate(scenario)


def test_held_segment_is_written_though_an_attempt_left_its_temporary_file() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await sealed(quiver, 7)
            disk.faults = [("write", "segments/", errno.EROFS), ("remove", "segments/", errno.EROFS)]
            with pytest.raises(ForebayError):
                await quiver.flush()
            await world.clock().sleep(5.0)
            assert quiver._finalizer.problem is None
            assert files(disk) == ["segments/0000000000000001.arrow"]

    simulate(scenario)


def test_held_segment_is_gone_whatever_becomes_of_files_that_go_with_it() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            for number in range(2):
                await sealed(quiver, number)
            first, second = await got(quiver, "a"), await got(quiver, "a")
            assert await first.nack()
            again = await got(quiver, "a")
            assert files(disk) == ["segments/0000000000000001.arrow"]
            disk.faults = [("sync_directory", "segments", errno.EIO)]
            await asyncio.gather(again.ack(), second.ack())
            while disk.faults:
                await world.clock().sleep(0.001)
            assert list(quiver._segments) == [1]

    simulate(scenario)


def test_segment_is_forwarded_under_one_name_whether_it_is_a_file_or_not() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            sender = Forwarder(quiver, MemoryStore(), source="edge", subscriber="a")
            await following(quiver, "a")
            await sealed(quiver, 7)
            early = await got(quiver, "a")
            assert files(disk) == []
            data = bytes(early.view.data)
            assert await early.nack()
            await quiver.flush()
            late = await got(quiver, "a")
            assert len(files(disk)) == 1
            assert sender.key(late.view.meta) == sender.key(early.view.meta)
            assert bytes(late.view.data) == data

    simulate(scenario)


async def test_tools_tell_of_a_segment_that_a_crash_left_without_a_file(tmp_path: Path) -> None:
    async with Quiver(tmp_path / "1", LONG) as quiver:
        await following(quiver, "a", "b")
        await sealed(quiver, 7)
        assert await (await got(quiver, "a")).ack()
        shutil.copytree(tmp_path / "1", tmp_path / "2")
    view = DirectoryView.read(tmp_path / "2")
    assert view.verify() == []
    told = view.stats()
    assert (told["segments"], told["held_segments"], told["wal_entries"]) == (0, 1, 1)
    assert {each["name"]: each["lag_segments"] for each in told["subscribers"]} == {"a": 0, "b": 1}


def test_mark_of_one_who_comes_while_a_write_fails_waits_for_no_number_that_is_gone() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, dataclasses.replace(LONG, segment_hold_ms=0)) as quiver:
            await following(quiver, "a")
            disk.delays = {"segments": 0.1, "ack": 0.3}
            disk.faults = [("write", "segments/", errno.ENOSPC)]
            await segment(quiver, 7)
            await world.clock().sleep(0.01)
            await quiver.register("late")
            assert not disk.faults
            assert await drain(quiver, "late") == [7]
            [late] = [each for each in quiver.stats().subscribers if each.name == "late"]
            assert (late.high_water, late.gap_set_size) == (2, 0)

    simulate(scenario)


def test_room_that_leased_segments_will_take_as_files_is_no_room_to_be_had() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, LONG) as quiver:
            await following(quiver, "a")
            await sealed(quiver, 7)
            before = quiver._retention._bytes_at_least(0)
            await got(quiver, "a")
            assert quiver._retention._bytes_at_least(0) - before == quiver.stats().open_bytes > 0

    simulate(scenario)
