"""Reading over HTTP: the same tables as the embedded log gives, to the end, beyond trims, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from tests.client.tiny_broker import TinyBroker

from forebay.client import ConsumerConfig, OffsetOutOfRange, connect
from forebay.client import aio as client_aio
from forebay.client._address import parse_address
from forebay.client.aio import Client
from forebay.errors import Closed, InvalidUrl, NotFound, UsageError
from forebay.formats.record_columns import RECORD_SCHEMA


@pytest.fixture
async def broker() -> AsyncIterator[TinyBroker]:
    async with TinyBroker() as running:
        yield running


@pytest.fixture
async def bay(broker: TinyBroker) -> AsyncIterator[Client]:
    async with client_aio.connect(broker.url) as client:
        yield client


async def fill(broker: TinyBroker, count: int, partition: int = 0) -> None:
    async with broker.bay.producer() as out:
        for number in range(count):
            await out.send("orders", [b"%d" % number], partition=partition, keys=[b"k"])


async def test_a_read_gives_the_table_that_the_embedded_log_gives(bay: Client, broker: TinyBroker) -> None:
    await fill(broker, 5)
    here = await (await bay.read("orders", partition=0)).read_all()
    there = await (await broker.bay.read("orders", partition=0)).read_all()
    assert here.combine_chunks() == there.combine_chunks()
    assert here.schema == RECORD_SCHEMA


async def test_a_read_stops_before_its_end_and_starts_at_its_start(bay: Client, broker: TinyBroker) -> None:
    await fill(broker, 9)
    table = await (await bay.read("orders", partition=0, start=3, end=6)).read_all()
    assert table.column("offset").to_pylist() == [3, 4, 5]
    assert (await (await bay.read("orders", partition=0, start=6, end=6)).read_all()).num_rows == 0


async def test_a_read_without_a_partition_reads_all_and_takes_no_offsets(
    bay: Client, broker: TinyBroker
) -> None:
    await broker.bay.topics.create("orders", partitions=2)
    await fill(broker, 2, 0)
    await fill(broker, 2, 1)
    table = await (await bay.read("orders")).read_all()
    assert table.column("partition").to_pylist() == [0, 0, 1, 1]
    with pytest.raises(UsageError):
        await bay.read("orders", start=3)


async def test_a_consumer_reads_on_where_it_stopped_and_knows_the_end(
    bay: Client, broker: TinyBroker
) -> None:
    await fill(broker, 3)
    async with bay.consumer("orders", partition=0, start="earliest") as consumer:
        batches = await consumer.poll(timeout_s=0)
        assert pa.Table.from_batches(batches).column("value").to_pylist() == [b"0", b"1", b"2"]
        assert consumer.at_end
        assert await consumer.poll(timeout_s=0) == []
        await fill(broker, 1)
        assert sum(len(batch) for batch in await consumer.poll(timeout_s=0)) == 1


async def test_a_consumer_goes_on_at_the_earliest_record_after_a_trim(
    bay: Client, broker: TinyBroker
) -> None:
    await fill(broker, 6)
    async with bay.consumer("orders", partition=0, start=1) as consumer:
        await broker.bay.trim("orders", partition=0, offset=4)
        found: list[pa.RecordBatch] = []
        while not found:
            found = await consumer.poll(timeout_s=0)
        assert found[0].column("offset")[0].as_py() == 4


async def test_an_offset_beyond_the_end_is_refused_by_name(bay: Client, broker: TinyBroker) -> None:
    await fill(broker, 1)
    async with bay.consumer("orders", partition=0, start=99) as consumer:
        with pytest.raises(OffsetOutOfRange) as refused:
            await consumer.poll(timeout_s=0)
    assert refused.value.next == 2


async def test_every_partition_has_its_turn_where_an_answer_holds_only_one(
    bay: Client, broker: TinyBroker
) -> None:
    await broker.bay.topics.create("orders", partitions=3)
    for partition in range(3):
        await fill(broker, 2, partition)
    firsts = set()
    async with bay.consumer("orders", start="earliest", config=ConsumerConfig(max_bytes=1)) as consumer:
        for _ in range(3):
            firsts.add(next(iter(consumer._in_turn())))
    assert len(firsts) == 3


async def test_a_topic_that_is_not_there_is_not_found(bay: Client) -> None:
    with pytest.raises(NotFound):
        await bay.read("nowhere")


async def test_a_time_needs_a_zone(bay: Client, broker: TinyBroker) -> None:
    await fill(broker, 1)
    with pytest.raises(UsageError, match="no time zone"):
        await bay.read("orders", partition=0, start=datetime(2026, 1, 1))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    assert (await (await bay.read("orders", partition=0, start=start)).read_all()).num_rows == 1


async def test_the_synchronous_client_does_the_same_from_any_thread(broker: TinyBroker) -> None:
    def work() -> list[bytes]:
        with connect(broker.url) as bay:
            with bay.producer() as out:
                receipts = [out.send("orders", [b"%d" % number], partition=0) for number in range(50)]
                assert [receipt.result(timeout=10).start_offset for receipt in receipts] == list(range(1, 51))
            found: list[bytes] = bay.read("orders", partition=0).read_all().column("value").to_pylist()
            with bay.consumer("orders", partition=0, start="earliest") as consumer:
                assert sum(len(batch) for batch in consumer.poll()) == 50
        with pytest.raises(Closed):
            bay.producer()
        return found

    assert await asyncio.to_thread(work) == [b"%d" % number for number in range(50)]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "host:80",
        "http://user:pass@host",
        "http://host?x=1",
        "http://h:99999",
        "http://h/ü",
    ],
)
def test_a_url_that_is_no_brokers_is_refused(url: str) -> None:
    with pytest.raises(InvalidUrl):
        parse_address(url)


def test_an_address_keeps_path_and_port() -> None:
    address = parse_address("http://[::1]:81/base/")
    assert (address.host, address.port, address.path, address.authority) == ("::1", 81, "/base", "[::1]:81")
    assert str(parse_address("http://broker")) == "http://broker:80"


def test_certificates_without_tls_and_files_that_are_none_are_refused(tmp_path: object) -> None:
    with pytest.raises(UsageError):
        parse_address("http://host", ca="ca.pem")
    with pytest.raises(UsageError):
        parse_address("https://host", ca="/nonexistent/ca.pem")
