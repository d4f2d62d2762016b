"""Commits from outside of a group: only what can have been read is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.log.test_groups import Log, at
from tests.log.writing import counted_coordinator

from forebay.coordination import MemoryCoordinator
from forebay.errors import UsageError
from forebay.log import OffsetOutOfRange, TopicPartition, UnknownTopic
from forebay.log._trim import Trimmer


@pytest.fixture
async def log() -> Log:
    made = Log()
    await made.catalog.create("orders", partitions=2)
    await made.write(0, [b"a", b"b"])
    return made


@pytest.mark.parametrize("place", [at(0, "nothing"), at(2)], ids=["topic", "partition"])
async def test_a_commit_to_what_is_not_there_is_refused_and_makes_no_group(
    log: Log, place: TopicPartition
) -> None:
    with pytest.raises(UnknownTopic):
        await log.groups.commit("billing", {place: 1})
    assert await log.groups.list() == []


async def test_a_commit_to_a_deleted_topic_is_refused(log: Log) -> None:
    await log.catalog.delete("orders")
    with pytest.raises(UnknownTopic):
        await log.groups.commit("billing", {at(0): 1})


@pytest.mark.parametrize(("partition", "end"), [(0, 3), (1, 1)], ids=["written", "empty"])
async def test_a_commit_goes_up_to_the_end_of_the_log_and_not_beyond(
    log: Log, partition: int, end: int
) -> None:
    """A group that stood beyond it would pass over what is written in between."""
    with pytest.raises(OffsetOutOfRange) as refused:
        await log.groups.commit("billing", {at(partition): end + 1})
    assert (refused.value.earliest, refused.value.next) == (1, end)
    assert await log.groups.committed("billing") == {}
    await log.groups.commit("billing", {at(partition): end})
    assert (await log.groups.committed("billing"))[at(partition)].offset == end


async def test_what_is_refused_keeps_nothing_else_from_being_committed(log: Log) -> None:
    with pytest.raises((UnknownTopic, OffsetOutOfRange)):
        await log.groups.commit("billing", {at(7): 1, at(0): 2, at(1): 9})
    committed = await log.groups.committed("billing")
    assert {place: record.offset for place, record in committed.items()} == {at(0): 2}


async def test_a_commit_below_the_start_of_the_log_is_taken(log: Log) -> None:
    """A trim may have come between reading and committing."""
    await Trimmer(log.coordinator, clock=log.clock, randomness=log.random).trim("orders", 0, 3)
    await log.groups.commit("billing", {at(0): 2})


async def test_a_commit_costs_the_same_requests_whatever_the_number_of_partitions() -> None:
    counted, calls = counted_coordinator(MemoryCoordinator())
    log = Log(coordinator=counted)
    for partition in range(20):
        await log.write(partition, [b"a"])
    await log.groups.commit("billing", {at(0): 1})
    calls.clear()
    await log.groups.commit("billing", {at(number): 2 for number in range(20)})
    assert calls == {"get_many": 1, "scan_all": 1, "write": 1}


async def test_integers_of_numpy_are_offsets_and_partitions(log: Log) -> None:
    place = TopicPartition("orders", np.int64(0))  # type: ignore[arg-type]
    await log.groups.commit("billing", {place: np.int32(2)}, generation=np.int8(1))  # type: ignore[dict-item, arg-type]
    committed = (await log.groups.committed("billing"))[at(0)]
    assert (committed.offset, committed.generation) == (2, 1)
    await log.groups.reset("billing", [place], to=np.uint16(1))  # type: ignore[arg-type]
    assert (await log.groups.committed("billing"))[at(0)].offset == 1
    async with log.groups.member("billing", ["orders"]) as member:
        await member.commit({place: np.int64(3)})  # type: ignore[dict-item]
        assert member.owned[at(0)] == 3
    for wrong in (np.float64(2), np.bool_(True), True, np.array([1, 2])):
        with pytest.raises(UsageError):
            await log.groups.commit("billing", {at(0): wrong})  # type: ignore[dict-item]


async def test_a_reset_of_no_partition_makes_no_group(log: Log) -> None:
    assert await log.groups.reset("billing", [], to="earliest") == []
    assert await log.groups.list() == []


@pytest.mark.timeout(20)
async def test_a_timeout_that_would_never_be_over_is_refused(log: Log) -> None:
    with pytest.raises(UsageError):
        await log.reader.wait_for_data([("orders", 1, 1)], timeout_s=float("nan"))
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        assert await consumer.poll(timeout_s=5)
        with pytest.raises(UsageError):
            await consumer.poll(timeout_s=float("nan"))


@pytest.mark.parametrize("limit", [0, -1, 1.5, "5", True])
async def test_limits_of_a_read_are_integers_from_one_on(log: Log, limit: Any) -> None:
    for name in ("max_bytes", "max_records"):
        with pytest.raises(UsageError):
            await log.reader.read("orders", 0, 1, **{name: limit})
    assert len(await log.reader.read("orders", 0, 1, max_records=np.int8(1))) == 1  # type: ignore[arg-type]
