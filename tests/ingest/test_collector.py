"""The reading side of the claiming queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from tests.ingest.parts import (
    CONSUMERS,
    HandClock,
    batches,
    claimed,
    collector,
    document,
    done,
    fill,
    pending,
)

from forebay.errors import Closed, Unavailable, UsageError
from forebay.formats import Corrupt
from forebay.ingest import BatchMissing, ClaimLost, Collector, CollectorConfig, CommitFailed, ManifestLost
from forebay.kit.conditions import ANY
from forebay.kit.retry import RetryPolicy
from forebay.storage import DeleteResult, MemoryStore, StoredObject
from forebay.storage._api import Buffer, When


class FaultyStore(MemoryStore):
    """Fails what it is told to fail, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()
        self.gets: list[str] = []
        self.undeletable: set[str] = set()

    async def get(self, key: str) -> StoredObject:
        self.gets.append(key)
        if "get" in self.failing and "manifest" not in key:
            raise Unavailable("no reads")
        return await super().get(key)

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        if "put" in self.failing:
            raise Unavailable("no writes")
        return await super().put(key, data, when)

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        if "delete" in self.failing:
            raise Unavailable("no deletes")
        results = await super().delete([key for key in keys if key not in self.undeletable])
        return results + [DeleteResult(key, Unavailable("stuck")) for key in keys if key in self.undeletable]


ONCE = RetryPolicy(attempts_max=1)


async def test_an_empty_queue_gives_nothing_and_writes_nothing() -> None:
    store = MemoryStore()
    async with collector(store) as reader:
        assert await reader.next_batch() is None
    assert [info.key async for info in store.list()] == []


async def test_batches_come_in_order_with_their_entries() -> None:
    store = MemoryStore()
    locations = await fill(store, 3)
    async with collector(store) as reader:
        found = [await reader.next_batch() for _ in range(4)]
    assert [batch and (batch.location, batch.entries) for batch in found] == [
        (locations[0], [b"0"]),
        (locations[1], [b"1"]),
        (locations[2], [b"2"]),
        None,
    ]


async def test_the_manifests_are_the_drafts_at_every_step() -> None:
    store = MemoryStore()
    clock = HandClock()
    [location] = await fill(store, 1)
    async with collector(store, clock) as reader:
        batch = await reader.next_batch()
        assert await document(store, CONSUMERS) == {"claimed": {location: clock.now_ms()}, "done": []}
        assert batch is not None
        await reader.ack(batch)
        assert await document(store, CONSUMERS) == {"claimed": {}, "done": [location]}
        assert await pending(store) == [location]


async def test_two_collectors_share_a_queue() -> None:
    store = MemoryStore()
    locations = await fill(store, 4)
    async with collector(store) as one, collector(store) as two:
        found = []
        for _ in range(2):
            for reader in (one, two):
                batch = await reader.next_batch()
                assert batch is not None
                found.append(batch.location)
                await reader.ack(batch)
        assert await one.next_batch() is None
    assert sorted(found) == sorted(locations)


async def test_at_the_threshold_entries_and_objects_are_removed() -> None:
    store = MemoryStore()
    await fill(store, 5)
    async with collector(store, done_cleanup_threshold=3) as reader:
        for _ in range(3):
            batch = await reader.next_batch()
            assert batch is not None
            await reader.ack(batch)
        assert await done(store) == []
        assert len(await pending(store)) == 2
        assert await batches(store) == await pending(store)


async def test_a_batch_may_be_named_batch_as_in_the_drafts_examples() -> None:
    store = MemoryStore()
    location = "data/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    await store.put(location, b'["eA=="]')
    await store.put("ingest/manifest.json", json.dumps({"pending": [location]}).encode())
    async with collector(store, done_cleanup_threshold=1) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        assert batch.entries == [b"x"]
        await reader.ack(batch)
    assert await pending(store) == []
    assert [info.key async for info in store.list("data/")] == []


async def test_cleanup_never_deletes_what_is_not_named_like_a_batch() -> None:
    store = MemoryStore()
    await store.put("precious/table", b'["eA=="]')
    await store.put("ingest/manifest.json", json.dumps({"pending": ["precious/table"]}).encode())
    async with collector(store, done_cleanup_threshold=1) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
    assert (await store.get("precious/table")).data == b'["eA=="]'
    assert await pending(store) == []


async def test_the_heartbeat_comes_at_a_third_of_the_timeout() -> None:
    store = MemoryStore()
    clock = HandClock()
    [location] = await fill(store, 1)
    async with collector(store, clock, heartbeat_timeout_ms=30_000) as reader:
        await reader.next_batch()
        first = (await claimed(store))[location]
        await clock.turn(9.9)
        assert (await claimed(store))[location] == first
        await clock.turn(0.2)
        assert (await claimed(store))[location] == first + 10_100


async def test_one_heartbeat_write_renews_all_claims() -> None:
    store = MemoryStore()
    clock = HandClock()
    await fill(store, 3)
    async with collector(store, clock) as reader:
        for _ in range(3):
            await reader.next_batch()
        before = (await store.head(CONSUMERS)).version
        await clock.turn(10)
        assert len(set((await claimed(store)).values())) == 1
        after = (await store.head(CONSUMERS)).version
    assert int(after.rpartition("-")[2]) == int(before.rpartition("-")[2]) + 1


async def test_a_heartbeat_that_fails_is_tried_again_and_the_claim_lives() -> None:
    store = FaultyStore()
    clock = HandClock()
    await fill(store, 1)
    async with collector(store, clock, commit=ONCE) as reader:
        batch = await reader.next_batch()
        store.failing.add("put")
        await clock.turn(10)
        store.failing.clear()
        await clock.turn(10)
        await clock.turn(20)
        assert batch is not None
        assert not batch.lost
        await reader.ack(batch)


async def test_given_back_means_free_at_once() -> None:
    store = MemoryStore()
    await fill(store, 1)
    async with collector(store) as one, collector(store) as two:
        batch = await one.next_batch()
        assert batch is not None
        assert await two.next_batch() is None
        await one.give_back(batch)
        again = await two.next_batch()
        assert again is not None
        assert again.location == batch.location
        with pytest.raises(ClaimLost):
            await one.ack(batch)


async def test_close_gives_everything_back() -> None:
    store = MemoryStore()
    await fill(store, 2)
    reader = collector(store)
    batch = await reader.next_batch()
    await reader.next_batch()
    assert reader.in_flight == 2
    await reader.close()
    await reader.close()
    assert await claimed(store) == {}
    assert batch is not None
    with pytest.raises(Closed):
        await reader.ack(batch)
    with pytest.raises(Closed):
        await reader.next_batch()


async def test_close_succeeds_when_the_store_is_down() -> None:
    store = FaultyStore()
    await fill(store, 1)
    reader = collector(store, commit=ONCE)
    await reader.next_batch()
    store.failing.add("put")
    await reader.close()


async def test_a_failed_ack_changes_nothing_and_can_be_repeated() -> None:
    store = FaultyStore()
    await fill(store, 1)
    async with collector(store, commit=ONCE) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        store.failing.add("put")
        with pytest.raises(CommitFailed):
            await reader.ack(batch)
        assert reader.in_flight == 1
        store.failing.clear()
        await reader.ack(batch)
        assert await done(store) == [batch.location]


async def test_an_ack_twice_is_harmless() -> None:
    store = MemoryStore()
    await fill(store, 1)
    async with collector(store) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
        await reader.ack(batch)
        assert await done(store) == [batch.location]


async def test_a_batch_that_cannot_be_read_is_given_back() -> None:
    store = FaultyStore()
    await fill(store, 1)
    async with collector(store, read=ONCE) as reader:
        store.failing.add("get")
        with pytest.raises(Unavailable):
            await reader.next_batch()
        assert await claimed(store) == {}
        store.failing.clear()
        assert await reader.next_batch() is not None


async def test_a_damaged_batch_is_named_and_given_back() -> None:
    store = MemoryStore()
    [location] = await fill(store, 1)
    await store.put(location, b'["truncated')
    async with collector(store) as reader:
        with pytest.raises(Corrupt, match=location):
            await reader.next_batch()
    assert await claimed(store) == {}


async def test_a_missing_batch_is_an_error_by_default() -> None:
    store = MemoryStore()
    locations = await fill(store, 2)
    await store.delete(locations[:1])
    async with collector(store) as reader:
        with pytest.raises(BatchMissing) as caught:
            await reader.next_batch()
        assert caught.value.location == locations[0]
    assert await claimed(store) == {}
    assert await pending(store) == locations


async def test_a_missing_batch_can_be_skipped() -> None:
    store = MemoryStore()
    locations = await fill(store, 2)
    await store.delete(locations[:1])
    async with collector(store, missing="skip") as reader:
        batch = await reader.next_batch()
        assert batch is not None
        assert batch.location == locations[1]
        assert await done(store) == [locations[0]]


async def test_a_failed_cleanup_does_not_fail_the_ack_and_is_made_up_for() -> None:
    store = FaultyStore()
    await fill(store, 2)
    async with collector(store, done_cleanup_threshold=1) as reader:
        store.failing.add("delete")
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
        assert len(await done(store)) == 1
        store.failing.clear()
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
    assert (await done(store), await pending(store), await batches(store)) == ([], [], [])


async def test_what_could_not_be_deleted_stays_in_both_manifests() -> None:
    store = FaultyStore()
    locations = await fill(store, 2)
    store.undeletable.add(locations[0])
    async with collector(store, done_cleanup_threshold=2) as reader:
        for _ in range(2):
            batch = await reader.next_batch()
            assert batch is not None
            await reader.ack(batch)
    assert await pending(store) == [locations[0]]
    assert await done(store) == [locations[0]]


async def test_an_idle_collector_finishes_the_cleanup_of_a_dead_one() -> None:
    store = MemoryStore()
    locations = await fill(store, 2)
    await store.put(CONSUMERS, json.dumps({"claimed": {}, "done": locations}).encode())
    async with collector(store, done_cleanup_threshold=2) as reader:
        assert await reader.next_batch() is None
    assert (await pending(store), await done(store), await batches(store)) == ([], [], [])


async def test_a_deleted_consumer_manifest_is_never_made_anew() -> None:
    store = MemoryStore()
    await fill(store, 2)
    async with collector(store) as reader:
        batch = await reader.next_batch()
        await store.delete([CONSUMERS])
        assert batch is not None
        with pytest.raises(ManifestLost):
            await reader.ack(batch)
        with pytest.raises(ManifestLost):
            await reader.next_batch()


async def test_a_damaged_manifest_is_refused_and_left_alone() -> None:
    store = MemoryStore()
    await store.put("ingest/manifest.json", b"{")
    async with collector(store) as reader:
        with pytest.raises(Corrupt, match=r"ingest/manifest\.json"):
            await reader.next_batch()
    assert (await store.get("ingest/manifest.json")).data == b"{"


async def test_a_cancelled_read_lets_its_claim_lapse() -> None:
    class Slow(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            if "manifest" not in key:
                await asyncio.Event().wait()
            return await super().get(key)

    store = Slow()
    await fill(store, 1)
    async with collector(store) as reader:
        reading = asyncio.create_task(reader.next_batch())
        for _ in range(20):
            await asyncio.sleep(0)
        assert reader.in_flight == 1
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert reader.in_flight == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"heartbeat_timeout_ms": 1},
        {"heartbeat_timeout_ms": float("nan")},
        {"done_cleanup_threshold": 0},
        {"missing": "perhaps"},
        {"manifest_path": "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.json"},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        CollectorConfig(**settings)  # type: ignore[arg-type]


async def test_a_collector_works_with_nothing_but_a_store() -> None:
    store = MemoryStore()
    await fill(store, 1)
    async with Collector(store) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
