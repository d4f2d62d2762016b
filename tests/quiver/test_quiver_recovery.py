from __future__ import annotations

import dataclasses
import errno
import random
import re
from pathlib import Path

import pytest
from tests.quiver.crash_matrix import crash_once
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import AccessDenied, Unavailable
from forebay.quiver import DirectoryInUse, Quiver
from forebay.testing.world import World, seeds

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000, wal_file_bytes=32_768, wal_spare_files=0)
"""Segments are cut by hand."""


def test_numbers_never_restart_after_everything_was_delivered_and_deleted() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            assert await drain(quiver, "a") == [1]
        for number in range(2, 5):
            async with store(world, disk) as quiver:
                assert quiver.stats().next_segment == number
                await quiver.ingest(batch(number))
                assert await drain(quiver, "a") == [number]
                assert disk.files("segments/") == {}

    simulate(scenario)


def test_killed_before_the_first_checkpoint_knows_every_record_and_starts_at_latest() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        await store(world, disk).open()
        await world.clock().sleep(0.2)
        # The spare of the log has taken the first number.
        left = disk.after_crash(power_loss=False)
        quiver = await store(world, left).open()
        await quiver.register("a")
        await quiver.ingest(batch(1))
        await quiver.flush()
        left = left.after_crash(power_loss=True)
        async with store(world, left) as quiver:
            assert not quiver.report.redelivery_possible
            await quiver.register("b", "latest")
            assert await drain(quiver, "b") == []
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


def test_damaged_entry_in_the_middle_costs_that_entry_alone() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        ends = []
        for number in range(10):
            await quiver.ingest(batch(number))
            [data] = disk.files("wal/").values()
            ends.append(len(data))
        left = disk.after_crash(power_loss=True)
        [name] = left.files("wal/")
        left.flip(name, ends[3] + 100)
        async with store(world, left, SLOW) as quiver:
            report = quiver.report
            assert (report.entries_replayed, report.damaged_ranges) == (9, 1)
            assert report.sequence_gaps == 1
            assert report.damaged_bytes == ends[4] - ends[3]
            [aside] = report.quarantined
            assert len(left.files()[aside]) == report.damaged_bytes
            await quiver.register("a")
            await quiver.flush()
            assert await drain(quiver, "a") == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        async with store(world, left, SLOW) as quiver:
            assert quiver.report.sequence_gaps == 0, "said once"

    simulate(scenario)


def test_damaged_header_of_a_wal_file_costs_nothing() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.ingest(batch(1))
        left = disk.after_crash(power_loss=True)
        [name] = left.files("wal/")
        left.flip(name, 20)
        async with store(world, left) as quiver:
            assert quiver.report.damaged_ranges == 1
            await quiver.register("a")
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


def test_finalized_data_is_not_replayed_even_after_its_segment_was_deleted() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        await quiver.ingest(batch(2), signal="traces")  # stays open, and keeps the WAL file
        await quiver.ingest(batch(1, rows=400))  # large enough for a segment
        assert await drain(quiver, "a") == [1]
        await quiver.maintain()
        assert disk.files("segments/") == {}
        for power_loss in (False, True):
            left = disk.after_crash(power_loss=power_loss)
            async with store(world, left) as again:
                assert again.report.entries_covered == 1
                assert await drain(again, "a") == [2]

    simulate(scenario)


def test_segment_that_is_gone_is_lost_and_counted_and_stops_nothing() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            for number in range(3):
                await quiver.ingest(batch(number))
                await quiver.flush()
        left = disk.after_crash(power_loss=False)
        del left.names["segments/0000000000000002.arrow"]
        left = left.after_crash(power_loss=False)
        async with store(world, left) as quiver:
            assert quiver.report.segments_lost == [2]
            assert await drain(quiver, "a") == [0, 2]
            [who] = quiver.stats().subscribers
            assert (who.high_water, who.dropped) == (3, {"lost": 1})
        async with store(world, left) as quiver:
            assert quiver.report.segments_lost == []
            assert quiver.stats().losses["segments.lost"] == 1

    simulate(scenario)


def test_segment_with_a_bad_footer_is_put_aside_and_the_others_are_delivered() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            for number in range(3):
                await quiver.ingest(batch(number))
                await quiver.flush()
        left = disk.after_crash(power_loss=False)
        name = "segments/0000000000000002.arrow"
        left.flip(name, len(left.files()[name]) - 20)
        async with store(world, left) as quiver:
            assert quiver.report.segments_quarantined == 1
            assert "quarantine/segment-0000000000000002.arrow" in left.files()
            assert await drain(quiver, "a") == [0, 2]
            assert quiver.stats().used_bytes >= len(left.files()["quarantine/segment-0000000000000002.arrow"])

    simulate(scenario)


def test_bad_part_of_a_segment_is_left_out_and_the_rest_is_delivered() -> None:
    import pyarrow as pa

    def wide(number: int) -> pa.RecordBatch:
        return pa.record_batch({"number": pa.array([number] * 200_000, pa.int64())})

    async def scenario(world: World, disk: SimDisk) -> None:
        big = 1 << 26
        config = dataclasses.replace(SLOW, segment_bytes=big, wal_bytes_max=big, size_cap_bytes=big << 3)
        quiver = await store(world, disk, config).open()
        await quiver.register("a")
        for number in range(3):
            await quiver.ingest(wide(number))
        await quiver.flush()
        disk.flip("segments/0000000000000001.arrow", 2_000_000)
        delivery = await quiver.next("a", 1)
        assert delivery is not None
        assert delivery.view.bad_parts == [1]
        assert numbers(delivery) == [0, 2]

    simulate(scenario)


def test_damaged_newest_checkpoint_falls_back_to_the_one_before() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        for number in range(3):
            async with store(world, disk) as quiver:
                await quiver.register("a")
                await quiver.ingest(batch(number))
                assert await drain(quiver, "a") == [number]
        left = disk.after_crash(power_loss=False)
        newest = max(left.files("ack/"), key=lambda name: (name.endswith("ckpt"), name))
        left.flip(newest, 30)
        async with store(world, left) as quiver:
            assert quiver.report.checkpoints_damaged == 1
            assert not quiver.report.redelivery_possible
            assert await drain(quiver, "a") == []
            assert quiver.stats().next_segment == 4

    simulate(scenario)


def test_loss_of_all_acknowledgements_means_redelivery_and_never_a_skip() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.register("b")
            for number in range(3):
                await quiver.ingest(batch(number))
                await quiver.flush()
            assert await drain(quiver, "a") == [0, 1, 2]
        left = disk.after_crash(power_loss=False)
        for name, data in left.files("ack/").items():
            for at in range(len(data)):
                if at % 20 == 0:
                    left.flip(name, at)
        async with store(world, left) as quiver:
            assert quiver.report.redelivery_possible
            await quiver.register("a", "latest")
            assert await drain(quiver, "a") == [0, 1, 2]
            await quiver.ingest(batch(9))
            await quiver.flush()
            assert quiver.stats().next_segment == 5

    simulate(scenario)


def test_damage_at_the_end_of_an_older_file_of_acknowledgements_is_no_torn_tail() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        first = next(name for name in disk.files("ack/") if name.endswith(".log"))
        size = len(disk.files("ack/")[first])
        for number in range(2):
            await quiver.ingest(batch(number))
            await quiver.flush()
        await quiver.register("b")
        assert await drain(quiver, "b") == [0, 1]
        delivery = await quiver.next("a")
        assert delivery is not None
        await delivery.ack()
        left = disk.after_crash(power_loss=False)
        # The registration of "a" is the last record of its file, and the log goes on in another.
        assert len(left.files("ack/")[first]) == size
        left.flip(first, size - 1)
        async with store(world, left, SLOW) as quiver:
            assert (quiver.report.damaged_ranges, quiver.report.torn_bytes) == (1, 0)
            assert quiver.report.redelivery_possible
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


def test_unreadable_directory_is_an_error_and_not_an_empty_store() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.ingest(batch(1))
        for directory, number, kind in (
            ("segments", errno.EACCES, AccessDenied),
            ("wal", errno.EIO, Unavailable),
        ):
            disk.faults.append(("list", directory, number))
            with pytest.raises(kind):
                await store(world, disk).open()
        async with store(world, disk) as quiver:
            assert quiver.stats().next_segment == 2

    simulate(scenario)


async def test_second_process_or_instance_is_refused(tmp_path: Path) -> None:
    async with Quiver(tmp_path / "q"):
        with pytest.raises(DirectoryInUse) as caught:
            await Quiver(tmp_path / "q").open()
        assert caught.value.hint
        assert str(tmp_path / "q") in caught.value.message
    async with Quiver(tmp_path / "q"):
        pass


async def test_missing_directory_above_fails_at_open_and_is_named(tmp_path: Path) -> None:
    place = tmp_path / "missing" / "q"
    with pytest.raises(Unavailable, match=re.escape(f"opening the directory ({place}): No such file")):
        await Quiver(place).open()


# The crash matrix.


OPERATIONS = crash_once(0, 10**9, power_loss=False)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("share", range(8))
def test_crash_before_any_operation_loses_and_repeats_nothing(share: int, power_loss: bool) -> None:
    assert OPERATIONS > 100
    for crash_at in range(1 + share, OPERATIONS + 1, 8 * 2):
        crash_once(crash_at, crash_at, power_loss=power_loss)


def test_crash_while_recovering_from_a_crash_loses_nothing() -> None:
    for seed in seeds(30):
        rng = random.Random(seed)
        crash_once(
            seed, rng.randrange(20, OPERATIONS), power_loss=seed % 3 != 0, again_at=rng.randrange(1, 120)
        )


def test_sectors_that_survive_in_any_order_lose_and_repeat_nothing() -> None:
    for seed in seeds(30):
        rng = random.Random(seed)
        again_at = rng.choice([None, rng.randrange(1, 200)])
        crash_once(
            seed, rng.randrange(20, OPERATIONS), power_loss=True, again_at=again_at, tears_sectors=True
        )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("share", range(2))
def test_error_of_any_operation_loses_and_repeats_nothing(share: int, number: int) -> None:
    for at in range(1 + share, OPERATIONS + 1, 2 * 3):
        crash_once(at, 10**9, power_loss=at % 2 == 0, fail_at=(at, number))


@pytest.mark.nightly
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
def test_crash_before_every_operation_under_many_seeds(power_loss: bool) -> None:
    for seed in range(5):
        for crash_at in range(1, OPERATIONS + 1):
            crash_once(seed, crash_at, power_loss=power_loss)
