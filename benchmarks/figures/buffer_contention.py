"""Producers that share one manifest, in virtual time: what the machine does plays no part.

The store takes 60 ms for a put and 25 ms for a get, and decides a compare-and-set at the end of the put. Each
producer flushes every 100 ms and gets one input per 5 ms, for ten seconds. What is counted is requests to the
store per committed batch, and the time from `produce` to durable. The Rust implementation under the same
model: 1 producer 3.0 requests and p99 410 ms; 3: 3.3 and 575 ms; 8: 11 and 3.3 s; 16: 24 and 7.7 to 9.7 s.

Every producer is a process of its own, so none commit together by themselves. With the commit broker, they
hand their locations to one more process, over a link that takes no time, as a local socket nearly does.

A consumer that keeps up looks for something new every 10 ms beside four producers. Each version of the
manifest is downloaded once, if at all: one that it wrote itself, or that was replaced before it looked, is
not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_most
from forebay.buffer import BufferConfig, Consumer, Producer, WriteHandle
from forebay.buffer._commit_broker import CommitBroker, CommitReply, CommitRequest
from forebay.buffer._commit_broker_client import BrokeredCommitter
from forebay.testing import Actor, World
from forebay.testing.faults import Constant, Latencies

__all__ = ["Contention", "buffer_contention", "contention"]

STORE = Latencies(Constant(25), {"put": Constant(60)}, decides_at=1.0)
SECONDS = 10.0
INPUT_EVERY_S = 0.005
POLL_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class Contention:
    """What one run showed."""

    batches: int
    requests_per_batch: float
    p50_ms: float
    p99_ms: float


class _Broker:
    """The commit broker as an actor, and the way to it: a line of requests and the answers to them."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[CommitRequest, asyncio.Future[CommitReply]]] = asyncio.Queue()

    async def serve(self, me: Actor) -> None:
        broker = CommitBroker(me.store, BufferConfig(), clock=me.clock, randomness=me.random, ids=me.ids)
        async with asyncio.TaskGroup() as answering:
            while True:
                request, reply = await self._requests.get()
                answering.create_task(self._answer(broker, request, reply))

    async def _answer(
        self, broker: CommitBroker, request: CommitRequest, reply: asyncio.Future[CommitReply]
    ) -> None:
        answer = await broker.commit(request)
        if not reply.done():
            reply.set_result(answer)

    async def request(self, request: CommitRequest) -> CommitReply:
        reply: asyncio.Future[CommitReply] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, reply))
        return await reply

    async def close(self) -> None:
        """It is there for the others too."""


class _Run:
    """Producers, and what they saw."""

    def __init__(self, broker: _Broker | None = None) -> None:
        self._broker = broker
        self.waits: list[float] = []
        self.locations: set[str] = set()
        self.writes = 0
        """Versions of the manifest that they made."""

    async def produce(self, me: Actor) -> None:
        config, clock, store = BufferConfig(), me.clock, me.store
        committer = None
        if self._broker is not None:
            committer = BrokeredCommitter(self._broker, store, config, clock=clock, randomness=me.random)
        watching = []
        async with Producer(
            config, clock, store=store, ids=me.ids, randomness=me.random, committer=committer
        ) as producer:
            begin = clock.monotonic()
            for number in range(int(SECONDS / INPUT_EVERY_S)):
                await clock.sleep(max(0.0, begin + number * INPUT_EVERY_S - clock.monotonic()))
                handle = await producer.produce([bytes(100)], b"meta")
                watching.append(asyncio.create_task(self._watch(me, handle)))
            await producer.flush()
            await asyncio.gather(*watching)
            self.writes += producer.metrics.writes.attempts - producer.metrics.writes.conflicts

    async def _watch(self, me: Actor, handle: WriteHandle) -> None:
        began = me.clock.monotonic()
        durable = await handle.watcher.await_durable()
        self.waits.append(me.clock.monotonic() - began)
        self.locations.add(durable.location)

    async def start(self, world: World, producers: int, seed: int) -> list[Actor]:
        draw = random.Random(seed)
        actors = []
        for number in range(producers):
            # Started together they would flush in step, which nobody does.
            await world.clock().sleep(draw.random() * 0.1)
            actors.append(world.spawn(f"producer-{number}", self.produce))
        return actors


@cache
def contention(producers: int, seed: int = 1, *, broker: bool = False) -> Contention:
    """Run the model. The same arguments give the same numbers on any machine."""
    run = _Run(_Broker() if broker else None)

    async def main(world: World) -> None:
        if run._broker is not None:
            world.spawn("broker", run._broker.serve)
        await world.join(*await run.start(world, producers, seed))

    world = World(seed, store_latencies=STORE)
    world.run(main)
    waits = sorted(run.waits)
    return Contention(
        len(run.locations),
        world.requests.count() / len(run.locations),
        waits[len(waits) // 2] * 1000,
        waits[int(len(waits) * 0.99)] * 1000,
    )


@cache
def manifest_reads(producers: int, seed: int = 1) -> float:
    """Downloads of the manifest by a consumer that keeps up, over the versions that there were."""
    run = _Run()
    found: list[float] = []

    async def consume(me: Actor) -> None:
        config = BufferConfig(gc_enabled=False)
        async with Consumer(config, me.clock, store=me.store, ids=me.ids, randomness=me.random) as consumer:
            await consumer.initialize()
            taken = -1
            while not ended.is_set() or taken < len(run.locations) - 1:
                batch = await consumer.next_batch()
                if batch is None:
                    await me.clock.sleep(POLL_EVERY_S)
                    continue
                taken = batch.sequence
                await consumer.ack(taken)
            writes = consumer.metrics.writes
            found.append(consumer.manifest_reads / (run.writes + writes.attempts - writes.conflicts))

    ended = asyncio.Event()

    async def main(world: World) -> None:
        consumer = world.spawn("consumer", consume)
        await world.join(*await run.start(world, producers, seed))
        ended.set()
        await world.join(consumer)

    World(seed, store_latencies=STORE).run(main)
    return found[0]


def _plain(value: float, unit: str) -> Variant:
    return Variant(lambda _: Sample(value), unit)


@suite.benchmark(
    "buffer-contention",
    "Many producers share one manifest without starving or hammering it (virtual time).",
    Figure("requests per batch, 1", of="1 requests", measure=Measure.PLAIN, target=at_most(2.1)),
    Figure("durable p99 ms, 1", of="1 p99", measure=Measure.PLAIN, target=at_most(300)),
    Figure("requests per batch, 3", of="3 requests", measure=Measure.PLAIN),
    Figure("durable p99 ms, 3", of="3 p99", measure=Measure.PLAIN),
    Figure("requests per batch, 8", of="8 requests", measure=Measure.PLAIN),
    Figure("durable p99 ms, 8", of="8 p99", measure=Measure.PLAIN),
    Figure("requests per batch, 16", of="16 requests", measure=Measure.PLAIN, target=at_most(6)),
    Figure("durable p99 ms, 16", of="16 p99", measure=Measure.PLAIN, target=at_most(3_000)),
    Figure(
        "requests per batch, 16, broker", of="broker requests", measure=Measure.PLAIN, target=at_most(2.2)
    ),
    Figure("durable p99 ms, 16, broker", of="broker p99", measure=Measure.PLAIN, target=at_most(500)),
    Figure("reads per manifest version", of="manifest reads", measure=Measure.PLAIN, target=at_most(1)),
)
def buffer_contention(bench: Bench) -> Iterator[Variants]:
    """One run each: virtual time does not vary."""
    variants: dict[str, Variant] = {}
    for producers in (1, 3, 8, 16):
        bench.say(f"{producers} producers, ten virtual seconds")
        found = contention(producers)
        variants[f"{producers} requests"] = _plain(found.requests_per_batch, "requests")
        variants[f"{producers} p99"] = _plain(found.p99_ms, "ms")
    bench.say("16 producers with the commit broker, and a consumer that keeps up")
    found = contention(16, broker=True)
    variants["broker requests"] = _plain(found.requests_per_batch, "requests")
    variants["broker p99"] = _plain(found.p99_ms, "ms")
    variants["manifest reads"] = _plain(manifest_reads(4), "reads")
    yield variants
