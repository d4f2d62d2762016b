from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import re
from pathlib import Path

import pyarrow as pa
import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import StorageFull
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import Quiver, QuiverConfig, QuiverFull, UnknownSubscriber
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)


async def segments(quiver: Quiver, count: int) -> None:
    """One segment for each number."""
    for number in range(count):
        await quiver.ingest(batch(number))
        await quiver.flush()


# Active or not.


def test_paused_subscriber_gets_nothing_and_keeps_everything_until_it_is_activated() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 2)
            held = await quiver.next("a", 1)
            assert held is not None
            quiver.deactivate("a")
            assert await quiver.next("a", 10) is None
            assert await held.ack(), "what is in its hands may be settled"
            await quiver.maintain()
            [state] = quiver.stats().subscribers
            assert (state.is_active, state.is_orphaned, state.lag_segments) == (False, False, 1)
            waiting = asyncio.create_task(quiver.next("a"))
            await world.clock().sleep(100)
            assert not waiting.done()
            quiver.activate("a")
            delivery = await waiting
            assert delivery is not None
            assert numbers(delivery) == [1]
            with pytest.raises(UnknownSubscriber):
                quiver.activate("b")
            with pytest.raises(UnknownSubscriber):
                quiver.deactivate("b")

    simulate(scenario)


@pytest.mark.parametrize("timeout_ms", [None, 120_000])
def test_orphan_is_named_in_the_log_and_removed_only_where_that_is_asked_for(
    timeout_ms: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, orphan_timeout_ms=timeout_ms)
        async with store(world, disk, config) as quiver:
            for name in ("reads", "paused", "orphan"):
                await quiver.register(name)
            await segments(quiver, 2)
            quiver.deactivate("paused")
            assert await drain(quiver, "reads") == [0, 1]
            await world.clock().sleep(90)
            assert quiver.has_subscriber("orphan")
            await world.clock().sleep(90)
            assert quiver.has_subscriber("paused")
            assert quiver.has_subscriber("orphan") is (timeout_ms is None)
        async with store(world, disk.after_crash(power_loss=True), SLOW) as quiver:
            assert quiver.has_subscriber("orphan") is (timeout_ms is None)

    with caplog.at_level(logging.WARNING, "forebay.quiver"):
        simulate(scenario)
    said = [each.getMessage() for each in caplog.records if "quiver.subscriber" in each.getMessage()]
    pattern = r"quiver\.subscriber\.(\w+): orphan, never active, 2 segments behind, [1-9]\d* bytes pinned"
    found = [match[1] for each in said if (match := re.fullmatch(pattern, each))]
    assert len(found) == len(said)
    assert found == (["orphaned"] if timeout_ms is None else ["orphaned", "removed"])


def test_orphan_that_somebody_else_removes_during_a_pass_is_no_error() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, orphan_timeout_ms=10_000, maintenance_interval_ms=3_600_000)
        async with store(world, disk, config) as quiver:
            for name in "abcdef":
                await quiver.register(name)
            await quiver.maintain()
            await world.clock().sleep(11)
            await asyncio.gather(quiver._orphans.look(), quiver.unregister("f"))
            assert not quiver.stats().subscribers

    simulate(scenario)


def test_maintenance_goes_on_after_an_error_that_nobody_thought_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SMALL) as quiver:
            look, looks = quiver._orphans.look, 0

            async def broken() -> None:
                nonlocal looks
                looks += 1
                if looks == 1:
                    raise ValueError("a defect")
                await look()

            quiver._orphans.look = broken  # type: ignore[method-assign]
            await world.clock().sleep(1)
            assert looks > 1

    simulate(scenario)
    [record] = [each for each in caplog.records if "quiver.maintenance.failed" in each.getMessage()]
    assert record.exc_info


# What is dropped before it is a segment.


@pytest.mark.parametrize("subscribers", [0, 2])
def test_drop_oldest_takes_open_data_where_no_segment_can_be_written(subscribers: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        names = ["a", "b"][:subscribers]
        config = dataclasses.replace(
            SMALL, size_cap_bytes=262_144, wal_bytes_max=240_000, size_cap_policy="drop_oldest"
        )
        async with store(world, disk, config) as quiver:
            for name in names:
                await quiver.register(name)
            # Until the faults are taken away, every attempt to write a segment fails.
            disk.faults += [("open", "segments", errno.EIO)] * 1_000
            for number in range(200):
                await quiver.ingest(batch(number, 40))
                assert disk.used_bytes <= config.size_cap_bytes
            losses = quiver.stats().losses
            assert losses["entries.size"] > 0
            assert losses["rows.size"] == 40 * losses["entries.size"]
            assert losses["bytes.size"] > 0
            crashed = disk.after_crash(power_loss=True)
            disk.faults.clear()
            for name in names:
                found = await drain(quiver, name, timeout_s=5)
                assert found == list(range(losses["entries.size"], 200))
                [state] = [each for each in quiver.stats().subscribers if each.name == name]
                assert state.dropped["size"] > 0
                assert state.gap_set_size == 0
        async with store(world, crashed, config) as quiver:
            assert quiver.report.is_clean
            assert quiver.stats().losses == losses
            await quiver.register("a")
            assert await drain(quiver, "a", timeout_s=5) == list(range(losses["entries.size"], 200))

    simulate(scenario)


def test_drop_that_cannot_be_recorded_drops_nothing_and_leaves_no_hole() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(
            SMALL, size_cap_bytes=262_144, wal_bytes_max=240_000, size_cap_policy="drop_oldest"
        )
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            disk.faults += [("open", "segments", errno.EIO)] * 1_000
            taken = []
            for number in range(200):
                if number == 20:
                    disk.faults.insert(0, ("write", "ack", errno.ENOSPC))
                with contextlib.suppress(StorageFull):
                    await quiver.ingest(batch(number, 40))
                    taken.append(number)
            assert len(taken) == 199, "one ingest met the full disk"
            lost = quiver.stats().losses["entries.size"]
            disk.faults.clear()
            assert sorted(await drain(quiver, "a", timeout_s=5)) == taken[lost:]
            [state] = quiver.stats().subscribers
            assert state.gap_set_size == 0

    simulate(scenario)


def test_backpressure_never_drops_open_data() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, size_cap_bytes=262_144, wal_bytes_max=240_000)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            disk.faults += [("open", "segments", errno.EIO)] * 1_000
            taken = []
            for number in range(200):
                with contextlib.suppress(QuiverFull):
                    await quiver.ingest(batch(number, 40))
                    taken.append(number)
            disk.faults.clear()
            assert 0 < len(taken) < 200
            assert await drain(quiver, "a", timeout_s=5) == taken

    simulate(scenario)


def test_entries_that_expired_while_nobody_ran_are_left_out_and_recorded() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, retain_ms=10_000)
        quiver = await store(world, disk, config).open()
        await quiver.register("a")
        await quiver.ingest(batch(0), signal="logs")
        await quiver.ingest(batch(1), signal="traces")
        await world.clock().sleep(8)
        await quiver.ingest(batch(2))
        crashed = disk.after_crash(power_loss=True)
        await world.clock().sleep(5)
        async with store(world, crashed, config) as again:
            assert (again.report.entries_expired, again.report.entries_replayed) == (2, 1)
            assert again.stats().losses == {
                "entries.expired": 2,
                "rows.expired": 20,
                "bytes.expired": again.stats().losses["bytes.expired"],
            }
            await again.flush()
            assert await drain(again, "a") == [2]
            [state] = again.stats().subscribers
            assert (state.dropped, state.gap_set_size) == ({"expired": 1}, 0)
            crashed = crashed.after_crash(power_loss=True)
        async with store(world, crashed, SLOW) as again:
            assert again.report.entries_expired == 0
            assert await drain(again, "a") == []

    simulate(scenario)


# Damage.


def wide(number: int) -> pa.RecordBatch:
    return pa.record_batch({"number": pa.array([number] * 200_000, pa.int64())})


@pytest.mark.parametrize(("limit", "kept"), [(1 << 26, 1), (1 << 20, 0)])
def test_bad_part_is_put_aside_once_within_the_bound_and_outlives_its_segment(limit: int, kept: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        big = 1 << 26
        config = dataclasses.replace(
            SLOW,
            segment_bytes=big,
            wal_bytes_max=big,
            size_cap_bytes=big << 3,
            dead_letter_bytes_max=limit,
            retry_base_ms=0,
        )
        registry = MetricsRegistry()
        async with store(world, disk, config, metrics=registry) as quiver:
            for name in ("a", "b"):
                await quiver.register(name)
            for number in range(3):
                await quiver.ingest(wide(number))
            await quiver.flush()
            disk.flip("segments/0000000000000001.arrow", 2_000_000)
            for name in ("a", "a", "b"):
                delivery = await quiver.next(name, 1)
                assert delivery is not None
                assert numbers(delivery) == [0, 2]
                await (delivery.nack() if name == "a" and delivery.attempt == 1 else delivery.ack())
            await quiver.maintain()
            assert disk.files("segments/") == {}
            aside = disk.files("quarantine/")
            assert len(aside) == kept
            assert all(1_600_000 <= len(data) <= 1_700_000 for data in aside.values())
            help_ = "Segments or parts that are damaged"
            assert registry.counter("quiver.segment.quarantined_total", help_)._only().value == 1
            assert quiver.stats().used_bytes == disk.used_bytes

    simulate(scenario)


def test_segment_of_which_nothing_is_left_is_put_aside_and_a_failed_record_releases_its_claim() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 2)
            for offset in range(100, 120):
                disk.flip("segments/0000000000000001.arrow", offset)
            disk.faults.append(("write", "ack", errno.ENOSPC))
            with pytest.raises(StorageFull):
                await quiver.next("a", 1)
            [state] = quiver.stats().subscribers
            assert state.in_flight == 0
            assert await drain(quiver, "a") == [1]
            [state] = quiver.stats().subscribers
            assert (state.dropped, state.in_flight) == ({"lost": 1}, 0)
            assert list(disk.files("quarantine/")) == ["quarantine/segment-0000000000000001.arrow"]

    simulate(scenario)


def test_restarts_after_a_part_of_the_wal_is_gone_repeat_nothing() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, segment_bytes=1 << 16, wal_spare_files=0)
        quiver = await store(world, disk, config).open()
        await quiver.register("a")
        for number in range(60):
            # The open segment of one signal keeps the later WAL files, the other lets the first ones go.
            await quiver.ingest(batch(number), signal="kept" if number >= 40 else "done")
            if number == 39:
                await quiver.flush()
                await quiver.maintain()
        first = min(each for each in disk.files("wal/"))
        assert "0000000000000001" not in first
        for _ in range(3):
            disk = disk.after_crash(power_loss=True)
            quiver = await store(world, disk, config).open()
            assert quiver.report.is_clean
            assert quiver.report.entries_replayed == 20
        await quiver.flush()
        assert sorted(await drain(quiver, "a")) == list(range(60))
        await quiver.close()
        async with store(world, disk, config) as again:
            assert again.report.entries_replayed == 0
            assert await drain(again, "a") == []

    simulate(scenario)


# Memory.


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell what is resident")
async def test_settled_segments_do_not_count_as_memory_of_the_process(tmp_path: Path) -> None:
    def resident() -> int:
        text = Path("/proc/self/smaps").read_text()
        parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
        found = [part for part in parts if str(tmp_path) in part and ".arrow" in part.split("\n")[0]]
        assert found
        return sum(int(re.findall(r"(?m)^Rss:\s+(\d+) kB", part)[0]) for part in found)

    async with Quiver(tmp_path / "store", QuiverConfig(segment_open_ms=86_400_000)) as quiver:
        await quiver.register("a")
        await quiver.register("b")
        await quiver.ingest(wide(7))
        await quiver.flush()
        delivery = await quiver.next("a", 10)
        assert delivery is not None
        assert delivery.view.table()["number"].to_numpy().sum() == 7 * 200_000
        before = resident()
        await delivery.ack()
        assert resident() < before / 4
        assert delivery.view.table()["number"].to_numpy().sum() == 7 * 200_000, "it can be read again"
