"""The producer against a broker that misbehaves on demand: appended once, in order, and told honestly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import pytest
from tests.client.tiny_broker import TinyBroker

from forebay.client import ClientConfig, PartlyDelivered, ProducerConfig, Refused
from forebay.client.aio import Client, connect
from forebay.errors import Backpressure, Closed, NotDone, OutcomeUnknown, Unavailable, UsageError
from forebay.formats.bytes_batch import decode
from forebay.kit.retry import RetryPolicy
from forebay.testing._servers.ports import free_ports
from forebay.testing.proxy import FaultProxy, lose_reply

FAST = RetryPolicy(attempts_max=1_000_000, base_ms=1, cap_ms=10)
SOON = ProducerConfig(linger_ms=0, retry=FAST)


@pytest.fixture
async def broker() -> AsyncIterator[TinyBroker]:
    async with TinyBroker() as running:
        yield running


@pytest.fixture
async def bay(broker: TinyBroker) -> AsyncIterator[Client]:
    async with connect(broker.url) as client:
        yield client


async def test_a_receipt_tells_where_the_records_are(bay: Client, broker: TinyBroker) -> None:
    async with bay.producer(SOON) as out:
        first = await out.send("orders", [b"a", b"b"], partition=0)
        second = await out.send("orders", [b"c"], partition=0)
    assert (first.start_offset, first.end_offset, first.count, first.partition) == (1, 2, 2, 0)
    assert (second.start_offset, second.end_offset) == (3, 3)
    assert await broker.values("orders") == [b"a", b"b", b"c"]


async def test_sends_that_linger_together_share_a_request_and_keep_their_own_offsets(
    bay: Client, broker: TinyBroker
) -> None:
    async with bay.producer(ProducerConfig(linger_ms=20)) as out:
        receipts = [out.send("orders", [b"%d" % number], partition=number % 3) for number in range(30)]
        await out.flush()
    assert len(broker.produced) == 1
    assert len(broker.produced[0].topic_partitions) == 3
    for number, receipt in enumerate(receipts):
        assert (await receipt).start_offset == 1 + number // 3


async def test_records_with_keys_times_and_headers_arrive_as_sent(bay: Client, broker: TinyBroker) -> None:
    async with bay.producer(SOON) as out:
        await out.send(
            "orders",
            [b"v", b"w"],
            partition=0,
            keys=[b"k", None],
            timestamps_ms=[5, 6],
            headers=[{"h": b"1"}, None],
        )
    table = await (await broker.bay.read("orders", partition=0)).read_all()
    assert table.column("key").to_pylist() == [b"k", None]
    assert [each.timestamp() * 1000 for each in table.column("timestamp").to_pylist()] == [5, 6]
    assert table.column("headers").to_pylist()[0] == [{"key": "h", "value": b"1"}]


async def test_without_a_partition_equal_keys_stay_together_as_in_the_embedded_producer(
    bay: Client, broker: TinyBroker
) -> None:
    await broker.bay.topics.create("orders", partitions=4)
    keys = [b"%d" % (number % 7) for number in range(70)]
    async with broker.bay.producer() as embedded, bay.producer(SOON) as out:
        there = await embedded.send("orders", [b"x"] * 70, keys=keys)
        here = await out.send("orders", [b"x"] * 70, keys=keys)
    assert {part.partition: part.count for part in there.parts} == {
        part.partition: part.count for part in here.parts
    }


async def test_a_lost_answer_is_asked_for_again_and_nothing_is_appended_twice(
    bay: Client, broker: TinyBroker
) -> None:
    broker.before.extend(["lose", "", "lose", "lose"])
    async with bay.producer(SOON) as out:
        for number in range(6):
            done = await out.send("orders", [b"%d" % number], partition=0)
            assert done.start_offset == number + 1
    assert await broker.values("orders") == [b"%d" % number for number in range(6)]
    assert len(broker.produced) == 9


async def test_an_answer_lost_by_the_network_is_never_a_duplicate(broker: TinyBroker) -> None:
    async with FaultProxy("127.0.0.1", broker.port) as proxy, connect(f"http://{proxy.address}") as bay:
        async with bay.producer(SOON) as out:
            for number in range(10):
                if number % 3 == 0:
                    proxy.next_response(lose_reply(quiet_ms=20))
                assert (await out.send("orders", [b"%d" % number], partition=0)).start_offset == number + 1
        assert proxy.stats.faults_met == 4
    assert await broker.values("orders") == [b"%d" % number for number in range(10)]


async def test_refusals_that_pass_are_tried_again(bay: Client, broker: TinyBroker) -> None:
    broker.before.extend(["BackPressureRejected", "Contended", "503", "stopping", "drop", "Unavailable"])
    async with bay.producer(SOON) as out:
        assert (await out.send("orders", [b"a"], partition=0)).start_offset == 1
    assert await broker.values("orders") == [b"a"]
    sequences = [request.topic_partitions[0].sequence for request in broker.produced]
    assert sequences == [0] * 7


async def test_a_defect_of_the_broker_is_never_told_as_not_done(bay: Client, broker: TinyBroker) -> None:
    broker.before.append("defect")
    async with bay.producer(SOON) as out:
        # It was appended before the defect showed: sent again under its number, it is there once.
        assert (await out.send("orders", [b"a"], partition=0)).start_offset == 1
    assert await broker.values("orders") == [b"a"]
    broker.before.extend(["defect", "AccessDenied"])
    async with bay.producer(SOON) as out:
        with pytest.raises(OutcomeUnknown, match="InternalError"):
            await out.send("orders", [b"b"], partition=0)
    assert await broker.values("orders") == [b"a", b"b"]


async def test_a_refusal_for_good_is_told_as_not_done_and_the_next_batch_goes_through(
    bay: Client, broker: TinyBroker
) -> None:
    broker.before.append("Fenced")
    async with bay.producer(SOON) as out:
        with pytest.raises(Refused) as refused:
            await out.send("orders", [b"a"], partition=0)
        assert isinstance(refused.value, NotDone)
        assert refused.value.error_type == "Fenced"
        assert (await out.send("orders", [b"b"], partition=0)).start_offset == 1
    assert await broker.values("orders") == [b"b"]


async def test_a_refusal_after_a_lost_answer_is_told_as_unknown(bay: Client, broker: TinyBroker) -> None:
    broker.before.extend(["lose", "AccessDenied"])
    async with bay.producer(SOON) as out:
        with pytest.raises(OutcomeUnknown, match="2 attempts"):
            await out.send("orders", [b"a"], partition=0)
        # It had been appended, as it turns out: the next one stands behind it.
        assert (await out.send("orders", [b"b"], partition=0)).start_offset == 2


async def test_when_the_time_is_up_a_lost_answer_is_unknown_and_a_refusal_is_not(
    bay: Client, broker: TinyBroker
) -> None:
    config = ProducerConfig(linger_ms=0, retry=FAST, delivery_timeout_ms=1)
    async with bay.producer(config) as out:
        broker.before.extend(["lose"] * 50)
        with pytest.raises(OutcomeUnknown):
            await out.send("orders", [b"a"], partition=0)
        broker.before.clear()
        broker.before.extend(["BackPressureRejected"] * 50)
        with pytest.raises(Backpressure):
            await out.send("orders", [b"b"], partition=0)


async def test_many_batches_under_way_keep_their_order_whatever_fails(
    bay: Client, broker: TinyBroker
) -> None:
    broker.before.extend(["", "lose", "drop", "", "BackPressureRejected", "lose", "503", "", "drop"] * 3)
    config = ProducerConfig(linger_ms=0, batch_bytes=1, retry=FAST, in_flight_per_partition=5)
    async with bay.producer(config) as out:
        receipts = [out.send("orders", [b"%d" % number], partition=0) for number in range(60)]
        offsets = [(await receipt).start_offset for receipt in receipts]
    assert offsets == list(range(1, 61))
    assert await broker.values("orders") == [b"%d" % number for number in range(60)]


async def test_a_batch_given_up_does_not_hold_up_those_behind_it(bay: Client, broker: TinyBroker) -> None:
    broker.gate = asyncio.Event()
    broker.before.extend(["Fenced"])
    config = ProducerConfig(linger_ms=0, batch_bytes=1, retry=FAST, in_flight_per_partition=4)
    async with bay.producer(config) as out:
        receipts = [out.send("orders", [b"%d" % number], partition=0) for number in range(8)]
        await asyncio.sleep(0)
        broker.gate.set()
        with pytest.raises(Refused):
            await receipts[0]
        for receipt in receipts[1:]:
            await receipt
    assert await broker.values("orders") == [b"%d" % number for number in range(1, 8)]


async def test_what_is_not_durable_is_bounded(bay: Client, broker: TinyBroker) -> None:
    broker.gate = asyncio.Event()
    config = ProducerConfig(linger_ms=0, pending_bytes_max=1000, retry=FAST)
    async with bay.producer(config) as out:
        receipt = out.send("orders", [bytes(2000)], partition=0)
        with pytest.raises(Backpressure):
            out.send("orders", [b"more"], partition=0)
        waiting = asyncio.create_task(out.room())
        broker.gate.set()
        await waiting
        assert out.pending_bytes < 1000
        await receipt


async def test_no_broker_is_unavailable_and_certainly_not_done() -> None:
    [port] = free_ports(1)
    config = ProducerConfig(linger_ms=0, retry=FAST, delivery_timeout_ms=30)
    async with connect(f"http://127.0.0.1:{port}") as bay, bay.producer(config) as out:
        sends = [out.send("orders", [b"%d" % number], partition=0) for number in range(3)]
        for receipt in sends:
            with pytest.raises(Unavailable):
                await receipt


async def test_a_failure_nobody_asked_for_is_raised_by_close_once(bay: Client, broker: TinyBroker) -> None:
    broker.before.append("Fenced")
    out = bay.producer(SOON)
    out.send("orders", [b"a"], partition=0)
    with pytest.raises(Refused):
        await out.close()
    await out.close()
    with pytest.raises(Closed):
        await out.send("orders", [b"b"], partition=0)


async def test_records_that_no_broker_would_take_are_refused_at_the_call(bay: Client) -> None:
    async with bay.producer() as out:
        for records, keys in (([], None), ([b"a", None], None), ([b"a"], [b"k", b"l"])):
            with pytest.raises(UsageError):
                out.send("orders", records, partition=0, keys=keys)  # type: ignore[arg-type]


async def test_one_batch_that_spoils_a_request_does_not_spoil_the_others(
    bay: Client, broker: TinyBroker
) -> None:
    async with bay.producer(ProducerConfig(linger_ms=5, retry=FAST)) as out:
        good = out.send("orders", [b"a"], partition=0)
        bad = out.send("orders", [b"b"], partition=1)
        # The whole request is refused first; then each batch by itself, the second for good.
        broker.before.extend(["400", "", "400"])
        assert (await good).start_offset == 1
        with pytest.raises(UsageError):
            await bad


async def test_a_send_to_several_partitions_that_half_succeeds_says_which(
    bay: Client, broker: TinyBroker
) -> None:
    await broker.bay.topics.create("orders", partitions=2)
    async with bay.producer(ProducerConfig(linger_ms=0, retry=FAST, request_bytes=1)) as out:
        broker.before.extend(["Fenced", ""])
        with pytest.raises(PartlyDelivered) as partly:
            await out.send("orders", [b"x"] * 20, keys=[b"%d" % number for number in range(20)])
    assert sorted(part.ok for part in partly.value.parts) == [False, True]


@pytest.mark.parametrize("answer", ["garbage", "strange"])
async def test_something_that_is_no_broker_leaves_the_outcome_unknown(
    bay: Client, broker: TinyBroker, answer: str
) -> None:
    broker.before.extend([answer] * 50)
    async with bay.producer(ProducerConfig(linger_ms=0, retry=FAST, delivery_timeout_ms=1)) as out:
        with pytest.raises(OutcomeUnknown):
            await out.send("orders", [b"a"], partition=0)


async def test_frames_carry_the_records_and_the_token_goes_with_every_request(broker: TinyBroker) -> None:
    async with connect(broker.url, token="s3cret") as bay, bay.producer(SOON) as out:
        await out.send("orders", [b"a", b"b"], partition=0)
    [entry] = broker.produced[0].topic_partitions
    assert decode(bytes(entry.frame or b"")).records() == [b"a", b"b"]
    assert entry.records is None
    assert {each.get("authorization") for each in broker.headers} == {"Bearer s3cret"}


async def test_a_broker_that_answers_too_late_leaves_the_outcome_unknown(broker: TinyBroker) -> None:
    broker.gate = asyncio.Event()
    config = ClientConfig(request_timeout_s=0.05)
    async with connect(broker.url, config=config) as bay:
        producer = ProducerConfig(linger_ms=0, retry=FAST, delivery_timeout_ms=1)
        async with bay.producer(producer) as out:
            with pytest.raises(OutcomeUnknown, match="no answer within"):
                await out.send("orders", [b"a"], partition=0)
        broker.gate.set()


async def test_a_partition_may_be_a_number_of_numpy(bay: Client, broker: TinyBroker) -> None:
    await broker.bay.topics.create("orders", partitions=2)
    async with bay.producer(SOON) as out:
        done = await out.send("orders", [b"a"], partition=cast("int", np.int64(1)))
    assert done.partition == 1
