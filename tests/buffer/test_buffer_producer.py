"""The producer: what becomes of calls, when, and what is told to whom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from tests.buffer.scripted_store import ScriptedStore

from forebay.buffer import (
    BufferConfig,
    CommitFailed,
    Consumer,
    Durable,
    Producer,
    Reader,
    UploadFailed,
)
from forebay.errors import (
    Backpressure,
    Closed,
    LimitExceeded,
    NotDone,
    OutcomeUnknown,
    Unavailable,
    UsageError,
)
from forebay.formats import buffer_batch, buffer_manifest
from forebay.kit import MetricsRegistry, RetryPolicy, SystemClock
from forebay.kit.conditions import ANY
from forebay.storage import MemoryStore, open_store
from forebay.storage._api import Buffer, When
from forebay.testing import Actor, World

CONFIG = BufferConfig(
    flush_interval_ms=5,
    gc_enabled=False,
    upload_retry=RetryPolicy(attempts_max=2, base_ms=1, cap_ms=1),
    commit_retry=RetryPolicy(attempts_max=2, base_ms=1, cap_ms=1),
)


async def batches(store: MemoryStore) -> list[list[bytes]]:
    reader = Reader(CONFIG, store=store)
    return [list((await reader.read(entry)).entries) for entry in await reader.entries()]


async def test_a_watcher_is_open_until_the_records_are_in_the_queue() -> None:
    store = MemoryStore()
    async with Producer(CONFIG, store=store) as producer:
        handle = await producer.produce([b"a", b"b"], b"meta")
        assert handle.watcher.result() is None
        durable = await handle.watcher.await_durable()
        assert handle.watcher.result() == durable
        entry = (await Reader(CONFIG, store=store).entries())[durable.sequence]
        assert entry.location == durable.location
        assert entry.metadata == (buffer_manifest.Metadata(0, handle.ingestion_time_ms, b"meta"),)
    assert await batches(store) == [[b"a", b"b"]]


async def test_calls_of_one_batch_keep_order_and_their_own_metadata() -> None:
    store = MemoryStore()
    async with Producer(CONFIG, store=store) as producer:
        handles = [await producer.produce([f"{n}".encode()] * (n + 1), f"m{n}".encode()) for n in range(3)]
        await producer.flush()
    assert [handle.watcher.result() for handle in handles] == [
        Durable(0, handles_location(handles[0].watcher.result()), start, count)
        for start, count in ((0, 1), (1, 2), (3, 3))
    ]
    [entry] = await Reader(CONFIG, store=store).entries()
    assert [(item.start_index, item.payload) for item in entry.metadata] == [
        (0, b"m0"),
        (1, b"m1"),
        (3, b"m2"),
    ]


def handles_location(durable: Durable | None) -> str:
    assert durable is not None
    return durable.location


async def test_batches_and_manifest_are_the_bytes_of_the_specification() -> None:
    store = MemoryStore()
    async with Producer(replace(CONFIG, batch_compression="zstd"), store=store) as producer:
        handle = await producer.produce([b"a", b""], b"x")
        durable = await handle.watcher.await_durable()
    assert (await store.get(durable.location)).data == buffer_batch.encode([b"a", b""], "zstd")
    expected = buffer_manifest.append(
        buffer_manifest.EMPTY,
        [
            buffer_manifest.NewEntry(
                durable.location, (buffer_manifest.Metadata(0, handle.ingestion_time_ms, b"x"),)
            )
        ],
    )
    assert (await store.get("ingest/manifest")).data == expected.data


async def test_arrow_arrays_are_records_too() -> None:
    store = MemoryStore()
    async with Producer(CONFIG, store=store) as producer:
        await producer.produce(pa.array([b"a", b"bc"], pa.binary()))
    assert await batches(store) == [[b"a", b"bc"]]


@pytest.mark.parametrize("entries", [[], b"abc", "abc", pa.array([], pa.binary())])
async def test_a_call_without_a_list_of_records_is_refused(entries: Sequence[bytes]) -> None:
    async with Producer(CONFIG, store=MemoryStore()) as producer:
        with pytest.raises(UsageError):
            await producer.produce(entries, b"meta")
        await producer.produce([b""])


@pytest.mark.parametrize(
    ("entries", "metadata"), [(None, b""), (7, b""), ([b"a"], None), ([b"a"], "text"), (iter([b"a"]), b"")]
)
async def test_what_is_no_list_of_records_or_no_metadata_is_refused_with_its_type(
    entries: Any, metadata: Any
) -> None:
    async with Producer(CONFIG, store=MemoryStore()) as producer:
        with pytest.raises(UsageError, match=r"entries is|metadata is"):
            await producer.produce(entries, metadata)
        assert producer.pending_inputs == 0


async def test_calls_whose_metadata_would_fill_the_manifest_are_spread_over_batches() -> None:
    config = replace(CONFIG, flush_interval_ms=60_000, manifest_append_bytes_max=10_000)
    store = MemoryStore()
    async with Producer(config, store=store) as producer:
        handles = [await producer.produce([b"%d" % n], bytes(400)) for n in range(20)]
    assert len({handle.watcher.result() for handle in handles}) == 20
    entries = await Reader(config, store=store).entries()
    assert [len(entry.metadata) for entry in entries] == [6, 6, 6, 2]


async def test_a_call_whose_metadata_no_manifest_can_hold_is_refused_before_it_is_accepted() -> None:
    config = replace(CONFIG, manifest_append_bytes_max=1_024)
    store = MemoryStore()
    async with Producer(config, store=store) as producer:
        largest = 0
        for size in range(1_024, 0, -1):
            try:
                await producer.produce([b"x"], bytes(size))
                largest = size
                break
            except LimitExceeded:
                pass
        await producer.flush()
    assert len((await store.get("ingest/manifest")).data) == 1_024 and largest > 800


async def test_the_producer_tells_of_itself_under_the_names_of_the_go_producer() -> None:
    config = replace(CONFIG, flush_interval_ms=60_000, max_buffered_inputs=2)
    async with Producer(config, store=MemoryStore()) as producer:
        metrics = MetricsSeen(producer.metrics.registry)
        await producer.produce([b"a"])
        assert metrics("inflight_bytes") > 0 and metrics("oldest_unflushed_batch_age_seconds") > 0
        for _ in range(3):
            await producer.produce([b"a"])
        await producer.flush()
        assert metrics("batch_outcome", outcome="committed") >= 2
        assert metrics("appendch_block_seconds") >= 1, "how often somebody waited"
        for name in ("encode", "upload", "manifest_append"):
            assert metrics(f"{name}_duration_seconds") >= 1
        assert metrics("head_of_line_block_seconds") >= 2 and metrics("manifest_append_batch_size") >= 1
        for name in (
            "encode_workers_busy",
            "upload_workers_busy",
            "halted",
            "inflight_bytes",
            "inflight_batches",
            "queue_depth",
            "oldest_unflushed_batch_age_seconds",
        ):
            assert metrics(name) == 0, name


class MetricsSeen:
    """Values of `buffer.producer.*`; of a histogram the number of observations."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry

    def __call__(self, name: str, **labels: str) -> float:
        [family] = [each for each in self._registry.families() if each.name == f"buffer.producer.{name}"]
        [value] = [
            series.value for key, series in family.series() if all(value in key for value in labels.values())
        ]
        return value if isinstance(value, (int, float)) else value.count


async def test_one_wrong_call_does_not_spoil_the_batch_of_others() -> None:
    store = MemoryStore()
    async with Producer(replace(CONFIG, flush_interval_ms=60_000), store=store) as producer:
        records: list[bytes] = [b"mine"]
        await producer.produce(records)
        records.append(b"changed afterwards")
        with pytest.raises(UsageError, match="a record is str"):
            await producer.produce([b"a", "text"])  # type: ignore[list-item, unused-ignore]
        await producer.produce([bytearray(b"yours"), b""])
        await producer.produce(pa.array([b"arrow"], pa.binary()))
    assert await batches(store) == [[b"mine", b"yours", b"", b"arrow"]]


async def test_a_size_trigger_does_not_wait_for_the_interval() -> None:
    config = replace(CONFIG, flush_interval_ms=60_000, flush_size_bytes=100)
    async with Producer(config, store=MemoryStore()) as producer:
        handle = await producer.produce([bytes(100)])
        await handle.watcher.await_durable()


def test_merging_makes_one_item_of_equal_neighbours() -> None:
    async def run(world: World) -> int:
        async def produce(me: Actor) -> None:
            config = replace(CONFIG, merge_metadata=True, flush_interval_ms=1_000)
            async with Producer(
                config, me.clock, store=me.store, ids=me.ids, randomness=me.random
            ) as producer:
                for payload in (b"a", b"a", b"b"):
                    await producer.produce([b"record"], payload)

        await world.spawn("producer", produce).join()
        manifest = buffer_manifest.decode((await world.bucket.get("ingest/manifest")).data)
        return len(manifest.entries[0].metadata)

    assert World(1).run(run) == 2


async def test_extensions_tell_size_checksum_producer_and_number() -> None:
    store = MemoryStore()
    async with Producer(replace(CONFIG, entry_extension=True), store=store) as producer:
        for record in (b"a", b"b"):
            await producer.produce([record])
            await producer.flush()
    first, second = [entry.extension() for entry in await Reader(CONFIG, store=store).entries()]
    assert first is not None and second is not None
    data = (await store.get((await Reader(CONFIG, store=store).entries())[0].location)).data
    assert (first.object_bytes, first.crc32c, first.record_count) == (len(data), crc32c(data), 1)
    assert first.producer_id == second.producer_id and (first.ordinal, second.ordinal) == (0, 1)


@pytest.mark.parametrize("word", ["after", "refused", "lost"])
async def test_a_lost_reply_neither_loses_nor_doubles_an_entry(word: str) -> None:
    store = ScriptedStore()
    store.script.append(word)
    async with Producer(CONFIG, store=store) as producer:
        durable = await (await producer.produce([b"once"])).watcher.await_durable()
    assert durable.sequence == 0 and await batches(store) == [[b"once"]]


async def test_a_flush_costs_two_requests() -> None:
    store = ScriptedStore()
    async with Producer(CONFIG, store=store) as producer:
        for number in range(10):
            await producer.produce([bytes(number)])
            await producer.flush()
    assert store.counts["put"] == store.counts["manifest.put"] == 10
    assert store.counts["manifest.get"] == 1


async def test_flush_and_close_raise_what_only_watchers_were_told() -> None:
    store = ScriptedStore()
    producer = Producer(CONFIG, store=store)
    store.script.extend(["before"] * 10)
    handle = await producer.produce([b"a"])
    with pytest.raises(CommitFailed):
        await handle.watcher.await_durable()
    with pytest.raises(CommitFailed):
        await producer.flush()
    with pytest.raises(CommitFailed):
        handle.watcher.result()
    await producer.produce([b"b"])
    with pytest.raises(CommitFailed):
        await producer.close()
    await producer.close()
    with pytest.raises(Closed):
        await producer.produce([b"c"])


class FailingUploads(MemoryStore):
    """The first uploads fail for good."""

    fail = 2

    async def put(self, key: str, data: Buffer, when: When = "any version") -> str:
        if key.endswith(".batch") and self.fail:
            self.fail -= 1
            raise Unavailable("no")
        return await super().put(key, data) if key.endswith(".batch") else await super().put(key, data, when)


async def test_a_failed_upload_is_told_and_holds_up_nobody() -> None:
    store = FailingUploads()
    producer = Producer(CONFIG, store=store)
    first = await producer.produce([b"lost"])
    with pytest.raises(UploadFailed) as caught:
        await first.watcher.await_durable()
    assert isinstance(caught.value, NotDone)
    await (await producer.produce([b"kept"])).watcher.await_durable()
    with pytest.raises(UploadFailed):
        await producer.close()
    assert await batches(store) == [[b"kept"]]


async def test_bytes_with_their_framing_and_calls_are_bounded() -> None:
    config = replace(CONFIG, max_buffered_bytes=100, max_buffered_inputs=3, flush_interval_ms=60_000)
    async with Producer(config, store=MemoryStore()) as producer:
        with pytest.raises(LimitExceeded):
            await producer.produce([bytes(81)])
        producer.produce_nowait([bytes(80)])
        assert (producer.pending_bytes, producer.pending_inputs) == (100, 1)
        with pytest.raises(Backpressure):
            producer.produce_nowait([b""])
        waiting = asyncio.create_task(producer.produce([b"x"]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await producer.flush()
        assert (producer.pending_bytes, producer.pending_inputs) == (0, 0)


async def test_an_error_in_the_block_does_not_cost_what_was_accepted() -> None:
    store = MemoryStore()
    with pytest.raises(RuntimeError, match="mine"):
        async with Producer(CONFIG, store=store) as producer:
            await producer.produce([b"kept"])
            raise RuntimeError("mine")
    assert await batches(store) == [[b"kept"]]


async def test_a_cancelled_close_answers_every_watcher_and_tells_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called = asyncio.Event()

    class Stuck(MemoryStore):
        async def put(self, key: str, data: Buffer, when: When = "any version") -> str:
            called.set()
            await asyncio.Event().wait()
            raise AssertionError

    producer = Producer(replace(CONFIG, flush_interval_ms=60_000), store=Stuck())
    handle = await producer.produce([b"a"])
    closing = asyncio.create_task(producer.close())
    await called.wait()
    closing.cancel()
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await closing
    assert "1 calls were not durable" in caplog.text
    with pytest.raises(Closed):
        await handle.watcher.await_durable()


class HeldStore(MemoryStore):
    """The first put of the manifest and those of batches with `late` in them wait to be let go."""

    def __init__(self) -> None:
        super().__init__()
        self.manifest_tried, self.manifest_free, self.late_free = (asyncio.Event() for _ in range(3))
        self.begun: dict[bytes, asyncio.Event] = {}
        self.stored: dict[bytes, asyncio.Event] = {}

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        if key == CONFIG.manifest_path:
            if not self.manifest_tried.is_set():
                self.manifest_tried.set()
                await self.manifest_free.wait()
                raise Unavailable("once")
            return await super().put(key, data, when)
        record = buffer_batch.decode(bytes(data))[0]
        self.begun.setdefault(record, asyncio.Event()).set()
        if record == b"late":
            await self.late_free.wait()
        version = await super().put(key, data, when)
        self.stored.setdefault(record, asyncio.Event()).set()
        return version


async def test_what_a_cancelled_close_calls_not_done_is_not_done() -> None:
    """What a commit under way may have taken along is unknown, not undone."""
    store = HeldStore()
    config = replace(CONFIG, flush_interval_ms=0, commit_retry=RetryPolicy(attempts_max=5, base_ms=1))
    producer = Producer(config, store=store)
    handles = {b"first": await producer.produce([b"first"])}
    await store.manifest_tried.wait()
    handles[b"ready"] = await producer.produce([b"ready"])
    await store.stored.setdefault(b"ready", asyncio.Event()).wait()
    handles[b"late"] = await producer.produce([b"late"])
    await store.begun.setdefault(b"late", asyncio.Event()).wait()
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    store.late_free.set()
    await store.stored.setdefault(b"late", asyncio.Event()).wait()
    store.manifest_free.set()
    await handles[b"first"].watcher.await_durable()
    told_undone = set()
    for record, handle in handles.items():
        with contextlib.suppress(OutcomeUnknown):
            try:
                handle.watcher.result()
            except Closed:
                told_undone.add(record)
    assert told_undone == {b"late"}
    assert [b"late"] not in await batches(store)
    assert isinstance(handles[b"ready"].watcher._ticket.exception(), OutcomeUnknown)


async def test_a_producer_dropped_without_close_tells_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    producer = Producer(replace(CONFIG, flush_interval_ms=60_000), store=MemoryStore())
    await producer.produce([b"a"])
    with caplog.at_level(logging.WARNING):
        producer.__del__()
    assert "dropped without close, 1 calls are lost" in caplog.text
    await producer.close()


def test_a_flush_comes_in_time_although_producers_never_pause() -> None:
    """Records keep coming without a gap; the interval holds nevertheless."""

    async def produce(me: Actor) -> float:
        config = replace(CONFIG, flush_interval_ms=100, max_buffered_inputs=100_000)
        async with Producer(config, me.clock, store=me.store, ids=me.ids, randomness=me.random) as producer:
            began = me.clock.monotonic()
            first = await producer.produce([b"first"])
            while first.watcher.result() is None:
                await producer.produce([b"more"])
                await me.clock.sleep(0.0005)
            return me.clock.monotonic() - began

    async def main(world: World) -> float:
        found: float = await world.spawn("producer", produce).join()
        return found

    assert World(3).run(main) < 1.0


def test_a_wall_clock_that_steps_back_delays_nothing() -> None:
    async def produce(me: Actor) -> float:
        config = replace(CONFIG, flush_interval_ms=100)
        async with Producer(config, me.clock, store=me.store, ids=me.ids, randomness=me.random) as producer:
            handle = await producer.produce([b"a"])
            me.clock.step(-3_600_000)
            began = me.clock.monotonic()
            await handle.watcher.await_durable()
            return me.clock.monotonic() - began

    async def main(world: World) -> float:
        found: float = await world.spawn("producer", produce).join()
        return found

    assert World(3).run(main) < 1.0


def test_uploads_run_side_by_side_and_commit_in_order_many_at_a_time() -> None:
    async def produce(me: Actor) -> list[int]:
        config = replace(CONFIG, flush_interval_ms=0, flush_size_bytes=1)
        async with Producer(config, me.clock, store=me.store, ids=me.ids, randomness=me.random) as producer:
            handles = [await producer.produce([str(number).encode()]) for number in range(12)]
            await producer.flush()
            return [handle.watcher.result().sequence for handle in handles]  # type: ignore[union-attr]

    async def main(world: World) -> tuple[list[int], int]:
        found = await world.spawn("producer", produce).join()
        writes = [
            event
            for event in world.events
            if event.what == "store.put" and event.subject == "ingest/manifest"
        ]
        return found, len(writes)

    sequences, writes = World(4).run(main)
    assert sequences == list(range(12)) and writes < 12


async def test_metrics_have_the_names_of_the_other_implementations() -> None:
    registry = MetricsRegistry()
    async with Producer(CONFIG, store=MemoryStore(), metrics=registry) as producer:
        await producer.produce([b"abc", b"d"])
        await producer.flush()
        assert producer.conflict_rate() == 0.0
        values = {
            family.name: next(series for _, series in family.series())
            for family in registry.families()
            if "instance" in family.label_names
        }
    assert values["buffer.entries_flushed"].value == 2
    assert values["buffer.bytes_flushed"].value == 12
    assert values["buffer.bytes_written"].value == 19
    assert {"buffer.batches_flushed", "buffer.manifest_writes", "buffer.flush_duration_seconds"} <= set(
        values
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"data_path_prefix": ""},
        {"data_path_prefix": "/ingest"},
        {"data_path_prefix": "in gest"},
        {"data_path_prefix": "a//b"},
        {"manifest_path": "ingest/manifest%20"},
        {"manifest_path": "ingest/../manifest"},
        {"flush_size_bytes": 0},
        {"flush_size_bytes": 2 << 30},
        {"max_buffered_bytes": 2 << 30},
        {"batch_bytes_max": 1 << 20},
        {"max_buffered_inputs": 0},
        {"flush_interval_ms": float("nan")},
        {"flush_interval_ms": "5"},
        {"manifest_path": "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"},
        {"batch_compression": "lz4"},
        {"missing_batch": "ignore"},
        {"upload_age_ms_max": 400_000},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BufferConfig(**settings)  # type: ignore[arg-type]


def test_defaults_are_those_of_the_specification() -> None:
    config = BufferConfig()
    assert (config.data_path_prefix, config.manifest_path) == ("ingest", "ingest/manifest")
    assert (config.flush_interval_ms, config.flush_size_bytes, config.max_buffered_inputs) == (
        100,
        1 << 26,
        1000,
    )
    assert (config.batch_compression, config.dequeue_acks) == ("none", 100)
    assert (config.gc_interval_ms, config.gc_grace_period_ms, config.upload_age_s_max) == (
        300_000,
        600_000,
        300,
    )


async def test_it_works_on_local_files_by_url(tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(tmp_path))
    async with Producer(config, randomness=random.Random(1)) as producer:
        for number in range(3):
            await producer.produce([str(number).encode()])
            await producer.flush()
    async with Consumer(config) as consumer:
        await consumer.initialize()
        found = []
        while (batch := await consumer.next_batch()) is not None:
            found += list(batch.entries)
            await consumer.ack(batch.sequence)
    assert found == [b"0", b"1", b"2"]
    store = open_store(str(tmp_path))
    assert len(buffer_manifest.decode((await store.get("ingest/manifest")).data)) == 0
    await store.close()
    gc.collect()


async def test_metadata_that_no_manifest_could_hold_is_refused_and_spoils_nothing() -> None:
    store = MemoryStore()
    config = replace(CONFIG, manifest_append_bytes_max=2_000, flush_interval_ms=60_000)
    async with Producer(config, store=store) as producer:
        handle = await producer.produce([b"good"])
        with pytest.raises(LimitExceeded):
            await producer.produce([b"x"], bytes(2_000))
    assert handle.watcher.result() is not None
    assert await batches(store) == [[b"good"]]


class PassingClock(SystemClock):
    """Time that passes with every look at it: a loop that does nothing but produce takes time too."""

    seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 0.000_1
        return self.seconds


async def test_a_loop_that_only_produces_keeps_nobody_from_uploading() -> None:
    store = MemoryStore()
    config = replace(CONFIG, flush_interval_ms=5, max_buffered_inputs=100_000)
    async with Producer(config, PassingClock(), store=store) as producer:
        first = await producer.produce([b"first"])
        for _ in range(2_000):
            await producer.produce([b"more"])
        assert first.watcher.result() is not None
