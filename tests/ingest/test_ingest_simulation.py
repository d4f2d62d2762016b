"""Many ingestors, many collectors, crashes, faults and wrong clocks, over many seeds.

Promised and checked: every entry whose watcher said "durable" is delivered at least once and acknowledged;
nothing is delivered that was never sent; a batch is acknowledged at most once, and only by the collector it
was handed to last; in the end nothing is left in the manifests or the bucket but the orphans of crashed
ingestors. An auditor looks at the bucket all the while: no location is pending twice, none is claimed and
done, and what waits has its object.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from tests.ingest.parts import HashStore, batches, claimed, done, pending

from forebay.errors import ForebayError, NotDone
from forebay.ingest import Collector, CollectorConfig, Ingestor, IngestorConfig
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy
from forebay.testing import Faults, World, run_seeds
from forebay.testing.actor import Actor
from forebay.testing.world import seeds

FAULTS = Faults(before=0.03, after=0.03, lost={"put": 0.03}, late=0.02, duplicate=0.01, slow=0.03, reset=0.02)
PATIENT = RetryPolicy(attempts_max=40, base_ms=20, cap_ms=500, deadline_ms=120_000)


@dataclass
class Told:
    """What the actors were told; a report to the test, never read by them."""

    sent: set[bytes] = field(default_factory=set)
    durable: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    delivered: list[bytes] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    holder: dict[str, str] = field(default_factory=dict)
    """Whom a location was handed to last."""
    wrongly_acked: list[str] = field(default_factory=list)
    missing: MetricsRegistry = field(default_factory=MetricsRegistry)
    stopped: bool = False
    ack_sent: set[bytes] = field(default_factory=set)
    next_entry: dict[str, int] = field(default_factory=dict)
    writers_left: int = 0


async def ingest(me: Actor, told: Told, count: int) -> None:
    config = IngestorConfig(flush_interval_ms=50, commit=PATIENT)
    out = Ingestor(me.store, config, clock=me.clock, ids=me.ids, randomness=me.random)
    while told.next_entry.setdefault(me.name, 0) < count:
        number = told.next_entry[me.name]
        told.next_entry[me.name] += 1
        entry = f"{me.name}/{number}".encode()
        told.sent.add(entry)
        watcher = await out.ingest([entry])
        try:
            await watcher.await_durable()
            told.durable.add(entry)
        except NotDone:
            told.failed.add(entry)
        except ForebayError:
            pass
        await me.clock.sleep(me.random.random() * 0.2)
    told.writers_left -= 1


async def collect(me: Actor, told: Told, timeout_ms: int) -> None:
    config = CollectorConfig(
        heartbeat_timeout_ms=timeout_ms, done_cleanup_threshold=3, commit=PATIENT, missing="skip"
    )
    reader = Collector(me.store, config, clock=me.clock, randomness=me.random, metrics=told.missing)
    name = f"{me.name}/{me.lives}"
    idle = 0
    while idle < 8 or told.writers_left:
        try:
            batch = await reader.next_batch()
        except ForebayError:
            continue
        if batch is None:
            idle += 1
            await me.clock.sleep(timeout_ms / 4000)
            continue
        idle = 0
        told.delivered.extend(batch.entries)
        told.holder[batch.location] = name
        # Sometimes the sink takes longer than the timeout.
        await me.clock.sleep(me.random.choice([0, 0.1, 1.2 * timeout_ms / 1000]))
        told.ack_sent.update(batch.entries)
        try:
            await reader.ack(batch)
        except ForebayError:
            continue  # lost, or unknown: it is delivered again, or it is done
        told.acked.append(batch.location)
        if told.holder[batch.location] != name:
            told.wrongly_acked.append(batch.location)
    await reader.close()


async def audit(world: World, told: Told) -> None:
    """Look at the bucket itself, again and again."""
    while not told.stopped:
        waiting, finished = await pending(world.bucket), set(await done(world.bucket))
        assert len(set(waiting)) == len(waiting), "a location is pending twice"
        assert not finished & set(await claimed(world.bucket)), "claimed and done at once"
        lost = set(waiting) - finished - set(await batches(world.bucket))
        assert not lost, f"waits, but has no object: {sorted(lost)[:3]}"
        await world.clock().sleep(0.3)


def pause_now_and_then(world: World, seed: int) -> None:
    """Let collectors stand still for longer than the timeout, as a machine that swaps does."""
    draw = random.Random(seed)
    for number in range(3):
        actor = world.actors[f"collector-{number}"]
        for _ in range(2):
            at, length = draw.uniform(0.2, 12), draw.uniform(2, 7)
            world.loop.call_later(at, actor.pause, length, context=world.context)


async def run(world: World, *, crashes: bool, entries: int = 6, collectors: int = 3) -> Told:
    told = Told(writers_left=2)
    for number in range(2):
        writer = world.spawn(f"writer-{number}", ingest, told, entries)
        if crashes:
            writer.crash_randomly(0.004, restart_after_s=0.5, crashes_max=2)
    for number in range(collectors):
        reader = world.spawn(f"collector-{number}", collect, told, 3_000)
        if crashes:
            reader.crash_randomly(0.004, restart_after_s=1.0, crashes_max=3)
    auditor = asyncio.get_running_loop().create_task(audit(world, told))
    if crashes:
        pause_now_and_then(world, world.seed)
    await world.join(*[actor for name, actor in world.actors.items() if name.startswith("writer")])
    world.inject(Faults())
    await world.join()
    world.heal()
    await world.clock().sleep(30)
    told.stopped = True
    await auditor
    world.spawn("last", collect, told, 3_000)
    await world.join()
    async with Collector(world.store(), CollectorConfig(), clock=world.clock()) as cleaner:
        await cleaner.cleanup()
    return told


async def check(world: World, told: Told, *, orphans: bool) -> None:
    delivered = set(told.delivered)
    assert told.durable <= delivered, f"lost: {sorted(told.durable - delivered)[:5]}"
    assert told.durable <= told.ack_sent, "durable, but nobody could acknowledge it"
    assert delivered <= told.sent, "delivered, but never sent"
    assert not delivered & told.failed, "delivered, but the sender was told that it certainly is not there"
    assert len(set(told.acked)) == len(told.acked), "two collectors acknowledged the same batch"
    assert not told.wrongly_acked, "acknowledged by a collector that had lost it to another"
    assert await pending(world.bucket) == []
    assert await claimed(world.bucket) == {}
    assert await done(world.bucket) == []
    if not orphans:
        assert await batches(world.bucket) == []


def stormy(seed: int) -> None:
    async def main(world: World) -> None:
        await check(world, await run(world, crashes=True), orphans=True)

    World(seed, faults=FAULTS, rotate_s=2.0, skew_ms=120_000, drift_ppm=500).run(main)


def calm(seed: int) -> None:
    async def main(world: World) -> None:
        told = await run(world, crashes=False)
        assert told.durable == told.sent
        await check(world, told, orphans=False)

    World(seed).run(main)


def stormy_with_recurring_versions(seed: int) -> None:
    """The bucket's versions are hashes of the content, as on S3, so that they come back."""

    async def main(world: World) -> None:
        world.bucket = HashStore(world.clock(), world.ids())
        told = await run(world, crashes=True)
        await check(world, told, orphans=True)

    World(seed, faults=FAULTS, rotate_s=2.0, skew_ms=120_000, drift_ppm=500).run(main)


def test_every_entry_is_delivered_at_least_once_and_cleaned_up_under_faults_crashes_and_wrong_clocks() -> (
    None
):
    for _ in run_seeds(stormy, seeds(40)):
        pass


def test_the_same_holds_where_versions_are_hashes_and_come_back() -> None:
    for _ in run_seeds(stormy_with_recurring_versions, seeds(40)):
        pass


def test_without_faults_everything_is_delivered_and_nothing_is_left_behind() -> None:
    for _ in run_seeds(calm, seeds(20)):
        pass


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_a_long_soak_of_claiming_collectors() -> None:
    for _ in run_seeds(stormy, seeds(5_000)):
        pass
    for _ in run_seeds(stormy_with_recurring_versions, seeds(5_000)):
        pass
