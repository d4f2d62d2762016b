"""Safety question 8: uploads that nobody enqueued, collected without ever touching anything else."""

from __future__ import annotations

import json
import random

import pytest
from tests.ingest.parts import PRODUCERS, HandClock, batches, collector, fill, pending

from forebay.errors import UsageError
from forebay.ingest import (
    CollectorConfig,
    IngestorConfig,
    ManifestLost,
    OrphanCollector,
    OrphanConfig,
    PrefixTaken,
)
from forebay.kit.ids import IdSource
from forebay.storage import MemoryStore

GRACE_S = 600.0


def orphan(clock: HandClock, prefix: str = "ingest") -> str:
    return f"{prefix}/{IdSource(clock, random.Random(7)).ulid()}.json"


async def queue_with_orphan(clock: HandClock) -> tuple[MemoryStore, str]:
    store = MemoryStore(clock)
    await fill(store, 1)
    key = orphan(clock)
    await store.put(key, b"[]")
    return store, key


def orphans(store: MemoryStore, clock: HandClock, **settings: object) -> OrphanCollector:
    return OrphanCollector(store, OrphanConfig(**settings), clock=clock)  # type: ignore[arg-type]


async def test_8_an_upload_that_nobody_enqueued_is_deleted_after_the_grace_period() -> None:
    clock = HandClock()
    store, key = await queue_with_orphan(clock)
    await clock.turn(GRACE_S)
    report = await orphans(store, clock).collect()
    assert report.deleted == [key]
    assert await batches(store) == await pending(store)


async def test_8_a_young_upload_stays() -> None:
    clock = HandClock()
    store, key = await queue_with_orphan(clock)
    await clock.turn(GRACE_S - 1)
    report = await orphans(store, clock).collect()
    assert report.deleted == []
    assert report.kept[key] == "younger than the grace period"


async def test_8_the_age_counts_by_the_stores_clock_too() -> None:
    clock = HandClock()
    store = MemoryStore(clock)
    await fill(store, 1)
    key = orphan(HandClock(now_ms=1_000_000_000_000))  # named by a machine whose clock is years behind
    await store.put(key, b"[]")
    report = await orphans(store, clock).collect()
    assert key in report.kept


async def test_8_a_dry_run_deletes_nothing_and_says_what_it_would() -> None:
    clock = HandClock()
    store, key = await queue_with_orphan(clock)
    await clock.turn(GRACE_S)
    assert (await orphans(store, clock).collect(dry_run=True)).deleted == [key]
    assert key in await batches(store)


async def test_8_everything_named_by_either_manifest_stays() -> None:
    clock = HandClock()
    store, key = await queue_with_orphan(clock)
    await fill(store, 2)
    async with collector(store) as reader:
        batch = await reader.next_batch()
        assert batch is not None
        await reader.ack(batch)
        await reader.next_batch()
        await clock.turn(GRACE_S)
        report = await orphans(store, clock).collect()
    assert report.deleted == [key]
    assert await batches(store) == sorted(await pending(store))


async def test_8_without_the_mark_of_its_owner_a_prefix_is_not_touched() -> None:
    clock = HandClock()
    store, key = await queue_with_orphan(clock)
    await store.delete(["ingest/forebay-owner.json"])
    await clock.turn(GRACE_S)
    with pytest.raises(UsageError):
        await orphans(store, clock).collect()
    assert key in await batches(store)


async def test_8_a_mistyped_manifest_deletes_nothing() -> None:
    clock = HandClock()
    store, _ = await queue_with_orphan(clock)
    await clock.turn(GRACE_S)
    before = await batches(store)
    with pytest.raises(PrefixTaken):
        await orphans(store, clock, manifest_path="ingest/manifset.json").collect()
    assert await batches(store) == before


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]"])
async def test_8_a_missing_or_damaged_manifest_is_not_an_empty_one(damage: bytes | None) -> None:
    clock = HandClock()
    store, _ = await queue_with_orphan(clock)
    await clock.turn(GRACE_S)
    before = await batches(store)
    await store.delete([PRODUCERS])
    if damage is not None:
        await store.put(PRODUCERS, damage)
    with pytest.raises((ManifestLost, Exception)) as caught:
        await orphans(store, clock).collect()
    assert type(caught.value).__name__ in ("ManifestLost", "Corrupt")
    assert await batches(store) == before


async def test_8_only_direct_children_named_like_batches_are_looked_at() -> None:
    clock = HandClock()
    store, key = await queue_with_orphan(clock)
    strangers = [
        orphan(clock, "ingest/other/queue"),
        orphan(clock, "ingest2"),
        "ingest/readme.json",
        "ingest/x.batch",
    ]
    for stranger in strangers:
        await store.put(stranger, b"[]")
    await clock.turn(GRACE_S)
    report = await orphans(store, clock).collect()
    assert report.deleted == [key]
    found = [info.key async for info in store.list()]
    assert set(strangers) <= set(found)


async def test_8_what_is_enqueued_between_listing_and_deleting_stays() -> None:
    clock = HandClock()

    class Raced(MemoryStore):
        heads = 0

        async def get_if_changed(self, key, version):  # type: ignore[no-untyped-def]
            if key == PRODUCERS and not self.heads:
                self.heads += 1
                found = json.loads((await self.get(PRODUCERS)).data)
                await self.put(
                    PRODUCERS, json.dumps({"pending": [*found["pending"], key_of_orphan]}).encode()
                )
            return await super().get_if_changed(key, version)

    store = Raced(clock)
    await fill(store, 1)
    key_of_orphan = orphan(clock)
    await store.put(key_of_orphan, b"[]")
    await clock.turn(GRACE_S)
    report = await orphans(store, clock).collect()
    assert report.deleted == []
    assert report.kept[key_of_orphan] == "in the queue"


def test_an_ingestor_gives_up_its_name_at_half_the_grace_period() -> None:
    assert IngestorConfig().upload_age_max_ms * 2 <= OrphanConfig().grace_ms
    assert CollectorConfig().manifest_path == OrphanConfig().manifest_path == IngestorConfig().manifest_path
