"""Real processes, real files, SIGKILL at any moment: every record once, in order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.buffer.kill_workers import config_of, consume, open_sink, produce_forever

from forebay.buffer import BufferConfig, Producer, Reader
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
