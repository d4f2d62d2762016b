"""The client against the real broker, as a process and through a network that loses answers."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from forebay.broker import self_signed, server_tls
from forebay.cli import run
from forebay.client import ClientConfig, ProducerConfig, Refused, connect
from forebay.client import aio as client_aio
from forebay.coordination import open_coordinator
from forebay.errors import NotFound, OutcomeUnknown, StorageDamaged, Unavailable
from forebay.kit.retry import RetryPolicy
from forebay.loadtest._brokers import BrokerRun, start_broker
from forebay.log._keys import GroupKeys
from forebay.testing.proxy import FaultProxy, lose_reply

FAST = RetryPolicy(attempts_max=1_000_000, base_ms=1, cap_ms=20)
OPTIONS = ["--batch-max-delay-ms", "5"]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerRun]:
    started = await start_broker("b", ["--data", str(tmp_path / "data")], OPTIONS, tmp_path / "log", {})
    try:
        yield started
    finally:
        await started.stop()


async def test_produce_read_topics_groups_and_trim_work_over_the_wire(broker: BrokerRun) -> None:
    async with client_aio.connect(broker.url) as bay:
        assert (await bay.health()).broker_id == "b"
        await bay.topics.create("orders", partitions=3)
        with pytest.raises(Refused, match="TopicExists"):
            await bay.topics.create("orders")
        async with bay.producer() as out:
            done = await out.send("orders", [b"a", b"b\xff"], partition=1, keys=[b"k", None])
            assert (done.start_offset, done.end_offset) == (1, 2)
            spread = await out.send("orders", [b"x"] * 30, keys=[b"%d" % number for number in range(30)])
            assert spread.count == 30 and len(spread.parts) == 3
        table = await (await bay.read("orders", partition=1, end=3)).read_all()
        assert table.column("value").to_pylist() == [b"a", b"b\xff"]
        assert table.column("key").to_pylist() == [b"k", None]
        assert (await (await bay.read("orders")).read_all()).num_rows == 32
        async with bay.groups.consumer("g", ["orders"]) as consumer:
            found = 0
            while found < 32:
                found += sum(len(batch) for batch in await consumer.poll(timeout_s=5))
            await consumer.commit()
        assert (await bay.groups.describe("g")).lag_records == 0
        async with bay.groups.consumer("g", ["orders"]) as consumer:
            assert await consumer.poll(timeout_s=0) == []
        await bay.groups.reset("g", to="earliest")
        assert sum((await bay.groups.committed("g")).values()) == 3
        assert [each.topic for each in await bay.topics.list()] == ["orders"]
        assert (await bay.trim("orders", partition=1, offset=2)).earliest == 2
        start = datetime(2020, 1, 1, tzinfo=UTC)
        assert (await (await bay.read("orders", partition=1, start=start)).read_all()).num_rows > 0
        await bay.groups.delete("g")
        await bay.topics.delete("orders")
        with pytest.raises(NotFound):
            await bay.read("orders")


async def test_a_committed_offset_that_cannot_be_read_does_not_count_as_none(
    broker: BrokerRun, tmp_path: Path
) -> None:
    """A consumer that took it for none would begin at the end, and pass over what is there."""
    keys = GroupKeys("g")
    async with client_aio.connect(broker.url) as bay:
        async with bay.producer() as out:
            await out.send("orders", [b"a", b"b"], partition=0)
        async with bay.groups.consumer("g", ["orders"]) as consumer:
            await consumer.poll(timeout_s=5)
            await consumer.commit()
        async with open_coordinator(tmp_path / "data") as coordinator:
            await coordinator.put(keys.offset("orders", 0), b"torn", partition_key=keys.partition_key)
        with pytest.raises(StorageDamaged, match="orders:00000"):
            await bay.groups.committed("g")
        with pytest.raises(StorageDamaged):
            async with bay.groups.consumer("g", ["orders"], start_at="latest") as consumer:
                await consumer.poll(timeout_s=0)


async def test_a_retry_after_a_lost_answer_never_duplicates(broker: BrokerRun) -> None:
    randomness = random.Random(7)
    port = urlsplit(broker.url).port
    assert port is not None
    async with FaultProxy("127.0.0.1", port) as proxy, client_aio.connect(f"http://{proxy.address}") as bay:
        config = ProducerConfig(linger_ms=0, batch_bytes=1, retry=FAST, in_flight_per_partition=3)
        async with bay.producer(config) as out:
            receipts = []
            for number in range(40):
                if randomness.random() < 0.2:
                    proxy.next_response(lose_reply(quiet_ms=50))
                receipts.append(out.send("orders", [b"%d" % number], partition=0))
                await asyncio.sleep(0.005)
            offsets = [(await receipt).start_offset for receipt in receipts]
        assert proxy.stats.faults_met > 0
        assert offsets == list(range(1, 41))
        table = await (await bay.read("orders", partition=0)).read_all()
    assert table.column("value").to_pylist() == [b"%d" % number for number in range(40)]


async def test_a_killed_broker_leaves_what_was_under_way_unknown_and_the_rest_not_done(
    tmp_path: Path,
) -> None:
    where = ["--data", str(tmp_path / "data")]
    # Nothing is flushed for a minute: what was sent is under way when the broker dies.
    options = ["--batch-max-delay-ms", "60000", "--batch-max-bytes", "64MiB"]
    broker = await start_broker("b", where, options, tmp_path / "log", {})
    try:
        config = ProducerConfig(linger_ms=0, retry=FAST, delivery_timeout_ms=500)
        async with client_aio.connect(broker.url) as bay, bay.producer(config) as out:
            first = out.send("orders", [b"a"], partition=0)
            # The broker has it once it says that something is pending.
            async with asyncio.timeout(60):
                while not (await broker.sample()).get("pending_bytes"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await broker.kill()
            with pytest.raises(OutcomeUnknown, match="attempts"):
                await first
            with pytest.raises(Unavailable):
                await out.send("orders", [b"b"], partition=0)
    finally:
        await broker.stop()


async def test_a_certificate_that_is_not_trusted_is_named_with_what_to_give(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "127.0.0.1")
    tls = server_tls(certificate, key)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        once = ClientConfig(retry=RetryPolicy(attempts_max=1))
        async with client_aio.connect(url, config=once) as bay:
            with pytest.raises(Unavailable, match="not trusted") as raised:
                await bay.topics.list()
        assert "--ca" in raised.value.hint


async def test_pipes_work_against_a_broker_as_on_a_directory(
    broker: BrokerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe(data: bytes, *words: str) -> tuple[int, bytes]:
        out = io.TextIOWrapper(io.BytesIO())
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            patch.setattr(sys, "stdout", out)
            code = run([*words, "--url", broker.url])
        out.flush()
        return code, out.buffer.getvalue()

    def work() -> None:
        assert pipe(b"a:1\nb:2\nc:3\n", "produce", "t", "-K", ":")[0] == 0
        assert pipe(b"", "consume", "t", "-e", "-f", "%o %k=%s\\n")[1] == b"1 a=1\n2 b=2\n3 c=3\n"
        assert pipe(b"", "consume", "t", "-e", "--from", "-1")[1] == b"3\n"
        assert pipe(b"", "consume", "t", "-G", "g", "-c", "2")[1] == b"1\n2\n"
        assert pipe(b"", "consume", "t", "-G", "g", "-e")[1] == b"3\n"
        lines = pipe(b"", "tail", "t", "-n", "2", "--no-follow", "-o", "json")[1].splitlines()
        assert [json.loads(line)["value"] for line in lines] == ["2", "3"]

    await asyncio.to_thread(work)


async def test_the_synchronous_client_moves_code_from_embedded_to_http_unchanged(broker: BrokerRun) -> None:
    def work() -> None:
        with connect(broker.url) as bay:
            bay.topics.create("orders", partitions=4)
            with bay.producer() as out:
                receipt = out.send("orders", [b"alpha", b"beta"], partition=0)
                done = receipt.result(timeout=60)
            assert (done.start_offset, done.end_offset) == (1, 2)
            table = bay.read("orders", partition=0, start=1).read_all()
            assert table.column("value").to_pylist() == [b"alpha", b"beta"]

    await asyncio.to_thread(work)
