from __future__ import annotations

import asyncio
import dataclasses
import errno
from pathlib import Path

import pyarrow as pa
import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import Closed, OutcomeUnknown, StorageFull, UsageError
from forebay.formats.quiver_frame import WAL_MAGIC, decode_file_header, scan
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import Quiver, QuiverConfig, QuiverFailed, QuiverFull
from forebay.testing.world import World


def test_acknowledged_batches_are_covered_by_a_sync() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await asyncio.gather(*(quiver.ingest(batch(number)) for number in range(5)))
            lost_power = disk.after_crash(power_loss=True)
        async with store(world, lost_power) as quiver:
            await quiver.register("a")
            assert sorted(await drain(quiver, "a")) == [0, 1, 2, 3, 4]

    simulate(scenario)


def test_concurrent_producers_share_syncs() -> None:
    async def scenario(world: World, disk: SimDisk) -> int:
        async with store(world, disk) as quiver:
            await asyncio.gather(*(quiver.ingest(batch(number)) for number in range(64)))
            return sum(line.startswith("sync wal/") for line in disk.history)

    assert simulate(scenario) <= 8


def test_producer_with_many_in_flight_leaves_the_loop_to_the_syncs() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(
            SMALL, wal_bytes_max=1 << 24, wal_file_bytes=1 << 22, size_cap_bytes=1 << 27
        )
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            turns = 0

            async def take_turns() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            other = asyncio.create_task(take_turns())
            futures = [await quiver.submit(batch(number, 2_000)) for number in range(100)]
            other.cancel()
            assert turns >= 5
            receipts = await asyncio.gather(*futures)
            assert [each.sequence for each in receipts] == list(range(1, 101))
            await quiver.flush()
            assert sorted(await drain(quiver, "a")) == list(range(100))

    simulate(scenario)


def test_idle_batch_becomes_visible_by_itself() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            delivery = await quiver.next("a", 10)
            assert delivery is not None
            assert numbers(delivery) == [1]
            assert world.now < 1

    simulate(scenario)


def test_flush_interval_delays_and_never_hastens_the_acknowledgement() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, flush_interval_ms=250)
        async with store(world, disk, config) as quiver:
            await quiver.ingest(batch(0))
            began = world.now
            done = asyncio.create_task(quiver.ingest(batch(1)))
            await world.clock().sleep(0.1)
            assert not done.done()
            assert not any(b"word" in piece for _, piece in _unsynced(disk))
            await done
            assert 0.2 < world.now - began < 0.3

    simulate(scenario)


def _unsynced(disk: SimDisk) -> list[tuple[int, bytes]]:
    return [each for inode in disk.names.values() for each in inode.pending if isinstance(each, tuple)]


def test_segments_are_cut_by_size_and_keep_the_order_of_their_batches() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(60):
                await quiver.ingest(batch(number))
            await quiver.flush()
            assert quiver.stats().segments >= 3
            assert await drain(quiver, "a") == list(range(60))

    simulate(scenario)


def test_metadata_tells_times_signal_schema_and_context() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(3), signal="traces", context={"tenant": "x"})
            await quiver.ingest(batch(4), signal="traces")
            await quiver.flush()
            delivery = await quiver.next("a", 1)
            assert delivery is not None
            meta = delivery.view.meta
            assert (meta.signal, meta.rows, meta.segment) == ("traces", 20, 1)
            assert meta.event_ns == (3_000, 4_009)
            assert meta.ingested_ms[0] <= meta.ingested_ms[1] <= world.clock().now_ms()
            assert [meta.contexts[each.context] for each in meta.sources] == [{"tenant": "x"}, {}]

    simulate(scenario)


def test_signals_and_schemas_have_segments_of_their_own() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1), signal="logs")
            await quiver.ingest(batch(2), signal="traces")
            await quiver.ingest(pa.record_batch({"number": pa.array([3], pa.int64())}), signal="logs")
            await quiver.flush()
            assert quiver.stats().segments == 3
            assert sorted(await drain(quiver, "a")) == [1, 2, 3]

    simulate(scenario)


def test_dictionaries_stay_dictionaries_and_do_not_grow_with_the_batches() -> None:
    def words(count: int) -> pa.RecordBatch:
        values = [f"value number {(row + count) % 100}" for row in range(100)]
        return pa.record_batch({"w": pa.array(values).dictionary_encode()})

    async def scenario(world: World, disk: SimDisk) -> int:
        config = dataclasses.replace(
            SMALL, segment_bytes=1 << 24, size_cap_bytes=1 << 28, wal_bytes_max=1 << 26
        )
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await asyncio.gather(*(quiver.ingest(words(number)) for number in range(300)))
            await quiver.flush()
            delivery = await quiver.next("a", 1)
            assert delivery is not None
            assert delivery.view.schema.field("w").type == pa.dictionary(pa.int32(), pa.string())
            table = delivery.view.table()
            assert table.num_rows == 30_000
            assert len(table["w"].unique()) == 100
            return sum(len(data) for data in disk.files("segments/").values())

    # 30,000 indices of four bytes, one dictionary, and the footer.
    assert simulate(scenario) < 30_000 * 4 + 30_000


def test_dictionary_that_outgrows_its_index_is_split_and_keeps_its_type() -> None:
    kind = pa.dictionary(pa.int8(), pa.string())

    def words(at: int) -> pa.RecordBatch:
        values = pa.array([f"v{at + row}" for row in range(100)])
        indices = pa.array(range(100), pa.int8())
        return pa.record_batch({"number": pa.DictionaryArray.from_arrays(indices, values)})

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(
            world,
            disk,
            dataclasses.replace(SMALL, segment_bytes=1 << 20, wal_bytes_max=1 << 18, size_cap_bytes=1 << 23),
        ) as quiver:
            await quiver.register("a")
            for at in range(0, 500, 100):
                await quiver.ingest(words(at))
            await quiver.flush()
            seen: list[str] = []
            while (delivery := await quiver.next("a", 1)) is not None:
                assert delivery.view.schema.field("number").type == kind
                seen += delivery.view.table()["number"].to_pylist()
                await delivery.ack()
            assert seen == [f"v{row}" for row in range(500)]

    simulate(scenario)


def test_replayed_slices_count_their_logical_bytes() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        # Twenty of these are more than a segment of the usual size here, which would be cut.
        config = dataclasses.replace(SMALL, segment_open_ms=1_000_000, segment_bytes=8_192)
        long = pa.record_batch({"number": pa.array(range(1_000_000), pa.int64())})
        async with store(world, disk, config) as quiver:
            for at in range(20):
                await quiver.ingest(long.slice(at * 10, 10))
            before = quiver.stats().open_bytes
            assert 20 * 80 <= before <= 20 * 400
            assert quiver.stats().segments == 0
            killed = disk.after_crash(power_loss=False)
        async with store(world, killed, config) as quiver:
            assert quiver.stats().open_bytes == before

    simulate(scenario)


def test_finished_wal_files_are_written_over_and_their_old_frames_stay_dead() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            for number in range(100):
                await quiver.ingest(batch(number))
            await quiver.flush()
            for number in range(100, 103):
                await quiver.ingest(batch(number))
            files = disk.files("wal/")
            killed = disk.after_crash(power_loss=False)
            lost_power = disk.after_crash(power_loss=True)
        made = [line for line in disk.history if line.startswith("open wal/") and "spare" not in line]
        begun = [line for line in disk.history if line.startswith("rename wal/") and ".spare" in line]
        assert len(begun) > len(made)
        headers = [decode_file_header(data, WAL_MAGIC) for name, data in files.items() if ".wal" in name]
        assert any(header.is_reused for header in headers)
        for left in (killed, lost_power):
            async with store(world, left) as quiver:
                assert quiver.report.is_clean
                assert quiver.report.torn_bytes == 0
                await quiver.register("a")
                assert sorted(await drain(quiver, "a")) == list(range(103))

    simulate(scenario)


def test_spares_count_and_go_when_space_is_short() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, size_cap_bytes=1 << 18)
        async with store(world, disk, config) as quiver:
            for number in range(40):
                await quiver.ingest(batch(number))
            await quiver.flush()
            await quiver.maintain()
            assert [name for name in disk.files("wal/") if name.endswith(".spare")]
            assert quiver.stats().used_bytes == disk.used_bytes
            with pytest.raises(QuiverFull):
                for number in range(1_000):
                    await quiver.ingest(batch(number))
            assert not [name for name in disk.files("wal/") if name.endswith(".spare")]
            assert disk.used_bytes <= config.size_cap_bytes

    simulate(scenario)


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
async def test_codecs_on_the_real_disk(tmp_path: Path, codec: str) -> None:
    config = QuiverConfig(segment_codec=codec, wal_codec=codec, segment_open_ms=20)
    async with Quiver(tmp_path / "q", config) as quiver:
        await quiver.register("a")
        await asyncio.gather(*(quiver.ingest(batch(number, 1_000)) for number in range(20)))
        assert sorted(await drain(quiver, "a", timeout_s=0.5)) == list(range(20))


async def test_reads_of_an_uncompressed_segment_allocate_nothing(tmp_path: Path) -> None:
    async with Quiver(tmp_path / "q") as quiver:
        await quiver.register("a")
        await quiver.ingest(pa.record_batch({"number": pa.array(range(100_000), pa.int64())}))
        await quiver.flush()
        delivery = await quiver.next("a")
        assert delivery is not None
        before = pa.total_allocated_bytes()
        table = delivery.view.table()
        assert table["number"][99_999].as_py() == 99_999
        assert pa.total_allocated_bytes() - before < 10_000


def test_full_disk_fails_only_those_callers_and_ends_when_space_returns() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, segment_open_ms=1_000_000, wal_spare_files=0)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            disk.capacity = disk.used_bytes + 100
            with pytest.raises(StorageFull):
                await quiver.ingest(batch(2))
            disk.capacity = None
            await quiver.ingest(batch(3))
            killed = disk.after_crash(power_loss=False)
            lost_power = disk.after_crash(power_loss=True)
        for left in (killed, lost_power):
            async with store(world, left) as quiver:
                assert quiver.report.is_clean
                await quiver.register("a")
                assert await drain(quiver, "a") == [1, 3]

    simulate(scenario)


@pytest.mark.parametrize("operation", ["sync", "sync_directory"])
def test_failed_sync_latches_until_the_store_is_reopened(operation: str) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, dataclasses.replace(SMALL, wal_spare_files=0)).open()
        if operation == "sync":
            await quiver.ingest(batch(1))
        disk.faults.append((operation, "wal", errno.EIO))
        results = await asyncio.gather(
            quiver.ingest(batch(2)), quiver.ingest(batch(3)), return_exceptions=True
        )
        # Who was not written yet when the sync failed is certainly not done.
        assert {type(each) for each in results} <= {OutcomeUnknown, QuiverFailed}
        assert any(isinstance(each, OutcomeUnknown) for each in results)
        with pytest.raises(QuiverFailed):
            await quiver.ingest(batch(4))
        await quiver.close()
        async with store(world, disk) as quiver:
            await quiver.ingest(batch(5))
            await quiver.register("a")
            assert {5} <= set(await drain(quiver, "a")) <= {1, 2, 3, 5}

    simulate(scenario)


@pytest.mark.parametrize(
    "operation", ["open", "write", "sync", "rename", "sync_directory", "read", "protect"]
)
def test_failed_segment_write_loses_nothing_and_delays_only_itself(operation: str) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            disk.faults.append((operation, "segments", errno.EIO))
            for number in range(40):
                await quiver.ingest(batch(number))
            assert sorted(await drain(quiver, "a", timeout_s=3)) == list(range(40))
            for data in (data for name, data in disk.files("wal/").items() if name.endswith(".wal")):
                assert not list(scan(data, decode_file_header(data, WAL_MAGIC)))
        async with store(world, disk) as quiver:
            assert quiver.report.segments_lost == []
            assert await drain(quiver, "a") == []

    simulate(scenario)


def test_wal_never_passes_its_bound_while_segments_are_written() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(
            SMALL, segment_bytes=1 << 18, segment_open_ms=1_000_000, size_cap_bytes=1 << 22
        )
        async with store(world, disk, config) as quiver:
            for number in range(400):
                await quiver.ingest(batch(number))
                assert sum(map(len, disk.files("wal/").values())) <= config.wal_bytes_max

    simulate(scenario)


def test_closed_store_says_so() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = store(world, disk)
        with pytest.raises(Closed):
            await quiver.ingest(batch(1))
        async with quiver:
            await quiver.register("a")
            waiting = asyncio.create_task(quiver.next("a"))
            await world.clock().sleep(0.1)
        with pytest.raises(Closed):
            await waiting
        with pytest.raises(Closed):
            await quiver.ingest(batch(1))

    simulate(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment_bytes": 1},
        {"segment_codec": "gzip"},
        {"size_cap_policy": "newest"},
        {"retain_ms": 0},
        {"size_cap_bytes": 1 << 20},
        {"wal_bytes_max": 1 << 20},
    ],
)
def test_settings_out_of_range_are_refused_with_the_range(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        QuiverConfig(**wrong)  # type: ignore[arg-type]
    assert caught.value.hint


def test_metrics_count_what_happened() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        registry = MetricsRegistry()
        async with store(world, disk, metrics=registry) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            await drain(quiver, "a")
            await world.clock().sleep(1)
            assert registry.counter("quiver.ingest.batches_total", "Batches made durable")._only().value == 1
            gauge = registry.gauge(
                "quiver.subscriber.lag_segments", "Segments it has not resolved", ("subscriber",)
            )
            assert gauge.labels("a").value == 0

    simulate(scenario)
