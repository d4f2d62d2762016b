"""The producer: what is flushed when, that everybody gets exactly its own offsets, and what it costs."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.log.writing import (
    AT_ONCE,
    as_one,
    counted_coordinator,
    counted_store,
    group,
    in_world,
    index_of,
    read_log,
    span,
    writer_in,
    writer_of,
)

from forebay.coordination import MemoryCoordinator
from forebay.errors import Backpressure, Closed, LimitExceeded, UsageError
from forebay.kit.clock import SystemClock
from forebay.log import (
    BatchingProducer,
    Fenced,
    Fencing,
    LogWriter,
    OutOfSequence,
    ProducerConfig,
    WriterConfig,
)
from forebay.log import _batching as batching_module
from forebay.log._keys import PartitionKeys
from forebay.storage import MemoryStore
from forebay.testing import Actor, Constant, Latencies, World


def _producer(writer: LogWriter, **config: int) -> BatchingProducer:
    return BatchingProducer(writer, clock=SystemClock(), config=ProducerConfig(**config))


def _in(me: Actor, writer: LogWriter | None = None, **config: int) -> BatchingProducer:
    return BatchingProducer(writer or writer_in(me), clock=me.clock, config=ProducerConfig(**config))


async def test_many_calls_become_one_object_one_round_trip_one_entry_per_partition() -> None:
    store, requests = counted_store(MemoryStore())
    coordinator, calls = counted_coordinator(MemoryCoordinator())
    writer = writer_of(store, coordinator)
    await writer.append_shared([group("t", 0, b"first"), group("t", 1, b"first")])
    calls.clear()
    requests.clear()
    producer = _producer(writer)
    tickets = [
        ticket
        for number in range(100)
        for ticket in producer.append_nowait([group("t", number % 2, b"%d" % number)])
    ]
    await producer.flush()
    assert requests == {"put": 1} and calls == {"write": 1}
    offsets = [span(ticket.result()) for ticket in tickets]
    assert offsets == [(2 + number // 2, 2 + number // 2) for number in range(100)]
    await producer.close()
    for partition in (0, 1):
        assert list(await index_of(coordinator, PartitionKeys("t", partition))) == [1, 51]
        log = await read_log(store, coordinator, "t", partition)
        assert log == [b"first", *(b"%d" % number for number in range(partition, 100, 2))]


async def test_every_task_gets_exactly_its_own_offsets() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    claims: dict[int, bytes] = {}

    async def task(producer: BatchingProducer, name: int) -> None:
        for number in range(10):
            records = [b"%d/%d/%d" % (name, number, part) for part in range(1 + (name + number) % 3)]
            [ticket] = await producer.append([group("t", 0, *records)])
            result = await ticket
            assert result.start_offset is not None
            claims.update(enumerate(records, result.start_offset))

    async with _producer(writer_of(store, coordinator), batch_max_delay_ms=1) as producer:
        await asyncio.gather(*[task(producer, name) for name in range(20)])
    log = await read_log(store, coordinator)
    assert [claims[offset] for offset in range(1, len(log) + 1)] == log
    assert producer.stats.batches_committed < 200


async def test_a_refused_group_fails_its_own_ticket_alone() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    producer = _producer(writer_of(store, coordinator))
    good, bad, late, other = producer.append_nowait(
        [
            group("t", 0, b"a"),
            group("bad/name", 0, b"b"),
            group("t", 0, b"c", producer="p", sequence=3),
            group("u", 0, b"d"),
        ]
    )
    with pytest.raises(UsageError):
        await producer.flush()
    assert (await good).start_offset == 1
    assert (await other).start_offset == 1
    with pytest.raises(UsageError):
        await bad
    with pytest.raises(OutOfSequence):
        await late
    assert await read_log(store, coordinator) == [b"a"]


async def test_fenced_groups_fail_while_their_neighbours_are_appended() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    producer = _producer(writer)
    await writer.catalog.create("t", partitions=2)
    door = Fencing(coordinator, writer.catalog, clock=SystemClock(), randomness=random.Random(1))
    await door.fence("t", 0)
    fenced, fine = producer.append_nowait([group("t", 0, b"a"), group("t", 1, b"b")])
    with pytest.raises(Fenced):
        await producer.flush()
    with pytest.raises(Fenced):
        await fenced
    assert (await fine).start_offset == 1


async def test_backpressure_takes_all_groups_of_a_call_or_none() -> None:
    producer = _producer(writer_of(), pending_max_groups=3)
    first = producer.append_nowait([group("t", 0, b"a"), group("t", 0, b"b")])
    with pytest.raises(Backpressure, match="not durable yet"):
        producer.append_nowait([group("t", 0, b"c"), group("t", 0, b"d")])
    assert producer.pending_groups == 2
    [single] = producer.append_nowait([group("t", 0, b"e")])
    with pytest.raises(Backpressure):
        producer.append_nowait([group("t", 0, b"f")])
    await producer.flush()
    assert [span(await ticket) for ticket in (*first, single)] == [(1, 1), (2, 2), (3, 3)]


async def test_bytes_are_bounded_too() -> None:
    producer = _producer(writer_of(), pending_max_bytes=10_000, batch_max_bytes=10_000)
    producer.append_nowait([group("t", 0, bytes(6_000))])
    with pytest.raises(Backpressure):
        producer.append_nowait([group("t", 0, bytes(6_000))])
    with pytest.raises(LimitExceeded):
        producer.append_nowait([group("t", 0, bytes(11_000))])
    await producer.close()


async def test_a_caller_that_waits_gets_room_when_a_flush_is_done() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    async with _producer(writer_of(store, coordinator), pending_max_groups=2) as producer:
        tickets = [
            ticket
            for number in range(20)
            for ticket in await producer.append([group("t", 0, b"%d" % number)])
        ]
    assert [span(ticket.result()) for ticket in tickets] == [(n, n) for n in range(1, 21)]


async def test_closing_flushes_and_refuses_what_comes_after() -> None:
    coordinator = MemoryCoordinator()
    producer = _producer(writer_of(coordinator=coordinator))
    [ticket] = producer.append_nowait([group("t", 0, b"a")])
    await producer.close()
    await producer.close()
    assert ticket.result().start_offset == 1
    assert list(await index_of(coordinator, PartitionKeys("t", 0))) == [1]
    with pytest.raises(Closed):
        producer.append_nowait([group("t", 0, b"b")])


@pytest.mark.parametrize(
    "config",
    [
        {"batch_max_groups": 0},
        {"batch_max_groups": 1_000_000},
        {"batch_max_bytes": 0},
        {"batch_max_bytes": 1 << 40},
        {"batch_max_delay_ms": -1},
        {"uploads_max": 0},
    ],
)
def test_impossible_configurations_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ProducerConfig(**config).batcher()


async def test_too_many_groups_in_one_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = _producer(writer_of())
    monkeypatch.setattr(batching_module, "GROUPS_PER_CALL_MAX", 2)
    with pytest.raises(LimitExceeded, match="GROUPS_PER_CALL_MAX"):
        await producer.append([group("t", 0, b"a")] * 3)


def test_a_batch_is_flushed_by_age_and_an_idle_producer_costs_nothing() -> None:
    async def produce(me: Actor) -> None:
        producer = _in(me, batch_max_delay_ms=100)
        began = me.clock.monotonic()
        [ticket] = producer.append_nowait([group("t", 0, b"a")])
        await ticket
        assert me.clock.monotonic() - began >= 0.1
        await producer.start()
        await me.clock.sleep(10)
        before = me.world.requests.snapshot()
        await me.clock.sleep(600)
        assert me.world.requests.since(before).count("w") == 0
        await producer.close()

    as_one(produce)


def test_the_background_puts_the_index_entries_of_idle_partitions() -> None:
    async def produce(me: Actor) -> None:
        keys = PartitionKeys("t", 0)
        async with _in(me) as producer:
            [ticket] = producer.append_nowait([group("t", 0, b"a")])
            await ticket
            assert await index_of(me.world.keys, keys) == {}
            await me.clock.sleep(5)
            assert list(await index_of(me.world.keys, keys)) == [1]

    as_one(produce)


def test_the_next_flush_uploads_while_the_last_one_commits() -> None:
    async def produce(me: Actor) -> None:
        producer = _in(me, batch_max_bytes=1)
        [ticket] = producer.append_nowait([group("t", 0, b"warm")])
        await ticket
        began = me.clock.monotonic()
        tickets = [
            ticket
            for number in range(4)
            for ticket in producer.append_nowait([group("t", 0, b"%d" % number)])
        ]
        await asyncio.gather(*tickets)
        # One after the other it would be four times a put of 1 s and a commit of 0.1 s.
        assert me.clock.monotonic() - began < 1.6

    slow = Latencies(Constant(1_000))
    as_one(produce, store_latencies=slow, coordinator_latencies=Latencies(Constant(100)))


def test_an_acknowledgement_never_comes_before_its_commit() -> None:
    async def produce(me: Actor) -> None:
        producer = _in(me, batch_max_bytes=1)
        for number in range(5):
            [ticket] = producer.append_nowait([group("t", 0, b"%d" % number)])
            result = await ticket
            keys = PartitionKeys("t", 0)
            record = await me.world.keys.get(keys.control, partition_key=keys.partition_key)
            assert record is not None
            assert b'"sequence_counter":%d' % (number + 2) in record.value
            assert result.start_offset == number + 1

    as_one(produce)


def test_a_failed_flush_does_not_stop_the_next() -> None:
    async def produce(me: Actor) -> None:
        config = WriterConfig(upload=AT_ONCE)
        producer = _in(me, writer_in(me, config), batch_max_bytes=1)
        [ticket] = producer.append_nowait([group("t", 0, b"a")])
        await ticket
        me.world.fail_next(me, "put", "before", times=AT_ONCE.attempts_max)
        [lost] = producer.append_nowait([group("t", 0, b"b")])
        await asyncio.wait([lost])
        assert lost.exception() is not None
        [ticket] = producer.append_nowait([group("t", 0, b"c")])
        assert span(await ticket) == (2, 2)
        assert await read_log(me.world.bucket, me.world.keys) == [b"a", b"c"]

    as_one(produce)


def test_two_producers_on_the_same_partitions_keep_the_order_of_each() -> None:
    async def main(world: World) -> None:
        async def produce(me: Actor) -> None:
            producer = _in(me, batch_max_delay_ms=10)
            for number in range(30):
                for ticket in producer.append_nowait([group("t", 0, f"{me.name}/{number:02d}".encode())]):
                    if number % 5 == 0:
                        await ticket
            await producer.close()

        for name in ("ann", "bob"):
            world.spawn(name, produce)
        await world.join()
        log = await read_log(world.bucket, world.keys)
        for letter in (b"ann", b"bob"):
            own = [record for record in log if record.startswith(letter)]
            assert own == sorted(own) and len(own) == 30

    for seed in range(5):
        in_world(main, seed)
