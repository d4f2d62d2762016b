"""Producers that share one manifest, in virtual time: what the machine does plays no part.

The store takes 60 ms for a put and 25 ms for a get, and decides a compare-and-set at the end of the put. Each
producer flushes every 100 ms and gets one input per 5 ms, for ten seconds. What is counted is requests to the
store per committed batch, and the time from `produce` to durable. The Rust implementation under the same
model: 1 producer 3.0 requests and p99 410 ms; 3: 3.3 and 575 ms; 8: 11 and 3.3 s; 16: 24 and 7.7 to 9.7 s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_most
from forebay.buffer import BufferConfig, Producer, WriteHandle
from forebay.testing import Actor, World
from forebay.testing.faults import Constant, Latencies

__all__ = ["Contention", "buffer_contention", "contention"]

STORE = Latencies(Constant(25), {"put": Constant(60)}, decides_at=1.0)
SECONDS = 10.0
INPUT_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Contention:
    """What one run showed."""

    batches: int
    requests_per_batch: float
    p50_ms: float
    p99_ms: float


@cache
def contention(producers: int, seed: int = 1) -> Contention:
    """Run the model. The same arguments give the same numbers on any machine."""
    waits: list[float] = []
    locations: set[str] = set()

    async def watch(me: Actor, handle: WriteHandle) -> None:
        began = me.clock.monotonic()
        durable = await handle.watcher.await_durable()
        waits.append(me.clock.monotonic() - began)
        locations.add(durable.location)

    async def produce(me: Actor) -> None:
        watching = []
        store, clock = me.store, me.clock
        async with Producer(BufferConfig(), clock, store=store, ids=me.ids, randomness=me.random) as producer:
            begin = clock.monotonic()
            for number in range(int(SECONDS / INPUT_EVERY_S)):
                await clock.sleep(max(0.0, begin + number * INPUT_EVERY_S - clock.monotonic()))
                handle = await producer.produce([bytes(100)], b"meta")
                watching.append(asyncio.create_task(watch(me, handle)))
            await producer.flush()
            await asyncio.gather(*watching)

    async def main(world: World) -> None:
        draw = random.Random(seed)
        for number in range(producers):
            # Started together they would flush in step, which nobody does.
            await world.clock().sleep(draw.random() * 0.1)
            world.spawn(f"producer-{number}", produce)
        await world.join()

    world = World(seed, store_latencies=STORE)
    world.run(main)
    waits.sort()
    return Contention(
        len(locations),
        world.requests.count() / len(locations),
        waits[len(waits) // 2] * 1000,
        waits[int(len(waits) * 0.99)] * 1000,
    )


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
)
def buffer_contention(bench: Bench) -> Iterator[Variants]:
    """One run each: virtual time does not vary."""
    variants: dict[str, Variant] = {}
    for producers in (1, 3, 8, 16):
        bench.say(f"{producers} producers, ten virtual seconds")
        found = contention(producers)
        variants[f"{producers} requests"] = _plain(found.requests_per_batch, "requests")
        variants[f"{producers} p99"] = _plain(found.p99_ms, "ms")
    yield variants
