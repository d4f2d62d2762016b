"""Real processes, real files, SIGKILL at any moment: every record once, in order."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.buffer.kill_workers import (
    BROKER_PERMISSION_MS,
    config_of,
    consume,
    open_sink,
    produce_forever,
    serve_broker,
)

from forebay.buffer import BufferConfig, Producer, Reader
from forebay.buffer._commit_broker_client import BrokeredCommitter
from forebay.buffer._commit_broker_socket import BrokerSocket
from forebay.errors import NotDone, OutcomeUnknown
from forebay.kit.clock import SystemClock
from forebay.storage import open_store
from forebay.testing.kill import Child, kill_repeatedly


async def fill(store: str, batches: int) -> list[str]:
    records = [f"record {number}" for number in range(batches)]
    async with Producer(BufferConfig(url=store, flush_interval_ms=0)) as producer:
        for record in records:
            await producer.produce([record.encode()])
            await producer.flush()
    return records


async def stored_exactly_once(tmp_path: Path, *, batches: int, lives: int, seed: int) -> None:
    store, sink_path = str(tmp_path / "store"), tmp_path / "sink.db"
    records = await fill(store, batches)
    arguments = {"store": store, "sink_path": str(sink_path), "until": batches - 1}
    run = kill_repeatedly(
        consume,
        randomness=random.Random(seed),
        lives=lives,
        arguments=arguments,
        delay_ms_max=25,
        total_timeout_s=600,
    )
    with Child(consume, arguments=arguments) as last:  # nobody kills it, so it drains what is left
        assert last.wait() == 0
    sink = open_sink(sink_path)
    found = [data for (data,) in sink.execute("select data from record order by sequence, rowid")]
    sink.close()
    assert found == records
    assert run.kills > 0


async def test_a_killed_consumer_with_an_atomic_sink_stores_every_record_once(tmp_path: Path) -> None:
    await stored_exactly_once(tmp_path, batches=150, lives=8, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
async def test_two_hundred_kills_of_a_consumer(tmp_path: Path) -> None:
    await stored_exactly_once(tmp_path, batches=3_000, lives=200, seed=2)


async def killed_producers_keep_promises(tmp_path: Path, lives: int) -> None:
    store = str(tmp_path / "store")
    run = kill_repeatedly(
        produce_forever,
        randomness=random.Random(3),
        lives=lives,
        arguments={"store": store, "name": "killed"},
        delay_ms_max=60,
        total_timeout_s=600,
    )
    async with Reader(config_of(store)) as reader:
        found = []
        for entry in await reader.entries():
            found += [record.decode() for record in (await reader.read(entry)).entries]
    assert len(set(found)) == len(found)
    assert set(run.acknowledged) <= set(found) <= set(run.attempted)
    order = {record: place for place, record in enumerate(found)}
    places = [order[record] for record in run.acknowledged]
    assert places == sorted(places) and run.kills == lives


async def test_a_killed_producer_keeps_what_it_promised(tmp_path: Path) -> None:
    await killed_producers_keep_promises(tmp_path, 5)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
async def test_a_hundred_kills_of_a_producer(tmp_path: Path) -> None:
    await killed_producers_keep_promises(tmp_path, 100)


def brokered_producer(store: str, socket: Path, number: int) -> tuple[Producer, BrokeredCommitter]:
    config, clock = config_of(store), SystemClock()
    opened = open_store(store)
    link = BrokerSocket(socket, manifest_path=config.manifest_path, store=opened.url)
    committer = BrokeredCommitter(
        link,
        opened,
        config,
        clock=clock,
        randomness=random.Random(number),
        permission_ms=BROKER_PERMISSION_MS,
    )
    return Producer(config, store=opened, committer=committer), committer


async def produce_until(ended: asyncio.Event, producer: Producer, name: str, told: dict[str, str]) -> None:
    number = 0
    while not ended.is_set():
        record = f"{name}/{number:05}"
        try:
            await (await producer.produce([record.encode()])).watcher.await_durable()
            told[record] = "ok"
        except NotDone:
            told[record] = "failed"
        except OutcomeUnknown:
            told[record] = "unknown"
        number += 1
        await asyncio.sleep(0.002)
    await producer.close()


async def killed_brokers_cost_nothing(tmp_path: Path, lives: int) -> None:
    store, socket = str(tmp_path / "store"), tmp_path / "socket"
    draw = random.Random(4)
    told: dict[str, str] = {}
    ended = asyncio.Event()
    pairs = [brokered_producer(store, socket, number) for number in range(3)]
    producing = [
        asyncio.create_task(produce_until(ended, producer, f"p{number}", told))
        for number, (producer, _) in enumerate(pairs)
    ]
    with Child(serve_broker, arguments={"store": store, "socket": str(socket)}) as broker:
        for life in range(lives):
            if life:
                broker.start()
            await asyncio.to_thread(broker.wait_for, "ready")
            before = sum(committer.brokered for _, committer in pairs)
            while sum(committer.brokered for _, committer in pairs) < before + 5:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            await asyncio.sleep(draw.random() * 0.05)
            await asyncio.to_thread(broker.kill)
            count = len(told)
            while len(told) < count + 5:  # noqa: ASYNC110 - they go on without it
                await asyncio.sleep(0.01)
    ended.set()
    await asyncio.gather(*producing)
    for producer, _ in pairs:
        await producer._store.close()
    async with Reader(config_of(store)) as reader:
        found = []
        for entry in await reader.entries():
            found += [record.decode() for record in (await reader.read(entry)).entries]
    assert len(set(found)) == len(found), "nothing is there twice"
    assert set(told.values()) == {"ok"}, "whatever was sent is found by looking: nobody consumes here"
    assert set(found) == set(told)
    for number in range(3):
        own = [record for record in found if record.startswith(f"p{number}/")]
        assert own == sorted(own)
    assert sum(committer.alone for _, committer in pairs) > 0, "they went on by themselves"


async def test_a_killed_commit_broker_loses_and_doubles_nothing(tmp_path: Path) -> None:
    await killed_brokers_cost_nothing(tmp_path, 3)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
async def test_fifty_kills_of_a_commit_broker(tmp_path: Path) -> None:
    await killed_brokers_cost_nothing(tmp_path, 50)
