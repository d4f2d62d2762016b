"""Reads of a log at rest and in the middle of every step that others take."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.log.hand_log import FAST, HandLog, numbered

from forebay.errors import UsageError
from forebay.formats import bytes_batch
from forebay.formats.record_columns import RECORD_SCHEMA
from forebay.kit.retry import RetryPolicy
from forebay.log import _fetch
from forebay.log._errors import DataLost, OffsetOutOfRange, UnknownPartition, UnknownTopic
from forebay.log._fetched import Fetched, ReaderConfig, ReadRequest
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.log._resolve import Located
from forebay.testing import Actor, World


async def log_of(*sizes: int) -> HandLog:
    log = HandLog()
    for size in sizes:
        await log.append(numbered(log.control.sequence_counter, size))
        log.now_ms += 1_000
    return log


async def values(log: HandLog, offset: int, **bounds: Any) -> list[bytes]:
    return (await log.reader().read(*log.place, offset, **bounds)).records()


async def test_every_offset_is_read_from_index_and_pending_tail() -> None:
    log = await log_of(3, 1, 4, 2)
    for offset in range(1, 11):
        fetched = await log.reader().read(*log.place, offset, max_records=1)
        assert fetched.records() == [b"%d" % offset]
        assert (fetched.next_offset, fetched.earliest, fetched.high_watermark) == (offset + 1, 1, 11)


async def test_a_read_goes_on_over_batches_within_its_bounds() -> None:
    log = await log_of(3, 3, 3)
    assert await values(log, 2) == numbered(2, 8)
    assert await values(log, 2, max_records=4) == numbered(2, 4)
    assert await values(log, 1, max_bytes=2) == numbered(1, 2)


async def test_a_record_larger_than_the_bound_is_returned_alone() -> None:
    log = HandLog()
    await log.append([b"x" * 1000, b"y" * 1000, b"z"])
    assert await values(log, 2, max_bytes=10) == [b"y" * 1000]
    assert await values(log, 3, max_bytes=10) == [b"z"]


async def test_a_read_at_the_end_is_empty_and_beyond_it_an_error() -> None:
    log = await log_of(2)
    fetched = await log.reader().read(*log.place, 3)
    assert fetched.batches == []
    assert fetched.next_offset == 3
    with pytest.raises(OffsetOutOfRange) as caught:
        await values(log, 4)
    assert (caught.value.earliest, caught.value.next) == (1, 3)


async def test_a_control_record_without_pending_is_read_from_the_index_alone() -> None:
    log = HandLog()
    await log.append(numbered(1, 3), clear=True)
    assert await log.everything() == numbered(1, 3)


async def test_whole_objects_of_the_older_layout_are_read() -> None:
    log = await log_of(2)
    compacted = await log.compact(1, 2)
    entry = await log.coordinator.get(log.keys.index(2), partition_key=log.keys.partition_key)
    assert entry is not None
    legacy = compacted.replace("/compacted/", "/wal/")
    await log.store.put(legacy, (await log.store.get(compacted)).data)
    await log.coordinator.put(
        log.keys.index(2),
        entry.value.replace(b"/compacted/", b"/wal/").replace(b'"COMPACTED"', b'"WAL"'),
        partition_key=log.keys.partition_key,
    )
    assert await values(log, 1) == numbered(1, 2)


async def test_trimmed_offsets_name_the_earliest_and_a_straddling_batch_stays() -> None:
    log = await log_of(4, 4)
    await log.trim(3)
    with pytest.raises(OffsetOutOfRange, match="not between 3 and 9") as caught:
        await values(log, 2)
    assert caught.value.earliest == 3
    assert await values(log, 3) == numbered(3, 6)
    assert await log.everything() == numbered(3, 6)


async def test_a_scan_from_the_start_passes_over_index_keys_that_a_trim_left_behind() -> None:
    log = await log_of(2, 3, 2, 2)
    for start in range(1, 10):
        log.control = msgspec.structs.replace(log.control, start_offset=start)
        await log.put_control()  # The keys below it would go a moment later.
        assert await log.everything() == numbered(start, 10 - start)


async def test_offsets_go_on_after_everything_was_trimmed() -> None:
    log = await log_of(4)
    await log.trim(5)
    assert await log.everything() == []
    await log.append(numbered(5, 2))
    assert await log.everything() == numbered(5, 2)


# -- Compaction, late index puts, vacuum


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_every_offset_is_readable_after_every_step_of_a_compaction(steps: int) -> None:
    log = await log_of(2, 2, 2, 2)
    await log.compact(1, 6, steps=steps)
    for offset in range(1, 9):
        assert await values(log, offset, max_records=1) == [b"%d" % offset]
    assert await log.everything() == numbered(1, 8)


async def test_a_late_index_put_inside_a_compacted_range_hides_nothing() -> None:
    log = await log_of(2)
    late = await log.append(numbered(3, 2))
    await log.append(numbered(5, 2))
    await log.append(numbered(7, 1))
    await log.compact(1, 6)
    await log.put_entry(late.end_offset, late.index_entry())
    for offset in range(1, 8):
        assert await values(log, offset, max_records=1) == [b"%d" % offset]


async def test_a_late_index_put_whose_object_was_vacuumed_is_stepped_over() -> None:
    log = await log_of(2)
    late = await log.append(numbered(3, 2))
    await log.append(numbered(5, 2))
    await log.append(numbered(7, 1))
    await log.compact(1, 6)
    await log.put_entry(late.end_offset, late.index_entry())
    await log.vacuum(late)
    for offset in range(1, 8):
        assert await values(log, offset, max_records=1) == [b"%d" % offset]
    assert await log.everything() == numbered(1, 7)


async def test_many_stale_keys_below_the_cursor_do_not_end_the_walk() -> None:
    log = HandLog()
    appends = [await log.append(numbered(n, 1)) for n in range(1, 31)]
    await log.append(numbered(31, 1))
    await log.compact(1, 30)
    for pending in appends[2:-1]:
        await log.put_entry(pending.end_offset, pending.index_entry())
        await log.vacuum(pending)
    config = ReaderConfig(lookup_entries_max=1, retry=RetryPolicy(base_ms=0, cap_ms=0))
    reader = log.reader(config)
    for offset in (1, 2, 3, 17, 30, 31):
        assert (await reader.read(*log.place, offset, max_records=1)).records() == [b"%d" % offset]
    assert await log.everything() == numbered(1, 31)


async def test_a_missing_object_is_data_lost_and_names_the_offset() -> None:
    log = await log_of(2)
    first = log.control.pending
    await log.append(numbered(3, 2))
    assert first is not None
    await log.vacuum(first)
    with pytest.raises(DataLost, match="offset 1 is gone"):
        await values(log, 1)
    with pytest.raises(DataLost, match="offset 1 is gone"):
        await log.everything()
    assert await values(log, 3) == numbered(3, 2)


async def test_a_read_returns_what_comes_before_a_missing_object() -> None:
    log = await log_of(2, 2)
    missing = log.control.pending
    await log.append(numbered(5, 2))
    assert missing is not None
    await log.vacuum(missing)
    fetched = await log.reader().read(*log.place, 1)
    assert fetched.records() == numbered(1, 2)
    assert fetched.next_offset == 3


async def test_an_index_without_the_offset_is_data_lost() -> None:
    log = await log_of(2, 2)
    await log.coordinator.delete(log.keys.index(2), partition_key=log.keys.partition_key)
    with pytest.raises(DataLost, match="nothing in the index covers offset 1"):
        await values(log, 1)


# -- Damage


@pytest.mark.parametrize("position", [0, 30, -1])
async def test_a_flipped_bit_is_never_served(position: int) -> None:
    log = await log_of(2)
    pending = log.control.pending
    assert pending is not None
    assert pending.byte_offset is not None and pending.byte_length is not None
    blob = bytearray((await log.store.get(pending.append_id)).data)
    blob[pending.byte_offset + position % pending.byte_length] ^= 4
    await log.store.put(pending.append_id, blob)
    with pytest.raises(DataLost, match="is damaged"):
        await values(log, 1)


async def test_another_batch_that_is_sound_by_itself_is_never_served() -> None:
    """Same place, length and count, and a checksum that fits: only the entry knows it for the wrong one."""
    log = await log_of(2)
    pending = log.control.pending
    assert pending is not None and pending.byte_offset is not None and pending.byte_length is not None
    assert pending.crc32c is not None
    blob = bytearray((await log.store.get(pending.append_id)).data)
    place = slice(pending.byte_offset, pending.byte_offset + pending.byte_length)
    right = bytes_batch.decode(bytes(blob[place])).records()
    blob[place] = wrong = bytes_batch.encode([bytes(len(record)) for record in right])
    assert len(wrong) == pending.byte_length
    await log.store.put(pending.append_id, blob)
    with pytest.raises(DataLost, match="not that of the index entry"):
        await values(log, 1)


async def test_a_count_that_differs_from_the_entry_is_never_served() -> None:
    log = await log_of(2)
    pending = log.control.pending
    assert pending is not None
    await log.append(numbered(3, 1))
    entry = pending.index_entry()
    await log.put_entry(2, msgspec.structs.replace(entry, msg_count=1))
    with pytest.raises(DataLost, match="2 records, 1 expected"):
        await values(log, 2)


async def test_an_object_cut_short_is_never_served() -> None:
    log = await log_of(2)
    pending = log.control.pending
    assert pending is not None
    blob = (await log.store.get(pending.append_id)).data
    await log.store.put(pending.append_id, blob[:-1])
    with pytest.raises(DataLost, match="is damaged"):
        await values(log, 1)


# -- Topics


async def test_a_topic_nobody_made_is_unknown() -> None:
    with pytest.raises(UnknownTopic, match="orders"):
        await values(HandLog(), 1)


async def test_a_created_partition_without_records_is_empty() -> None:
    log = HandLog()
    entry = b'{"topic":"orders","topic_id":"x","partitions":1,"created_at_ms":0,"first_offset":9}'
    await log.coordinator.put(topic_key("orders"), entry, partition_key=CATALOG_PARTITION_KEY)
    assert (await log.reader().offsets("orders", 0)).next == 9
    assert await values(log, 9) == []
    with pytest.raises(UnknownPartition, match="no partition 1"):
        await log.reader().offsets("orders", 1)


# -- Many partitions, Arrow, bounds


def test_slices_of_one_object_are_fetched_by_one_request() -> None:
    def main_of(count: int) -> int:
        world = World(seed=1)

        async def run(world: World) -> int:
            base = HandLog(store=world.bucket, coordinator=world.keys)
            pending = await base.append(numbered(1, 2))
            for partition in range(1, count):
                log = HandLog(PartitionKeys("orders", partition), world.bucket, world.keys)
                log.control = base.control
                await log.put_control()
            assert pending.data_key

            async def reader(me: Actor) -> None:
                log = HandLog(store=me.store, coordinator=me.coordinator)
                requests = [ReadRequest("orders", number, 1) for number in range(count)]
                for answer in await log.reader().read_many(requests):
                    assert isinstance(answer, Fetched)
                    assert answer.records() == numbered(1, 2)

            await world.spawn("reader", reader).join()
            return world.requests.count("reader", "store.get_ranges") + world.requests.count(
                "reader", "store.get"
            )

        return world.run(run)

    assert main_of(1) == main_of(5) == 1


async def test_one_bad_request_does_not_spoil_the_others() -> None:
    log = await log_of(2)
    requests = [ReadRequest("orders", 0, 1), ReadRequest("orders", 0, 99), ReadRequest("nobody", 0, 1)]
    good, beyond, unknown = await log.reader().read_many(requests)
    assert isinstance(good, Fetched)
    assert isinstance(beyond, OffsetOutOfRange)
    assert isinstance(unknown, UnknownTopic)


async def test_scan_gives_arrow_with_every_column() -> None:
    log = HandLog()
    await log.append([b"a", b"b"], keys=[b"k", None], timestamps_ms=[5, 6], headers=[{"h": b"1"}, None])
    await log.append([b"c"])
    batches = [batch async for batch in log.reader().scan(*log.place)]
    table = pa.Table.from_batches(batches, RECORD_SCHEMA)
    table.validate(full=True)
    assert table.column("value").to_pylist() == [b"a", b"b", b"c"]
    assert table.column("key").to_pylist() == [b"k", None, None]
    assert table.column("offset").to_pylist() == [1, 2, 3]
    assert table.column("topic").to_pylist() == ["orders"] * 3
    assert table.column("headers").to_pylist() == [[{"key": "h", "value": b"1"}], None, None]
    times = [int(time.timestamp() * 1000) for time in table.column("timestamp").to_pylist()]
    assert times == [5, 6, 1000]


async def test_scan_honours_both_ends_inside_batches() -> None:
    log = await log_of(3, 3, 3)
    found = [
        value
        async for batch in log.reader().scan_batches(*log.place, 2, 9)
        for value in batch.batch.records()
    ]
    assert found == numbered(2, 7)
    with pytest.raises(UsageError, match="from 5 to 2"):
        [batch async for batch in log.reader().scan_batches(*log.place, 5, 2)]


async def test_scan_decodes_a_batch_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode_slice = _fetch.decode_slice

    def watched(located: Located, piece: bytes | memoryview) -> bytes_batch.BytesBatch:
        decoded.append(located.start_offset)
        return decode_slice(located, piece)

    monkeypatch.setattr(_fetch, "decode_slice", watched)
    log = await log_of(2, 2, 2)
    async for batch in log.reader().scan_batches(*log.place):
        assert decoded == list(range(1, batch.end_offset + 1, 2))


async def test_scan_stops_where_the_log_ended_when_it_began() -> None:
    log = await log_of(2, 2)
    found: list[bytes] = []
    async for batch in log.reader().scan_batches(*log.place):
        found += batch.batch.records()
        if len(found) == 2:
            await log.append(numbered(5, 2))
    assert found == numbered(1, 4)


async def test_scan_outlives_compaction_and_vacuum_of_what_it_looked_up() -> None:
    log = await log_of(*[1] * 20)
    config = ReaderConfig(prefetch_bytes_max=1, cache_bytes_max=0, retry=RetryPolicy(base_ms=0, cap_ms=0))
    found: list[bytes] = []
    async for batch in log.reader(config).scan_batches(*log.place):
        found += batch.batch.records()
        if len(found) == 3:
            await log.compact(1, 15)
            names = [info.key async for info in log.store.list("llog/wal-shared/")]
            gone = [name for name in names if int(name.split("-")[2]) <= 15]
            await log.store.delete(gone)
    assert found == numbered(1, 20)


async def test_scan_that_is_overtaken_by_a_trim_says_what_is_earliest() -> None:
    log = await log_of(*[1] * 20)
    config = ReaderConfig(scan_entries_max=2, prefetch_bytes_max=1, retry=RetryPolicy(base_ms=0, cap_ms=0))
    found: list[bytes] = []
    with pytest.raises(OffsetOutOfRange) as caught:
        async for batch in log.reader(config).scan_batches(*log.place):
            found += batch.batch.records()
            if len(found) == 3:
                await log.trim(15)
    assert caught.value.earliest == 15
    assert found == numbered(1, len(found))


def test_a_large_object_read_in_portions_is_fetched_once() -> None:
    world = World(seed=1)

    async def run(world: World) -> int:
        log = HandLog(store=world.bucket, coordinator=world.keys)
        for start in range(1, 101, 10):
            await log.append(numbered(start, 10))
        await log.append(numbered(101, 1))
        await log.compact(1, 100)

        async def portions(me: Actor) -> None:
            reader = HandLog(store=me.store, coordinator=me.coordinator).reader()
            offset, found = 1, []
            while offset <= 100:
                fetched = await reader.read("orders", 0, offset, max_records=7)
                found += fetched.records()
                offset = fetched.next_offset
            assert found[:100] == numbered(1, 100)

        await world.spawn("reader", portions).join()
        return world.requests.count("reader", "store.get")

    assert world.run(run) == 1


# -- Waiting


async def test_wait_returns_at_once_where_there_is_data_and_empty_after_the_timeout() -> None:
    log = await log_of(2)
    reader = log.reader()
    assert await reader.wait_for_data([("orders", 0, 1)], timeout_s=60) == [("orders", 0)]
    assert await reader.wait_for_data([("orders", 0, 3)], timeout_s=0.001) == []


async def test_wait_wakes_with_an_append_of_somebody_else() -> None:
    log = await log_of(2)
    waiting = asyncio.create_task(log.reader().wait_for_data([("orders", 0, 3)], timeout_s=60))
    await asyncio.sleep(0)
    assert not waiting.done()
    await log.append(numbered(3, 1))
    assert await waiting == [("orders", 0)]


def test_configuration_outside_its_ranges_is_refused() -> None:
    wrongs: list[dict[str, Any]] = [{"bytes_max": 0}, {"lookup_entries_max": 0}, {"cache_bytes_max": -1}]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            ReaderConfig(**wrong)
    assert FAST.bytes_max > 0
