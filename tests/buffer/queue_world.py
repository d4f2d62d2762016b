"""A queue in the simulated world: producers and consumers that crash, a store that fails, one honest sink.

The sink is what a database would be: it takes a batch and its sequence in one step, and only if the sequence
follows the last one. It survives every crash. What it holds at the end is compared with what every caller was
told; nothing is taken from the engine's own books.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from forebay.buffer import (
    BufferConfig,
    Consumer,
    Fenced,
    GarbageCollector,
    Producer,
    ResumeRefused,
    WriteHandle,
)
from forebay.errors import ForebayError, NotDone, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit import MetricsRegistry, RetryPolicy
from forebay.testing import Actor, Faults, World

CONFIG = BufferConfig(
    flush_interval_ms=50,
    gc_interval_ms=2_000,
    gc_grace_period_ms=20_000,
    dequeue_acks=2,
    read_ahead_batches=2,
    commit_retry=RetryPolicy(attempts_max=30, base_ms=20, cap_ms=500, deadline_ms=20_000),
    upload_retry=RetryPolicy(attempts_max=3, base_ms=20, cap_ms=500, deadline_ms=20_000),
)


@dataclass
class Sink:
    """Batches in the order they were stored."""

    batches: list[tuple[int, list[bytes]]] = field(default_factory=list)

    @property
    def last(self) -> int | None:
        return self.batches[-1][0] if self.batches else None

    def store(self, sequence: int, records: list[bytes]) -> bool:
        """One transaction: the batch and its sequence, or nothing."""
        if self.last is not None and sequence != self.last + 1:
            return False
        self.batches.append((sequence, records))
        return True


@dataclass
class Told:
    """What the caller of one `produce` knows."""

    producer: str
    records: list[bytes]
    status: str = "unknown"
    sequence: int = -1
    start_index: int = -1


@dataclass
class Plan:
    """How big, and how bad."""

    producers: int = 3
    calls: int = 3
    together: int = 1
    """Producers per actor, which then commit together."""
    consumers: int = 1
    faults: Faults = field(default_factory=Faults)
    rotate_s: float = 1.0
    crash_rate: float = 0.0
    skew_ms: int = 0
    config: BufferConfig = CONFIG
    crash: tuple[str, int, bool] | None = None
    """An actor, the step after which it crashes once, and whether its requests in flight arrive."""


class QueueWorld:
    """One run. `problems` is empty where every promise was kept."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.plan = plan
        self.world = World(seed, faults=plan.faults, rotate_s=plan.rotate_s, skew_ms=plan.skew_ms)
        self.sink = Sink()
        self.told: list[Told] = []
        self.metrics = MetricsRegistry()
        self.fenced = 0
        self.crashes = 0
        self.done = False
        self.left: list[str] = []

    def run(self) -> list[str]:
        self.world.run(self._main)
        return self.problems()

    async def _main(self, world: World) -> None:
        plan = self.plan
        writers = [world.spawn(f"producer-{number}", self._produce) for number in range(plan.producers)]
        readers = [world.spawn(f"consumer-{number}", self._consume) for number in range(plan.consumers)]
        for actor in (*writers, *readers):
            actor.crash_randomly(plan.crash_rate, restart_after_s=0.5, crashes_max=2)
        if plan.crash is not None:
            name, step, in_flight = plan.crash
            world.actors[name].crash_at(step, in_flight)
        await world.join(*writers)
        world.heal()
        await world.clock().sleep(5)
        self.done = True
        await world.join(*readers)
        self.crashes = sum(actor.crashes for actor in world.actors.values())
        await world.spawn("last", self._consume).join()
        await world.clock().sleep(60)
        await self._sweep(world)

    async def _sweep(self, world: World) -> None:
        """Everything was consumed, so nothing but the manifest and the owner's mark may be left.

        A queue that never held an entry is left alone: it might be a mistyped path.
        """
        collector = GarbageCollector(self.plan.config, world.clock(), store=world.store())
        report = await collector.collect()
        keys = [info.key async for info in world.bucket.list("ingest/")]
        self.left = [] if report.refused else keys

    async def _produce(self, me: Actor) -> None:
        await asyncio.gather(*[self._produce_as(me, number) for number in range(self.plan.together)])

    async def _produce_as(self, me: Actor, number: int) -> None:
        name = f"{me.name}/{me.lives}/{number}"
        config = self.plan.config
        producer = Producer(
            config, me.clock, store=me.store, ids=me.ids, randomness=me.random, metrics=self.metrics
        )
        waiting = []
        for call in range(self.plan.calls):
            records = [f"{name}/{call}/{n}".encode() for n in range(me.random.randint(1, 3))]
            told = Told(name, records)
            self.told.append(told)
            handle = await producer.produce(records, me.name.encode())
            watch = self._watch(told, handle)
            if me.random.random() < 0.5:
                await watch
            else:
                waiting.append(asyncio.create_task(watch))
                await me.clock.sleep(me.random.random() * 0.2)
        with contextlib.suppress(ForebayError):  # The watchers have told the same.
            await producer.close()
        for task in waiting:
            await task

    async def _watch(self, told: Told, handle: WriteHandle) -> None:
        try:
            durable = await handle.watcher.await_durable()
            told.sequence, told.start_index = durable.sequence, durable.start_index
            told.status = "ok"
        except NotDone:
            told.status = "failed"
        except OutcomeUnknown:
            told.status = "unknown"

    async def _consume(self, me: Actor) -> None:
        while True:
            consumer = Consumer(
                self.plan.config,
                me.clock,
                store=me.store,
                ids=me.ids,
                randomness=me.random,
                metrics=self.metrics,
            )
            position = self.sink.last
            try:
                await consumer.initialize(position)
                await self._drain(me, consumer)
                await consumer.close()
                return
            except Fenced:
                self.fenced += 1
                await consumer.close()
                if me.name != "last" and self.plan.consumers > 1 and me.random.random() < 0.5:
                    return
            except ResumeRefused:
                assert self.sink.last != position, "refused although nobody else has gone on"
                await consumer.close()
            except (Unavailable, OutcomeUnknown, PreconditionFailed):
                with contextlib.suppress(ForebayError):
                    await consumer.close()
            await me.clock.sleep(me.random.random())

    async def _drain(self, me: Actor, consumer: Consumer) -> None:
        while True:
            batch = await consumer.next_batch()
            if batch is None:
                if self.done:
                    return
                await me.clock.sleep(0.4)
            elif self.sink.store(batch.sequence, list(batch.entries)):
                await consumer.ack(batch.sequence)
            else:
                return  # Somebody else is further.

    # -- what must hold

    def problems(self) -> list[str]:
        found = []
        sequences = [sequence for sequence, _ in self.sink.batches]
        if sequences != list(range(len(sequences))):
            found.append(f"sequences are {sequences}")
        records = [record for _, batch in self.sink.batches for record in batch]
        counts = Counter(records)
        sent = {record for told in self.told for record in told.records}
        found += [f"{record!r} was never sent" for record in counts if record not in sent]
        for told in self.told:
            found += self._broken(told, counts)
        found += self._out_of_order(records)
        found += [f"{key} was not collected" for key in self.left if key.endswith(".batch")]
        return found

    def _broken(self, told: Told, counts: Counter[bytes]) -> list[str]:
        seen = {counts[record] for record in told.records}
        allowed = {"ok": [{1}], "failed": [{0}], "unknown": [{0}, {1}]}[told.status]
        if seen not in allowed:
            return [f"{told} is there {seen} times"]
        if told.status == "ok":
            batch = dict(self.sink.batches)[told.sequence]
            place = batch[told.start_index : told.start_index + len(told.records)]
            if place != told.records:
                return [f"{told} is not where its producer was told"]
        return []

    def _out_of_order(self, records: list[bytes]) -> list[str]:
        places = {record: place for place, record in enumerate(records)}
        last: dict[str, int] = {}
        found = []
        for told in self.told:
            for record in told.records:
                place = places.get(record)
                if place is None:
                    continue
                if place < last.get(told.producer, -1):
                    found.append(f"{record!r} is before an earlier one of its producer")
                last[told.producer] = place
        return found
