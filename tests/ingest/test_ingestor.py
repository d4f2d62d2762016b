"""The writing side of the claiming queue."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ingest.parts import PRODUCERS, batches, document, pending

from forebay.errors import Closed, InvalidKey, Unavailable, UsageError
from forebay.formats import ingest_batch
from forebay.ingest import (
    CommitFailed,
    CommitUnknown,
    Ingestor,
    IngestorConfig,
    ManifestLost,
    PrefixTaken,
    QueueFull,
)
from forebay.kit.clock import SystemClock
from forebay.kit.conditions import ANY
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import as_json
from forebay.kit.retry import RetryPolicy
from forebay.storage import MemoryStore
from forebay.storage._api import Buffer, When
from forebay.testing import World

QUICK = IngestorConfig(flush_interval_ms=0)


class BrokenStore(MemoryStore):
    """Fails puts of keys that contain `broken`."""

    broken = "nothing"

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        if self.broken in key:
            raise Unavailable("down")
        return await super().put(key, data, when)


async def test_entries_are_stored_and_enqueued_as_the_draft_says() -> None:
    store = MemoryStore()
    async with Ingestor(store, QUICK) as ingestor:
        watcher = await ingestor.ingest([b"alpha", b"beta"])
        await watcher.await_durable()
        [location] = await pending(store)
        assert location.startswith("ingest/")
        assert location.endswith(".json")
        assert json.loads((await store.get(location)).data) == ["YWxwaGE=", "YmV0YQ=="]
        assert await document(store, PRODUCERS) == {"pending": [location]}


async def test_a_watcher_is_open_then_true() -> None:
    async with Ingestor(MemoryStore(), IngestorConfig(flush_interval_ms=60_000)) as ingestor:
        watcher = await ingestor.ingest([b"x"])
        assert watcher.result() is None
        await ingestor.flush()
        assert watcher.result() is True


async def test_calls_are_gathered_into_one_batch_in_order() -> None:
    store = MemoryStore()
    async with Ingestor(store, IngestorConfig(flush_interval_ms=60_000)) as ingestor:
        for number in range(5):
            await ingestor.ingest([b"%d" % number, b""])
    [location] = await pending(store)
    entries = ingest_batch.decode((await store.get(location)).data)
    assert entries == [b"0", b"", b"1", b"", b"2", b"", b"3", b"", b"4", b""]


async def test_a_full_batch_does_not_wait_for_the_interval() -> None:
    store = MemoryStore()
    async with Ingestor(store, IngestorConfig(flush_interval_ms=60_000, flush_size_bytes=10)) as ingestor:
        watcher = await ingestor.ingest([b"0123456789"])
        await watcher.await_durable()


async def test_locations_are_enqueued_in_the_order_of_ingestion() -> None:
    store = MemoryStore()
    async with Ingestor(store, IngestorConfig(flush_interval_ms=60_000, flush_size_bytes=1)) as ingestor:
        for number in range(50):
            await ingestor.ingest([b"%d" % number])
    bodies = [ingest_batch.decode((await store.get(key)).data) for key in await pending(store)]
    assert bodies == [[b"%d" % number] for number in range(50)]


async def test_ingest_waits_while_too_many_bytes_are_not_durable() -> None:
    store = BrokenStore()
    store.broken = "manifest"
    config = IngestorConfig(flush_interval_ms=60_000, max_unflushed_bytes=100)
    ingestor = Ingestor(store, config)
    await ingestor.ingest([b"x" * 90])
    waiting = asyncio.create_task(ingestor.ingest([b"y" * 90]))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert ingestor.unflushed_bytes <= 100
    store.broken = "nothing"
    await waiting
    await ingestor.close()
    assert len(await pending(store)) == 2


async def test_one_call_larger_than_the_bound_goes_in_alone() -> None:
    store = MemoryStore()
    async with Ingestor(store, IngestorConfig(flush_interval_ms=0, max_unflushed_bytes=10)) as ingestor:
        await (await ingestor.ingest([b"x" * 1000])).await_durable()
    assert len(await pending(store)) == 1


async def test_a_cancelled_wait_for_room_leaves_nothing_behind() -> None:
    ingestor = Ingestor(MemoryStore(), IngestorConfig(flush_interval_ms=60_000, max_unflushed_bytes=10))
    await ingestor.ingest([b"x" * 10])
    waiting = asyncio.create_task(ingestor.ingest([b"y"]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await ingestor.close()
    assert ingestor.unflushed_bytes == 0


async def test_close_flushes_and_refuses_more() -> None:
    store = MemoryStore()
    ingestor = Ingestor(store, IngestorConfig(flush_interval_ms=60_000))
    watcher = await ingestor.ingest([b"x"])
    await ingestor.close()
    assert watcher.result() is True
    with pytest.raises(Closed):
        await ingestor.ingest([b"y"])
    await ingestor.close()


async def test_a_failed_enqueue_reaches_watcher_and_close() -> None:
    store = BrokenStore()
    store.broken = "manifest"
    impatient = IngestorConfig(flush_interval_ms=0, commit=RetryPolicy(attempts_max=2, base_ms=1))
    ingestor = Ingestor(store, impatient)
    watcher = await ingestor.ingest([b"x"])
    with pytest.raises(CommitFailed):
        await watcher.await_durable()
    with pytest.raises(CommitFailed):
        watcher.result()
    with pytest.raises(CommitFailed):
        await ingestor.close()


async def test_nothing_to_ingest_is_wrong_usage() -> None:
    async with Ingestor(MemoryStore(), QUICK) as ingestor:
        with pytest.raises(UsageError):
            await ingestor.ingest([])


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "a b", "a%b", "a~b", "ä", "a\\b", "a[b]"])
def test_paths_that_some_store_would_change_are_refused(path: str) -> None:
    with pytest.raises(InvalidKey):
        IngestorConfig(data_path_prefix=path)
    with pytest.raises(InvalidKey):
        IngestorConfig(manifest_path=path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flush_size_bytes", 0),
        ("max_unflushed_bytes", 0),
        ("flush_interval_ms", -1),
        ("manifest_bytes_max", 1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=name):
        IngestorConfig(**{name: value})  # type: ignore[arg-type]


async def test_a_deleted_manifest_is_never_made_anew() -> None:
    store = MemoryStore()
    ingestor = Ingestor(store, QUICK)
    await (await ingestor.ingest([b"x"])).await_durable()
    await store.delete([PRODUCERS])
    watcher = await ingestor.ingest([b"y"])
    with pytest.raises(ManifestLost):
        await watcher.await_durable()
    assert await document(store, PRODUCERS) is None
    with pytest.raises(ManifestLost):
        await ingestor.close()


async def test_a_full_queue_pushes_back() -> None:
    store = MemoryStore()
    ingestor = Ingestor(store, IngestorConfig(flush_interval_ms=0, manifest_bytes_max=100))
    for _ in range(2):
        await (await ingestor.ingest([b"x"])).await_durable()
    with pytest.raises(QueueFull):
        await (await ingestor.ingest([b"x"])).await_durable()
    assert len(await pending(store)) == 2
    with pytest.raises(QueueFull):
        await ingestor.close()


async def test_a_prefix_belongs_to_one_manifest() -> None:
    store = MemoryStore()
    async with Ingestor(store, QUICK) as first:
        await first.ingest([b"x"])
    other = Ingestor(store, IngestorConfig(flush_interval_ms=0, manifest_path="other/manifest.json"))
    with pytest.raises(PrefixTaken):
        await (await other.ingest([b"y"])).await_durable()
    with pytest.raises(PrefixTaken):
        await other.close()


async def test_what_was_done_is_counted() -> None:
    registry = MetricsRegistry()
    async with Ingestor(MemoryStore(), QUICK, metrics=registry) as ingestor:
        await (await ingestor.ingest([b"abc", b"d"])).await_durable()
    text = json.dumps(as_json(registry))
    for name in ("ingest.batches_flushed", "ingest.entries_flushed", "ingest.queue_length"):
        assert name in text


def test_a_steady_flush_costs_two_requests() -> None:
    async def main(world: World) -> None:
        async def work(me):  # type: ignore[no-untyped-def]
            async with Ingestor(me.store, QUICK, clock=me.clock, ids=me.ids, randomness=me.random) as out:
                for _ in range(10):
                    await (await out.ingest([b"x"])).await_durable()

        await world.spawn("ann", work).join()

    world = World(seed=1)
    world.run(main)
    # The mark of the prefix and the first look at the manifest come once.
    assert world.requests.count("ann") == 2 * 10 + 2


@pytest.mark.parametrize("kind", ["after", "lost", "late"])
def test_an_append_whose_answer_was_lost_is_enqueued_exactly_once(kind: str) -> None:
    async def main(world: World) -> list[str]:
        async def work(me):  # type: ignore[no-untyped-def]
            out = Ingestor(me.store, QUICK, clock=me.clock, ids=me.ids, randomness=me.random)
            await (await out.ingest([b"x"])).await_durable()
            await (await out.ingest([b"y"])).await_durable()

            watcher = await out.ingest([b"z"])
            while len(await batches(world.bucket)) < 3:
                await me.clock.sleep(0.001)
            world.fail_next(me, "put", kind)
            await watcher.await_durable()
            await out.close()

        await world.spawn("ann", work).join()
        await world.clock().sleep(60)
        return await pending(world.bucket)

    found = World(seed=3).run(main)
    assert len(found) == 3
    assert len(set(found)) == 3


def test_an_upload_that_waited_too_long_is_uploaded_anew() -> None:
    async def main(world: World) -> tuple[list[str], list[str]]:
        async def work(me):  # type: ignore[no-untyped-def]
            config = IngestorConfig(flush_interval_ms=0, upload_age_max_ms=10)  # uploads alone take 60 ms
            async with Ingestor(me.store, config, clock=me.clock, ids=me.ids, randomness=me.random) as out:
                await (await out.ingest([b"x"])).await_durable()

        await world.spawn("ann", work).join()
        return await pending(world.bucket), await batches(world.bucket)

    enqueued, stored = World(seed=1).run(main)
    assert len(enqueued) == 1
    assert len(stored) == 2
    assert enqueued[0] == stored[1]


def test_an_enqueue_nobody_can_tell_is_reported_as_unknown() -> None:
    async def main(world: World) -> str:
        async def work(me):  # type: ignore[no-untyped-def]
            policy = RetryPolicy(attempts_max=3)
            config = IngestorConfig(flush_interval_ms=0, commit=policy)
            out = Ingestor(me.store, config, clock=me.clock, ids=me.ids, randomness=me.random)
            await (await out.ingest([b"x"])).await_durable()
            watcher = await out.ingest([b"y"])
            await me.clock.sleep(0)
            while len(await batches(world.bucket)) < 2:
                await me.clock.sleep(0.001)
            world.partition(me, "store")
            try:
                await watcher.await_durable()
            except CommitUnknown:
                return "unknown"
            return "known"

        return str(await world.spawn("ann", work).join())

    assert World(seed=1, timeout_s=5).run(main) == "unknown"


@given(st.lists(st.lists(st.binary(max_size=8), min_size=1, max_size=4), min_size=1, max_size=8))
def test_every_entry_is_stored_once_and_in_order(calls: list[list[bytes]]) -> None:
    async def work() -> list[bytes]:
        store = MemoryStore()
        config = IngestorConfig(flush_interval_ms=0, flush_size_bytes=6)
        async with Ingestor(store, config) as ingestor:
            for call in calls:
                await ingestor.ingest(call)
        found = [ingest_batch.decode((await store.get(key)).data) for key in await pending(store)]
        return [entry for batch in found for entry in batch]

    assert asyncio.run(work()) == [entry for call in calls for entry in call]


@pytest.mark.parametrize("entries", ["text", b"bytes", ["text"], [b"fine", None], [7], [[b"nested"]]])
async def test_what_is_not_bytes_is_refused_and_spoils_nothing(entries: object) -> None:
    """Text would be JSON too, and durable, and no collector could ever read it."""
    store = MemoryStore()
    async with Ingestor(store, IngestorConfig(flush_interval_ms=60_000)) as ingestor:
        watcher = await ingestor.ingest([b"good"])
        with pytest.raises(UsageError):
            await ingestor.ingest(entries)  # type: ignore[arg-type]
    assert watcher.result()
    [location] = await pending(store)
    assert ingest_batch.decode((await store.get(location)).data) == [b"good"]


async def test_an_entry_that_its_caller_changes_later_is_stored_as_it_was() -> None:
    store, entry = MemoryStore(), bytearray(b"before")
    async with Ingestor(store, IngestorConfig(flush_interval_ms=60_000)) as ingestor:
        await ingestor.ingest([entry])  # type: ignore[list-item]
        entry[:] = b"after!"
    [location] = await pending(store)
    assert ingest_batch.decode((await store.get(location)).data) == [b"before"]


@pytest.mark.parametrize("path", [".", "..", "a/../b", "./a"])
def test_a_path_that_climbs_is_refused(path: str) -> None:
    with pytest.raises(InvalidKey):
        IngestorConfig(data_path_prefix=path)


class PassingClock(SystemClock):
    """Time that passes with every look at it: a loop that does nothing but ingest takes time too."""

    seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 0.000_1
        return self.seconds


async def test_a_loop_that_only_ingests_keeps_nobody_from_uploading() -> None:
    config = IngestorConfig(flush_interval_ms=5)
    async with Ingestor(MemoryStore(), config, clock=PassingClock()) as ingestor:
        first = await ingestor.ingest([b"first"])
        for _ in range(2_000):
            await ingestor.ingest([b"more"])
        assert first.result() is True


@pytest.mark.parametrize("entries", [(each for each in [b"x"]), iter([b"x"]), {b"x"}, {b"x": 1}, None, 5])
async def test_entries_are_a_sequence_and_nothing_else_is_called_durable(entries: Any) -> None:
    """A generator is empty once it was looked through, so nothing of it would be stored."""
    store = MemoryStore()
    async with Ingestor(store, QUICK) as ingestor:
        with pytest.raises(UsageError):
            await ingestor.ingest(entries)
    assert await pending(store) == []
