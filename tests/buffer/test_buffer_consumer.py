"""The consumer: order, fencing, acknowledgements, and what to do where the queue is not as it should be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.buffer.scripted_store import ManualClock, ScriptedStore

from forebay.buffer import (
    AckOutOfOrder,
    BatchMissing,
    BufferConfig,
    Consumer,
    Fenced,
    ManifestLost,
    NotInitialized,
    Producer,
    ResumeRefused,
)
from forebay.buffer._cursor import Cursor
from forebay.errors import Closed, ForebayError, FormatError, Unavailable, UsageError
from forebay.formats import buffer_batch, buffer_manifest
from forebay.formats.buffer_batch import CorruptBatch
from forebay.formats.buffer_manifest import EMPTY, Manifest, Metadata, NewEntry
from forebay.formats.entry_tail import EntryTail, encode_tail
from forebay.kit import RetryPolicy
from forebay.storage import MemoryStore

PATH = "ingest/manifest"
QUICK = RetryPolicy(attempts_max=2, base_ms=1, cap_ms=1)
CONFIG = BufferConfig(gc_enabled=False, missing_batch_retry=QUICK, read_retry=QUICK)


async def fill(store: MemoryStore, count: int, *, first: int = 0, **entry: Any) -> None:
    """A queue of `count` batches of one record each, as a producer would leave it."""
    manifest = buffer_manifest.decode(buffer_manifest.encode(next_sequence=first))
    for number in range(first, first + count):
        key = f"ingest/{number:026}.batch"
        await store.put(key, buffer_batch.encode([f"{number}".encode()]))
        item = NewEntry(key, (Metadata(0, 1_700_000_000_000 + number, b"m"),), **entry)
        manifest = buffer_manifest.append(manifest, [item])
    await store.put(PATH, manifest.data)


async def manifest_of(store: MemoryStore) -> Manifest:
    return buffer_manifest.decode((await MemoryStore.get(store, PATH)).data)


async def opened(store: MemoryStore, last: int | None = None, config: BufferConfig = CONFIG) -> Consumer:
    consumer = Consumer(config, store=store)
    await consumer.initialize(last)
    return consumer


async def drain(consumer: Consumer) -> list[bytes]:
    found = []
    while (batch := await consumer.next_batch()) is not None:
        found += list(batch.entries)
    return found


# -- taking over


async def test_batches_come_in_order_and_end_with_none() -> None:
    store = MemoryStore()
    await fill(store, 3)
    consumer = await opened(store)
    batch = await consumer.next_batch()
    assert batch is not None and (batch.sequence, list(batch.entries)) == (0, [b"0"])
    assert batch.metadata[0].payload == b"m" and batch.duplicate_of is None and len(batch) == 1
    assert await drain(consumer) == [b"1", b"2"]
    assert await consumer.next_batch() is None
    assert len(consumer) == 3 and not consumer.is_empty()


async def test_records_that_no_item_covers_are_delivered_without_metadata() -> None:
    store = MemoryStore()
    await store.put("ingest/x.batch", buffer_batch.encode([b"a", b"b"]))
    await store.put(
        PATH, buffer_manifest.append(EMPTY, [NewEntry("ingest/x.batch", (Metadata(1, 5, b"p"),))]).data
    )
    batch = await (await opened(store)).next_batch()
    assert batch is not None and list(batch.entries) == [b"a", b"b"]
    found = batch.metadata_of(1)
    assert batch.metadata_of(0) is None and found is not None and found.payload == b"p"
    assert batch.to_arrow().to_pylist() == [b"a", b"b"]


async def test_a_first_consumer_creates_the_queue_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.WARNING):
        consumer = await opened(store)
    assert "created a new queue at 'ingest/manifest'" in caplog.text
    assert (await store.get(PATH)).data == buffer_manifest.encode(epoch=1)
    assert await consumer.next_batch() is None and consumer.is_empty()


async def test_resuming_starts_after_the_position_and_costs_one_write() -> None:
    store = ScriptedStore()
    await fill(store, 5)
    before = store.counts["manifest.put"]
    consumer = await opened(store, 2)
    assert store.counts["manifest.put"] == before + 1
    manifest = await manifest_of(store)
    assert (manifest.first_sequence, manifest.epoch) == (3, 1)
    assert await drain(consumer) == [b"3", b"4"]
    assert consumer.last_acked_sequence == 2


@pytest.mark.parametrize("position", [5, 1_000])
async def test_resuming_beyond_the_queue_is_refused_and_changes_nothing(position: int) -> None:
    store = MemoryStore()
    await fill(store, 5)
    before = (await store.get(PATH)).data
    with pytest.raises(ResumeRefused) as caught:
        await opened(store, position)
    assert caught.value.next_sequence == 5 and (await store.get(PATH)).data == before
    with pytest.raises(ResumeRefused):
        await opened(MemoryStore(), 0)
    with pytest.raises(UsageError):
        await opened(store, -1)


async def test_resuming_over_a_gap_has_to_be_asked_for() -> None:
    store = MemoryStore()
    await fill(store, 3, first=7)
    with pytest.raises(ResumeRefused, match="from 5 to 6 are gone"):
        await opened(store, 4)
    consumer = await opened(store, 4, replace(CONFIG, allow_gap=True))
    assert await drain(consumer) == [b"7", b"8", b"9"]
    assert [entry.sequence for entry in (await manifest_of(store)).entries] == [7, 8, 9]


@pytest.mark.parametrize("word", ["after", "refused", "lost", "before"])
async def test_an_epoch_counts_only_where_the_store_said_so(word: str) -> None:
    store = ScriptedStore()
    await fill(store, 1)
    store.script.append(word)
    consumer = await opened(store)
    assert consumer.epoch == (await manifest_of(store)).epoch == (2 if word in ("after", "refused") else 1)
    assert await drain(consumer) == [b"0"]


async def test_nothing_works_before_initialize_or_after_close() -> None:
    consumer = Consumer(CONFIG, store=MemoryStore())
    with pytest.raises(NotInitialized):
        await consumer.next_batch()
    await consumer.close()
    await consumer.close()
    with pytest.raises(Closed):
        await consumer.initialize()


# -- fencing


OPERATIONS: dict[str, Callable[[Consumer], Coroutine[Any, Any, object]]] = {
    "next_batch": lambda consumer: consumer.next_batch(),
    "next_descriptors": lambda consumer: consumer.next_descriptors(1),
    "ack": lambda consumer: consumer.ack(0),
    "ack_through": lambda consumer: consumer.ack_through(0),
    "flush": lambda consumer: consumer.flush(),
    "initialize": lambda consumer: consumer.initialize(),
}


@pytest.mark.parametrize("first", [name for name in OPERATIONS if name != "initialize"])
async def test_every_operation_of_a_fenced_consumer_fails_for_good(first: str) -> None:
    store = MemoryStore()
    await fill(store, 5)
    old = await opened(store)
    [batch] = await old.next_descriptors(1)
    new = await opened(store)
    after = await manifest_of(store)
    with pytest.raises(Fenced) as caught:
        await OPERATIONS[first](old)
    assert (caught.value.own_epoch, caught.value.epoch) == (1, 2)
    for operation in OPERATIONS.values():
        with pytest.raises(Fenced):
            await operation(old)
    with pytest.raises(Fenced):
        await old.fetch(batch)
    await old.close()
    assert await manifest_of(store) == after
    assert old.metrics.fenced.value == 1
    assert len(await drain(new)) == 5


async def test_a_fenced_consumer_cannot_remove_entries() -> None:
    store = MemoryStore()
    await fill(store, 3)
    config = replace(CONFIG, fence_check_interval_ms=3_600_000)
    old = await opened(store, config=config)
    for number in range(3):
        await old.next_batch()
        await old.ack(number)
    await opened(store)
    with pytest.raises(Fenced):
        await old.flush()
    assert len(await manifest_of(store)) == 3


async def test_a_relaxed_fence_check_saves_requests() -> None:
    store = ScriptedStore()
    await fill(store, 3)
    consumer = await opened(store, config=replace(CONFIG, fence_check_interval_ms=3_600_000))
    before = store.counts["manifest.get"]
    assert await drain(consumer) == [b"0", b"1", b"2"]
    assert store.counts["manifest.get"] == before


# -- acknowledging


@pytest.mark.parametrize("sequence", [1, 77])
async def test_the_first_ack_takes_only_the_first_batch(sequence: int) -> None:
    store = MemoryStore()
    await fill(store, 100)
    consumer = await opened(store)
    with pytest.raises(AckOutOfOrder) as nothing:
        await consumer.ack(0)
    assert nothing.value.expected is None
    await consumer.next_batch()
    for ack in (consumer.ack, consumer.ack_through):
        with pytest.raises(AckOutOfOrder) as caught:
            await ack(sequence)
        assert (caught.value.expected, caught.value.got) == (0, sequence)
    await consumer.flush()
    assert len(await manifest_of(store)) == 100


async def test_acks_are_in_order_and_of_what_was_handed_out() -> None:
    store = MemoryStore()
    await fill(store, 4)
    consumer = await opened(store)
    await consumer.next_descriptors(3)
    await consumer.ack(0)
    for wrong in (0, 2, 3):
        with pytest.raises(AckOutOfOrder):
            await consumer.ack(wrong)
    await consumer.ack_through(2)
    with pytest.raises(AckOutOfOrder):
        await consumer.ack_through(3)
    assert consumer.metrics.acks.value == 3
    assert [entry.sequence for entry in (await manifest_of(store)).entries] == [3]


async def test_ack_through_counts_what_it_acknowledges() -> None:
    store = MemoryStore()
    await fill(store, 10, first=5)
    consumer = await opened(store)
    await consumer.next_descriptors(4)
    await consumer.ack_through(8)
    assert consumer.metrics.acks.value == 4


async def test_the_manifest_is_rewritten_every_so_many_acks() -> None:
    store = ScriptedStore()
    await fill(store, 7)
    consumer = await opened(store, config=replace(CONFIG, dequeue_acks=3))
    writes = store.counts["manifest.put"]
    for number in range(7):
        await consumer.next_batch()
        await consumer.ack(number)
    assert store.counts["manifest.put"] == writes + 2
    assert [entry.sequence for entry in (await manifest_of(store)).entries] == [6]
    await consumer.close()
    assert len(await manifest_of(store)) == 0


async def test_a_failed_ack_changes_nothing_and_can_be_repeated() -> None:
    store = ScriptedStore()
    await fill(store, 3)
    consumer = await opened(store, config=replace(CONFIG, dequeue_acks=2))
    await consumer.next_descriptors(3)
    await consumer.ack(0)
    store.script.extend(["before", "lost"])
    with pytest.raises(ForebayError):
        await consumer.ack(1)
    assert consumer.last_acked_sequence == 0
    with pytest.raises(AckOutOfOrder):
        await consumer.ack(2)
    store.script.clear()
    await consumer.ack(1)
    await consumer.ack(2)
    assert consumer.metrics.acks.value == 3


async def test_a_dequeue_whose_reply_was_lost_is_recognized() -> None:
    store = ScriptedStore()
    await fill(store, 2)
    consumer = await opened(store)
    await consumer.next_batch()
    await consumer.ack(0)
    store.script.append("after")
    writes = store.counts["manifest.put"]
    await consumer.flush()
    assert store.counts["manifest.put"] == writes + 1
    assert [entry.sequence for entry in (await manifest_of(store)).entries] == [1]


async def test_nothing_is_written_where_nothing_changes() -> None:
    store = ScriptedStore()
    await fill(store, 2)
    consumer = await opened(store)
    writes = store.counts["manifest.put"]
    await consumer.flush()
    await consumer.next_batch()
    await consumer.flush()
    await consumer.ack(0)
    await consumer.flush()
    await consumer.flush()
    await consumer.close()
    assert store.counts["manifest.put"] == writes + 1


async def test_entries_appended_meanwhile_survive_a_dequeue() -> None:
    store = ScriptedStore()
    await fill(store, 1)
    consumer = await opened(store)
    await consumer.next_batch()
    await consumer.ack(0)

    async def produce() -> None:
        async with Producer(CONFIG, store=store) as producer:
            await producer.produce([b"new"])

    store.before_put = produce
    await consumer.flush()
    assert await drain(consumer) == [b"new"]


@given(st.lists(st.sampled_from(["hand out", "skip", "ack", "through"]), max_size=30), st.none() | st.just(4))
def test_the_cursor_never_acknowledges_what_was_not_handed_out(steps: list[str], start: int | None) -> None:
    cursor, following = Cursor(start), 0 if start is None else start + 1
    open_batches: list[int] = []
    for step in steps:
        if step in ("hand out", "skip"):
            (cursor.skip if step == "skip" else cursor.hand_out)(following)
            open_batches += [following] if step == "hand out" else []
            following += 1
        elif open_batches and step == "ack":
            cursor.check(open_batches[0])
            cursor.ack(open_batches.pop(0))
        elif open_batches:
            cursor.check(open_batches[-1], through=True)
            cursor.ack(open_batches[-1])
            open_batches.clear()
        assert cursor.expected == (open_batches[0] if open_batches else None)
        assert cursor.acked is None or cursor.handed_out is None or cursor.acked <= cursor.handed_out


# -- reading


async def test_each_version_of_the_manifest_is_read_at_most_once() -> None:
    store = ScriptedStore()
    await fill(store, 3)
    consumer = await opened(store)
    assert consumer.manifest_reads == 1
    for number in range(3):
        await consumer.next_batch()
        await consumer.ack(number)
    for _ in range(5):
        assert await consumer.next_batch() is None
    await consumer.flush()
    await consumer.next_batch()
    assert consumer.manifest_reads == 1, "own writes need not be read"
    async with Producer(CONFIG, store=store) as producer:
        await producer.produce([b"new"])
    assert await drain(consumer) == [b"new"] and consumer.manifest_reads == 2


async def test_a_failed_read_leaves_the_cursor_where_it_is() -> None:
    class Flaky(MemoryStore):
        failures = 0

        async def get(self, key: str) -> Any:
            if key.endswith(".batch") and self.failures:
                self.failures -= 1
                raise Unavailable("scripted")
            return await super().get(key)

    store = Flaky()
    await fill(store, 2)
    consumer = await opened(store, config=replace(CONFIG, read_ahead_batches=0))
    store.failures = 2
    with pytest.raises(Unavailable):
        await consumer.next_batch()
    assert await drain(consumer) == [b"0", b"1"]


async def test_descriptors_are_fetched_by_whoever_wants_them_in_any_order() -> None:
    store = MemoryStore()
    await fill(store, 4)
    consumer = await opened(store)
    assert await consumer.next_descriptors(0) == []
    found = await consumer.next_descriptors(3)
    assert [batch.sequence for batch in found] == [0, 1, 2] and found[0].metadata_of(0) is not None
    fetched = [await consumer.fetch(batch) for batch in reversed(found)]
    assert [list(batch.entries) for batch in fetched] == [[b"2"], [b"1"], [b"0"]]
    assert await drain(consumer) == [b"3"]
    assert consumer.metrics.descriptors_handed_out.value == 3


@pytest.mark.parametrize(("batches", "size", "expected"), [(0, 1 << 20, 1), (2, 1 << 20, 3), (9, 1, 1)])
async def test_reading_ahead_is_bounded_in_batches_and_bytes(batches: int, size: int, expected: int) -> None:
    store = ScriptedStore()
    await fill(store, 6, tail=encode_tail(EntryTail(object_bytes=12)))
    consumer = await opened(store, config=replace(CONFIG, read_ahead_batches=batches, read_ahead_bytes=size))
    await consumer.next_batch()
    assert store.counts["get"] == expected
    assert len(await drain(consumer)) == 5 and store.counts["get"] == 6
    await consumer.close()


async def test_a_missing_batch_is_named_after_several_looks() -> None:
    store = ScriptedStore()
    await fill(store, 3)
    await store.delete([f"ingest/{1:026}.batch"])
    consumer = await opened(store, config=replace(CONFIG, read_ahead_batches=0))
    await consumer.next_batch()
    before = store.counts["get"]
    for _ in range(2):
        with pytest.raises(BatchMissing) as caught:
            await consumer.next_batch()
    assert (caught.value.sequence, caught.value.location) == (1, f"ingest/{1:026}.batch")
    assert store.counts["get"] - before == 4
    await store.put(caught.value.location, buffer_batch.encode([b"restored"]))
    assert await drain(consumer) == [b"restored", b"2"]


async def test_a_missing_batch_may_be_skipped_counted_and_acknowledged_around() -> None:
    store = MemoryStore()
    await fill(store, 4)
    await store.delete([f"ingest/{number:026}.batch" for number in (0, 2)])
    consumer = await opened(store, config=replace(CONFIG, missing_batch="skip"))
    assert await drain(consumer) == [b"1", b"3"]
    assert consumer.metrics.batches_missing.value == 2
    assert [batch.sequence for batch in consumer.skipped] == [0, 2]
    await consumer.ack(1)
    await consumer.ack(3)
    await consumer.flush()
    assert len(await manifest_of(store)) == 0


async def test_a_fenced_consumer_does_not_blame_a_missing_batch() -> None:
    store = MemoryStore()
    await fill(store, 2)
    old = await opened(store, config=replace(CONFIG, fence_check_interval_ms=3_600_000, read_ahead_batches=0))
    await opened(store, 0)
    await store.delete([f"ingest/{0:026}.batch"])
    with pytest.raises(Fenced):
        await old.next_batch()


@pytest.mark.parametrize("policy", ["deliver", "skip"])
async def test_a_location_that_comes_twice_is_marked_or_skipped(policy: str) -> None:
    store = MemoryStore()
    await fill(store, 2)
    manifest = await manifest_of(store)
    twice = buffer_manifest.append(manifest, [NewEntry(manifest.entries[0].location), NewEntry("ingest/x")])
    await store.put("ingest/x", buffer_batch.encode([b"x"]))
    await store.put(PATH, twice.data)
    consumer = await opened(store, config=replace(CONFIG, duplicates=policy))  # type: ignore[arg-type]
    found = [
        (batch.sequence, batch.duplicate_of)
        for batch in [await consumer.next_batch() for _ in range(3)]
        if batch
    ]
    assert found == (
        [(0, None), (1, None), (2, 0)] if policy == "deliver" else [(0, None), (1, None), (3, None)]
    )
    assert consumer.metrics.duplicates_seen.value == 1


@pytest.mark.parametrize("tail", [EntryTail(object_bytes=99), EntryTail(crc32c=1)])
async def test_an_object_that_is_not_what_its_entry_says_is_refused(tail: EntryTail) -> None:
    store = MemoryStore()
    await fill(store, 1, tail=encode_tail(tail))
    with pytest.raises(CorruptBatch, match="its entry says"):
        await (await opened(store)).next_batch()


async def test_an_entry_without_a_location_is_named() -> None:
    store = MemoryStore()
    await store.put(PATH, buffer_manifest.encode([buffer_manifest.Entry(0, "")]))
    with pytest.raises(CorruptBatch, match="no location"):
        await (await opened(store)).next_batch()


async def test_a_manifest_that_disappears_is_lost_not_empty() -> None:
    store = MemoryStore()
    await fill(store, 1)
    consumer = await opened(store)
    await store.delete([PATH])
    with pytest.raises(ManifestLost):
        await consumer.next_batch()


async def test_lag_length_and_age_are_measured() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    await fill(store, 2)
    consumer = Consumer(CONFIG, clock, store=store)
    await consumer.initialize()
    clock.advance(5)
    await consumer.next_batch()
    assert consumer.metrics.consumer_lag.value == pytest.approx(5)
    assert consumer.metrics.oldest_entry_age.value == pytest.approx(5)
    assert consumer.metrics.queue_length.value == consumer.metrics.consumer_sequence_lag.value == 2
    assert consumer.metrics.manifest_bytes.value == len((await store.get(PATH)).data)
    assert consumer.conflict_rate() == 0.0


@pytest.mark.parametrize("damage", ["tail", "location"])
async def test_a_damaged_entry_does_not_hold_up_those_before_it(damage: str) -> None:
    store = MemoryStore()
    await fill(store, 3)
    manifest = await manifest_of(store)
    tail = b"FBX1\xff\xff" if damage == "tail" else b""
    await store.put("ingest/late", buffer_batch.encode([b"late"]))
    location = "ingest/\u00e9" if damage == "location" else "ingest/late"
    data = buffer_manifest.append(manifest, [NewEntry(location, (), tail)]).data
    await store.put(PATH, data.replace("\u00e9".encode(), b"\xff\xff"))
    consumer = await opened(store)
    for number in range(3):
        batch = await consumer.next_batch()
        assert batch is not None and list(batch.entries) == [b"%d" % number]
        await consumer.ack(number)
    with pytest.raises(FormatError):
        await consumer.next_batch()
    if damage == "location":
        assert [each.sequence for each in await (await opened(store)).next_descriptors(9)] == [0, 1, 2]


@pytest.mark.parametrize("sequence", [0.0, True, "0", None])
async def test_an_acknowledgement_is_an_integer(sequence: Any) -> None:
    store = MemoryStore()
    await fill(store, 2)
    consumer = await opened(store)
    await consumer.next_batch()
    for ack in (consumer.ack, consumer.ack_through):
        with pytest.raises(UsageError, match="sequence is"):
            await ack(sequence)
    if sequence is not None:
        with pytest.raises(UsageError, match="sequence is"):
            await consumer.initialize(sequence)
    await consumer.ack(0)


async def test_closing_a_fenced_consumer_stops_it_and_tells_what_it_could_not_write() -> None:
    """Whoever knows already is not told again; nor is there anything to tell where nothing was left."""
    store = ScriptedStore()
    await fill(store, 3)
    idle = await opened(store)
    knows = await opened(store)
    await knows.next_batch()
    await knows.ack(0)
    behind = await opened(store)
    await behind.next_batch()
    await behind.ack(0)
    newest = await opened(store)
    with pytest.raises(Fenced):
        await knows.ack(1)
    before = store.counts.copy()
    await idle.close()
    await knows.close()
    assert store.counts == before, "neither of them asks the store"
    with pytest.raises(Fenced):
        await behind.close()
    for consumer in (idle, knows, behind):
        assert not consumer.is_collecting
        await consumer.close()
    assert len(await manifest_of(store)) == 3, "a fenced consumer removes nothing"
    assert await drain(newest) == [b"0", b"1", b"2"]
