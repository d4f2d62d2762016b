"""Long polls and event streams: they wait for nothing but records, and cost nothing meanwhile."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.broker.bed import Answer, Client, Wire, parts, serving, until

from forebay.broker import Broker, HttpLimits


async def poll(client: Client, offset: int, *, wait_ms: int = 30_000, **more: Any) -> Wire:
    wire = await client.open()
    place = {"topic": "t", "partition": 0, "fetch_offset": offset}
    body = json.dumps({"topic_partitions": [place], "max_wait_ms": wait_ms, **more}).encode()
    await wire.send("POST", "/consume", body)
    return wire


async def polled(client: Client, offset: int, **more: Any) -> Answer:
    wire = await poll(client, offset, **more)
    answer = await wire.answer()
    await wire.close()
    return answer


async def waiting(broker: Broker, count: int) -> None:
    await until(lambda: broker.engines.followers.waiting >= count)


def requests(broker: Broker) -> dict[str, float]:
    found = {}
    for name, text in (
        ("coordination.requests", "Round trips to the coordinator"),
        ("log.store_requests", "Requests to the store"),
    ):
        for labels, series in broker.metrics.counter(name, text, ("operation",)).series():
            found[f"{name}/{labels[0]}"] = series.value
    return found


async def test_long_poll_ends_with_the_first_record() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a"])
        wire = await poll(client, 2)
        await waiting(broker, 1)
        await client.produce("t", 0, ["b"])
        [result] = (await wire.answer()).json()["results"]
        assert [record["value"] for record in result["records"]] == ["b"]
        await wire.close()


async def test_long_poll_without_records_ends_empty_when_its_time_is_up() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await poll(client, 2, wait_ms=50)
        [result] = (await wire.answer()).json()["results"]
        assert (result["ok"], result["records"], result["next_offset"]) == (True, [], 2)
        assert (result["high_watermark"], result["earliest_offset"]) == (2, 1)
        await wire.close()


async def test_long_poll_waits_for_min_bytes_and_answers_what_there_is_in_the_end() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["x" * 10])
        wire = await poll(client, 1, min_bytes=25)
        await waiting(broker, 1)
        await client.produce("t", 0, ["y" * 10])
        await waiting(broker, 1)
        await client.produce("t", 0, ["z" * 10])
        assert len((await wire.answer()).json()["results"][0]["records"]) == 3
        await wire.close()
        wire = await poll(client, 1, min_bytes=1_000, wait_ms=50)
        assert len((await wire.answer()).json()["results"][0]["records"]) == 3
        await wire.close()


@pytest.mark.parametrize("bounds", [{}, {"partition_max_bytes": 1_000}])
async def test_min_bytes_are_not_waited_for_where_there_is_more_than_the_bounds_give(
    bounds: dict[str, int],
) -> None:
    async with serving() as (_, client):
        await client.post("/topics", {"topic": "t", "partitions": 200})
        await client.produce("t", 0, ["x" * 50_000] * 40)
        # So many partitions share the answer that none may give min_bytes alone.
        places = [{"topic": "t", "partition": number, "fetch_offset": 1, **bounds} for number in range(200)]
        message = {"topic_partitions": places, "max_wait_ms": 60_000, "min_bytes": 1_900_000}
        [first, *_] = (await client.post("/consume", message)).json()["results"]
        assert 0 < len(first["records"]) < 40
        assert first["next_offset"] < first["high_watermark"]


async def test_min_bytes_of_zero_never_waits() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await poll(client, 2, min_bytes=0)
        assert (await wire.answer()).json()["results"][0]["records"] == []
        await wire.close()


async def test_thousand_idle_long_polls_send_no_request() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a"])
        await broker.engines.writer.materialize_idle(idle_ms=0)  # Else it does so a second later, in between.
        wires = [await poll(client, 2) for _ in range(1_000)]
        await waiting(broker, 1_000)
        await asyncio.sleep(0.1)  # The follower has looked once; whatever else there would be has begun.
        before = requests(broker)
        await asyncio.sleep(0.5)
        assert requests(broker) == before
        await client.produce("t", 0, ["b"])
        answers = [await wire.answer() for wire in wires]
        assert all(answer.json()["results"][0]["records"][0]["value"] == "b" for answer in answers)
        for wire in wires:
            await wire.close()


async def test_polling_again_at_the_end_sends_no_request_either() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a"])
        for _ in range(2):
            await polled(client, 2, wait_ms=20)
        before = requests(broker)
        for _ in range(5):
            [result] = (await polled(client, 2, wait_ms=20)).json()["results"]
            assert result["ok"] and result["records"] == []
        assert requests(broker) == before


@pytest.mark.parametrize("shared_tail", [False, True])
async def test_append_through_another_broker_ends_a_long_poll(tmp_path: Path, shared_tail: bool) -> None:
    name = str(uuid.uuid4())
    tail = tmp_path / "tail" if shared_tail else None
    async with (
        serving(made_of=parts(name), roles=("write",), tail_cache_dir=tail) as (_, writing),
        serving(made_of=parts(name), roles=("read",), tail_cache_dir=tail) as (broker, reading),
    ):
        await writing.produce("t", 0, ["a"])
        wire = await poll(reading, 2)
        await waiting(broker, 1)
        await writing.produce("t", 0, ["b"])
        assert (await wire.answer()).json()["results"][0]["records"][0]["value"] == "b"
        await wire.close()


async def test_a_tail_directory_left_by_another_log_serves_none_of_its_records(tmp_path: Path) -> None:
    async with serving(tail_cache_dir=tmp_path / "tail") as (_, client):
        for value in ("old 1", "old 2", "old 3"):
            await client.produce("t", 0, [value])
    async with serving(tail_cache_dir=tmp_path / "tail") as (_, client):
        await client.produce("t", 0, ["new"])
        [result] = (await client.consume("t", 0, 1)).json()["results"]
        assert [record["value"] for record in result["records"]] == ["new"]
        [result] = (await client.consume("t", 0, 2)).json()["results"]
        assert result["records"] == []


async def test_own_appends_are_read_from_the_tail() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a", "b"])
        before = requests(broker)
        assert len((await client.consume("t", 0, 1)).json()["results"][0]["records"]) == 2
        assert requests(broker) == before


async def test_followers_end_after_the_last_waiter() -> None:
    async with serving(follow_linger_ms=50) as (broker, client):
        await client.produce("t", 0, ["a"])
        await polled(client, 2, wait_ms=10)
        assert broker.engines.followers.followed == 1
        await until(lambda: not broker.engines.followers.followed)


async def test_waits_are_bounded() -> None:
    async with serving(limits=HttpLimits(waits_max=2)) as (broker, client):
        await client.produce("t", 0, ["a"])
        wires = [await poll(client, 2) for _ in range(2)]
        await waiting(broker, 2)
        third = await poll(client, 2)
        answer = await third.answer()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        for wire in (*wires, third):
            await wire.close()


async def test_topic_that_is_deleted_ends_the_wait_for_it() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a"])
        wire = await poll(client, 2)
        await waiting(broker, 1)
        assert (await client.request("DELETE", "/topics/t")).status == 200
        answer = await wire.answer()
        assert answer.status in (200, 409)
        await wire.close()


# -- server-sent events


async def test_tail_gives_old_records_then_new_ones() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a", "b", "c"])
        wire = await client.open()
        await wire.send("GET", "/tail?topic=t&partition=0&from=-2")
        answer = await wire.head()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
        events = wire.events()
        seen = []
        async for event in events:
            if event.startswith("id: "):
                first, data = event.split("\n", 1)
                seen.append(
                    (int(first.removeprefix("id: ")), json.loads(data.removeprefix("data: "))["value"])
                )
            if len(seen) == 2:
                await client.produce("t", 0, ["d"])
            if len(seen) == 3:
                break
        assert seen == [(2, "b"), (3, "c"), (4, "d")]
        await wire.close()
        await until(lambda: not broker.server.connections)


async def test_tail_goes_on_behind_the_last_event_of_a_lost_connection() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a", "b", "c"])
        wire = await client.open()
        await wire.send("GET", "/tail?topic=t&from=earliest", None, {"Last-Event-ID": "2"})
        await wire.head()
        async for event in wire.events():
            if event.startswith("id: "):
                assert event.startswith("id: 3\n")
                break
        await wire.close()


async def test_idle_tail_gives_signs_of_life() -> None:
    async with serving(tail_heartbeat_ms=20) as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await client.open()
        await wire.send("GET", "/tail?topic=t")
        await wire.head()
        beats = 0
        async for event in wire.events():
            beats += event == ": still here"
            if beats == 3:
                break
        await wire.close()


@pytest.mark.parametrize("query", ["", "?topic=", "?topic=t&partition=x", "?topic=t&from=now", "?topic=nope"])
async def test_tail_of_nothing_is_refused(query: str) -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        assert (await client.get(f"/tail{query}")).status in (400, 404)


async def test_tails_are_bounded_and_counted() -> None:
    async with serving(limits=HttpLimits(tails_max=1)) as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await client.open()
        await wire.send("GET", "/tail?topic=t")
        await wire.head()
        assert (await client.get("/tail?topic=t")).status == 429
        await wire.close()
