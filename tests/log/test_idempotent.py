"""Idempotent producers: a repeated append finds its offsets, a gap is refused, memory is bounded."""

from __future__ import annotations

import pytest
from tests.log.writing import as_one, control_of, group, read_log, span, values, writer_in, writer_of

from forebay.coordination import MemoryCoordinator
from forebay.errors import OutcomeUnknown
from forebay.kit.retry import RetryPolicy
from forebay.log import AppendGroup, AppendResult, LogWriter, OutOfSequence, WriterConfig
from forebay.log import _producers as producers_module
from forebay.log._keys import PartitionKeys
from forebay.log._records import PRODUCER_APPENDS_KEPT
from forebay.storage import MemoryStore
from forebay.testing import Actor

KEYS = PartitionKeys("t", 0)


def _of(sequence: int, *records: bytes, producer: str = "p", partition: int = 0) -> AppendGroup:
    return group("t", partition, *(records or (b"%d" % sequence,)), producer=producer, sequence=sequence)


async def _one(writer: LogWriter, sent: AppendGroup) -> AppendResult:
    [result] = await writer.append_shared([sent])
    return result


async def test_a_repeated_sequence_gets_the_original_offsets_and_appends_nothing() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    first = await _one(writer, _of(0, b"a", b"b"))
    await _one(writer, group("t", 0, b"other"))
    again = await _one(writer, _of(0, b"a", b"b"))
    assert span(first) == span(again) == (1, 2)
    assert again.ok and again.duplicate and not first.duplicate
    assert await read_log(store, coordinator) == [b"a", b"b", b"other"]


async def test_a_repetition_is_recognised_by_another_writer() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    await _one(writer_of(store, coordinator), _of(0))
    again = await _one(writer_of(store, coordinator), _of(0))
    assert again.duplicate and span(again) == (1, 1)


async def test_a_repetition_in_the_same_call_is_recognised() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    results = await writer_of(store, coordinator).append_shared([_of(0), _of(0), _of(1)])
    assert values(results) == [(1, 1), (1, 1), (2, 2)]
    assert [one.duplicate for one in results] == [False, True, False]
    assert await read_log(store, coordinator) == [b"0", b"1"]


@pytest.mark.parametrize("sequence", [1, 5])
async def test_a_producer_begins_at_zero(sequence: int) -> None:
    result = await _one(writer_of(), _of(sequence))
    assert isinstance(result.error, OutOfSequence)
    assert (result.error.expected, result.error.got) == (0, sequence)


async def test_a_gap_is_refused_and_the_next_number_is_taken() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    await _one(writer, _of(0))
    gap = await _one(writer, _of(2))
    assert isinstance(gap.error, OutOfSequence)
    assert gap.error.expected == 1
    assert (await _one(writer, _of(1))).start_offset == 2
    assert await read_log(store, coordinator) == [b"0", b"1"]


async def test_a_sequence_too_old_to_be_remembered_is_refused() -> None:
    writer = writer_of()
    for sequence in range(PRODUCER_APPENDS_KEPT + 1):
        assert (await _one(writer, _of(sequence))).ok
    assert (await _one(writer, _of(1))).duplicate
    assert isinstance((await _one(writer, _of(0))).error, OutOfSequence)


async def test_a_repetition_with_other_records_is_refused() -> None:
    writer = writer_of()
    await _one(writer, _of(0, b"a"))
    assert isinstance((await _one(writer, _of(0, b"a", b"b"))).error, OutOfSequence)


async def test_sequences_count_per_partition_and_per_producer() -> None:
    writer = writer_of()
    results = await writer.append_shared(
        [_of(0), _of(0, partition=1), _of(0, producer="q"), _of(1), _of(1, producer="q")]
    )
    assert all(result.ok for result in results)
    assert values(results) == [(1, 1), (1, 1), (2, 2), (3, 3), (4, 4)]


async def test_idempotent_and_plain_groups_share_an_entry_and_keep_their_own_books() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    results = await writer.append_shared(
        [group("t", 0, b"x"), _of(0, b"a", b"b"), _of(0, b"c", producer="q")]
    )
    assert len({result.index_key for result in results}) == 1
    control, _ = await control_of(coordinator, KEYS)
    remembered = {
        name: [(one.sequence, one.start_offset, one.end_offset) for one in appends]
        for name, appends in control.producers.items()
    }
    assert remembered == {"p": [(0, 2, 3)], "q": [(0, 4, 4)]}


async def test_a_refused_group_does_not_take_its_neighbours_along() -> None:
    """The flush was uploaded as one slice; what is left of it is uploaded again, without the refused."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    await _one(writer, _of(0, b"p0"))
    results = await writer.append_shared(
        [group("t", 0, b"x"), _of(0, b"p0"), _of(7, b"p7"), _of(1, b"p1"), group("t", 0, b"y")]
    )
    assert values(results) == [(2, 2), (1, 1), (None, None), (3, 3), (4, 4)]
    assert results[1].duplicate
    assert isinstance(results[2].error, OutOfSequence)
    assert await read_log(store, coordinator) == [b"p0", b"x", b"p1", b"y"]


async def test_the_producer_silent_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers_module, "PRODUCERS_MAX", 3)
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    for name, sequence in (("a", 0), ("b", 0), ("c", 0), ("a", 1), ("d", 0)):
        assert (await _one(writer, _of(sequence, producer=name))).ok
    control, _ = await control_of(coordinator, KEYS)
    assert list(control.producers) == ["c", "a", "d"]
    assert isinstance((await _one(writer, _of(1, producer="b"))).error, OutOfSequence)
    assert (await _one(writer, _of(2, producer="a"))).ok


def test_repeating_after_an_unknown_outcome_is_safe_whatever_happened() -> None:
    async def append(me: Actor) -> None:
        config = WriterConfig(commit=RetryPolicy(attempts_max=2, base_ms=1))
        writer = writer_in(me, config)
        assert (await _one(writer, _of(0))).ok
        me.world.partition(me, "coordinator", replies_only=True)
        result = await _one(writer, _of(1))
        assert isinstance(result.error, OutcomeUnknown)
        me.world.heal()
        while True:
            result = await _one(writer_in(me, config), _of(1))
            if not isinstance(result.error, OutcomeUnknown):
                break
        assert span(result) == (2, 2)
        await me.clock.sleep(60)
        assert await read_log(me.world.bucket, me.world.keys) == [b"0", b"1"]

    for seed in range(10):
        as_one(append, seed)
