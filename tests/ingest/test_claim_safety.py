"""The safety questions the draft leaves open, each with our rule as a test."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.ingest.parts import (
    CONSUMERS,
    PRODUCERS,
    HandClock,
    HashStore,
    batches,
    claimed,
    collector,
    done,
    fill,
    hashed,
    pending,
)

from forebay.errors import PreconditionFailed
from forebay.ingest import BatchMissing, ClaimLost, Collector, CollectorConfig, Ingestor, IngestorConfig
from forebay.kit.retry import RetryPolicy
from forebay.storage import MemoryStore, StoredObject
from forebay.testing import World
from forebay.testing.actor import Actor

TIMEOUT_S = 30.0


def stale_pair(store: MemoryStore) -> tuple[Collector, Collector, HandClock, HandClock]:
    """Two collectors with a clock each, so that time passes for one of them only."""
    first_clock, second_clock = HandClock(), HandClock()
    first, second = collector(store, first_clock), collector(store, second_clock)
    return first, second, first_clock, second_clock


# 1. A stale claim is claimed again while the first collector still acks.


async def test_1_the_first_collector_learns_on_ack_that_its_claim_was_taken_over() -> None:
    store = MemoryStore()
    await fill(store, 1)
    first, second, _, second_clock = stale_pair(store)
    lost = await first.next_batch()
    assert await second.next_batch() is None
    await second_clock.turn(TIMEOUT_S)
    taken = await second.next_batch()
    assert lost is not None
    assert taken is not None
    assert taken.location == lost.location
    with pytest.raises(ClaimLost) as caught:
        await first.ack(lost)
    assert caught.value.location == lost.location
    await second.ack(taken)
    assert await done(store) == [taken.location]


async def test_1_the_first_collectors_heartbeat_does_not_keep_the_seconds_claim_alive() -> None:
    store = MemoryStore()
    [location] = await fill(store, 1)
    first, second, first_clock, second_clock = stale_pair(store)
    lost = await first.next_batch()
    assert await second.next_batch() is None
    await second_clock.turn(TIMEOUT_S)
    assert await second.next_batch() is not None
    before = (await claimed(store))[location]
    await first_clock.turn(10)
    assert (await claimed(store))[location] == before
    assert lost is not None
    assert lost.lost
    assert first.in_flight == 0


async def test_1_every_claim_has_a_higher_number_than_the_one_before_also_with_a_slow_clock() -> None:
    store = MemoryStore()
    [location] = await fill(store, 1)
    first = collector(store, HandClock(now_ms=2_000_000_000_000))
    await first.next_batch()
    before = (await claimed(store))[location]
    slow = HandClock(now_ms=1_000_000_000_000)
    second = collector(store, slow)
    assert await second.next_batch() is None
    await slow.turn(TIMEOUT_S)
    assert await second.next_batch() is not None
    assert (await claimed(store))[location] == before + 1


def test_1_a_claim_of_unknown_outcome_is_not_taken_for_ones_own() -> None:
    """Two collectors claim in the same millisecond, so with the same number; one of them gets no answer."""

    async def claim_once(me: Actor, told: list[str]) -> None:
        reader = Collector(me.store, CollectorConfig(), clock=me.clock, randomness=me.random)
        me.world.fail_next(me, "put", "lost" if me.name == "ann" else "slow")
        batch = await reader.next_batch()
        if batch is not None:
            await me.clock.sleep(5)
            try:
                await reader.ack(batch)
                told.append(me.name)
            except ClaimLost:
                pass

    async def main(world: World) -> list[str]:
        await fill(world.bucket, 1)
        told: list[str] = []
        for name in ("ann", "bob"):
            world.spawn(name, claim_once, told)
        await world.join()
        return told

    for seed in range(20):
        assert len(World(seed).run(main)) <= 1


# 2. Claims that lapse by themselves.


async def test_2_the_heart_beats_while_the_batch_is_still_being_read() -> None:
    reading = asyncio.Event()

    class Slow(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            if "manifest" not in key and "owner" not in key:
                await reading.wait()
            return await super().get(key)

    store = Slow()
    clock = HandClock()
    [location] = await fill(store, 1)
    async with collector(store, clock) as reader:
        task = asyncio.create_task(reader.next_batch())
        for _ in range(20):
            await asyncio.sleep(0)
        before = (await claimed(store))[location]
        await clock.turn(10)
        assert (await claimed(store))[location] > before
        reading.set()
        assert await task is not None


async def test_2_a_claim_without_heartbeat_is_not_used_after_the_timeout_even_if_nobody_took_it() -> None:
    store = MemoryStore()
    await fill(store, 1)
    clock = HandClock()
    reader = collector(store, clock)
    batch = await reader.next_batch()
    # The process stood still: no heartbeat ran, and others may act by now.
    clock._monotonic += TIMEOUT_S
    assert batch is not None
    with pytest.raises(ClaimLost):
        await reader.ack(batch)
    await reader.close()


async def test_2_a_batch_whose_read_outlived_its_claim_is_not_handed_out() -> None:
    clock = HandClock()

    class Slow(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            if key == locations[0]:
                clock._monotonic += TIMEOUT_S  # the process stood still while it read
            return await super().get(key)

    locations = [""]
    store = Slow()
    locations = await fill(store, 2)
    async with collector(store, clock) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        assert batch.location == locations[1]


async def test_2_the_owner_stops_before_the_others_begin() -> None:
    store = MemoryStore()
    await fill(store, 1)
    owner_clock, other_clock = HandClock(), HandClock()
    owner, other = collector(store, owner_clock), collector(store, other_clock)
    batch = await owner.next_batch()
    assert await other.next_batch() is None
    almost = TIMEOUT_S * 0.97
    owner_clock._monotonic += almost
    other_clock._monotonic += almost
    assert await other.next_batch() is None
    assert batch is not None
    with pytest.raises(ClaimLost):
        await owner.ack(batch)
    await owner.close()
    await other.close()


# 3. Clock skew.


async def test_3_a_wall_clock_an_hour_ahead_does_not_make_a_fresh_claim_look_stale() -> None:
    store = MemoryStore()
    await fill(store, 1)
    now = HandClock().now_ms()
    first, ahead = collector(store, HandClock()), collector(store, HandClock(now_ms=now + 3_600_000))
    assert await first.next_batch() is not None
    assert await ahead.next_batch() is None


async def test_3_a_claim_far_in_the_future_is_taken_over_once_it_stands_still() -> None:
    store = MemoryStore()
    [location] = await fill(store, 1)
    await store.put(CONSUMERS, json.dumps({"claimed": {location: 4_000_000_000_000}, "done": []}).encode())
    clock = HandClock()
    async with collector(store, clock) as reader:
        assert await reader.next_batch() is None
        await clock.turn(TIMEOUT_S - 0.1)
        assert await reader.next_batch() is None
        await clock.turn(0.2)
        assert await reader.next_batch() is not None


async def test_3_a_claim_that_moves_is_never_stale() -> None:
    store = MemoryStore()
    await fill(store, 1)
    owner_clock, other_clock = HandClock(), HandClock()
    owner, other = collector(store, owner_clock), collector(store, other_clock)
    assert await owner.next_batch() is not None
    for _ in range(20):
        await owner_clock.turn(10)
        await other_clock.turn(10)
        assert await other.next_batch() is None
    await owner.close()
    await other.close()


# 4. The order of a cleanup.


def test_4_a_crash_anywhere_in_a_cleanup_is_finished_by_the_next_one() -> None:
    async def clean(me: Actor) -> None:
        reader = Collector(
            me.store, CollectorConfig(done_cleanup_threshold=2), clock=me.clock, randomness=me.random
        )
        await reader.cleanup()

    def crash_after(step: int | None, in_flight: bool) -> int:
        async def main(world: World) -> int:
            locations = await fill(world.bucket, 3)
            state = {"claimed": {}, "done": locations[:2]}
            await world.bucket.put(CONSUMERS, json.dumps(state).encode())
            actor = world.spawn("ann", clean)
            if step is not None:
                actor.crash_at(step, in_flight)
            await world.join()
            steps = actor.steps
            await world.clock().sleep(60)
            # Whatever the crash left: what is out of `done` is out of `pending`, and what is out of `pending`
            # has no object.
            left, guarded = set(await pending(world.bucket)), set(await done(world.bucket))
            assert not left & (set(locations[:2]) - guarded)
            assert set(await batches(world.bucket)) <= left
            if actor.crashed:
                actor.restart()
                await world.join()
            assert await pending(world.bucket) == [locations[2]]
            assert await done(world.bucket) == []
            assert await batches(world.bucket) == [locations[2]]
            return steps

        return World(seed=1).run(main)

    for step in range(crash_after(None, True) + 1):
        for in_flight in (True, False):
            crash_after(step, in_flight)


async def test_4_a_batch_cleaned_up_while_it_is_read_is_a_lost_claim_and_the_next_one_comes() -> None:
    """Its object is gone and so is the claim: not a missing batch."""
    rival: list[bool] = []
    locations = [""]

    class Raced(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            if key == locations[0] and not rival:
                rival.append(True)
                await self.put(CONSUMERS, json.dumps({"claimed": {}, "done": [key]}).encode())
                await self.delete([key])
            return await super().get(key)

    store = Raced()
    locations = await fill(store, 2)
    async with collector(store) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        assert batch.location == locations[1]


# 5. A claim that races with a cleanup.


async def test_5_the_consumer_manifest_is_read_before_the_producer_manifest() -> None:
    order: list[str] = []

    class Watched(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            order.append(key)
            return await super().get(key)

    store = Watched()
    await fill(store, 1)
    order.clear()
    async with collector(store) as reader:
        await reader.next_batch()
    assert order[:2] == [CONSUMERS, PRODUCERS]


async def test_5_a_finished_location_claimed_on_an_equal_manifest_is_dropped_again() -> None:
    """The consumer manifest is empty, then in use, then empty again, all while one collector looks away."""
    looks = -1_000  # not yet

    class Raced(HashStore):
        async def get(self, key: str) -> StoredObject:
            nonlocal looks
            found = await super().get(key)
            if key == PRODUCERS:
                looks += 1
                if looks == 1:
                    async with collector(self, done_cleanup_threshold=1) as rival:
                        batch = await rival.next_batch()
                        assert batch is not None
                        await rival.ack(batch)
            return found

    store = Raced()
    await fill(store, 1)
    await store.put(CONSUMERS, b'{"claimed":{},"done":[]}')
    looks = 0
    async with collector(store) as reader:
        assert await reader.next_batch() is None
    assert await claimed(store) == {}
    assert looks > 1


async def test_5_a_stale_claim_on_a_finished_location_is_dropped() -> None:
    store = MemoryStore()
    await fill(store, 1)
    ghost = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.json"
    await store.put(CONSUMERS, json.dumps({"claimed": {ghost: 5}, "done": []}).encode())
    clock = HandClock()
    async with collector(store, clock) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
        await clock.turn(TIMEOUT_S)
        assert await reader.next_batch() is None
    assert await claimed(store) == {}


# 6. Two collectors cleaning at once.


async def test_6_a_cleanup_takes_out_exactly_what_it_saw() -> None:
    store = MemoryStore()
    locations = await fill(store, 3)
    reader = collector(store, done_cleanup_threshold=10)
    rival = collector(store, done_cleanup_threshold=10)
    for one in (reader, rival):
        batch = await one.next_batch()
        assert batch is not None
        await one.ack(batch)
    original = store.delete
    late = await rival.next_batch()
    assert late is not None

    async def delete(keys):  # type: ignore[no-untyped-def]
        store.delete = original  # type: ignore[method-assign]
        await rival.ack(late)
        return await original(keys)

    store.delete = delete  # type: ignore[method-assign]
    assert await reader.cleanup() == 2
    assert await done(store) == [locations[2]]
    assert await pending(store) == [locations[2]]
    assert await batches(store) == [locations[2]]
    await reader.close()
    await rival.close()


async def test_6_two_cleanups_at_once_remove_everything_once_and_write_no_more_than_needed() -> None:
    store = MemoryStore()
    locations = await fill(store, 4)
    await store.put(CONSUMERS, json.dumps({"claimed": {}, "done": locations}).encode())
    readers = [collector(store), collector(store)]
    await asyncio.gather(*(reader.cleanup() for reader in readers))
    assert (await pending(store), await done(store), await batches(store)) == ([], [], [])
    version = (await store.head(CONSUMERS)).version
    assert await readers[0].cleanup() == 0
    assert (await store.head(CONSUMERS)).version == version


# 7. A late duplicate append of a location that was cleaned up.


def test_7_an_append_of_unknown_outcome_that_was_processed_and_cleaned_up_is_not_appended_again() -> None:
    """The append takes effect, its answer is lost, and before the ingestor looks the batch is gone again."""

    async def write(me: Actor) -> None:
        # A long wait before the second attempt leaves the collector its time.
        config = IngestorConfig(flush_interval_ms=0, commit=RetryPolicy(base_ms=60_000, cap_ms=60_000))
        out = Ingestor(me.store, config, clock=me.clock, ids=me.ids, randomness=me.random)
        await (await out.ingest([b"first"])).await_durable()
        await out.flush()
        watcher = await out.ingest([b"x"])
        while len(await batches(me.world.bucket)) < 2:
            await me.clock.sleep(0.001)
        me.world.fail_next(me, "put", "after")
        await watcher.await_durable()
        await out.close()

    async def read(me: Actor, seen: list[bytes]) -> None:
        config = CollectorConfig(done_cleanup_threshold=1)
        async with Collector(me.store, config, clock=me.clock, randomness=me.random) as reader:
            while len(seen) < 2:
                batch = await reader.next_batch()
                if batch is None:
                    await me.clock.sleep(0.01)
                    continue
                seen.extend(batch.entries)
                await reader.ack(batch)

    async def main(world: World) -> None:
        seen: list[bytes] = []
        world.spawn("writer", write)
        world.spawn("reader", read, seen)
        await world.join()
        assert seen == [b"first", b"x"]
        assert await pending(world.bucket) == []

    for seed in range(10):
        World(seed).run(main)


async def test_7_a_location_that_came_back_after_its_cleanup_is_reported_not_delivered() -> None:
    store = MemoryStore()
    [location] = await fill(store, 1)
    async with collector(store, done_cleanup_threshold=1) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
        await store.put(PRODUCERS, json.dumps({"pending": [location]}).encode())
        with pytest.raises(BatchMissing):
            await reader.next_batch()
    async with collector(store, missing="skip", done_cleanup_threshold=1) as reader:
        assert await reader.next_batch() is None
        assert await pending(store) == []


async def test_the_store_of_these_tests_brings_versions_back() -> None:
    store = HashStore()
    first = await store.put("k", b"a")
    await store.put("k", b"b", first)
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"c", first)
    again = await store.put("k", b"a")
    assert again == first == hashed(store._entry("k"))
    assert await store.get_if_changed("k", first) is None
