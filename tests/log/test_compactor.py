"""What a compactor folds, when it waits, what it checks, and how little it asks for."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.log.compaction_bed import EAGER, START_MS, Bed

from forebay.coordination import MemoryCoordinator
from forebay.errors import OutcomeUnknown, StorageDamaged, Unavailable, UsageError
from forebay.formats import bytes_batch
from forebay.kit.metrics import MetricsRegistry
from forebay.log import AppendGroup, CompactorConfig, CountingStore, DataLost, LogWriter, WriterConfig
from forebay.log._compaction_rewrite import Rewriter
from forebay.log._compaction_steps import CompactionSteps
from forebay.log._keys import PartitionKeys
from forebay.log._records import Compaction, Control, IndexEntry, decode_record, encode_record
from forebay.log._uris import key_of, uri_of
from forebay.storage import LocalStore, MemoryStore, ObjectStore


async def test_folds_all_entries_into_one_object_and_every_record_stays() -> None:
    bed = Bed()
    await bed.append(1, 2, 3, 4)
    result = await bed.compact()
    assert (result.outcome, result.start_offset, result.end_offset) == ("compacted", 1, 10)
    assert (result.records, result.entries, result.lag_records) == (10, 4, 0)
    assert await bed.spans() == [("COMPACTED", 1, 10)]
    assert await bed.read_all() == bed.sent
    meta = await bed.meta()
    assert (meta.cursor, meta.compaction) == (11, None)


async def test_objects_and_compactions_are_named_by_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(1, 2)
    seen: list[str] = []
    begin = CompactionSteps.begin

    async def watched(self: CompactionSteps, *arguments: Any, **named: Any) -> Any:
        seen.extend(each.compaction_id for each in arguments if isinstance(each, Compaction))
        return await begin(self, *arguments, **named)

    monkeypatch.setattr(CompactionSteps, "begin", watched)
    await bed.compact()
    [entry] = await bed.index()
    seen.append(entry.entry.data_key.rpartition("/data/compacted/")[2])
    assert len(seen) == 2 and [str(uuid.UUID(name)) for name in seen] == seen


async def test_the_pending_append_is_given_its_index_entry_first() -> None:
    bed = Bed()
    await bed.append(2, 2)
    assert await bed.spans() == [("WAL", 1, 2)]
    result = await bed.compact()
    assert result.pending and result.end_offset == 4


async def test_a_run_ends_at_the_entry_that_would_pass_the_target() -> None:
    bed = Bed()
    await bed.append(10, 10, 10, 10)
    [size] = {entry.entry.byte_length for entry in await bed.index()}
    assert size is not None
    config = replace(EAGER, target_bytes=2 * size)
    results = [await bed.compact(config) for _ in range(3)]
    assert [(each.outcome, each.start_offset, each.end_offset) for each in results] == [
        ("compacted", 1, 20),
        ("compacted", 21, 40),
        ("idle", None, None),
    ]
    assert results[0].reason == "the run ended by target"
    assert await bed.unreadable() == []


async def test_an_entry_larger_than_the_target_is_a_run_of_its_own() -> None:
    bed = Bed()
    await bed.append(50, 1)
    result = await bed.compact(replace(EAGER, target_bytes=10))
    assert (result.outcome, result.end_offset) == ("compacted", 50)


async def test_compressed_batches_are_cut_by_their_decoded_size() -> None:
    bed = Bed()
    compressing = LogWriter(
        bed.store,
        bed.coordinator,
        clock=bed.clock,
        ids=bed.ids,
        randomness=bed.random,
        config=WriterConfig(codec="zstd"),
    )
    for number in range(8):
        bed.sent.append(bytes([number]) * 10_000)
        await compressing.append_shared([AppendGroup.of("t", 0, bed.sent[-1:])])
    result = await bed.compact(replace(EAGER, target_bytes=30_000))
    assert (result.outcome, result.candidate_entries) == ("compacted", 8)
    assert result.candidate_bytes < 30_000 and result.entries == 4
    assert await bed.unreadable() == []


async def test_whole_objects_of_the_older_layout_are_folded_too() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    first = (await bed.index())[0]
    data = await bed.store.get_range(
        key_of(bed.store, first.entry.data_key), first.entry.byte_offset or 0, first.entry.byte_length or 0
    )
    key = f"{bed.keys.root}/data/wal/old"
    await bed.store.put(key, data)
    whole = IndexEntry(
        type="WAL",
        msg_count=2,
        data_key=uri_of(bed.store, key),
        encoding=bytes_batch.ENCODING,
        created_at_ms=START_MS,
    )
    await bed.put_index(2, whole)
    assert (await bed.compact()).outcome == "compacted"
    assert await bed.read_all() == bed.sent


async def test_young_entries_are_left_alone() -> None:
    bed = Bed()
    await bed.append(2)
    await bed.clock.sleep(10)
    await bed.append(2)
    config = replace(EAGER, min_age_ms=5_000)
    result = await bed.compact(config)
    assert (result.outcome, result.end_offset, result.reason) == ("compacted", 2, "the run ended by young")
    assert (await bed.compact(config)).reason == "no entry is old enough"
    await bed.clock.sleep(6)
    assert (await bed.compact(config)).end_offset == 4


async def test_what_a_clock_ahead_has_dated_is_folded_where_no_least_age_is_set() -> None:
    """One writer a year ahead dates everything after it: times never go back. There must be a way out."""
    bed = Bed()
    now = bed.clock.elapsed
    bed.clock.elapsed = now + 365 * 24 * 3_600
    await bed.append(2)
    bed.clock.elapsed = now
    await bed.append(2)
    assert (await bed.compact(replace(EAGER, min_age_ms=1))).reason == "no entry is old enough"
    result = await bed.compact(replace(EAGER, min_age_ms=0))
    assert (result.outcome, result.end_offset) == ("compacted", 4)
    assert await bed.unreadable() == []


async def test_a_small_run_waits_for_more_until_it_is_old() -> None:
    bed = Bed()
    await bed.append(2, 2)
    patient = replace(EAGER, wait_for_full_ms=60_000)
    waiting = await bed.compact(patient)
    assert (waiting.outcome, waiting.candidate_entries) == ("waiting", 2)
    assert waiting.candidate_bytes > 0 and "below the target" in waiting.reason
    await bed.clock.sleep(61)
    assert (await bed.compact(patient)).outcome == "compacted"


async def test_a_lone_entry_waits_for_a_second() -> None:
    bed = Bed()
    await bed.append(2)
    assert (await bed.compact(replace(EAGER, entries_min=2))).outcome == "waiting"
    await bed.append(1)
    assert (await bed.compact(replace(EAGER, entries_min=2))).outcome == "compacted"


async def test_nothing_to_do_is_said_with_its_reason() -> None:
    bed = Bed()
    assert (await bed.compact()).reason == "the partition does not exist"
    await bed.append(1)
    await bed.compact()
    again = await bed.compact()
    assert (again.outcome, again.reason, again.progressed) == ("idle", "everything is compacted", False)


async def test_trimmed_offsets_are_skipped_and_an_entry_that_straddles_the_start_is_kept() -> None:
    bed = Bed()
    await bed.append(2, 4, 4)
    await bed.writer.close()
    await _trim(bed, 5)
    skipped = await bed.compact()
    assert (skipped.outcome, skipped.start_offset, skipped.end_offset) == ("skipped", 1, 2)
    folded = await bed.compact()
    assert (folded.outcome, folded.start_offset, folded.end_offset) == ("compacted", 3, 10)
    assert await bed.unreadable() == [] and await bed.problems() == []


async def test_a_log_that_was_trimmed_to_its_end_goes_on() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    await _trim(bed, 5)
    assert (await bed.compact()).outcome == "skipped"
    assert (await bed.meta()).cursor == 5
    bed.writer = bed.new_writer()
    await bed.append(3)
    assert (await bed.compact()).end_offset == 7
    assert await bed.unreadable() == []


async def test_the_cursor_never_stops_inside_a_pending_append_whose_entry_did_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The put of its index entry is lost, and the log was trimmed to the middle of it."""
    bed = Bed()
    await bed.append(2, 4)
    await _trim(bed, 5)
    put = bed.coordinator.put

    async def lose_index_puts(key: str, *arguments: Any, **named: Any) -> int:
        if "/index/" in key:
            raise OutcomeUnknown("put")
        return await put(key, *arguments, **named)

    with monkeypatch.context() as broken:
        broken.setattr(bed.coordinator, "put", lose_index_puts)
        assert (await bed.compact()).outcome == "skipped"
    assert (await bed.meta()).cursor == 3
    assert (await bed.compact()).end_offset == 6
    assert await bed.unreadable() == []


async def _trim(bed: Bed, offset: int) -> None:
    """What trim leaves: a higher start, and no index keys strictly below it."""
    keys = bed.keys
    record = await bed.coordinator.get(keys.control, partition_key=keys.partition_key)
    assert record is not None
    control = msgspec.structs.replace(decode_record(Control, record.key, record.value), start_offset=offset)
    await bed.coordinator.put(
        keys.control, encode_record(control), record.version, partition_key=keys.partition_key
    )
    await bed.coordinator.delete_range(
        keys.index_range()[0], keys.index(offset), partition_key=keys.partition_key
    )


async def test_times_keys_and_headers_of_records_survive() -> None:
    bed = Bed()
    first = AppendGroup.of("t", 0, [b"a", b"b"], keys=[b"k", None], timestamps_ms=[5, 6])
    second = AppendGroup.of("t", 0, [b"c"], headers=[{"h": b"v"}])
    await bed.writer.append_shared([first])
    await bed.clock.sleep(3)
    await bed.writer.append_shared([second])
    await bed.compact()
    [batch] = [batch async for batch in bed.reader().scan("t", 0)]
    rows = batch.to_pylist()
    assert [row["value"] for row in rows] == [b"a", b"b", b"c"]
    assert [row["key"] for row in rows] == [b"k", None, None]
    times = [int(row["timestamp"].timestamp() * 1000) for row in rows]
    assert times == [5, 6, START_MS + 3_000]
    assert rows[2]["headers"][0]["key"] == "h"
    [entry] = await bed.index()
    assert (entry.entry.first_time_ms, entry.entry.created_at_ms) == (START_MS, START_MS + 3_000)
    assert entry.entry.size_bytes and entry.entry.crc32c is not None


async def test_compacted_objects_can_be_compressed() -> None:
    bed = Bed()
    await bed.append(500, 500)
    result = await bed.compact(replace(EAGER, codec="zstd"))
    assert result.bytes_written < result.bytes_read / 2
    assert await bed.read_all() == bed.sent


async def test_a_damaged_slice_is_not_folded() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    key = key_of(bed.store, (await bed.index())[0].entry.data_key)
    data = bytearray((await bed.store.get(key)).data)
    data[-10] ^= 1
    await bed.store.put(key, data)
    with pytest.raises(DataLost, match="damaged"):
        await bed.compact()
    assert [span[0] for span in await bed.spans()] == ["WAL", "WAL"]


async def test_another_batch_that_is_sound_by_itself_is_not_folded() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.materialize_idle(idle_ms=0)
    entry = (await bed.index())[0].entry
    assert entry.byte_offset is not None and entry.byte_length is not None
    key = key_of(bed.store, entry.data_key)
    blob = bytearray((await bed.store.get(key)).data)
    wrong = bytes_batch.encode([bytes(len(record)) for record in bed.sent[:2]])
    assert len(wrong) == entry.byte_length
    blob[entry.byte_offset : entry.byte_offset + entry.byte_length] = wrong
    await bed.store.put(key, blob)
    with pytest.raises(DataLost, match="not that of the index entry"):
        await bed.compact()
    assert len(await bed.index()) == 2


async def test_a_slice_with_another_count_than_its_entry_is_not_folded() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    entry = (await bed.index())[0].entry
    await bed.put_index(3, msgspec.structs.replace(entry, msg_count=3))
    await bed.coordinator.delete(bed.keys.index(2), partition_key=bed.keys.partition_key)
    with pytest.raises(DataLost, match="holds 2 records, its entry says 3"):
        await bed.compact()


async def test_a_missing_source_is_reported_and_nothing_is_touched() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    await bed.store.delete([key_of(bed.store, (await bed.index())[0].entry.data_key)])
    with pytest.raises(DataLost, match="its index entry names it"):
        await bed.compact()
    assert [span[0] for span in await bed.spans()] == ["WAL", "WAL"]


class Liar(MemoryStore):
    """Stores other bytes than it was given, once."""

    lie = True

    async def put(self, key: str, data: Any, when: Any = None) -> str:
        if "/compacted/" in key and self.lie:
            data = bytes(data)[:-1] + b"?"
        return await super().put(key, data) if when is None else await super().put(key, data, when)


async def test_an_object_that_did_not_arrive_whole_is_found_before_its_sources_are_let_go() -> None:
    bed = Bed()
    bed.store = Liar(bed.clock, bed.ids)
    bed.writer = bed.new_writer()
    await bed.append(2, 2)
    with pytest.raises(DataLost, match="read back"):
        await bed.compact()
    assert (await bed.meta()).compaction is None
    assert await bed.unreadable() == []


async def test_without_reading_back_the_size_is_still_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2)
    upload = Rewriter.upload

    async def truncate(self: Rewriter, *arguments: Any, **named: Any) -> str:
        key = await upload(self, *arguments, **named)
        await bed.store.put(key, (await bed.store.get(key)).data[:-1])
        return key

    monkeypatch.setattr(Rewriter, "upload", truncate)
    with pytest.raises(DataLost, match="bytes"):
        await bed.compact(replace(EAGER, read_back=False))
    assert await bed.unreadable() == []


async def test_a_record_whose_object_was_vacuumed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2)
    upload = Rewriter.upload

    async def vanish(self: Rewriter, *arguments: Any, **named: Any) -> str:
        key = await upload(self, *arguments, **named)
        await bed.store.delete([key])
        return key

    monkeypatch.setattr(Rewriter, "upload", vanish)
    assert (await bed.compact()).outcome == "raced"
    monkeypatch.setattr(Rewriter, "upload", upload)
    assert await bed.unreadable() == []
    assert (await bed.compact()).outcome == "compacted"


async def test_an_upload_past_its_deadline_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2)
    upload = Rewriter.upload

    async def slow(self: Rewriter, *arguments: Any, **named: Any) -> str:
        await bed.clock.sleep(700)
        return await upload(self, *arguments, **named)

    monkeypatch.setattr(Rewriter, "upload", slow)
    with pytest.raises(Unavailable, match="upload took 700 s"):
        await bed.compact()
    assert (await bed.meta()).compaction is None


async def test_an_entry_of_another_bucket_is_refused() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    entry = (await bed.index())[0].entry
    await bed.put_index(2, msgspec.structs.replace(entry, data_key="s3://other/llog/wal-shared/x"))
    with pytest.raises(StorageDamaged, match="not an object of"):
        await bed.compact()


async def test_compact_all_goes_on_until_nothing_is_left_and_tells_every_step() -> None:
    bed = Bed()
    await bed.append(*[3] * 9)
    told: list[str] = []
    config = replace(EAGER, entries_max=4)
    results = await bed.compactor(config).compact_all("t", 0, progress=lambda each: told.append(each.outcome))
    assert told == ["compacted"] * 3 + ["idle"]
    assert [each.entries for each in results] == [4, 4, 1, 0]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("read_back", [True, False])
async def test_a_store_that_gathers_gets_the_same_object_from_the_slices(
    tmp_path: Path, codec: bytes_batch.Codec, read_back: bool
) -> None:
    config = replace(EAGER, codec=codec, read_back=read_back)
    objects = []
    for store in (LocalStore(tmp_path), MemoryStore()):
        bed = Bed()
        bed.store = store  # type: ignore[assignment]
        bed.writer = bed.new_writer()
        await bed.append(*[2] * 300)
        metrics = MetricsRegistry()
        bed.store = CountingStore(store, metrics)  # type: ignore[assignment]
        result = await bed.compact(config)
        assert result.outcome == "compacted" and result.data_key is not None
        data = (await store.get(key_of(store, result.data_key))).data
        assert len(data) == result.bytes_written
        assert await bed.read_all() == bed.sent
        objects.append(data)
        await store.close()
    assert objects[0] == objects[1]


async def test_folding_costs_one_request_per_slice_one_put_one_head_and_one_look_back() -> None:
    bed = Bed()
    metrics = MetricsRegistry()
    await bed.append(*[2] * 10)
    counted: ObjectStore = CountingStore(bed.store, metrics)
    bed.store = counted  # type: ignore[assignment]
    assert (await bed.compact()).outcome == "compacted"
    family = metrics.counter("log.store_requests", "Requests to the store", labels=("operation",))
    counts = {labels[0]: int(series.value) for labels, series in family.series() if series.value}
    assert counts == {"range_get": 10 + 1, "put": 1, "head": 1}


async def test_coordination_requests_do_not_grow_with_the_history() -> None:
    async def requests_after(runs: int) -> int:
        bed = Bed()
        for _ in range(runs):
            await bed.append(2, 2)
            await bed.compact()
        await bed.append(2, 2)
        counting = _Counting(bed.coordinator)
        bed.coordinator = counting  # type: ignore[assignment]
        assert (await bed.compact()).outcome == "compacted"
        return counting.requests

    assert await requests_after(1) == await requests_after(30)


class _Counting:
    """Counts the calls of a coordinator."""

    def __init__(self, inner: MemoryCoordinator) -> None:
        self._inner = inner
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("get", "write", "range_scan", "ceiling", "put", "delete", "delete_range"):
            self.requests += 1
        return method


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_bytes": 0},
        {"target_bytes": 1 << 30},
        {"entries_max": 0},
        {"min_age_ms": -1},
        {"commit_deadline_ms": 0},
        {"fetches_max": 0},
    ],
)
def test_a_configuration_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompactorConfig(**wrong)


async def test_partitions_do_not_touch_each_other() -> None:
    bed = Bed()
    await bed.append(2, 2, partitions=[0, 1])
    await bed.compact()
    other = PartitionKeys("t", 1)
    start, end = other.index_range()
    found = await bed.coordinator.range_scan(start, end, partition_key=other.partition_key)
    assert [other.end_offset(record.key) for record in found] == [2]


async def test_a_read_across_a_range_that_is_being_compacted_returns_every_record_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the first step the compacted entry overlaps the last entries it replaces."""
    bed = Bed()
    await bed.append(2, 3, 2)
    await bed.writer.close()

    async def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(CompactionSteps, "_delete_old", crash)
        with pytest.raises(KeyboardInterrupt):
            await bed.compact()
    assert [span[0] for span in await bed.spans()] == ["WAL", "WAL", "COMPACTED"]
    for offset in range(1, 8):
        found = await bed.reader().read("t", 0, offset)
        assert found.records() == bed.sent[offset - 1 :]


async def test_a_read_gives_nothing_behind_the_end_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the control record and the index others append, and what they appended is folded in."""
    bed = Bed()
    await bed.append(2, 1)
    wanted, ceiling = list(bed.sent), bed.coordinator.ceiling

    async def folded_first(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(bed.coordinator, "ceiling", ceiling)
        await bed.append(2)
        assert (await bed.compact()).end_offset == 5
        return await ceiling(*arguments, **options)

    monkeypatch.setattr(bed.coordinator, "ceiling", folded_first)
    found = await bed.reader().read("t", 0, 1)
    assert (found.high_watermark, found.next_offset, found.records()) == (4, 4, wanted)
