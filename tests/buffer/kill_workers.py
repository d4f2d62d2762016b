"""What runs in the child processes of the kill tests."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from forebay.buffer import BufferConfig, Consumer, Producer
from forebay.buffer._commit_broker import CommitBroker, with_permission
from forebay.buffer._commit_broker_socket import BrokerServer
from forebay.storage import open_store
from forebay.testing.kill import Report

BROKER_PERMISSION_MS = 300
"""How long producers of the tests wait for a broker that was killed."""


def config_of(store: str) -> BufferConfig:
    return BufferConfig(url=store, flush_interval_ms=2, dequeue_acks=3, gc_interval_ms=50)


async def produce_forever(report: Report, store: str, name: str) -> None:
    """Sends numbered records, reports each before it is tried and once it is durable."""
    async with Producer(config_of(store)) as producer:
        number = 0
        while True:
            record = f"{name}/{producer.instance}/{number}"
            report.attempt(record)
            handle = await producer.produce([record.encode()])
            await handle.watcher.await_durable()
            report.ack(record)
            report.mark("ready")
            number += 1


async def serve_broker(report: Report, store: str, socket: str) -> None:
    """Commits for whoever connects, until it is killed."""
    config = with_permission(config_of(store), BROKER_PERMISSION_MS)
    async with open_store(store) as opened:
        broker = CommitBroker(opened, config)
        async with BrokerServer(broker, Path(socket), manifest_path=config.manifest_path, store=opened.url):
            report.mark("ready")
            await asyncio.Event().wait()


def open_sink(path: Path) -> sqlite3.Connection:
    sink = sqlite3.connect(path, isolation_level=None)
    sink.execute("pragma journal_mode=wal")
    sink.execute("create table if not exists batch (sequence integer primary key)")
    sink.execute("create table if not exists record (data text, sequence integer)")
    return sink


async def consume(report: Report, store: str, sink_path: str, until: int) -> None:
    """Stores batch and sequence in one transaction, until sequence `until` is there."""
    sink = open_sink(Path(sink_path))
    [last] = sink.execute("select max(sequence) from batch").fetchone()
    async with Consumer(config_of(store)) as consumer:
        await consumer.initialize(last)
        report.mark("ready")
        while last is None or last < until:
            batch = await consumer.next_batch()
            if batch is None:
                await asyncio.sleep(0.001)
                continue
            rows = [(record.decode(), batch.sequence) for record in batch.entries]
            sink.execute("begin immediate")
            sink.execute("insert into batch values (?)", (batch.sequence,))
            sink.executemany("insert into record values (?, ?)", rows)
            sink.execute("commit")
            last = batch.sequence
            await consumer.ack(batch.sequence)
