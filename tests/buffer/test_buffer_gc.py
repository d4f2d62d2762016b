"""Garbage collection: what nobody needs goes, and nothing else ever does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.buffer.scripted_store import ManualClock

from forebay.buffer import BufferConfig, Consumer, Fenced, GarbageCollector, Producer
from forebay.errors import Unavailable
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import NewEntry
from forebay.kit import IdSource
from forebay.storage import DeleteResult, MemoryStore
from forebay.testing import Actor, World

PATH = "ingest/manifest"
CONFIG = BufferConfig(gc_grace_period_ms=600_000)
MINUTE = 60.0


class Yard:
    """A store, a clock and a queue to collect around."""

    def __init__(self, config: BufferConfig = CONFIG) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.config = config
        self.ids = IdSource(self.clock)

    async def batch(self, prefix: str = "ingest", name: str = "") -> str:
        key = f"{prefix}/{name or f'{self.ids.ulid()}.batch'}"
        await self.store.put(key, b"data")
        return key

    async def queue(self, *locations: str, following: int = 10, path: str = PATH) -> None:
        empty = buffer_manifest.decode(buffer_manifest.encode(next_sequence=following))
        entries = [NewEntry(location) for location in locations]
        await self.store.put(path, buffer_manifest.append(empty, entries).data)

    def collector(self, epoch: int | None = None) -> GarbageCollector:
        return GarbageCollector(self.config, self.clock, store=self.store, epoch=epoch)

    async def keys(self) -> set[str]:
        return {info.key async for info in self.store.list("")} - {PATH, "ingest/forebay-owner"}


async def test_what_is_unreferenced_and_old_goes_and_the_report_says_so() -> None:
    yard = Yard()
    old = [await yard.batch() for _ in range(3)]
    yard.clock.advance(11 * MINUTE)
    used, young = await yard.batch(), await yard.batch()
    await yard.queue(used)
    report = await yard.collector().collect()
    assert sorted(report.deleted) == old and report.deleted_bytes == 12
    assert {item.key: item.reason for item in report.kept} == {
        used: "referenced",
        young: "young",
        PATH: "not a batch",
    }
    assert await yard.keys() == {used, young}


async def test_a_dry_run_deletes_and_marks_nothing() -> None:
    yard = Yard()
    old = await yard.batch()
    await yard.queue()
    yard.clock.advance(11 * MINUTE)
    report = await yard.collector().collect(dry_run=True)
    assert report.deleted == [old] and report.as_json()["dry_run"]
    assert {info.key async for info in yard.store.list("")} == {old, PATH}


async def test_an_empty_queue_that_was_used_lets_everything_old_go() -> None:
    yard = Yard()
    await yard.batch()
    await yard.queue(following=3)
    yard.clock.advance(10 * MINUTE)
    assert len((await yard.collector().collect()).deleted) == 1


async def test_nothing_newer_than_the_oldest_entry_goes() -> None:
    yard = Yard()
    used = await yard.batch()
    yard.clock.advance(1)
    waiting = await yard.batch()
    await yard.queue(used)
    yard.clock.advance(60 * MINUTE)
    report = await yard.collector().collect()
    assert not report.deleted and report.kept_counts["newer than the oldest entry"] == 1
    assert waiting in await yard.keys()


@pytest.mark.parametrize("damage", ["missing", "corrupt", "unused"])
async def test_without_a_sound_and_used_manifest_nothing_goes(damage: str) -> None:
    yard = Yard()
    old = await yard.batch()
    yard.clock.advance(60 * MINUTE)
    if damage == "corrupt":
        await yard.store.put(PATH, b"x" * 40)
    elif damage == "unused":
        await yard.queue(following=0)
    report = await yard.collector().collect()
    assert report.refused and await yard.keys() == {old}


async def test_other_prefixes_and_nested_queues_are_untouched() -> None:
    yard = Yard()
    mine = await yard.batch()
    others = {await yard.batch(prefix) for prefix in ("ingest2", "ingest/other", "other")}
    others |= {await yard.batch(name=name) for name in ("notes.txt", "nonsense.batch", "I" * 26 + ".batch")}
    await yard.queue()
    yard.clock.advance(60 * MINUTE)
    assert (await yard.collector().collect()).deleted == [mine]
    assert await yard.keys() == others


async def test_two_manifests_on_one_prefix_do_not_destroy_each_other() -> None:
    yard = Yard()
    await yard.queue()
    await yard.collector().collect()
    await yard.batch()
    await yard.queue(path="ingest/second")
    yard.clock.advance(60 * MINUTE)
    other = GarbageCollector(replace(CONFIG, manifest_path="ingest/second"), yard.clock, store=yard.store)
    report = await other.collect()
    assert "another manifest" in report.refused and not report.deleted
    assert len((await yard.collector().collect()).deleted) == 1


async def test_two_clocks_must_agree_that_it_is_old() -> None:
    yard = Yard()
    slow = ManualClock()
    slow.wall_ms = yard.clock.wall_ms - 3_600_000
    key = f"ingest/{IdSource(slow).ulid()}.batch"
    await yard.store.put(key, b"by a producer whose clock is an hour slow")
    await yard.queue()
    assert not (await yard.collector().collect()).deleted
    yard.clock.advance(10 * MINUTE)
    assert (await yard.collector().collect()).deleted == [key]


async def test_what_is_enqueued_after_the_listing_stays() -> None:
    yard = Yard()
    late = await yard.batch()
    await yard.queue()
    yard.clock.advance(60 * MINUTE)

    class Racing(MemoryStore):
        def list_pages(self, *arguments, **named):  # type: ignore[no-untyped-def]
            return self._racing(yard.store.list_pages(*arguments, **named))  # type: ignore[no-untyped-call]

        async def _racing(self, pages):  # type: ignore[no-untyped-def]
            async for page in pages:
                yield page
            await yard.queue(late)

        async def get(self, key):  # type: ignore[no-untyped-def]
            return await yard.store.get(key)

        async def put(self, key, data, when):  # type: ignore[no-untyped-def, override]
            return await yard.store.put(key, data, when)

        async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
            return await yard.store.delete(keys)

    report = await GarbageCollector(CONFIG, yard.clock, store=Racing()).collect()
    assert not report.deleted and late in await yard.keys()


async def test_the_manifest_is_read_again_before_every_delete_request() -> None:
    yard = Yard(replace(CONFIG, gc_delete_keys=1))
    keys = [await yard.batch() for _ in range(3)]
    await yard.queue()
    yard.clock.advance(60 * MINUTE)
    original = yard.store.delete

    async def delete(wanted: Sequence[str]) -> list[DeleteResult]:
        if wanted[0] == keys[0]:
            await yard.queue(keys[2], following=20)
        return await original(wanted)

    yard.store.delete = delete  # type: ignore[method-assign, assignment]
    report = await yard.collector().collect()
    assert keys[2] in await yard.keys() and keys[2] not in report.deleted


async def test_deletes_that_fail_are_told_and_end_nothing() -> None:
    yard = Yard(replace(CONFIG, gc_delete_keys=1))
    keys = [await yard.batch() for _ in range(2)]
    await yard.queue()
    yard.clock.advance(60 * MINUTE)
    original = yard.store.delete

    async def delete(wanted: Sequence[str]) -> list[DeleteResult]:
        if wanted[0] == keys[0]:
            raise Unavailable("scripted")
        return await original(wanted)

    yard.store.delete = delete  # type: ignore[method-assign, assignment]
    report = await yard.collector().collect()
    assert report.deleted == [keys[1]] and list(report.failed) == [keys[0]]


async def test_names_of_the_go_producer_are_collected_only_if_asked_for() -> None:
    yard = Yard()
    run = yard.ids.ulid()
    go = await yard.batch(name=f"{run}/{7:016x}")
    odd = {await yard.batch(name=name) for name in (f"{run}/7", f"run/{7:016x}", f"{run}/deep/{7:016x}")}
    await yard.queue()
    yard.clock.advance(60 * MINUTE)
    assert not (await yard.collector().collect()).deleted
    yard.config = replace(CONFIG, gc_go_names=True)
    assert (await yard.collector().collect()).deleted == [go]
    assert await yard.keys() == odd


async def test_a_collector_of_a_fenced_consumer_deletes_nothing() -> None:
    yard = Yard()
    old = await yard.batch()
    await yard.queue()
    yard.clock.advance(60 * MINUTE)
    report = await yard.collector(epoch=7).collect()
    assert "epoch 0, this collector at 7" in report.refused and old in await yard.keys()


# -- with a consumer


def with_consumer(steps: str) -> int:
    """Batches left after an hour, with a consumer that collects every minute and meets `steps`."""

    async def consume(me: Actor) -> None:
        config = replace(CONFIG, gc_interval_ms=60_000)
        consumer = Consumer(config, me.clock, store=me.store, ids=me.ids, randomness=me.random)
        await consumer.initialize()
        if steps == "closed":
            await consumer.close()
        elif steps == "fenced":
            other = Consumer(replace(config, gc_enabled=False), me.clock, store=me.store, ids=me.ids)
            await other.initialize()
            with pytest.raises(Fenced):
                await consumer.next_batch()
        elif steps == "fenced unnoticed":
            other = Consumer(replace(config, gc_enabled=False), me.clock, store=me.store, ids=me.ids)
            await other.initialize()
        elif steps == "taken over by itself":
            await consumer.initialize()
        elif steps == "dropped":
            del consumer
            gc.collect()
        await me.clock.sleep(3_600)

    async def main(world: World) -> int:
        await world.bucket.put(f"ingest/{world.ids().ulid()}.batch", b"orphan")
        await world.bucket.put(PATH, buffer_manifest.encode(next_sequence=3))
        await world.spawn("consumer", consume).join()
        return len([info async for info in world.bucket.list("ingest/") if info.key.endswith(".batch")])

    return World(1).run(main)


@pytest.mark.parametrize("steps", ["alive", "taken over by itself"])
def test_a_living_consumer_collects(steps: str) -> None:
    assert with_consumer(steps) == 0


@pytest.mark.parametrize("steps", ["closed", "fenced", "fenced unnoticed", "dropped"])
def test_collection_ends_with_its_consumer(steps: str) -> None:
    assert with_consumer(steps) == 1


async def test_a_close_that_fails_stops_collection_too() -> None:
    store = MemoryStore()
    async with Producer(CONFIG, store=store) as producer:
        await producer.produce([b"x"])
    consumer = Consumer(replace(CONFIG, gc_interval_ms=60_000), store=store)
    await consumer.initialize()
    await consumer.next_batch()
    await consumer.ack(0)
    await store.delete([PATH])
    with pytest.raises(Exception, match="gone"):
        await consumer.close()
    assert consumer._gc_task is not None and consumer._gc_task.done()
    await asyncio.sleep(0)
