"""Every hole that the protocol is known to have, closed by a guard; and open again once the guard is removed.

Letters and rows are those of the analysis of the protocol: (a) a crash after the first step, (b) entries that
straddle a range, (c) index puts that arrive after compaction, (d) deletes that are not one step, (e) commits
whose reply was lost, (f) two compactors at once. Each test runs twice where that is possible: with the guard,
and without it, where the same story must end badly. A test of a guard that cannot fail without it is none.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from tests.log.compaction_bed import AT_ONCE, EAGER, Bed

from forebay.coordination import ANY, DeleteRange, MemoryCoordinator, Operation, WriteResult
from forebay.errors import ForebayError, OutcomeUnknown, StorageDamaged
from forebay.formats import bytes_batch
from forebay.log import AppendGroup, Compactor, CompactorConfig, _commit
from forebay.log._compaction_rewrite import Rewriter
from forebay.log._compaction_run import RunLimits, select_run
from forebay.log._compaction_steps import CompactionSteps, _entry_of
from forebay.log._compactor import _Work
from forebay.log._meta import PartitionMeta, located
from forebay.log._records import Compaction, Cursor, encode_record
from forebay.log._references import LogObjects, Visit
from forebay.log._resolve import Located, Resolver, _Walk
from forebay.log._settle import Verdict
from forebay.log._uris import uri_of

GUARD = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "guard removed"])


class Crash(Exception):
    """The power was cut. No `ForebayError`: nothing catches it."""


async def crash(*_: object, **__: object) -> Any:
    raise Crash


# -- a: crash after step 1


@GUARD
async def test_hole_a_a_crash_after_the_first_step_does_not_stop_compaction_for_ever(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    await bed.append(2, 2)
    with monkeypatch.context() as broken:
        broken.setattr(CompactionSteps, "_change", crash)
        if not guarded:
            broken.setattr(CompactionSteps, "begin", _index_before_record)
        with pytest.raises(Crash):
            await bed.compact()
    assert [span[0] for span in await bed.spans()] == ["WAL", "COMPACTED"]
    if not guarded:
        # Without the record, only a selection that knows of such ranges could go on.
        monkeypatch.setattr(_Work, "_skip_target", _never_skip)
    result = await bed.compact()
    assert (result.outcome == "resumed") is guarded
    await bed.append(2)
    await bed.compact()
    assert ((await bed.meta()).cursor == 7) is guarded
    assert await bed.unreadable() == []


async def _index_before_record(self: CompactionSteps, keys: Any, record: Compaction) -> None:
    await self.coordinator.put(
        keys.index(record.end_offset), encode_record(_entry_of(record)), ANY, partition_key=keys.partition_key
    )
    raise Crash


async def _never_skip(self: _Work, meta: PartitionMeta) -> int:
    return 0


async def test_hole_a_a_range_that_was_left_without_a_record_is_stepped_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed()
    await bed.append(2, 2)
    with monkeypatch.context() as broken:
        broken.setattr(CompactionSteps, "begin", _index_before_record)
        with pytest.raises(Crash):
            await bed.compact()
    # As a compactor of another origin leaves it. The lower key is still there and still right.
    first = await bed.compact()
    await bed.append(2)
    assert first.outcome in ("compacted", "skipped")
    for _ in range(3):
        await bed.compact()
    assert (await bed.meta()).cursor == 7
    assert await bed.unreadable() == []


# -- b: straddling


@GUARD
async def test_hole_b_a_range_never_ends_inside_an_entry(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    await bed.append(2, 2)
    if not guarded:
        monkeypatch.setattr(CompactionSteps, "_write_index", _write_unconditionally)
        monkeypatch.setattr(CompactionSteps, "_check_trimmed", _anything_goes)
    record = await _offer(bed, start=1, end=3)
    steps = bed.compactor().steps
    await steps.begin(bed.keys, record)
    if guarded:
        with pytest.raises(StorageDamaged, match="no entry at its end key"):
            await steps.resume(bed.keys)
        assert await bed.spans() == [("WAL", 1, 2)]
        assert await bed.unreadable() == []
    else:
        await steps.resume(bed.keys)
        await bed.writer.close()
        assert any("two owners" in problem for problem in await bed.problems())


@GUARD
async def test_hole_b_selection_ends_on_entry_ends_and_rejects_gaps_and_straddling(guarded: bool) -> None:
    def entry(start: int, end: int) -> Located:
        whole = msgspec.structs.replace(_COMPACTED, type="WAL", msg_count=end - start + 1)
        return Located(Bed().keys, start, end, whole)

    async def entries(*spans: tuple[int, int]) -> Any:
        for span in spans:
            yield entry(*span)

    limits = RunLimits(target_bytes=1 << 20, entries_max=100, young_ms=1)
    cases: list[tuple[list[tuple[int, int]], int, int | None]] = [
        ([(1, 2), (3, 4)], 1, 4),
        ([(1, 2), (4, 5)], 1, 2),  # a gap
        ([(1, 2), (2, 4)], 1, 2),  # an overlap
        ([(1, 4)], 3, None),  # straddles the cursor
        ([(4, 5)], 3, None),  # leaves a gap at the cursor
    ]
    for spans, cursor, expected in cases:
        run = await select_run(entries(*spans), cursor if guarded else spans[0][0], limits)
        end = None if run is None else run.end_offset
        assert end == expected or not guarded
    if not guarded:
        # A selection that starts anywhere else than at the cursor takes what straddles it.
        run = await select_run(entries((1, 4)), 1, limits)
        assert run is not None and run.start_offset < 3


_COMPACTED = _entry_of(
    Compaction(
        compaction_id="c",
        state="WRITING_COMPACTED_INDEX",
        start_offset=1,
        end_offset=1,
        msg_count=1,
        data_key="memory:///llog/t/partitions/0/data/compacted/x",
        encoding="bytes-batch-v1",
        created_at_ms=0,
    )
)


async def _offer(bed: Bed, start: int, end: int) -> Compaction:
    """A record for a range, with an object that holds the right records."""
    body = bytes_batch.encode(bed.sent[start - 1 : end])
    key = bed.keys.compacted_object(bed.ids.token())
    await bed.store.put(key, body)
    return Compaction(
        compaction_id=bed.ids.token(),
        state="WRITING_COMPACTED_INDEX",
        start_offset=start,
        end_offset=end,
        msg_count=end - start + 1,
        data_key=uri_of(bed.store, key),
        encoding=bytes_batch.ENCODING,
        created_at_ms=bed.clock.now_ms(),
        size_bytes=len(body),
    )


async def _write_unconditionally(self: CompactionSteps, meta: PartitionMeta, record: Compaction) -> bool:
    await self.coordinator.put(
        meta.keys.index(record.end_offset),
        encode_record(_entry_of(record)),
        partition_key=meta.keys.partition_key,
    )
    return True


async def _anything_goes(self: CompactionSteps, meta: PartitionMeta, record: Compaction, found: str) -> None:
    return None


@GUARD
async def test_hole_b_lower_keys_stay_where_the_end_key_is_not_what_they_are_deleted_for(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record says that the end key is compacted, and it is not: what lies below is all there is."""
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.materialize_idle(idle_ms=0)
    record = msgspec.structs.replace(await _offer(bed, 1, 6), state="DELETING_OLD")
    await bed.coordinator.put(
        bed.keys.compaction, encode_record(record), partition_key=bed.keys.partition_key
    )
    if not guarded:
        monkeypatch.setattr(CompactionSteps, "_check_trimmed", _anything_goes)
    before = await bed.spans()
    with contextlib.suppress(StorageDamaged):
        await bed.compact()
    assert (await bed.spans() == before) is guarded
    assert (await bed.unreadable() == []) is guarded


async def test_hole_b_an_end_key_that_holds_another_entry_than_was_folded_is_not_replaced() -> None:
    """The record knows where the last entry began that was folded: so whoever resumes it can tell."""
    bed = Bed()
    await bed.append(2, 4)
    await bed.writer.materialize_idle(idle_ms=0)
    record = msgspec.structs.replace(await _offer(bed, 1, 6), tail_start_offset=5)
    await bed.coordinator.put(
        bed.keys.compaction, encode_record(record), partition_key=bed.keys.partition_key
    )
    before = await bed.spans()
    with pytest.raises(StorageDamaged, match="an entry that starts at 3"):
        await bed.compact()
    assert await bed.spans() == before and await bed.unreadable() == []


# -- c: late index puts, the four rows and the vacuumed ones


async def _folded_with_late(end: int) -> tuple[Bed, Located]:
    """Entries 1-2, 3-4, 5-6 folded into one; and the entry that its writer is about to put again."""
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    [late] = [entry for entry in await bed.index() if entry.end_offset == end]
    assert (await bed.compact()).outcome == "compacted"
    return bed, late


def _plain_ceiling(self: Any, record: Any) -> None:
    """A lookup that gives up when the first key it finds does not cover the offset."""
    found = located(self.keys, record)
    if not getattr(self, "looked", False) and found.start_offset <= self.position:
        self.take(found.start_offset, found.end_offset, found.entry)
    self.looked = True


@GUARD
async def test_hole_c_row_1_and_2_a_late_put_at_the_end_of_a_range_is_refused(guarded: bool) -> None:
    bed, late = await _folded_with_late(6)
    assert await bed.put_late(late, if_absent=guarded) is not guarded
    assert await bed.unreadable() == ([] if guarded else [1, 2, 3, 4])


@GUARD
async def test_hole_c_row_3_and_4_a_late_put_inside_a_range_lands_and_is_stepped_over(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, late = await _folded_with_late(4)
    assert await bed.put_late(late)
    assert ("WAL", 3, 4) in await bed.spans()
    if not guarded:
        monkeypatch.setattr(_Walk, "step", _plain_ceiling)
    assert await bed.unreadable() == ([] if guarded else [1, 2])
    if guarded:
        assert await bed.read_all() == bed.sent


@GUARD
async def test_hole_c_a_late_entry_whose_object_was_vacuumed_is_below_the_cursor_and_ignored(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, late = await _folded_with_late(4)
    await bed.append(2)  # The pending append moves on, so that all three sources are free.
    assert (await bed.run_vacuum()).deleted == 3
    assert await bed.put_late(late)
    if not guarded:
        monkeypatch.setattr(Resolver, "cursor", _cursor_zero)
    assert await bed.unreadable() == ([] if guarded else [3, 4])


async def _cursor_zero(self: Resolver, keys: Any) -> int:
    return 0


@GUARD
async def test_hole_c_vacuum_does_not_keep_an_object_for_a_late_entry_below_the_cursor(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, late = await _folded_with_late(4)
    await bed.put_late(late)
    if not guarded:
        monkeypatch.setattr(LogObjects, "visit", _visit_believing_all)
    await bed.run_vacuum()
    left = [info.key async for info in bed.store.list("llog/wal-shared/")]
    assert any(late.entry.data_key.endswith(key) for key in left) is not guarded
    assert ("WAL", 3, 4) not in await bed.spans() or not guarded


async def _visit_believing_all(self: LogObjects, keys: Any, named: Any) -> Any:
    async for record in self._index(keys):
        named(self._key(located(keys, record).entry.data_key))
    return Visit(keys, True)


@GUARD
async def test_hole_c_the_next_compaction_sweeps_late_entries_in_its_range(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that lands between the range delete and the cursor is in the swept range already."""
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    late = (await bed.index())[1]
    moved = CompactionSteps._move_cursor

    async def late_put_first(self: CompactionSteps, keys: Any, offset: int) -> None:
        await bed.put_late(late)
        await moved(self, keys, offset)

    monkeypatch.setattr(CompactionSteps, "_move_cursor", late_put_first)
    if not guarded:
        monkeypatch.setattr(CompactionSteps, "sweep", _sweep_nothing)
    result = await bed.compact()
    assert (result.swept == 1) is guarded
    assert (await bed.spans() == [("COMPACTED", 1, 6)]) is guarded
    assert await bed.unreadable() == []


async def _sweep_nothing(self: CompactionSteps, keys: Any, first: int, cursor: int) -> int:
    return 0


async def test_hole_c_a_sweep_spares_a_key_that_changed_since_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed, late = await _folded_with_late(4)
    await bed.put_late(late)
    scan = bed.coordinator.range_scan

    async def scan_then_change(*arguments: Any, **named: Any) -> Any:
        found = await scan(*arguments, **named)
        await bed.put_late(late, if_absent=False)
        return found

    monkeypatch.setattr(bed.coordinator, "range_scan", scan_then_change)
    assert await bed.compactor().steps.sweep(bed.keys, 1, 7) == 0


@GUARD
async def test_hole_c_vacuum_waits_while_a_compaction_stalls_before_its_cursor(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the range delete and the cursor nobody could tell a late entry from a good one."""
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    late = (await bed.index())[1]
    with monkeypatch.context() as broken:
        broken.setattr(CompactionSteps, "_move_cursor", crash)
        with pytest.raises(Crash):
            await bed.compact()
    if not guarded:
        monkeypatch.setattr("forebay.log._vacuum._Pass._note", _note_nothing)
    await bed.run_vacuum(times=3)
    await bed.put_late(late)
    assert await bed.unreadable() == ([] if guarded else [3, 4])
    assert (await bed.compact()).outcome == "resumed"
    assert await bed.unreadable() == []


async def _note_nothing(self: Any, visit: Any) -> None:
    return None


# -- d: deletes in pages


class PagedDeletes(MemoryCoordinator):
    """A coordinator that deletes a range key by key, and lets somebody look in between."""

    look: Any = None

    async def write(self, operations: Any) -> list[WriteResult]:
        kept: list[Operation] = []
        for operation in operations:
            if isinstance(operation, DeleteRange) and self.look is not None:
                for key in await self.list(
                    operation.start, operation.end, partition_key=operation.partition_key
                ):
                    await self.delete(key, partition_key=operation.partition_key)
                    await self.look()
            kept.append(operation)
        return await super().write(kept)


@GUARD
async def test_hole_d_readers_see_every_offset_while_a_range_is_deleted_key_by_key(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    coordinator = PagedDeletes()
    bed.coordinator = coordinator
    bed.writer = bed.new_writer()
    await bed.append(2, 2, 2, 2)
    await bed.writer.close()
    seen: list[list[int]] = []

    async def look() -> None:
        seen.append(await bed.unreadable())

    coordinator.look = look
    if not guarded:
        monkeypatch.setattr(_Walk, "step", _plain_ceiling)
    assert (await bed.compact()).outcome == "compacted"
    assert len(seen) == 3
    assert (not any(seen)) is guarded


# -- e: commits whose reply was lost


class LosesReply(MemoryCoordinator):
    """Does the next write, and says that nobody knows."""

    lose = False

    async def write(self, operations: Any) -> list[WriteResult]:
        results = await super().write(operations)
        if self.lose:
            self.lose = False
            return [WriteResult(error=OutcomeUnknown("write", reason="the reply was lost"))] * len(results)
        return results


@GUARD
async def test_hole_e_a_commit_whose_reply_was_lost_is_recognised_and_not_repeated(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    coordinator = LosesReply()
    bed.coordinator = coordinator
    bed.writer = bed.new_writer()
    await bed.append(1)
    if not guarded:
        monkeypatch.setattr(_commit, "settle", _blind)
    coordinator.lose = True
    [result] = await bed.writer.append_shared([AppendGroup.of("t", 0, [b"once"])])
    assert result.error is None
    assert (await bed.read_all()).count(b"once") == (1 if guarded else 2)


async def _blind(coordinator: Any, unit: Any, doubt: Any, state: Any, metrics: Any) -> Verdict:
    return Verdict.OPEN if doubt is None else Verdict.NOT_COMMITTED


# -- f: two compactors at once


async def _rivals(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, *, rival: CompactorConfig
) -> tuple[str, PartitionMeta]:
    """One compactor has uploaded [1, 4] and stalls; its rival folds a range; then the first wakes."""
    upload = Rewriter.upload
    stalled = bed.compactor(CompactorConfig(min_age_ms=0, wait_for_full_ms=0, entries_max=2))

    async def upload_then_stall(self: Rewriter, *arguments: Any, **named: Any) -> str:
        key = await upload(self, *arguments, **named)
        monkeypatch.setattr(Rewriter, "upload", upload)
        assert (await bed.compact(rival)).outcome == "compacted"
        return key

    monkeypatch.setattr(Rewriter, "upload", upload_then_stall)
    result = await stalled.compact_once("t", 0)
    return result.outcome, await bed.meta()


RANGES = pytest.mark.parametrize("entries", [1, 2, 3], ids=["shorter", "same", "longer"])


@RANGES
async def test_hole_f_a_record_that_comes_after_a_rival_finished_is_dropped(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    rival = CompactorConfig(min_age_ms=0, wait_for_full_ms=0, entries_max=entries, entries_min=1)
    outcome, meta = await _rivals(bed, monkeypatch, rival=rival)
    assert outcome == "raced"
    assert (meta.cursor, meta.compaction) == (2 * entries + 1, None)
    assert await bed.unreadable() == [] and await bed.problems() == []
    assert (await bed.compact()).outcome == ("idle" if entries == 3 else "compacted")
    assert (await bed.meta()).cursor == 7


async def test_hole_f_without_its_guards_a_late_record_makes_overlapping_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompactionSteps, "_starts_at_cursor", lambda self, meta, record: True)
    monkeypatch.setattr(CompactionSteps, "_write_index", _write_unconditionally)
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    await _rivals(bed, monkeypatch, rival=EAGER)
    assert any("two owners" in problem for problem in await bed.problems())


@GUARD
async def test_hole_f_the_end_key_is_replaced_only_in_the_version_that_was_seen(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a record that should have been dropped, a WAL entry that is gone is not overwritten."""
    monkeypatch.setattr(CompactionSteps, "_starts_at_cursor", lambda self, meta, record: True)
    if not guarded:
        monkeypatch.setattr(CompactionSteps, "_write_index", _write_unconditionally)
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    try:
        await _rivals(bed, monkeypatch, rival=EAGER)
    except ForebayError:
        assert guarded
    assert (await bed.problems() == []) is guarded


@GUARD
async def test_hole_f_the_cursor_never_goes_back(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guarded:
        monkeypatch.setattr(CompactionSteps, "_move_cursor", _move_blindly)
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    await bed.compact()
    record = msgspec.structs.replace(await _offer(bed, 1, 4), state="UPDATING_CURSOR")
    steps = bed.compactor().steps
    await steps.begin(bed.keys, record)
    await steps.resume(bed.keys)
    assert (await bed.meta()).cursor == (7 if guarded else 5)


async def _move_blindly(self: CompactionSteps, keys: Any, offset: int) -> None:
    await self.coordinator.put(
        keys.cursor, encode_record(Cursor(offset=offset)), partition_key=keys.partition_key
    )


@GUARD
async def test_hole_f_a_state_is_changed_only_by_whoever_saw_the_last_one(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compactor that slept in its first state must not bring a finished record back to life."""
    if not guarded:
        monkeypatch.setattr(CompactionSteps, "_change", _change_blindly)
    bed = Bed()
    await bed.append(2, 2)
    await bed.writer.close()
    write_index = CompactionSteps._write_index

    async def sleep_meanwhile(self: CompactionSteps, meta: PartitionMeta, record: Compaction) -> bool:
        monkeypatch.setattr(CompactionSteps, "_write_index", write_index)
        done = await write_index(self, meta, record)
        # Somebody else finishes all of it before this one goes on.
        other = Compactor(
            bed.store, bed.coordinator, clock=bed.clock, ids=bed.ids, randomness=bed.random, policy=AT_ONCE
        )
        ended = await other.resume("t", 0)
        assert ended is not None and ended.outcome == "finished"
        monkeypatch.setattr(CompactionSteps, "_delete_old", crash)
        return done

    monkeypatch.setattr(CompactionSteps, "_write_index", sleep_meanwhile)
    if guarded:
        assert (await bed.compact()).outcome == "compacted"
    else:
        with pytest.raises(Crash):
            await bed.compact()
    assert ((await bed.meta()).compaction is None) is guarded


async def _change_blindly(
    self: CompactionSteps, keys: Any, record: Compaction, version: int, state: Any
) -> tuple[Compaction, int]:
    changed = msgspec.structs.replace(record, state=state)
    new = await self.coordinator.put(
        keys.compaction, encode_record(changed), partition_key=keys.partition_key
    )
    return changed, new
