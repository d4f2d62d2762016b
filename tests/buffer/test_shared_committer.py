"""Producers of one process commit as one: one write at a time, and nobody pays for another's trouble."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.buffer.scripted_store import ManualClock, ScriptedStore

from forebay.buffer import (
    BufferConfig,
    CommitFailed,
    Committed,
    CommitUnknown,
    Producer,
    QueueFull,
    Reader,
    Upload,
)
from forebay.buffer import _shared_committer as shared
from forebay.buffer._metrics import BufferMetrics
from forebay.buffer._shared_committer import SharedCommitter
from forebay.errors import OutcomeUnknown
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import Metadata, NewEntry
from forebay.kit import RetryPolicy
from forebay.kit.conditions import ANY
from forebay.storage import MemoryStore
from forebay.storage._api import Buffer, When

PATH = "ingest/manifest"
CONFIG = BufferConfig(
    flush_interval_ms=1,
    commit_retry=RetryPolicy(attempts_max=2, base_ms=1, cap_ms=1, deadline_ms=5_000),
)


class Gate(ScriptedStore):
    """Puts of the manifest wait until they are let through; how many wait at once is counted."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        super().__init__(PATH, clock)
        self.open = asyncio.Event()
        self.open.set()
        self.arrived = asyncio.Event()
        self.at_once = 0
        self.most_at_once = 0

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        if key != PATH:
            return await super().put(key, data, when)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.arrived.set()
        try:
            await self.open.wait()
            return await super().put(key, data, when)
        finally:
            self.at_once -= 1


class Bench:
    """Members of one line on a store whose manifest writes can be held."""

    def __init__(self, config: BufferConfig = CONFIG) -> None:
        self.clock = ManualClock()
        self.store = Gate(self.clock)
        self.config = config

    def member(self, config: BufferConfig | None = None) -> SharedCommitter:
        return SharedCommitter(
            self.store,
            config or self.config,
            is_store_own=False,
            clock=self.clock,
            randomness=random.Random(1),
            metrics=BufferMetrics(None, "producer", "test"),
        )

    def upload(self, name: str, payload: bytes = b"m") -> Upload:
        now = self.clock.monotonic()
        return Upload(NewEntry(name, (Metadata(0, 1, payload),)), now, now)

    def committing(self, member: SharedCommitter, *names: str) -> asyncio.Task[Sequence[object]]:
        return asyncio.create_task(member.commit([self.upload(name) for name in names]))

    async def held(self, member: SharedCommitter, *names: str) -> asyncio.Task[Sequence[object]]:
        """A commit whose write is on its way and waits."""
        self.store.open.clear()
        self.store.arrived.clear()
        task = self.committing(member, *names)
        await self.store.arrived.wait()
        return task

    async def locations(self) -> list[str]:
        return list(buffer_manifest.decode((await MemoryStore.get(self.store, PATH)).data).locations())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_waits_behind_a_write_goes_into_the_next_one_together() -> None:
    bench = Bench()
    a, b, c = (bench.member() for _ in range(3))
    first = await bench.held(a, "a0")
    others = [bench.committing(b, "b0", "b1"), bench.committing(c, "c0")]
    await turns()
    bench.store.open.set()
    assert await first == [Committed(0, "a0")]
    assert [await task for task in others] == [
        [Committed(1, "b0"), Committed(2, "b1")],
        [Committed(3, "c0")],
    ]
    assert bench.store.counts["manifest.put"] == 2
    assert await bench.locations() == ["a0", "b0", "b1", "c0"]


async def test_a_process_has_one_conditional_write_under_way_however_many_producers_it_has() -> None:
    store = Gate()
    producers = [Producer(CONFIG, store=store) for _ in range(8)]
    handles = []
    for call in range(20):
        handles += [
            await producer.produce([f"{number}:{call}".encode()]) for number, producer in enumerate(producers)
        ]
        await asyncio.sleep(0.001)
    for producer in producers:
        await producer.close()
    assert store.most_at_once == 1
    batches = {(await handle.watcher.await_durable()).location for handle in handles}
    assert store.counts["manifest.put"] < len(batches), "one write carries batches of several"
    reader = Reader(CONFIG, store=store)
    records = [record for entry in await reader.entries() for record in (await reader.read(entry)).entries]
    for number in range(8):
        mine = [record for record in records if record.startswith(b"%d:" % number)]
        assert mine == [f"{number}:{call}".encode() for call in range(20)]


async def test_a_failure_is_told_to_those_whose_batches_were_in_it() -> None:
    bench = Bench()
    a, b = bench.member(), bench.member()
    await bench.committing(b, "earlier")
    bench.store.script.append("lost")
    first = await bench.held(a, "a0")
    bench.store.reads.extend(["before"] * 3)
    second = bench.committing(b, "b0")
    await turns()
    bench.store.open.set()
    [answer] = await first
    assert isinstance(answer, CommitUnknown) and answer.location == "a0"
    assert await second == [Committed(1, "b0")]


async def test_whoever_was_only_taken_along_has_time_of_its_own() -> None:
    bench = Bench()
    a, b = bench.member(), bench.member()
    bench.store.script.append("before")
    first = await bench.held(a, "a0")
    second = bench.committing(b, "b0")
    bench.store.reads.append("before")  # The second and last attempt of the first gets no further than this.
    await turns()
    bench.store.open.set()
    [answer] = await first
    assert isinstance(answer, CommitFailed)
    assert await second == [Committed(0, "b0")]


async def test_a_commit_nobody_waits_for_leaves_the_line() -> None:
    bench = Bench()
    a, b = bench.member(), bench.member()
    first = await bench.held(a, "a0")
    second = bench.committing(b, "b0")
    await turns()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    bench.store.open.set()
    assert await first == [Committed(0, "a0")]
    assert await bench.locations() == ["a0"]
    assert await bench.committing(b, "b1") == [Committed(1, "b1")]


async def test_cancelling_the_work_itself_leaves_nobody_waiting() -> None:
    bench = Bench()
    a, b = bench.member(), bench.member()
    first = await bench.held(a, "a0")
    second = bench.committing(b, "b0")
    await turns()
    line = a._line
    assert line is not None and line._worker is not None
    line._worker.cancel()
    with pytest.raises(OutcomeUnknown):
        await first
    with pytest.raises(Exception, match="before it was tried"):
        await second
    bench.store.open.set()
    assert await bench.committing(b, "b1") == [Committed(0, "b1")], "and whoever comes next is served"


async def test_one_that_does_not_fit_holds_up_no_other() -> None:
    bench = Bench(replace(CONFIG, manifest_append_bytes_max=1_024))
    a, b, c = (bench.member() for _ in range(3))
    first = await bench.held(a, "a0")
    large = asyncio.create_task(b.commit([bench.upload("b0", bytes(1_000)), bench.upload("b1")]))
    small = bench.committing(c, "c0")
    await turns()
    bench.store.open.set()
    await first
    assert [type(answer) for answer in await large] == [QueueFull, QueueFull], "order of one is kept"
    assert await small == [Committed(1, "c0")]


async def test_a_producer_leaves_and_the_others_go_on_through_their_own_stores(tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(tmp_path))
    producers = [Producer(config) for _ in range(3)]
    for number, producer in enumerate(producers):
        await (await producer.produce([b"%d" % number])).watcher.await_durable()
    lines = {id(producer._committer._line) for producer in producers}  # type: ignore[attr-defined]
    assert len(lines) == 1, "the same address is the same place"
    for number in range(3):
        await producers[number].close()
        for left in producers[number + 1 :]:
            await (await left.produce([b"again"])).watcher.await_durable()
    async with Reader(config) as reader:
        assert len(await reader.entries()) == 6


async def test_whoever_comes_after_the_last_has_left_begins_anew(tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(tmp_path))
    kept = []
    for number in range(3):
        async with Producer(config) as producer:
            durable = await (await producer.produce([b"x"])).watcher.await_durable()
            kept.append(producer._committer._line)  # type: ignore[attr-defined]
        assert durable.sequence == number
    assert len({id(line) for line in kept}) == 3, "the store of each was closed with it"


async def test_producers_with_other_limits_or_on_other_stores_do_not_share() -> None:
    bench, other = Bench(), Bench()
    members = [
        bench.member(),
        bench.member(),
        bench.member(replace(CONFIG, commit_batches_max=3)),
        bench.member(replace(CONFIG, manifest_path="ingest/another")),
        other.member(),
    ]
    lines = [member._joined() for member in members]
    assert lines[0] is lines[1]
    assert len({id(line) for line in lines}) == 4


def test_another_event_loop_is_another_line() -> None:
    store = MemoryStore()
    kept: list[Producer] = []

    async def once() -> int:
        kept.append(Producer(CONFIG, store=store))
        return (await (await kept[-1].produce([b"x"])).watcher.await_durable()).sequence

    assert [asyncio.run(once()) for _ in range(3)] == [0, 1, 2]


async def test_nothing_is_kept_of_producers_that_are_gone() -> None:
    before = len(shared._LINES)
    for _ in range(5):
        store = MemoryStore()
        producer = Producer(CONFIG, store=store)
        await (await producer.produce([b"x"])).watcher.await_durable()
    del producer
    gc.collect()
    await asyncio.sleep(0)
    gc.collect()
    assert len(shared._LINES) <= before


async def test_a_write_counts_once_although_several_producers_were_in_it() -> None:
    bench = Bench()
    members = [bench.member() for _ in range(4)]
    first = await bench.held(members[0], "a0")
    others = [bench.committing(member, f"b{index}") for index, member in enumerate(members[1:])]
    await turns()
    bench.store.open.set()
    await asyncio.gather(first, *others)
    assert (
        sum(member.metrics.writes.attempts for member in members) == bench.store.counts["manifest.put"] == 2
    )
