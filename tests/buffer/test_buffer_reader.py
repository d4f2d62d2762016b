"""The reader: sees everything, changes nothing, shuts nobody out."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.buffer.scripted_store import ManualClock

from forebay.buffer import BatchMissing, BufferConfig, Consumer, Producer, Reader, manifest_as_json
from forebay.errors import NotFound
from forebay.formats import buffer_manifest
from forebay.formats.buffer_batch import CorruptBatch
from forebay.formats.buffer_manifest import Metadata, NewEntry
from forebay.storage import MemoryStore, StoredObject

CONFIG = BufferConfig(flush_interval_ms=1, gc_enabled=False)


async def filled(count: int = 3) -> MemoryStore:
    store = MemoryStore()
    async with Producer(CONFIG, store=store) as producer:
        for number in range(count):
            await producer.produce([f"{number}".encode()] * (number + 1), b"\xff")
            await producer.flush()
    return store


async def test_looking_does_not_fence_the_consumer() -> None:
    store = await filled()
    consumer = Consumer(CONFIG, store=store)
    await consumer.initialize()
    before = (await store.get("ingest/manifest")).version
    async with Reader(CONFIG, store=store) as reader:
        await reader.stats(sizes=True)
        await reader.read(0)
    assert (await store.get("ingest/manifest")).version == before
    assert await consumer.next_batch() is not None


async def test_entries_come_with_sizes_and_counts() -> None:
    store = await filled()
    found = await Reader(CONFIG, store=store).inspect()
    assert [(info.entry.sequence, info.record_count, info.compression) for info in found] == [
        (0, 1, "none"),
        (1, 2, "none"),
        (2, 3, "none"),
    ]
    assert [info.size_bytes for info in found] == [12, 17, 22]


async def test_any_batch_can_be_read_by_sequence_or_entry() -> None:
    store = await filled()
    reader = Reader(CONFIG, store=store)
    assert list((await reader.read(2)).entries) == [b"2"] * 3
    assert list((await reader.read((await reader.entries())[1])).entries) == [b"1"] * 2
    with pytest.raises(NotFound, match="sequence 9"):
        await reader.read(9)


async def test_a_missing_object_is_shown_and_not_an_error_of_the_listing() -> None:
    store = await filled(2)
    reader = Reader(CONFIG, store=store)
    first = (await reader.entries())[0]
    await store.delete([first.location])
    assert [info.size_bytes for info in await reader.inspect()] == [None, 17]
    stats = await reader.stats(sizes=True)
    assert (stats.missing_batches, stats.pending_bytes) == (1, 17)
    with pytest.raises(BatchMissing):
        await reader.read(0)


async def test_stats_of_a_queue_and_of_none() -> None:
    empty = await Reader(CONFIG, store=MemoryStore()).stats()
    assert (empty.exists, empty.entries, empty.oldest_entry_age_s) == (False, 0, None)
    clock = ManualClock()
    store = await filled()
    manifest = await Reader(CONFIG, store=store).manifest()
    clock.wall_ms = manifest.entries[0].metadata[0].ingestion_time_ms + 2_500
    stats = await Reader(CONFIG, clock, store=store).stats()
    assert (stats.entries, stats.next_sequence, stats.epoch) == (3, 3, 0)
    assert stats.oldest_entry_age_s == 2.5 and stats.manifest_bytes == len(manifest.data)


async def test_a_manifest_becomes_json() -> None:
    manifest = await Reader(CONFIG, store=await filled(1)).manifest()
    found = json.loads(json.dumps(manifest_as_json(manifest)))
    assert (found["version"], found["epoch"], found["next_sequence"]) == (1, 0, 1)
    [entry] = found["entries"]
    assert entry["sequence"] == 0 and entry["location"].startswith("ingest/")
    assert entry["metadata"][0]["payload"] == "/w==" and entry["metadata"][0]["start_index"] == 0


async def test_an_entry_without_a_location_is_shown_as_missing() -> None:
    store = MemoryStore()
    bad = buffer_manifest.append(buffer_manifest.EMPTY, [NewEntry("x", (Metadata(0, 1, b""),))])
    data = bad.data.replace(b"\x01\0x", b"\0\0", 1)
    size = int.from_bytes(data[:4], "little") - 1
    await store.put(CONFIG.manifest_path, size.to_bytes(4, "little") + data[4:])
    reader = Reader(CONFIG, store=store)
    [info] = await reader.inspect()
    assert (info.entry.location, info.size_bytes) == ("", None)
    stats = await reader.stats(sizes=True)
    assert (stats.pending_bytes, stats.missing_batches) == (0, 1)
    with pytest.raises(CorruptBatch, match="no location"):
        await reader.read(0)


class Overtaken(MemoryStore):
    """The first conditional read is answered with what it found, after all that were sent later."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()
        self.found = asyncio.Event()

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        changed = await super().get_if_changed(key, version)
        if not self.found.is_set():
            self.found.set()
            await self.answered.wait()
        return changed


async def produce(store: MemoryStore, data: bytes) -> None:
    async with Producer(CONFIG, store=store) as producer:
        await producer.produce([data])


async def test_a_look_that_a_later_one_overtook_is_not_a_lost_queue() -> None:
    store = Overtaken()
    await produce(store, b"first")
    reader = Reader(CONFIG, store=store)
    await reader.manifest()
    await produce(store, b"second")
    slow = asyncio.create_task(reader.read(0))
    await store.found.wait()
    await produce(store, b"third")
    assert list((await reader.read(2)).entries) == [b"third"]
    store.answered.set()
    assert list((await slow).entries) == [b"first"]
    assert (await reader.stats()).entries == 3


async def test_fetches_at_once_survive_looks_that_overtake_each_other() -> None:
    store = Overtaken()
    store.found.set()  # only from here on
    for data in (b"first", b"second"):
        await produce(store, data)
    async with Consumer(CONFIG, store=store) as consumer:
        await consumer.initialize()
        found = await consumer.next_descriptors(2)
        store.found.clear()
        await produce(store, b"third")
        slow = asyncio.create_task(consumer.fetch(found[0]))
        await store.found.wait()
        await produce(store, b"fourth")
        assert list((await consumer.fetch(found[1])).entries) == [b"second"]
        store.answered.set()
        assert list((await slow).entries) == [b"first"]
        assert len(consumer) == 4


async def test_a_damaged_batch_does_not_keep_others_from_being_counted() -> None:
    store = await filled()
    [_, second, _] = await Reader(CONFIG, store=store).entries()
    await store.put(second.location, b"not a batch at all")
    reader = Reader(CONFIG, store=store)
    assert [info.record_count for info in await reader.inspect()] == [1, None, 3]
    stats = await reader.stats(sizes=True)
    assert (stats.entries, stats.pending_bytes, stats.missing_batches) == (3, 12 + 18 + 22, 0)
