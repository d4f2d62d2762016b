"""Batches of a query enqueued once: by drivers that crash, are thought dead, and lose replies."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.buffer.queue_world import CONFIG, Sink

from forebay.buffer import (
    BufferConfig,
    CommitFailed,
    CommitUnknown,
    Consumer,
    GarbageCollector,
    ManifestLost,
    Producer,
    QueueFull,
    Reader,
)
from forebay.errors import ForebayError, FormatError, UsageError
from forebay.formats import buffer_batch
from forebay.formats.buffer_manifest import Metadata, NewEntry
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.spark._buffer_publication import OnUnknown, QueuePublications, StagedBatch
from forebay.storage import ObjectStore, open_store
from forebay.testing import Actor, Faults, World, run_seeds, seeds

BATCHES = 4
RECORDS = 8


async def staged(
    store: ObjectStore, ids: IdSource, now_ms: int, records: list[bytes], parts: int = 1
) -> list[StagedBatch]:
    """What tasks would have uploaded."""
    found = []
    step = -(-len(records) // parts)
    for first in range(0, len(records), step):
        location = f"ingest/{ids.ulid()}.batch"
        await store.put(location, buffer_batch.encode(records[first : first + step]))
        found.append(StagedBatch(NewEntry(location, (Metadata(0, now_ms, b"m"),), b""), now_ms))
    return found


class DriverWorld:
    """Drivers of one query that share a checkpoint, other producers, and a consumer."""

    def __init__(self, seed: int, *, drivers: int, crash_rate: float, faults: Faults) -> None:
        self.world = World(seed, faults=faults)
        self.drivers, self.crash_rate = drivers, crash_rate
        self.committed = -1
        self.unknown: set[int] = set()
        self.sink = Sink()
        self.done = False

    def run(self) -> list[str]:
        self.world.run(self._main)
        counts = Counter(record for _, batch in self.sink.batches for record in batch)
        problems = []
        for batch in range(BATCHES):
            for number in range(RECORDS):
                seen = counts.pop(b"query-%d-%d" % (batch, number), 0)
                if seen != 1 and not (seen == 0 and batch in self.unknown):
                    problems.append(f"record {number} of batch {batch} is there {seen} times")
        return problems + [f"{record!r} is there {seen} times" for record, seen in counts.items() if seen > 1]

    async def _main(self, world: World) -> None:
        drivers = [world.spawn(f"driver-{number}", self._drive) for number in range(self.drivers)]
        others = [world.spawn(f"producer-{number}", self._produce) for number in range(2)]
        reader = world.spawn("consumer", self._consume)
        for actor in drivers:
            actor.crash_randomly(self.crash_rate, restart_after_s=0.5, crashes_max=3)
        await world.join(*drivers, *others)
        world.heal()
        await world.clock().sleep(5)
        self.done = True
        await world.join(reader)

    async def _drive(self, me: Actor) -> None:
        while (batch := self.committed + 1) < BATCHES:
            records = [b"query-%d-%d" % (batch, number) for number in range(RECORDS)]
            publications = QueuePublications(
                me.store,
                CONFIG,
                clock=me.clock,
                ids=me.ids,
                randomness=me.random,
                on_unknown="skip" if batch in self.unknown else "fail",
            )
            try:
                parts = await staged(
                    me.store, me.ids, me.clock.now_ms(), records, parts=me.random.randint(1, 4)
                )
                await publications.publish("query", batch, parts)
            except CommitUnknown:
                self.unknown.add(batch)
                continue
            except ForebayError:
                await me.clock.sleep(me.random.random())
                continue
            self.committed = max(self.committed, batch)

    async def _produce(self, me: Actor) -> None:
        producer = Producer(CONFIG, me.clock, store=me.store, ids=me.ids, randomness=me.random)
        for number in range(6):
            handle = await producer.produce([b"%s-%d" % (me.name.encode(), number)])
            with contextlib.suppress(ForebayError):
                await handle.watcher.await_durable()
            await me.clock.sleep(me.random.random() * 0.3)
        with contextlib.suppress(ForebayError):
            await producer.close()

    async def _consume(self, me: Actor) -> None:
        while True:
            consumer = Consumer(CONFIG, me.clock, store=me.store, ids=me.ids, randomness=me.random)
            try:
                await consumer.initialize(self.sink.last)
                while True:
                    batch = await consumer.next_batch()
                    if batch is None:
                        if self.done:
                            await consumer.close()
                            return
                        await me.clock.sleep(0.2)
                    elif self.sink.store(batch.sequence, list(batch.entries)):
                        await consumer.ack(batch.sequence)
            except ForebayError:
                await me.clock.sleep(me.random.random())


FAULTS = Faults(before=0.03, after=0.04, lost={"put": 0.04}, late=0.03, duplicate=0.02, slow=0.04)


def test_sim_every_batch_is_enqueued_once_by_drivers_that_crash() -> None:
    def scenario(seed: int) -> DriverWorld:
        world = DriverWorld(seed, drivers=1, crash_rate=0.02, faults=FAULTS)
        assert world.run() == []
        return world

    runs = list(run_seeds(scenario, seeds(150)))
    assert sum(len(each.unknown) for each in runs) < len(runs), "doubt is the exception"


def test_sim_two_drivers_on_one_checkpoint_enqueue_once() -> None:
    def scenario(seed: int) -> None:
        assert DriverWorld(seed, drivers=2, crash_rate=0.01, faults=FAULTS).run() == []

    for _ in run_seeds(scenario, seeds(150)):
        pass


class Bench:
    """A queue on disk and a publisher with a clock that the test moves."""

    def __init__(self, folder: Path | str, **config: object) -> None:
        self.config = BufferConfig(url=str(folder), **config)  # type: ignore[arg-type]
        self.store = open_store(folder)
        self.clock = SteppingClock()
        self.ids = IdSource(self.clock, random.Random(1))

    def publications(self, on_unknown: OnUnknown = "fail") -> QueuePublications:
        return QueuePublications(
            self.store,
            self.config,
            clock=self.clock,
            ids=self.ids,
            randomness=random.Random(2),
            on_unknown=on_unknown,
        )

    async def stage(self, *records: bytes, parts: int = 1) -> list[StagedBatch]:
        return await staged(self.store, self.ids, self.clock.now_ms(), [*records], parts)

    async def queued(self) -> list[bytes]:
        async with Reader(self.config, store=self.store) as reader:
            batches = [await reader.read(entry) for entry in await reader.entries()]
        return [record for batch in batches for record in batch.entries]

    async def consume_all(self) -> None:
        async with Consumer(self.config, store=self.store) as consumer:
            await consumer.initialize()
            while (batch := await consumer.next_batch()) is not None:
                await consumer.ack(batch.sequence)


class SteppingClock(SystemClock):
    """The system's, and as much further as a test says."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class Failing(QueuePublications):
    """Dies where a test says: before or after the write of the manifest, or before the record is done."""

    where = ""

    async def _append(self, record: object, seen: object) -> None:
        if self.where == "before the effect":
            raise Dead
        await super()._append(record, seen)  # type: ignore[arg-type]
        if self.where == "after the effect":
            raise Dead


class Dead(BaseException):
    """kill -9, as far as one process can see it."""


async def dies(bench: Bench, where: str, batch: int, parts: list[StagedBatch]) -> None:
    publisher = Failing(
        bench.store, bench.config, clock=bench.clock, ids=bench.ids, randomness=random.Random(3)
    )
    publisher.where = where
    with pytest.raises(Dead):
        await publisher.publish("q", batch, parts)


async def test_a_batch_is_visible_at_once_and_as_a_whole_and_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    parts = await bench.stage(b"a", b"b", b"c", parts=3)
    assert await bench.publications().publish("q", 0, parts)
    assert await bench.queued() == [b"a", b"b", b"c"]
    assert not await bench.publications().publish("q", 0, await bench.stage(b"a", b"b", b"c"))
    assert await bench.publications().publish("q", 1, await bench.stage(b"d"))
    assert not await bench.publications().publish("q", 0, await bench.stage(b"a"))
    assert not await bench.publications().publish("q", 2, [])
    assert await bench.queued() == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("where", ["before the effect", "after the effect"])
async def test_whoever_comes_next_finishes_what_was_decided(tmp_path: Path, where: str) -> None:
    bench = Bench(tmp_path)
    await dies(bench, where, 0, await bench.stage(b"a", b"b", parts=2))
    await bench.publications().publish("q", 0, await bench.stage(b"a", b"b"))
    assert await bench.queued() == [b"a", b"b"]
    await dies(bench, where, 1, await bench.stage(b"c"))
    await bench.publications().publish("q", 2, await bench.stage(b"d"))
    assert await bench.queued() == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    ("where", "on_unknown", "expected"),
    [
        ("after the effect", "skip", []),
        ("after the effect", "append_again", [b"a"]),
        ("before the effect", "skip", []),
    ],
)
async def test_what_was_consumed_in_between_is_unknown_and_never_guessed(
    tmp_path: Path, where: str, on_unknown: OnUnknown, expected: list[bytes]
) -> None:
    bench = Bench(tmp_path)
    await dies(bench, where, 0, await bench.stage(b"a"))
    async with Producer(bench.config, store=bench.store) as producer:
        await producer.produce([b"another"])
    await bench.consume_all()
    for _ in range(2):
        with pytest.raises(CommitUnknown, match="onUnknown"):
            await bench.publications().publish("q", 0, await bench.stage(b"a"))
    assert await bench.queued() == []
    await bench.publications(on_unknown).publish("q", 0, await bench.stage(b"a"))
    assert await bench.queued() == expected
    await bench.publications().publish("q", 1, await bench.stage(b"b"))
    assert await bench.queued() == [*expected, b"b"]


async def test_what_was_staged_long_ago_is_copied_before_it_is_enqueued(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    old = await bench.stage(b"a", b"b", parts=2)
    bench.clock.ahead_ms = bench.config.gc_grace_period_ms // 2 + 1_000
    await bench.publications().publish("q", 0, old)
    assert await bench.queued() == [b"a", b"b"]
    async with Reader(bench.config, store=bench.store) as reader:
        now = {entry.location for entry in await reader.entries()}
    assert now.isdisjoint(each.entry.location for each in old)


async def test_what_garbage_collection_took_is_staged_again_or_certainly_not_enqueued(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    old = await bench.stage(b"a")
    await dies(bench, "before the effect", 0, old)
    bench.clock.ahead_ms = bench.config.gc_grace_period_ms
    await bench.store.delete([each.entry.location for each in old])
    with pytest.raises(CommitFailed, match="garbage collection took it"):
        await bench.publications().publish("q", 0, old)
    await bench.publications().publish("q", 0, await bench.stage(b"a"))
    assert await bench.queued() == [b"a"]


async def test_garbage_collection_leaves_the_records_of_publications_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, gc_grace_period_ms=0)
    publications = bench.publications()
    await publications.publish("q", 0, await bench.stage(b"a"))
    await publications.publish("a name: with / everything", 0, await bench.stage(b"b"))
    await bench.consume_all()
    await GarbageCollector(bench.config, store=bench.store).collect()
    assert not await publications.publish("q", 0, await bench.stage(b"a"))
    assert not await publications.publish("a name: with / everything", 0, await bench.stage(b"b"))
    await publications.forget("q")
    assert await publications.publish("q", 0, await bench.stage(b"a"))


async def test_a_full_queue_is_not_done_and_done_when_there_is_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, manifest_append_bytes_max=4096)
    first = [b"%d" % number for number in range(40)]
    await bench.publications().publish("q", 0, await bench.stage(*first, parts=40))
    with pytest.raises(QueueFull):
        await bench.publications().publish("q", 1, await bench.stage(*first, parts=40))
    assert await bench.queued() == first
    await bench.consume_all()
    async with Producer(bench.config, store=bench.store) as producer:
        await producer.produce([b"between"])
    await bench.publications().publish("q", 1, await bench.stage(*first, parts=3))
    assert await bench.queued() == [b"between", *first]


async def test_a_manifest_that_is_gone_and_a_strange_record_stop_everything(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    publications = bench.publications()
    await publications.publish("q", 0, await bench.stage(b"a"))
    await bench.store.delete([bench.config.manifest_path])
    with pytest.raises(ManifestLost):
        await publications.publish("q", 1, await bench.stage(b"b"))
    await bench.store.put(publications.key("q"), b"no record")
    with pytest.raises(FormatError):
        await publications.publish("q", 1, await bench.stage(b"b"))
    with pytest.raises(UsageError):
        await publications.publish("q", -1, [])


@pytest.mark.integration
@pytest.mark.parametrize("where", ["before the effect", "after the effect"])
async def test_a_real_bucket_holds_every_batch_once(seaweed: Any, where: str) -> None:
    bench = Bench(seaweed.url(f"publication-{where.split(maxsplit=1)[0]}"))
    await bench.publications().publish("q", 0, await bench.stage(b"a", b"b", parts=2))
    await dies(bench, where, 1, await bench.stage(b"c", b"d", parts=2))
    # Two drivers come back at once.
    await asyncio.gather(
        *[bench.publications().publish("q", 1, await bench.stage(b"c", b"d")) for _ in range(2)]
    )
    assert await bench.queued() == [b"a", b"b", b"c", b"d"]
