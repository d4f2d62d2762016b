"""Files of a log: reused, made ready before they are needed, filled with zeros when there is room."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Callable
from typing import TypeVar

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.formats.quiver_frame import WAL_MAGIC, Frame, decode_file_header, scan
from forebay.quiver import QuiverConfig, QuiverFailed
from forebay.quiver._disk import Lane
from forebay.quiver._group_log import GroupLog
from forebay.quiver._log_files import LogSettings
from forebay.testing.world import World

T = TypeVar("T")
IDLE = dataclasses.replace(SMALL, segment_open_ms=1_000_000)


class LaneDisk(SimDisk):
    """Writes down in which lane files get their names."""

    def __init__(self) -> None:
        super().__init__()
        self.lane: Lane = "wal"
        self.renamed: list[tuple[Lane, str]] = []

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        def noted() -> T:
            self.lane = lane
            return work()

        return await super().run(lane, noted)

    def rename(self, old: str, new: str) -> None:
        self.renamed.append((self.lane, new))
        super().rename(old, new)


def frames(disk: SimDisk) -> list[int]:
    """Sequences of all frames in the WAL, as a scan from the headers finds them."""
    found = []
    for name, data in disk.files("wal/").items():
        if name.endswith(".wal"):
            for each in scan(data, decode_file_header(data, WAL_MAGIC)):
                assert isinstance(each, Frame), (name, each)
                found.append(each.sequence)
    return sorted(found)


def test_no_producer_waits_for_the_next_file() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        assert isinstance(disk, LaneDisk)
        async with store(world, disk) as quiver:
            await world.clock().sleep(1)
            for number in range(200):
                await quiver.ingest(batch(number))
                await world.clock().sleep(0.01)
        begun = [lane for lane, new in disk.renamed if new.endswith(".wal")]
        assert len(begun) > 5
        assert set(begun) == {"files"}

    simulate(scenario, disk=LaneDisk())


def test_frames_that_waited_while_a_file_was_made_ready_are_found_in_it() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        settings = LogSettings("wal", "wal", "wal", WAL_MAGIC, 8_192, 0, 2, 8_192, is_ahead=True)
        log = GroupLog(disk, settings, world.clock(), on_durable=lambda group: None)
        log.start([], 1, 1, [])
        await log.prepare()
        await world.clock().sleep(1)
        await log.drop_spares()
        items = [log.append(1, 0, [b"x" * 100], 100)]
        preparing = asyncio.ensure_future(log.prepare())
        items += [log.append(1, 0, [b"x" * 5_000], 5_000) for _ in range(5)]
        for item in items:
            await item.done
        await preparing
        assert frames(disk) == [1, 2, 3, 4, 5, 6]
        await log.close()

    simulate(scenario)


def test_failed_sync_of_a_file_that_nobody_waits_for_latches() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, IDLE).open()
        await quiver.register("a")
        await world.clock().sleep(1)
        disk.faults.append(("sync_directory", "wal", errno.EIO))
        done = 0
        with pytest.raises(QuiverFailed):
            for number in range(100):
                await quiver.ingest(batch(number))
                done += 1
        assert 0 < done < 100
        lost_power = disk.after_crash(power_loss=True)
        await quiver.close()
        async with store(world, lost_power) as quiver:
            assert set(range(done)) <= set(await drain(quiver, "a"))

    simulate(scenario)


@pytest.mark.parametrize(("may_fill", "fills"), [(True, 2), (False, 0)])
def test_zeros_are_written_once_and_only_where_there_is_room(may_fill: bool, fills: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        settings = LogSettings("wal", "wal", "wal", WAL_MAGIC, 8_192, 0, 2, 8_192, is_ahead=True)
        log = GroupLog(
            disk, settings, world.clock(), on_durable=lambda group: None, may_fill=lambda size: may_fill
        )
        log.start([], 1, 1, [])
        for _ in range(3):
            await log.prepare()
            await world.clock().sleep(1)
        for _ in range(20):
            await log.append(1, 0, [b"x" * 4_000], 4_000).done
        made = [line for line in disk.history if line.startswith("open wal/") and ".spare" in line]
        assert len(set(made)) == fills
        assert frames(disk) == list(range(1, 21))
        await log.close()

    simulate(scenario)


def test_file_that_is_ready_goes_when_space_is_short_and_counts_until_then() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, IDLE) as quiver:
            await world.clock().sleep(1)
            assert quiver.stats().used_bytes == disk.used_bytes
            before = disk.used_bytes
            await quiver._wal.drop_spares()
            assert disk.used_bytes == before - SMALL.wal_spares_max * SMALL.wal_file_bytes
            assert quiver.stats().used_bytes == disk.used_bytes

    simulate(scenario)


def test_whoever_is_alone_is_written_at_once_and_a_crowd_shares_its_syncs() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        groups: list[int] = []
        settings = LogSettings("wal", "wal", "wal", WAL_MAGIC, 1 << 20, is_eager=True)
        log = GroupLog(disk, settings, world.clock(), on_durable=lambda group: groups.append(len(group)))
        log.start([], 1, 1, [])

        async def one() -> None:
            await log.append(1, 0, [b"x"], 1).done

        for _ in range(3):
            await one()
        alone = log.append(1, 0, [b"x"], 1)
        assert not log._pending, "not a turn of the loop later"
        await alone.done
        groups.clear()
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(16)))
        # The first of them was taken for one who is alone, once.
        assert groups[:2] == [1, 15]
        assert groups[2:] == [16] * 9
        await log.close()

    simulate(scenario)


def test_spare_counts_while_it_becomes_a_log_file_and_goes_when_space_is_short() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        settings = LogSettings("wal", "wal", "wal", WAL_MAGIC, 8_192, 0, 2, 8_192, is_ahead=True)
        log = GroupLog(disk, settings, world.clock(), on_durable=lambda group: None)
        log.start([], 1, 1, [])
        await log.prepare()
        await world.clock().sleep(1)
        await log.append(1, 0, [b"x"], 1).done
        await world.clock().sleep(1)
        assert log.bytes == disk.used_bytes == 2 * 8_192
        for _ in range(3):
            await log.append(1, 0, [b"x" * 4_000], 4_000).done
        assert log.bytes == disk.used_bytes
        await log.remove([file for file in log.files.values() if file.last_sequence < 3])
        # Now one is on its way.
        assert log.bytes == disk.used_bytes
        await log.drop_spares()
        assert log.spare_bytes == 0
        assert log.bytes == disk.used_bytes
        await log.close()

    simulate(scenario)


def test_files_kept_for_reuse_are_never_more_than_allowed_the_one_that_is_ready_included() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            for number in range(200):
                await quiver.ingest(batch(number))
            await quiver.flush()
            await world.clock().sleep(1)
            assert 0 < quiver._wal.spare_bytes <= SMALL.wal_spares_max * SMALL.wal_file_bytes
            assert quiver.stats().wal_bytes == quiver._wal.spare_bytes

    simulate(scenario)


def test_spares_last_for_two_segments_unless_they_are_told_not_to() -> None:
    # One segment is written while the next one fills the WAL; files that are made meanwhile sync slowly.
    config = QuiverConfig()
    assert config.wal_spares_max * config.wal_file_bytes >= 2 * config.segment_bytes
    assert dataclasses.replace(config, wal_spare_files=64).wal_spares_max * 2 * config.wal_file_bytes <= (
        config.wal_bytes_max
    )
