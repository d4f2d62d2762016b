"""The writer without faults: results, merging, limits, two writers on one partition, idle partitions."""

from __future__ import annotations

import uuid

import numpy as np
import pyarrow as pa
import pytest
from tests.log.writing import (
    AT_ONCE,
    control_of,
    counted_coordinator,
    counted_store,
    group,
    index_of,
    metric,
    read_log,
    span,
    values,
    writer_of,
)

from forebay.coordination import ABSENT, MemoryCoordinator
from forebay.errors import LimitExceeded, StorageDamaged, UsageError
from forebay.formats import bytes_batch, shared_blob
from forebay.formats.bytes_batch import HEADERS_TYPE, BytesBatch
from forebay.kit.metrics import MetricsRegistry
from forebay.log import AppendGroup, UnknownTopic, WriterConfig
from forebay.log import _append as append_module
from forebay.log import _proposals as proposals_module
from forebay.log import _upload as upload_module
from forebay.log._keys import PartitionKeys
from forebay.log._records import Pending, encode_record
from forebay.log._uris import key_of, uri_of
from forebay.storage import MemoryStore, open_store


async def test_offsets_begin_at_one_and_go_on() -> None:
    writer = writer_of()
    [first] = await writer.append_shared([group("t", 0, b"a", b"b")])
    [second] = await writer.append_shared([group("t", 0, b"c")])
    assert (span(first), span(second)) == ((1, 2), (3, 3))
    assert first.ok and first.count == 2 and not first.duplicate
    assert first.index_key == "llog/t/partitions/0/index/00000000000000000002"


async def test_result_names_the_object_that_holds_the_records() -> None:
    store = MemoryStore()
    [result] = await writer_of(store).append_shared([group("t", 0, b"a")])
    assert result.wal_uri is not None
    key = key_of(store, result.wal_uri)
    unique = key.removeprefix("llog/wal-shared/")
    assert str(uuid.UUID(unique)) == unique
    [row] = shared_blob.decode((await store.get(key)).data).partitions
    assert (row.topic, row.partition, row.msg_count) == ("t", 0, 1)


async def test_every_group_gets_its_own_result_in_order() -> None:
    results = await writer_of().append_shared(
        [group("t", 1, b"a"), group("u", 0, b"b", b"c"), group("t", 0, b"d")]
    )
    assert [(one.topic, one.partition, one.count) for one in results] == [
        ("t", 1, 1),
        ("u", 0, 2),
        ("t", 0, 1),
    ]
    assert values(results) == [(1, 1), (1, 2), (1, 1)]
    assert len({one.wal_uri for one in results}) == 1


async def test_groups_of_one_partition_share_an_entry_and_keep_their_own_offsets() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    results = await writer.append_shared(
        [group("t", 0, b"a", b"b"), group("u", 0, b"x"), group("t", 0, b"c"), group("t", 0, b"d", b"e")]
    )
    assert values(results) == [(1, 2), (1, 1), (3, 3), (4, 5)]
    assert results[0].index_key == results[2].index_key == results[3].index_key
    await writer.close()
    assert list(await index_of(coordinator, PartitionKeys("t", 0))) == [5]
    assert await read_log(store, coordinator) == [b"a", b"b", b"c", b"d", b"e"]


async def test_a_wrong_group_fails_alone() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    results = await writer_of(store, coordinator).append_shared(
        [
            group("t", 0, b"a"),
            group("no/slash", 0, b"b"),
            group("t", -1, b"c"),
            group("t", 0),
            AppendGroup("t", 0, BytesBatch(pa.array([b"x", None], pa.binary()))),
            AppendGroup("t", 0, BytesBatch(pa.array([b"x"], pa.binary()), timestamps_ms=np.zeros(2, "<i8"))),
            group("t", 0, b"d", producer="p"),
            group("t", 0, b"e", epoch=-1),
            group("t", 0, b"f"),
        ]
    )
    assert [one.ok for one in results] == [True] + [False] * 7 + [True]
    assert all(isinstance(one.error, UsageError) and one.start_offset is None for one in results[1:8])
    with pytest.raises(UsageError):
        results[1].unwrap()
    assert await read_log(store, coordinator) == [b"a", b"f"]


async def test_records_that_cannot_be_encoded_fail_alone() -> None:
    nameless = pa.array([[{"key": None, "value": b""}]], HEADERS_TYPE)
    bad = AppendGroup("u", 0, BytesBatch(pa.array([b"x"], pa.binary()), headers=nameless))
    good, failed = await writer_of().append_shared([group("t", 0, b"a"), bad])
    assert good.ok
    assert isinstance(failed.error, UsageError)


async def test_a_record_over_the_limit_fails_with_the_name_of_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(append_module, "RECORD_BYTES_MAX", 100)
    fits, large = await writer_of().append_shared([group("t", 0, bytes(100)), group("t", 0, bytes(101))])
    assert fits.ok
    assert isinstance(large.error, LimitExceeded)
    assert (large.error.name, large.error.actual) == ("RECORD_BYTES_MAX", 101)


async def test_a_call_with_too_many_groups_or_bytes_is_refused_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    monkeypatch.setattr(upload_module, "GROUPS_PER_CALL_MAX", 2)
    with pytest.raises(LimitExceeded, match="GROUPS_PER_CALL_MAX"):
        await writer.append_shared([group("t", 0, b"a")] * 3)
    monkeypatch.setattr(upload_module, "FLUSH_BYTES_MAX", 1_000)
    with pytest.raises(LimitExceeded, match="FLUSH_BYTES_MAX"):
        await writer.append_shared([group("t", 0, bytes(2_000))])
    assert await writer.catalog.list() == []


async def test_no_groups_cost_nothing() -> None:
    store, requests = counted_store(MemoryStore())
    coordinator, calls = counted_coordinator(MemoryCoordinator())
    assert await writer_of(store, coordinator).append_shared([]) == []
    assert not requests and not calls


async def test_timestamps_keys_and_headers_survive_merging() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    plain = group("t", 0, b"a")
    rich = AppendGroup.of("t", 0, [b"b"], keys=[b"k"], timestamps_ms=[77], headers=[{"trace": b"1"}])
    results = await writer.append_shared([plain, rich])
    assert results[0].wal_uri is not None
    blob = await store.get(key_of(store, results[0].wal_uri))
    [row] = shared_blob.decode(blob.data).partitions
    batch = bytes_batch.decode(blob.data[row.body_offset : row.body_offset + row.body_length])
    assert batch.keys is not None and batch.keys.to_pylist() == [None, b"k"]
    assert batch.timestamps_ms is not None and batch.timestamps_ms[1] == 77 < batch.timestamps_ms[0]
    assert batch.headers is not None and batch.headers.to_pylist() == [
        None,
        [{"key": "trace", "value": b"1"}],
    ]


async def test_zstd_is_read_back() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    config = WriterConfig(codec="zstd", commit=AT_ONCE)
    await writer_of(store, coordinator, config=config).append_shared([group("t", 0, bytes(10_000))])
    assert await read_log(store, coordinator) == [bytes(10_000)]
    [info] = [info async for info in store.list("llog/")]
    assert info.size < 1_000


async def test_two_writers_share_a_partition_without_loss_or_gap() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    metrics = MetricsRegistry()
    ann, bob = writer_of(store, coordinator), writer_of(store, coordinator, metrics=metrics)
    given = []
    for number in range(4):
        for name, writer in (("ann", ann), ("bob", bob)):
            [result] = await writer.append_shared([group("t", 0, f"{name}{number}".encode())])
            given.append(result.start_offset)
    assert given == list(range(1, 9))
    assert len(await read_log(store, coordinator)) == 8
    # Bob's first contact finds Ann's append; after that each append of hers costs him one conflict.
    assert metric(metrics, "log.commit_conflicts") == 3


async def test_the_index_entry_of_an_append_is_put_by_the_next_one() -> None:
    coordinator = MemoryCoordinator()
    writer, keys = writer_of(coordinator=coordinator, name="ann"), PartitionKeys("t", 0)
    await writer.append_shared([group("t", 0, b"a", b"b")])
    control, _ = await control_of(coordinator, keys)
    first = control.pending
    assert first is not None and first.writer == "ann"
    assert await index_of(coordinator, keys) == {}
    await writer.append_shared([group("t", 0, b"c")])
    assert await index_of(coordinator, keys) == {2: first.index_entry()}


async def test_materialize_idle_puts_the_last_entries_in_one_round_trip() -> None:
    coordinator, calls = counted_coordinator(MemoryCoordinator())
    writer = writer_of(coordinator=coordinator)
    await writer.append_shared([group("t", partition, b"a") for partition in range(50)])
    before = calls["write"]
    assert await writer.materialize_idle(idle_ms=0) == 50
    assert await writer.materialize_idle(idle_ms=0) == 0
    assert calls["write"] == before + 1
    assert list(await index_of(coordinator, PartitionKeys("t", 49))) == [1]


async def test_materialize_leaves_busy_partitions_alone() -> None:
    writer = writer_of()
    await writer.append_shared([group("t", 0, b"a")])
    assert await writer.materialize_idle(idle_ms=3_600_000) == 0


async def test_an_entry_that_is_in_the_index_is_not_put_again() -> None:
    coordinator = MemoryCoordinator()
    writer, keys = writer_of(coordinator=coordinator), PartitionKeys("t", 0)
    await writer.append_shared([group("t", 0, b"a")])
    await writer.materialize_idle(idle_ms=0)
    record = await coordinator.get(keys.index(1), partition_key=keys.partition_key)
    await writer.append_shared([group("t", 0, b"b")])
    assert await coordinator.get(keys.index(1), partition_key=keys.partition_key) == record


async def test_an_index_entry_that_is_there_already_does_not_stop_a_commit() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    ann, bob = writer_of(store, coordinator), writer_of(store, coordinator)
    await ann.append_shared([group("t", 0, b"a")])
    await bob.append_shared([group("t", 0, b"b")])
    # Both know of Bob's append; he puts its entry, then Ann commits and puts it once more.
    await ann.append_shared([group("t", 0, b"c")])
    await bob.materialize_idle(idle_ms=0)
    [result] = await ann.append_shared([group("t", 0, b"d")])
    assert result.start_offset == 4
    assert await read_log(store, coordinator) == [b"a", b"b", b"c", b"d"]


class SteppingClock:
    """A clock whose time of day is set by the test."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.seconds = 0.0

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


async def test_entry_times_never_go_back_when_the_clock_does() -> None:
    coordinator, clock = MemoryCoordinator(), SteppingClock()
    writer, keys = writer_of(coordinator=coordinator, clock=clock), PartitionKeys("t", 0)
    times = []
    for ms in (1_000_000, 999_000, 1_000_500):
        clock.ms = ms
        await writer.append_shared([group("t", 0, b"a")])
        control, _ = await control_of(coordinator, keys)
        assert control.pending is not None
        times.append(control.pending.created_at_ms)
    assert times == [1_000_000, 1_000_000, 1_000_500]


async def test_entry_times_never_go_back_where_the_pending_append_was_cleared() -> None:
    coordinator, clock = MemoryCoordinator(), SteppingClock()
    keys = PartitionKeys("t", 0)
    await writer_of(coordinator=coordinator, clock=clock).append_shared([group("t", 0, b"a")])
    control, version = await control_of(coordinator, keys)
    assert control.pending is not None
    home = keys.partition_key
    await coordinator.put(
        keys.index(1), encode_record(control.pending.index_entry()), ABSENT, partition_key=home
    )
    cleared = type(control)(log_state="OPEN", sequence_counter=2, pending=None)
    await coordinator.put(keys.control, encode_record(cleared), version, partition_key=home)
    clock.ms = 5
    await writer_of(coordinator=coordinator, clock=clock).append_shared([group("t", 0, b"b")])
    control, _ = await control_of(coordinator, keys)
    assert control.pending is not None and control.pending.created_at_ms == 1_000_000


async def test_a_stalled_upload_is_uploaded_again_before_its_commit() -> None:
    store, coordinator, clock = MemoryStore(), MemoryCoordinator(), SteppingClock()
    writer = writer_of(store, coordinator, clock=clock)
    fresh = await writer.upload([group("t", 0, b"fresh")])
    stalled = await writer.upload([group("u", 0, b"stalled")])
    clock.seconds += 59
    [[done]] = await writer.commit([fresh])
    clock.seconds += 2
    before = {info.key async for info in store.list("llog/")}
    [[late]] = await writer.commit([stalled])
    assert done.ok and late.ok and late.wal_uri is not None
    assert len(before) == 2 and done.wal_uri is not None and key_of(store, done.wal_uri) in before
    assert {info.key async for info in store.list("llog/")} - before == {key_of(store, late.wal_uri)}
    assert await read_log(store, coordinator, "u") == [b"stalled"]


async def test_units_of_one_partition_in_several_uploads_commit_in_order() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    uploads = [await writer.upload([group("t", 0, b"%d" % number)]) for number in range(5)]
    answers = await writer.commit(uploads)
    assert [span(one) for [one] in answers] == [(n, n) for n in range(1, 6)]
    assert await read_log(store, coordinator) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_flush_over_the_limit_of_a_write_takes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals_module, "PARTITIONS_PER_WRITE", 10)
    coordinator, calls = counted_coordinator(MemoryCoordinator())
    writer = writer_of(coordinator=coordinator)
    await writer.append_shared([group("t", partition, b"a") for partition in range(25)])
    before = calls["write"]
    results = await writer.append_shared([group("t", partition, b"b") for partition in range(25)])
    assert all(one.start_offset == 2 for one in results)
    assert calls["write"] == before + 3


async def test_large_control_records_split_a_write_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, calls = counted_coordinator(MemoryCoordinator())
    writer = writer_of(coordinator=coordinator)
    await writer.append_shared([group("t", partition, b"a") for partition in range(4)])
    monkeypatch.setattr(proposals_module, "BYTES_PER_WRITE", 100)
    before = calls["write"]
    results = await writer.append_shared([group("t", partition, b"b") for partition in range(4)])
    assert all(one.ok for one in results)
    assert calls["write"] == before + 4


async def test_a_topic_with_fixed_partitions_refuses_others() -> None:
    writer = writer_of()
    await writer.catalog.create("t", partitions=2)
    good, bad = await writer.append_shared([group("t", 1, b"a"), group("t", 2, b"b")])
    assert good.ok
    assert isinstance(bad.error, UnknownTopic)
    assert "0 to 1" in bad.error.hint


async def test_an_unknown_topic_is_refused_where_nothing_is_created_by_itself() -> None:
    writer = writer_of(config=WriterConfig(auto_create=False, commit=AT_ONCE))
    [result] = await writer.append_shared([group("t", 0, b"a")])
    assert isinstance(result.error, UnknownTopic)
    await writer.catalog.create("t")
    [result] = await writer.append_shared([group("t", 0, b"a")])
    assert result.ok


async def test_a_topic_created_by_an_append_grows_with_its_partitions() -> None:
    writer = writer_of()
    await writer.append_shared([group("t", 3, b"a")])
    assert (await writer.catalog.describe("t")).partitions == 4
    await writer.append_shared([group("t", 1, b"a"), group("t", 7, b"a")])
    assert (await writer.catalog.describe("t")).partitions == 8


async def test_a_forgotten_partition_is_read_again() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator, config=WriterConfig(cached_partitions_max=2, commit=AT_ONCE))
    for _ in range(2):
        for partition in range(5):
            [result] = await writer.append_shared([group("t", partition, b"a")])
            assert result.ok
    assert await read_log(store, coordinator, "t", 0) == [b"a", b"a"]


async def test_metrics_tell_appends_records_bytes_and_requests() -> None:
    metrics = MetricsRegistry()
    writer = writer_of(metrics=metrics)
    await writer.append_shared([group("t", 0, b"a", b"b"), group("bad/topic", 0, b"c")])
    await writer.append_shared([group("t", 0, b"c")])
    assert metric(metrics, "log.appends", "ok") == 2
    assert metric(metrics, "log.appends", "refused") == 1
    assert metric(metrics, "log.records_appended") == 3
    assert metric(metrics, "log.bytes_appended") > 0
    assert metric(metrics, "log.flushes") == 2
    # Two objects, and with the first topic the name of the log.
    assert metric(metrics, "log.store_requests", "put") == 3
    assert metric(metrics, "log.store_requests", "list") == 0
    assert metric(metrics, "log.coordination_requests", "write") == 2


@pytest.mark.parametrize("changes", [{"upload_deadline_ms": 0}, {"idle_ms": 0}, {"cached_partitions_max": 0}])
def test_impossible_configurations_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        WriterConfig(**changes)  # type: ignore[arg-type]


def test_uris_name_bucket_and_key_and_refuse_other_buckets() -> None:
    store = open_store("s3://bucket/some/prefix?endpoint=http://127.0.0.1:1&region=x")
    uri = uri_of(store, "llog/wal-shared/01")
    assert uri == "s3://bucket/some/prefix/llog/wal-shared/01"
    assert key_of(store, uri) == "llog/wal-shared/01"
    for foreign in (
        "s3://other/some/prefix/llog/wal-shared/01",
        "s3://bucket/llog/wal-shared/01",
        "s3://bucket/some/prefix",
        "file:///bucket/some/prefix/llog/wal-shared/01",
    ):
        with pytest.raises(StorageDamaged, match="not an object of"):
            key_of(store, foreign)


def test_uris_of_a_directory_survive_its_move(tmp_path: object) -> None:
    before, after = open_store(f"{tmp_path}/llog/before"), open_store(f"{tmp_path}/after")
    for key in ("llog/wal-shared/01", "llog/t.x/partitions/12/data/compacted/02"):
        uri = uri_of(before, key)
        assert uri.startswith("file:///")
        assert key_of(before, uri) == key_of(after, uri) == key
    with pytest.raises(StorageDamaged):
        key_of(after, "s3://bucket/llog/wal-shared/01")
    with pytest.raises(StorageDamaged):
        key_of(after, "file:///x/llog/elsewhere/01")


def test_pending_and_entry_name_the_same_append() -> None:
    pending = Pending(
        append_id="a",
        start_offset=3,
        end_offset=4,
        msg_count=2,
        entry_type="WAL",
        data_key="s3://b/k",
        encoding="bytes-batch-v1",
        created_at_ms=1,
        byte_offset=5,
        byte_length=6,
        crc32c=7,
        writer="w",
    )
    entry = pending.index_entry()
    assert (entry.append_id, entry.crc32c, entry.writer) == ("a", 7, "w")
    assert entry.start_offset(4) == 3
