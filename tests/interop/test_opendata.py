"""One queue, two implementations: ours and the published `opendata-buffer` crate, on the same SeaweedFS.

Run by `make interop`: the first run builds the crate, which takes some minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.harness import CannotMeasure
from benchmarks.peers.opendata import OpenDataPeer, finish, opendata_binary

from forebay.buffer import BufferConfig, Consumer, Fenced, GarbageCollector, Producer, Reader
from forebay.cli import run
from forebay.storage import open_store
from forebay.testing.servers import SeaweedServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(240)]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def binary() -> Any:
    try:
        return opendata_binary()
    except CannotMeasure as reason:
        pytest.skip(str(reason))


@pytest.fixture
def peer(binary: Any, seaweed: SeaweedServer) -> Iterator[OpenDataPeer]:
    """The crate's program on a queue of its own."""
    queue = f"interop/{next(_numbers)}"
    program = OpenDataPeer(binary, seaweed, f"{queue}/data", f"{queue}/manifest")
    yield program
    program.end()


@pytest.fixture
def config(peer: OpenDataPeer) -> BufferConfig:
    """The same queue, for us."""
    return BufferConfig(
        url=peer.server.url(),
        data_path_prefix=peer.prefix,
        manifest_path=peer.manifest,
        flush_interval_ms=20,
        gc_enabled=False,
    )


def record(producer: int, number: int, size: int) -> bytes:
    """As the crate's program makes them, so that either side can check what the other sent."""
    return f"{producer}:{number}:".encode().ljust(size, b"x")


async def produce(config: BufferConfig, producer: int, count: int, size: int = 100) -> None:
    async with Producer(config) as out:
        waiting = []
        for number in range(count):
            waiting.append(await out.produce([record(producer, number, size)], b"meta"))
            if number % 50 == 49:
                await asyncio.sleep(0.01)
        for handle in waiting:
            await handle.watcher.await_durable()


async def consume(config: BufferConfig, expect: int, *, ack: bool = True) -> list[bytes]:
    found: list[bytes] = []
    async with Consumer(config) as consumer:
        await consumer.initialize()
        sequences: list[int] = []
        while len(found) < expect:
            batch = await consumer.next_batch()
            if batch is None:
                await asyncio.sleep(0.02)
                continue
            found.extend(batch.entries)
            sequences.append(batch.sequence)
            if ack:
                await consumer.ack(batch.sequence)
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    return found


def check(records: list[bytes], counts: dict[int, int], size: int = 100) -> None:
    """Every record of every producer once, and in its order."""
    assert len(records) == sum(counts.values())
    for producer, count in counts.items():
        mine = [each for each in records if each.startswith(b"%d:" % producer)]
        assert mine == [record(producer, number, size) for number in range(count)]


@pytest.mark.parametrize("compressed", [False, True])
async def test_its_producers_to_our_consumer(
    peer: OpenDataPeer, config: BufferConfig, compressed: bool
) -> None:
    options: dict[str, Any] = {"zstd": True} if compressed else {}
    told = await asyncio.to_thread(
        peer.run, "produce", count=3_000, size=100, producers=3, flush_ms=20, metadata="abc", **options
    )
    assert told["failed_calls"] == 0
    async with Reader(config) as reader:
        entries = await reader.entries()
        assert {item.payload for entry in entries for item in entry.metadata} == {b"abc"}
    check(await consume(config, 3_000), {0: 1_000, 1: 1_000, 2: 1_000})


@pytest.mark.parametrize("read_ahead", [0, 8])
@pytest.mark.parametrize("changes", [{}, {"batch_compression": "zstd"}, {"entry_extension": True}])
async def test_our_producer_to_its_consumer(
    peer: OpenDataPeer, config: BufferConfig, read_ahead: int, changes: dict[str, Any]
) -> None:
    await produce(replace(config, **changes), 0, 1_000)
    told = await asyncio.to_thread(peer.run, "consume", expect=1_000, read_ahead=read_ahead)
    assert (told["count"], told["gaps"], told["repeated"], told["unparsed"]) == (1_000, 0, 0, 0)
    sent = hashlib.sha256(b"".join(record(0, number, 100) for number in range(1_000))).hexdigest()
    assert told["sha256"] == sent
    assert told["metadata_items"] == 1_000
    assert told["left_in_queue"] == 0


async def test_both_produce_into_one_manifest_at_once(peer: OpenDataPeer, config: BufferConfig) -> None:
    theirs = peer.start(
        "produce", count=2_000, size=100, producers=2, flush_ms=10, rate=2_000, first_producer=2
    )
    await asyncio.gather(produce(config, 0, 1_000), produce(config, 1, 1_000))
    told = await asyncio.to_thread(finish, theirs)
    assert told["failed_calls"] == 0
    async with Reader(config) as reader:
        entries = await reader.entries()
    assert [entry.sequence for entry in entries] == list(range(len(entries)))
    assert max(Counter(entry.location for entry in entries).values()) == 1
    check(await consume(config, 4_000), dict.fromkeys(range(4), 1_000))


async def test_both_produce_and_its_consumer_reads_along(peer: OpenDataPeer, config: BufferConfig) -> None:
    reading = peer.start("consume", expect=3_000, timeout_s=100)
    theirs = peer.start(
        "produce", count=2_000, size=100, producers=2, flush_ms=10, rate=2_000, first_producer=1
    )
    await produce(config, 0, 1_000)
    await asyncio.to_thread(finish, theirs)
    told = await asyncio.to_thread(finish, reading)
    assert (told["count"], told["gaps"], told["repeated"]) == (3_000, 0, 0)


async def test_its_consumer_fences_ours(peer: OpenDataPeer, config: BufferConfig) -> None:
    await produce(config, 0, 100)
    async with Consumer(config) as ours:
        await ours.initialize()
        batch = await ours.next_batch()
        assert batch is not None
        await asyncio.to_thread(peer.run, "fence")
        with pytest.raises(Fenced):
            await ours.ack(batch.sequence)
        with pytest.raises(Fenced):
            await ours.next_batch()
    check(await consume(config, 100), {0: 100})


async def test_our_consumer_fences_its(peer: OpenDataPeer, config: BufferConfig) -> None:
    theirs = peer.start("consume", expect=999_999, timeout_s=60)
    async with Reader(config) as reader:
        while (await reader.manifest()).epoch == 0:  # noqa: ASYNC110 - it is another process that acts
            await asyncio.sleep(0.02)
    async with Consumer(config) as ours:
        await ours.initialize()
        told = await asyncio.to_thread(finish, theirs, codes=(3,))
        assert told["outcome"] == "fenced"
        await produce(config, 0, 100)
        found: list[bytes] = []
        while len(found) < 100:
            batch = await ours.next_batch()
            if batch is not None:
                found.extend(batch.entries)
    check(found, {0: 100})


async def test_our_garbage_collector_beside_its_producers(peer: OpenDataPeer, config: BufferConfig) -> None:
    """With a grace period of seconds, which is far below what anybody should set.

    It must outlast the longest commit of the crate, which enqueues whatever it has uploaded, however old. Two
    producers that race on this server wait for up to two seconds now and then.
    """
    grace_s = 8.0
    writing = peer.start("produce", count=6_000, size=100, producers=2, flush_ms=10, rate=500)
    hasty = replace(config, gc_grace_period_ms=int(grace_s * 1000))
    deleted: list[str] = []
    found: list[bytes] = []
    collector = GarbageCollector(hasty)
    async with Consumer(replace(config, dequeue_acks=5)) as consumer:
        await consumer.initialize()
        while len(found) < 6_000:
            batch = await consumer.next_batch()
            if batch is None:
                report = await collector.collect()
                deleted += report.deleted
                await asyncio.sleep(0.05)
                continue
            found.extend(batch.entries)
            await consumer.ack(batch.sequence)
        await consumer.flush()
        await asyncio.to_thread(finish, writing)
        await asyncio.sleep(grace_s + 0.5)  # the age that the collector asks for, by the store's clock
        report = await collector.collect()
        deleted += report.deleted
    await collector.close()
    check(found, {0: 3_000, 1: 3_000})
    assert not report.refused
    assert not report.failed
    assert deleted, "the collector had nothing to do, so the test shows nothing"
    async with open_store(config.url) as store:
        left = [info.key async for info in store.list(f"{peer.prefix}/") if info.key.endswith(".batch")]
    assert left == []


async def test_the_command_line_reads_what_the_crate_wrote(
    peer: OpenDataPeer, config: BufferConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(peer.run, "produce", count=10, size=20, flush_ms=1, metadata="m")
    url = config.url.replace("?", f"/{peer.manifest}?", 1)
    code = await asyncio.to_thread(run, ["buffer", "inspect", url, "-o", "json"])
    assert code == 0
    assert '"kind": "manifest"' in capsys.readouterr().out
    code = await asyncio.to_thread(run, ["buffer", "verify", config.url, "--manifest", peer.manifest])
    assert code == 0
    assert "10 records" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FOREBAY_DATA", "FOREBAY_STORE", "FOREBAY_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    yield
