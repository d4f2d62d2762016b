"""Counted, not timed: what a flush costs, whatever the number of partitions in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.log.writing import as_one, counted_coordinator, counted_store, group, writer_in, writer_of

from forebay.coordination import Coordinator, open_coordinator
from forebay.log import AppendGroup
from forebay.storage import MemoryStore
from forebay.testing import Actor, Requests
from forebay.testing.servers import OxiaServer

PARTITIONS = [1, 10, 100, 1_000]


def _groups(partitions: int) -> list[AppendGroup]:
    return [group("t", partition, b"record") for partition in range(partitions)]


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_a_flush_is_one_put_and_one_round_trip(partitions: int) -> None:
    async def append(me: Actor) -> list[Requests]:
        writer, costs = writer_in(me), []
        for _ in range(3):
            before = me.world.requests.snapshot()
            results = await writer.append_shared(_groups(partitions))
            assert all(result.ok for result in results)
            costs.append(me.world.requests.since(before))
        return costs

    first, *steady = as_one(append)
    # First contact: one read per partition, and the catalog is read, written and confirmed once. The store is
    # asked whose it is, and is given the name of the log with its first topic.
    assert first.count("w", "coordinator.get") == partitions + 3
    assert first.count("w", "coordinator.write") == 3
    assert first.count("w", "store.get") == 2
    assert first.count("w", "store.put") == 2
    for cost in steady:
        assert cost.count("w", "store.put") == 1
        assert cost.count("w", "coordinator.write") == 1
        assert cost.count("w") == 2


def test_a_writer_that_lost_a_race_pays_one_read_and_one_write_more() -> None:
    async def append(me: Actor) -> None:
        ann, bob = writer_in(me), writer_in(me)
        await ann.append_shared(_groups(5))
        await bob.append_shared(_groups(5))
        before = me.world.requests.snapshot()
        await ann.append_shared(_groups(5))
        cost = me.world.requests.since(before)
        assert cost.count("w", "coordinator.write") == 2
        assert cost.count("w", "coordinator.get") == 5
        assert cost.count("w", "store.put") == 1

    as_one(append)


def test_the_cost_of_an_append_does_not_grow_with_the_log() -> None:
    async def append(me: Actor) -> set[tuple[int, int]]:
        writer, costs = writer_in(me), set()
        await writer.append_shared(_groups(1))
        for _ in range(300):
            before = me.world.requests.snapshot()
            await writer.append_shared(_groups(1))
            cost = me.world.requests.since(before)
            costs.add((cost.count("w", "store"), cost.count("w", "coordinator")))
        return costs

    assert as_one(append) == {(1, 1)}


@pytest.fixture(params=["sqlite", pytest.param("oxia", marks=pytest.mark.real_server("oxia"))])
async def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Coordinator]:
    if request.param == "sqlite":
        url = f"sqlite://{tmp_path}/keys.db"
    else:
        server: OxiaServer = request.getfixturevalue("oxia")
        url = server.url()
    async with open_coordinator(url) as opened:
        yield opened


@pytest.mark.parametrize("partitions", PARTITIONS)
async def test_a_flush_is_one_put_and_one_round_trip_on_real_coordinators(
    coordinator: Coordinator, partitions: int
) -> None:
    counted, calls = counted_coordinator(coordinator)
    store, requests = counted_store(MemoryStore())
    writer = writer_of(store, counted)
    topic = f"counted-{partitions}"
    for number in range(3):
        calls.clear()
        requests.clear()
        results = await writer.append_shared(
            [group(topic, partition, b"record") for partition in range(partitions)]
        )
        assert all(result.ok for result in results)
        if number:
            assert calls == {"write": 1}
            assert requests == {"put": 1}
