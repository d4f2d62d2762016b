"""What vacuum takes, what it keeps, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.log.compaction_bed import EAGER, HASTY, Bed

from forebay.coordination import MemoryCoordinator
from forebay.errors import ForebayError, OutcomeUnknown, StorageDamaged, Unavailable, UsageError
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, Catalog, VacuumConfig
from forebay.log._compaction_steps import CompactionSteps
from forebay.log._keys import CATALOG_PARTITION_KEY, IDENTITY_OBJECT, PartitionKeys, shared_wal_key, topic_key
from forebay.log._records import Cursor, encode_record
from forebay.log._references import LogObjects
from forebay.log._uris import key_of
from forebay.log._vacuum import _Pass
from forebay.log._vacuum_marks import MARKS_KEY
from forebay.storage import DeleteResult, MemoryStore


async def keys_of(bed: Bed, prefix: str = "llog/") -> list[str]:
    return [info.key async for info in bed.store.list(prefix)]


async def test_the_first_run_marks_and_the_second_deletes() -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.compact()
    await bed.clock.sleep(10)
    first = await bed.vacuum().run_once()
    assert (first.deleted, first.kept["waits for its second mark"]) == (0, 2)
    assert first.marked_bytes > 0
    await bed.clock.sleep(10)
    second = await bed.vacuum().run_once()
    assert second.deleted == 2 == len(second.deleted_keys) and second.deleted_bytes == first.marked_bytes
    assert len(await keys_of(bed, "llog/wal-shared/")) == 1
    assert await bed.unreadable() == []


async def test_two_runs_within_the_gap_delete_nothing() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.clock.sleep(10)
    patient = replace(HASTY, mark_gap_ms=60_000)
    for _ in range(3):
        assert (await bed.vacuum(patient).run_once()).deleted == 0
        await bed.clock.sleep(10)


async def test_objects_younger_than_the_grace_are_left_alone() -> None:
    bed = Bed()
    orphan = shared_wal_key("orphan")
    await bed.store.put(orphan, b"an upload whose commit is under way")
    careful = VacuumConfig(grace_ms=3_600_000, mark_gap_ms=0)
    for _ in range(3):
        report = await bed.vacuum(careful).run_once()
        assert report.kept == {"younger than the grace": 1} and report.deleted == 0
    assert orphan in await keys_of(bed)


async def test_a_header_that_cannot_be_read_of_an_object_that_turns_out_to_be_named() -> None:
    """Its partition is not in the catalog, and is found by the header of another object only."""
    bed = Bed()
    await bed.append(2, 2)
    named = await keys_of(bed, "llog/wal-shared/")
    await bed.store.put(shared_wal_key("00"), (await bed.store.get(named[0])).data)
    for key in named:
        data = (await bed.store.get(key)).data
        await bed.store.put(key, data[:8] + b"?" + data[9:])
    await bed.coordinator.delete(topic_key("t"), partition_key=CATALOG_PARTITION_KEY)
    assert (await bed.run_vacuum(times=3)).failed == []
    assert await keys_of(bed, "llog/wal-shared/") == named


async def test_an_upload_that_was_never_committed_goes_in_the_end() -> None:
    bed = Bed()
    await bed.writer.catalog.create(bed.keys.topic)
    uploaded = await bed.writer.upload([_group(bed, b"never committed")])
    assert uploaded.units and len(await keys_of(bed)) == 1
    assert (await bed.run_vacuum()).deleted == 1
    assert await keys_of(bed) == []


def _group(bed: Bed, *records: bytes) -> Any:
    return AppendGroup.of(bed.keys.topic, bed.keys.partition, list(records))


async def test_a_shared_object_lives_until_its_last_partition_lets_go() -> None:
    bed = Bed()
    await bed.append(2, 2, 2, partitions=[0, 1, 2])
    compactor = bed.compactor()
    for partition in (0, 1):
        await compactor.compact_once("t", partition)
        assert (await bed.run_vacuum()).deleted == 0
    await compactor.compact_once("t", 2)
    assert (await bed.run_vacuum()).deleted == 2  # The third is still pending everywhere.


async def test_the_pending_append_is_kept_although_it_was_compacted() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.run_vacuum()
    meta = await bed.meta()
    assert meta.control is not None and meta.control.pending is not None
    assert key_of(bed.store, meta.control.pending.data_key) in await keys_of(bed)


async def test_the_object_of_a_compaction_under_way_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2)
    with monkeypatch.context() as broken:

        async def crash(*_: object) -> None:
            raise KeyboardInterrupt

        broken.setattr(CompactionSteps, "_write_index", crash)
        with pytest.raises(KeyboardInterrupt):
            await bed.compact()
    await bed.store.put("llog/t/partitions/0/data/wal/1", b"a late index put may still name it")
    report = await bed.run_vacuum(times=3)
    assert report.deleted == 0 and report.stalled == ["t:0"]
    assert (await bed.compact()).outcome == "resumed"
    assert await bed.unreadable() == []


async def test_a_compacted_object_of_a_lost_race_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2)
    key = bed.keys.compacted_object("loser")
    await bed.store.put(key, b"nobody names it")
    assert (await bed.run_vacuum()).deleted_keys == [key]


async def test_trimmed_ranges_let_go_of_their_objects() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.append(2, 2)
    await bed.compact()
    meta = await bed.meta()
    assert meta.control is not None
    trimmed = msgspec.structs.replace(meta.control, start_offset=5)
    await bed.coordinator.put(bed.keys.control, encode_record(trimmed), partition_key=bed.keys.partition_key)
    await bed.run_vacuum()
    assert len(await keys_of(bed, f"{bed.keys.root}/data/")) == 1
    assert await bed.unreadable() == []


async def test_objects_of_a_deleted_topic_go() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.append(2)
    await bed.writer.catalog.delete("t")
    await bed.store.put(bed.keys.compacted_object("late"), b"uploaded while the topic was deleted")
    assert (await bed.run_vacuum()).deleted == 4
    assert await keys_of(bed) == []


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "guard removed"])
async def test_a_partition_that_the_catalog_forgot_keeps_its_objects(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects themselves tell whose they are: losing the catalog must not lose data."""
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.append(3, 3)
    await bed.writer.catalog.create("another")
    await bed.coordinator.delete(topic_key("t"), partition_key=CATALOG_PARTITION_KEY)
    if not guarded:

        async def nobody(self: LogObjects, infos: Any) -> dict[str, list[PartitionKeys]]:
            return {}

        monkeypatch.setattr(LogObjects, "owners", nobody)
        monkeypatch.setattr("forebay.log._vacuum.owner_of", lambda key: None)
    await bed.run_vacuum(times=3)
    assert (await bed.unreadable() == []) is guarded


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "guard removed"])
async def test_a_coordinator_that_knows_nothing_of_the_log_loses_no_object(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database was lost, or a URL names an empty namespace: everything looks like garbage from there."""
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.append(3)
    # With its name the store would refuse at once: see `test_identity`.
    await bed.store.delete([IDENTITY_OBJECT])
    before = await keys_of(bed)
    right, bed.coordinator = bed.coordinator, MemoryCoordinator()
    if not guarded:
        monkeypatch.setattr(_Pass, "_knows_the_log", property(lambda _: True, lambda *_: None), raising=False)
    report = await bed.run_vacuum(times=3)
    assert (await keys_of(bed) == before) is guarded
    if guarded:
        assert report.deleted == 0
        assert report.kept == {"the coordinator knows nothing of this log": len(before)}
        bed.coordinator = right
        assert await bed.unreadable() == []
        # It left no marks in its name, which would stand in the way of the right one.
        assert (await bed.run_vacuum(times=3)).failed == []
        assert await bed.unreadable() == []


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "guard removed"])
async def test_the_coordinator_of_another_log_may_not_vacuum_this_one(guarded: bool) -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.append(3)
    await bed.run_vacuum(times=3)
    before = await keys_of(bed)
    right, bed.coordinator = bed.coordinator, MemoryCoordinator()
    elsewhere = Catalog(
        MemoryStore(), bed.coordinator, clock=bed.clock, ids=IdSource(bed.clock), randomness=bed.random
    )
    await elsewhere.create("elsewhere")
    if guarded:
        for dry_run in (True, False):
            with pytest.raises(UsageError, match="another log"):
                await bed.vacuum().run_once(dry_run=dry_run)
        bed.coordinator = right
        assert (await bed.run_vacuum()).failed == [] and await keys_of(bed) == before
        assert await bed.unreadable() == []
    else:
        await bed.store.delete([IDENTITY_OBJECT])
        await bed.run_vacuum(times=3)
        assert await keys_of(bed) == []


async def test_an_object_whose_header_cannot_be_read_is_kept_and_said() -> None:
    bed = Bed()
    await bed.store.put(shared_wal_key("torn"), b"LLS1 but not really")
    await bed.append(1)
    report = await bed.run_vacuum(times=3)
    assert report.deleted == 0 and report.objects == 2
    assert report.kept == {"its header cannot be read": 1, "in use": 1}


async def test_what_is_not_of_the_log_is_not_touched() -> None:
    bed = Bed()
    for key in ("llog/notes.txt", "llog/t/partitions/0/data/other/x", "buffer/x"):
        await bed.store.put(key, b"somebody else's")
    report = await bed.run_vacuum(times=3)
    assert report.kept == {"not an object of the log": 2} and report.objects == 2
    assert len(await keys_of(bed, "")) == 3


async def test_a_dry_run_changes_nothing_and_says_what_would_go() -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.compact()
    await bed.clock.sleep(10)
    assert (await bed.vacuum().run_once(dry_run=True)).kept["waits for its second mark"] == 2
    assert MARKS_KEY not in await keys_of(bed, "")
    await bed.vacuum().run_once()
    await bed.clock.sleep(10)
    before = await keys_of(bed, "")
    dry = await bed.vacuum().run_once(dry_run=True)
    assert dry.dry_run and dry.deleted == 2
    assert await keys_of(bed, "") == before


async def test_stale_index_keys_are_swept_on_the_way_but_not_in_a_dry_run() -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    late = (await bed.index())[1]
    await bed.compact()
    await bed.put_late(late)
    await bed.clock.sleep(10)
    assert (await bed.vacuum().run_once(dry_run=True)).swept_index_keys == 0
    assert (await bed.vacuum().run_once()).swept_index_keys == 1
    assert await bed.spans() == [("COMPACTED", 1, 6)]


async def test_portions_find_the_same_as_one_look() -> None:
    bed = Bed()
    await bed.append(*[1] * 20)
    await bed.compact()
    small = replace(HASTY, candidates_max=3)
    report = await bed.run_vacuum(small)
    assert (report.deleted, report.objects) == (19, 21)
    assert await bed.unreadable() == []


async def test_marks_over_the_bound_wait_for_a_later_run() -> None:
    bed = Bed()
    await bed.append(*[1] * 10)
    await bed.compact()
    few = replace(HASTY, marks_max=4)
    deleted = [(await bed.run_vacuum(few, times=1)).deleted for _ in range(4)]
    assert sum(deleted) == 9 and max(deleted) <= 4 + 1


class RefusesDeletes(MemoryStore):
    """Cannot delete for a while."""

    refuse: Exception | None = None

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        if self.refuse is not None:
            raise self.refuse
        return await super().delete(keys)


@pytest.mark.parametrize("error", [Unavailable("not now"), OutcomeUnknown("delete")])
async def test_what_could_not_be_deleted_stays_marked_and_goes_next_time(error: Exception) -> None:
    bed = Bed()
    store = RefusesDeletes(bed.clock, bed.ids)
    bed.store = store
    bed.writer = bed.new_writer()
    await bed.append(2, 2)
    await bed.compact()
    store.refuse = error
    report = await bed.run_vacuum()
    assert report.deleted == 0 and len(report.failed) == 1
    store.refuse = None
    await bed.clock.sleep(5)
    assert (await bed.vacuum().run_once()).deleted == 1


async def test_unreadable_marks_cost_a_run_and_nothing_else() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.store.put(MARKS_KEY, b"not JSON")
    assert (await bed.run_vacuum()).deleted == 1


async def test_two_vacuums_at_once_keep_each_others_marks() -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.compact()
    await bed.clock.sleep(10)
    first, second = bed.vacuum(), bed.vacuum()
    load = first._marks.load

    async def load_then_wait() -> Any:
        first._marks.load = load  # type: ignore[method-assign]
        marks = await load()
        await second.run_once()
        return marks

    first._marks.load = load_then_wait  # type: ignore[method-assign]
    assert (await first.run_once()).deleted == 0
    await bed.clock.sleep(10)
    assert (await bed.vacuum().run_once()).deleted == 2


async def test_references_are_read_small_records_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that moves from pending to the index between two looks is seen by one of them."""
    bed = Bed()
    await bed.append(2)
    named: list[str] = []
    scan = bed.coordinator.range_scan
    moved = False

    async def scan_then_move(*arguments: Any, **options: Any) -> Any:
        nonlocal moved
        found = await scan(*arguments, **options)
        if not moved:
            moved = True
            await bed.append(1)  # Puts the index entry of the first append, and replaces it as pending.
        return found

    first = (await bed.meta()).control
    assert first is not None and first.pending is not None
    monkeypatch.setattr(bed.coordinator, "range_scan", scan_then_move)
    objects = LogObjects(bed.store, bed.coordinator, clock=bed.clock, randomness=bed.random)
    await objects.visit(bed.keys, named.append)
    assert key_of(bed.store, first.pending.data_key) in named


@pytest.mark.parametrize("damaged", ["cursor", "start"])
async def test_a_cursor_or_a_start_behind_the_end_gives_nothing_up(damaged: str) -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    meta = await bed.meta()
    assert meta.control is not None
    wrong: msgspec.Struct = Cursor(offset=2**40)
    key = bed.keys.cursor
    if damaged == "start":
        key, wrong = bed.keys.control, msgspec.structs.replace(meta.control, start_offset=2**40)
    await bed.coordinator.put(key, encode_record(wrong), partition_key=bed.keys.partition_key)
    before = await keys_of(bed)
    for _ in range(3):
        bed.clock.elapsed += 3_600
        with contextlib.suppress(ForebayError):
            assert (await bed.vacuum().run_once()).deleted == 0
    with pytest.raises(StorageDamaged):
        await bed.compact(EAGER)
    report = await bed.verify()
    assert not report.ok and "compacted to" in report.partitions[0].problems[0]
    assert await keys_of(bed) == before
    # Once it is put right, everything is there.
    right = Cursor(offset=1) if damaged == "cursor" else meta.control
    await bed.coordinator.put(key, encode_record(right), partition_key=bed.keys.partition_key)
    assert await bed.unreadable() == []


async def test_a_cursor_above_what_was_folded_gives_nothing_up() -> None:
    """Entries below it are the only ones of their offsets: no compacted one has taken their place."""
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    await bed.append(2, 2, 2)
    late = (await bed.index())[1]
    await bed.coordinator.put(
        bed.keys.cursor, encode_record(Cursor(offset=9)), partition_key=bed.keys.partition_key
    )
    report = await bed.run_vacuum(times=3)
    assert report.swept_index_keys == 0 and late in await bed.index()
    await bed.coordinator.put(
        bed.keys.cursor, encode_record(Cursor(offset=5)), partition_key=bed.keys.partition_key
    )
    assert await bed.unreadable() == []


async def test_more_late_entries_than_are_waited_for_keep_their_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.log._references.LATE_ENTRIES_MAX", 1)
    bed = Bed()
    await bed.append(1, 1, 1, 1)
    await bed.writer.materialize_idle(idle_ms=0)
    late = (await bed.index())[:3]
    await bed.compact()
    for entry in late:
        assert await bed.put_late(entry)
    named: list[str] = []
    objects = LogObjects(bed.store, bed.coordinator, clock=bed.clock, randomness=bed.random)
    visit = await objects.visit(bed.keys, named.append)
    assert [key for key, _ in visit.stale] == [bed.keys.index(3)]
    assert {key_of(bed.store, entry.entry.data_key) for entry in late[:2]} <= set(named)


async def test_nothing_is_removed_while_an_entry_of_the_catalog_cannot_be_read() -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.compact()
    key = topic_key(bed.keys.topic)
    whole = await bed.coordinator.get(key, partition_key=CATALOG_PARTITION_KEY)
    assert whole is not None
    await bed.coordinator.put(key, b"torn", partition_key=CATALOG_PARTITION_KEY)
    before = await keys_of(bed)
    for _ in range(3):
        bed.clock.elapsed += 3_600
        with pytest.raises(StorageDamaged, match=key):
            await bed.vacuum().run_once()
    assert await keys_of(bed) == before
    await bed.coordinator.put(key, whole.value, partition_key=CATALOG_PARTITION_KEY)
    assert await bed.unreadable() == []


@pytest.mark.parametrize(
    "wrong", [{"grace_ms": -1}, {"mark_gap_ms": -1}, {"candidates_max": 0}, {"marks_max": 0}]
)
def test_a_configuration_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        VacuumConfig(**wrong)


async def test_the_report_is_plain_data() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact(EAGER)
    document = (await bed.run_vacuum()).as_json()
    assert msgspec.json.decode(msgspec.json.encode(document)) == document
