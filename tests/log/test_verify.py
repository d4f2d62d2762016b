"""Verify finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.log.compaction_bed import Bed

from forebay.errors import Unavailable
from forebay.formats import bytes_batch
from forebay.log import (
    AppendGroup,
    DataLost,
    OffsetOutOfRange,
    PartitionReport,
    UnknownTopic,
    VerifyReport,
    explain,
    verify,
)
from forebay.log._compaction_steps import CompactionSteps
from forebay.log._keys import CATALOG_PARTITION_KEY, shared_wal_key, topic_key
from forebay.log._records import encode_record
from forebay.log._uris import key_of, uri_of


async def filled(*sizes: int) -> Bed:
    bed = Bed()
    await bed.append(*(sizes or (2, 3, 1)))
    await bed.writer.close()
    return bed


async def test_a_whole_log_has_no_problems_whatever_its_shape() -> None:
    for build in (_only_pending, _indexed, _half_compacted, _compacted, _trimmed, _empty):
        bed = await build()
        report = await bed.verify()
        assert report.ok, (build, report.as_json())
        assert report.orphans == [] or build is not _indexed


async def test_two_sound_objects_of_one_size_that_changed_places_are_found() -> None:
    bed = await filled(2, 2)
    entries = [each.entry for each in await bed.index()]
    keys = [key_of(bed.store, entry.data_key) for entry in entries]
    blobs = [(await bed.store.get(key)).data for key in keys]
    heads = [blob[: entry.byte_offset] for blob, entry in zip(blobs, entries, strict=True)]
    slices = [blob[len(head) :] for blob, head in zip(blobs, heads, strict=True)]
    assert len(slices[0]) == len(slices[1]) and slices[0] != slices[1]
    for key, head, foreign in zip(keys, heads, reversed(slices), strict=True):
        await bed.store.put(key, head + foreign)
    [report] = (await bed.verify()).partitions
    assert len(report.problems) == 2 and all("checksum" in problem for problem in report.problems)
    with pytest.raises(DataLost, match=keys[0]):
        await bed.read_all()


async def test_a_control_record_that_was_lost_is_found() -> None:
    """Without it the partition looks empty, and the next append would begin at the first offset again."""
    bed = await filled()
    await bed.coordinator.delete(bed.keys.control, partition_key=bed.keys.partition_key)
    [report] = (await bed.verify()).partitions
    assert report.problems == ["there is no control record, and the index has offset 2"]


async def test_what_a_sleeper_puts_after_a_deletion_is_no_problem() -> None:
    bed = await filled()
    [entry, *_] = await bed.index()
    await bed.writer.catalog.delete("t")
    key = bed.keys.index(entry.end_offset)
    await bed.coordinator.put(key, encode_record(entry.entry), partition_key=bed.keys.partition_key)
    await bed.writer.catalog.create("t")
    assert (await bed.verify()).ok


@pytest.mark.parametrize("name", ["garbage", "7", "0000000000000000007 "])
async def test_a_foreign_key_in_the_index_is_a_problem_and_no_crash(name: str) -> None:
    bed = await filled()
    [entry, *_] = await bed.index()
    key = f"{bed.keys.root}/index/{name}"
    await bed.coordinator.put(key, encode_record(entry.entry), partition_key=bed.keys.partition_key)
    [report] = (await bed.verify()).partitions
    assert report.problems == [f"{key!r} is no key of an index"]


async def _only_pending() -> Bed:
    bed = Bed()
    await bed.append(3)
    return bed


async def _indexed() -> Bed:
    return await filled()


async def _half_compacted() -> Bed:
    bed = await filled()
    await bed.compact()
    await bed.append(2, 2)
    return bed


async def _compacted() -> Bed:
    bed = await filled()
    await bed.compact()
    return bed


async def _trimmed() -> Bed:
    bed = await filled(4, 4)
    meta = await bed.meta()
    assert meta.control is not None
    changed = msgspec.structs.replace(meta.control, start_offset=3)
    await bed.coordinator.put(bed.keys.control, encode_record(changed), partition_key=bed.keys.partition_key)
    return bed


async def _empty() -> Bed:
    bed = Bed()
    await bed.writer.catalog.create("t", partitions=3)
    return bed


@pytest.mark.parametrize("step", ["_write_index", "_change", "_delete_old", "_move_cursor", "_drop"])
async def test_a_compaction_under_way_is_no_problem(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = await filled(2, 2, 2)

    async def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(CompactionSteps, step, crash)
        with pytest.raises(KeyboardInterrupt):
            await bed.compact()
    assert await bed.problems() == []


async def test_a_late_index_entry_is_no_problem() -> None:
    bed = await filled(2, 2, 2)
    late = (await bed.index())[1]
    await bed.compact()
    await bed.put_late(late)
    assert await bed.problems() == []


async def test_a_missing_index_entry_is_a_gap() -> None:
    bed = await filled()
    await bed.coordinator.delete(bed.keys.index(5), partition_key=bed.keys.partition_key)
    assert await bed.problems() == ["offsets 3 to 5 are missing"]


async def test_a_missing_tail_is_a_gap() -> None:
    bed = await filled()
    meta = await bed.meta()
    assert meta.control is not None
    changed = msgspec.structs.replace(meta.control, pending=None, sequence_counter=9)
    await bed.coordinator.put(bed.keys.control, encode_record(changed), partition_key=bed.keys.partition_key)
    assert await bed.problems() == ["offsets 7 to 8 are missing"]


async def test_offsets_with_two_owners_are_an_overlap() -> None:
    bed = await filled()
    second = (await bed.index())[1]
    body = bytes_batch.encode([b"x"] * 4)
    key = f"{bed.keys.root}/data/wal/longer"
    await bed.store.put(key, body)
    longer = msgspec.structs.replace(
        second.entry,
        msg_count=4,
        data_key=uri_of(bed.store, key),
        byte_offset=None,
        byte_length=None,
        crc32c=None,
    )
    await bed.put_index(5, longer)
    assert await bed.problems() == ["offsets 2 to 2 have two owners"]


async def test_an_entry_behind_the_counter_was_never_assigned() -> None:
    bed = await filled()
    await bed.put_index(20, (await bed.index())[0].entry)
    assert await bed.problems() == ["the index ends at offset 20, which was never assigned"]


async def test_a_missing_object_is_named() -> None:
    bed = await filled()
    await bed.compact()
    [entry] = await bed.index()
    await bed.store.delete([key_of(bed.store, entry.entry.data_key)])
    [problem] = await bed.problems()
    assert problem == f"offsets 1 to 6: object {entry.entry.data_key} is missing"


@pytest.mark.parametrize("place", [-1, -5, -20, 100], ids=str)
async def test_a_flipped_bit_anywhere_in_a_compacted_object_is_found(place: int) -> None:
    bed = await filled(20, 20)
    await bed.compact()
    [entry] = await bed.index()
    key = key_of(bed.store, entry.entry.data_key)
    data = bytearray((await bed.store.get(key)).data)
    data[place] ^= 4
    await bed.store.put(key, data)
    [problem] = await bed.problems()
    assert "damaged" in problem


async def test_a_truncated_object_is_found() -> None:
    bed = await filled()
    first = (await bed.index())[0]
    key = key_of(bed.store, first.entry.data_key)
    await bed.store.put(key, (await bed.store.get(key)).data[:-3])
    assert len(await bed.problems()) == 1


async def test_a_wrong_object_under_the_right_name_is_found() -> None:
    """Same count, sound in itself, but not what was committed."""
    bed = await filled(2, 2)
    await bed.compact()
    [entry] = await bed.index()
    await bed.store.put(key_of(bed.store, entry.entry.data_key), bytes_batch.encode([b"x"] * 4))
    assert len(await bed.problems()) == 1


async def test_a_header_that_disagrees_with_the_index_is_found() -> None:
    """Two topics in one object; an entry that points to the slice of the other."""
    bed = Bed()
    groups = [AppendGroup.of("t", 0, [b"mine"]), AppendGroup.of("u", 0, [b"your"])]
    for result in await bed.writer.append_shared(groups):
        assert result.error is None
    await bed.writer.close()
    mine = (await bed.index())[0]
    other = Bed("u")
    other.store, other.coordinator = bed.store, bed.coordinator
    await bed.put_index(1, (await other.index())[0].entry)
    meta = await bed.meta()
    assert meta.control is not None
    changed = msgspec.structs.replace(meta.control, pending=None)
    await bed.coordinator.put(bed.keys.control, encode_record(changed), partition_key=bed.keys.partition_key)
    [problem] = await bed.problems()
    assert "does not name t:0" in problem and mine.entry.byte_offset is not None


async def test_a_header_that_counts_other_records_is_found() -> None:
    bed = Bed()
    await bed.append(2)
    await bed.writer.close()
    [entry] = await bed.index()
    key = key_of(bed.store, entry.entry.data_key)
    blob = (await bed.store.get(key)).data
    assert blob.count(b'"msg_count":2') == 1
    await bed.store.put(key, blob.replace(b'"msg_count":2', b'"msg_count":3'))
    [problem] = await bed.problems()
    assert "does not name t:0 with 2 records" in problem


async def test_a_record_that_is_no_record_is_reported_not_raised() -> None:
    bed = await filled()
    await bed.coordinator.put(bed.keys.index(5), b"{", partition_key=bed.keys.partition_key)
    [problem] = await bed.problems()
    assert "holds no IndexEntry" in problem


async def test_an_entry_of_another_bucket_is_reported() -> None:
    bed = await filled()
    entry = (await bed.index())[0].entry
    await bed.put_index(2, msgspec.structs.replace(entry, data_key="s3://elsewhere/llog/wal-shared/x"))
    report = await verify(bed.store, bed.coordinator, clock=bed.clock, randomness=bed.random, topic="t")
    assert not report.ok


async def test_orphans_are_listed_and_do_no_harm() -> None:
    bed = await filled()
    await bed.store.put(shared_wal_key("orphan"), b"?")
    await bed.store.put(bed.keys.compacted_object("loser"), b"?")
    report = await bed.verify()
    assert report.ok
    assert report.orphans == [bed.keys.compacted_object("loser"), shared_wal_key("orphan")]


async def test_a_partition_that_the_catalog_forgot_is_verified_too() -> None:
    bed = await filled()
    await bed.coordinator.delete(topic_key("t"), partition_key=CATALOG_PARTITION_KEY)
    report = await bed.verify()
    assert [(each.topic, each.records) for each in report.partitions] == [("t", 6)]
    assert report.orphans == []


async def test_what_changes_under_its_eyes_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range is compacted, and its sources vacuumed, while verify holds the old entries."""
    bed = await filled(2, 2, 2)
    get_range = bed.store.get_range
    moved = False

    async def compact_first(*arguments: Any) -> bytes:
        nonlocal moved
        if not moved:
            moved = True
            await bed.compact()
            await bed.append(1)
            await bed.run_vacuum(times=3)
        return await get_range(*arguments)

    monkeypatch.setattr(bed.store, "get_range", compact_first)
    assert await bed.problems() == [] and moved


# -- explain


async def explained(bed: Bed, offset: int) -> Any:
    return await explain(bed.store, bed.coordinator, "t", 0, offset, clock=bed.clock, randomness=bed.random)


async def test_explain_of_each_kind_of_place() -> None:
    bed = Bed()
    await bed.append(2, 2)
    pending, indexed = await explained(bed, 4), await explained(bed, 1)
    assert (pending.source, pending.index_key, pending.requests["index"]) == ("pending", None, 0)
    assert (indexed.source, indexed.place, indexed.writer) == ("WAL", 0, "writer")
    assert indexed.index_key == bed.keys.index(2) and indexed.append_id
    await bed.compact()
    await bed.append(1)
    compacted = await explained(bed, 3)
    assert (compacted.source, compacted.batch_start, compacted.batch_end) == ("COMPACTED", 1, 4)
    assert compacted.timestamp_ms == indexed.committed_at_ms
    data = await bed.store.get_range(
        key_of(bed.store, compacted.object), compacted.byte_offset, compacted.byte_length
    )
    assert bytes_batch.decode(data).records()[compacted.place] == bed.sent[2]


async def test_explain_steps_over_late_entries_and_says_so() -> None:
    bed = await filled(2, 2, 2)
    late = (await bed.index())[1]
    await bed.compact()
    await bed.append(1)
    await bed.put_late(late)
    found = await explained(bed, 3)
    assert (found.source, found.stepped_over, found.cursor) == ("COMPACTED", 1, 7)


async def test_explain_of_what_is_not_there() -> None:
    bed = await filled()
    with pytest.raises(OffsetOutOfRange):
        await explained(bed, 7)
    with pytest.raises(UnknownTopic):
        await explain(bed.store, bed.coordinator, "u", 0, 1, clock=bed.clock, randomness=bed.random)
    await bed.writer.catalog.create("u")
    with pytest.raises(OffsetOutOfRange):
        await explain(bed.store, bed.coordinator, "u", 0, 1, clock=bed.clock, randomness=bed.random)
    await bed.coordinator.delete(bed.keys.index(2), partition_key=bed.keys.partition_key)
    with pytest.raises(DataLost, match="nothing covers offset 1"):
        await explained(bed, 1)
    await bed.store.delete([key_of(bed.store, (await bed.index())[0].entry.data_key)])
    with pytest.raises(DataLost, match="is missing"):
        await explained(bed, 3)


async def test_requests_of_an_explanation_are_counted_also_those_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = await filled()
    await bed.append(1)
    get_range, failures = bed.store.get_range, [Unavailable("no"), Unavailable("no")]

    async def fail_twice(*arguments: Any) -> bytes:
        if failures:
            raise failures.pop()
        return await get_range(*arguments)

    monkeypatch.setattr(bed.store, "get_range", fail_twice)
    assert (await explained(bed, 1)).requests == {"control": 1, "index": 1, "object": 3}


async def test_a_topic_that_cannot_be_read_is_a_problem_and_its_objects_are_no_orphans() -> None:
    bed = await filled(2, 3, 1)
    await bed.writer.append_shared([AppendGroup.of("other", 0, [b"x"])])
    await bed.coordinator.put(topic_key(bed.keys.topic), b"torn", partition_key=CATALOG_PARTITION_KEY)
    await bed.store.put(shared_wal_key("unknown"), b"perhaps of that topic")
    report = await bed.verify()
    assert not report.ok and report.orphans == []
    [problem] = report.as_json()["problems"]
    assert topic_key(bed.keys.topic) in problem
    # Its records are found by the objects that name it, and looked at all the same.
    assert {(each.topic, each.records) for each in report.partitions} == {("other", 1), (bed.keys.topic, 6)}


def test_reports_are_plain_data_in_the_promised_form() -> None:
    report = VerifyReport([PartitionReport("t", 0, 3, ["torn"])], ["orphan"])
    assert report.as_json() == {
        "ok": False,
        "partitions": [{"topic": "t", "partition": 0, "records": 3, "problems": ["torn"]}],
        "orphans": ["orphan"],
    }
