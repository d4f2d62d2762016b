"""Queues on S3: a real server, a network that loses replies, and a server that lies about its writes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

import pytest

from forebay.buffer import BufferConfig, Consumer, Producer
from forebay.errors import NotDone, OutcomeUnknown, Unavailable
from forebay.storage import open_store
from forebay.testing.proxy import FaultProxy, lose_reply
from forebay.testing.s3_faults import S3FaultServer, answer, drop
from forebay.testing.servers import SeaweedServer

CONFIG = BufferConfig(flush_interval_ms=10, gc_enabled=False)
RECORDS = 60


async def produce(config: BufferConfig, name: str, count: int = RECORDS) -> dict[str, str]:
    """What became of each record."""
    told: dict[str, str] = {}

    producer = Producer(config, randomness=random.Random(name))

    async def send(record: str) -> None:
        handle = await producer.produce([record.encode()], name.encode())
        try:
            await handle.watcher.await_durable()
            told[record] = "ok"
        except NotDone:
            told[record] = "failed"
        except OutcomeUnknown:
            told[record] = "unknown"

    for start in range(0, count, 5):
        await asyncio.gather(*[send(f"{name}/{number:04}") for number in range(start, start + 5)])
    with contextlib.suppress(NotDone, OutcomeUnknown):  # Each record was told already.
        await producer.close()
    return told


async def drain(config: BufferConfig) -> list[str]:
    found = []
    async with Consumer(config) as consumer:
        await consumer.initialize()
        while (batch := await consumer.next_batch()) is not None:
            found += [record.decode() for record in batch.entries]
            await consumer.ack(batch.sequence)
    return found


def check(told: dict[str, str], found: list[str]) -> None:
    assert len(set(found)) == len(found), "nothing is there twice"
    assert {record for record, status in told.items() if status == "ok"} <= set(found)
    assert not {record for record, status in told.items() if status == "failed"} & set(found)
    assert set(found) <= set(told)
    for name in {record.partition("/")[0] for record in found}:
        own = [record for record in found if record.startswith(f"{name}/")]
        assert own == sorted(own), "records of one producer keep their order"


@pytest.mark.parametrize("together", [True, False])
async def test_producers_that_race_on_a_real_bucket_lose_and_double_nothing(
    seaweed: SeaweedServer, together: bool
) -> None:
    config = replace(CONFIG, url=seaweed.url(f"buffer-race-{together}".lower()))
    # Producers of one process commit together where their limits agree.
    configs = [config if together else replace(config, commit_batches_max=60 + n) for n in range(3)]
    results = await asyncio.gather(*[produce(each, f"p{n}") for n, each in enumerate(configs)])
    told = {record: status for result in results for record, status in result.items()}
    assert set(told.values()) == {"ok"} and len(told) == 3 * RECORDS
    check(told, await drain(config))


async def test_a_network_that_loses_replies_costs_no_record(seaweed: SeaweedServer) -> None:
    direct = replace(CONFIG, url=seaweed.url("buffer-proxy"))
    with FaultProxy("127.0.0.1", seaweed.port) as proxy:
        config = replace(CONFIG, url=seaweed.url("buffer-proxy", endpoint=f"http://{proxy.address}"))
        proxy.fail_randomly(0.05, [lose_reply(quiet_ms=5)])
        told = await produce(config, "p")
        proxy.heal()
    check(told, await drain(direct))
    assert "ok" in told.values()


async def test_a_server_that_commits_and_answers_an_error_is_seen_through() -> None:
    with S3FaultServer() as s3:
        config = replace(CONFIG, url=s3.url("queue"))
        s3.fail_randomly(
            0.3, [("PUT", drop(after=True)), ("PUT", answer(500, after=True)), ("GET", answer(503))]
        )
        told = await produce(config, "p")
        assert s3.faults_met > 0
        s3.heal()
        check(told, await drain(config))


async def test_an_idle_consumer_asks_for_changes_only() -> None:
    with S3FaultServer() as s3:
        config = replace(CONFIG, url=s3.url("queue"))
        await produce(config, "p", 20)
        async with Consumer(config) as consumer:
            await consumer.initialize()
            while (batch := await consumer.next_batch()) is not None:
                await consumer.ack(batch.sequence)
            await consumer.flush()
            reads = consumer.manifest_reads
            for _ in range(5):
                assert await consumer.next_batch() is None
            assert consumer.manifest_reads == reads


async def test_a_dead_server_is_not_taken_for_an_empty_queue() -> None:
    with S3FaultServer() as s3:
        config = replace(CONFIG, url=s3.url("queue"))
        await produce(config, "p", 20)
        store = open_store(config.url)
        consumer = Consumer(config, store=store)
        await consumer.initialize()
        s3.fail_randomly(1.0, [("GET", answer(503))])
        try:
            await asyncio.wait_for(consumer.next_batch(), 60)
        except (Unavailable, TimeoutError):
            pass
        else:
            raise AssertionError("it must not look empty")
        s3.heal()
        await consumer.close()
        await store.close()
