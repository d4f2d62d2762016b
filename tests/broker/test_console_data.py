"""What the console asks beyond the rest: objects of a partition, and cost at other flush intervals."""

from __future__ import annotations

import pytest
from tests.broker.bed import parts, serving

from forebay.broker import BrokerConfig
from forebay.broker._config import ROLES
from forebay.broker._cost import MONTH_S, Load, flushes_at
from forebay.broker._objects import OBJECTS_MAX
from forebay.broker._routes import Action
from forebay.broker._tokens import Tokens
from forebay.formats.http_messages import PATHS

AT = "/topics/t/partitions/0/objects"


async def test_every_append_is_listed_with_its_object_and_the_sizes_add_up() -> None:
    async with serving() as (_, client):
        uris = [
            (await client.produce("t", 0, records)).json()["results"][0]["wal_uri"]
            for records in (["a"], ["b", "c"], ["d"])
        ]
        found = (await client.get(AT)).json()
        shown = [(each["start_offset"], each["end_offset"], each["object"]) for each in found["objects"]]
        assert shown == [(1, 1, uris[0]), (2, 3, uris[1]), (4, 4, uris[2])]
        assert [each["source"] for each in found["objects"]] == ["WAL", "WAL", "pending"]
        assert found["bytes"] == sum(each["bytes"] for each in found["objects"]) > 0
        assert (found["entries"], found["complete"], found["compacted_bytes"]) == (3, True, 0)
        assert (found["earliest"], found["next"], found["cursor"], found["lag_records"]) == (1, 5, 1, 4)
        assert (found["log_state"], found["epoch"]) == ("OPEN", 0)
        assert found["objects"][0]["writer"] == "broker-1"


async def test_pages_of_objects_go_on_where_the_last_ended() -> None:
    async with serving() as (_, client):
        for number in range(5):
            await client.produce("t", 0, [str(number)])
        seen, query = [], "?limit=2"
        while query:
            page = (await client.get(AT + query)).json()
            seen += [each["start_offset"] for each in page["objects"]]
            assert ("entries" in page) == (query == "?limit=2")
            query = f"?limit=2&from={page['next_from']}" if "next_from" in page else ""
        assert seen == [1, 2, 3, 4, 5]
        sizes = (await client.get(AT + "?limit=0")).json()
        assert (sizes["objects"], sizes["entries"]) == ([], 5)


async def test_compacted_ranges_and_trims_show() -> None:
    async with serving() as (_, client):
        await client.post("/topics", {"topic": "t", "settings": {"compact_min_age_ms": 0}})
        for number in range(4):
            await client.produce("t", 0, [str(number)])
        [run] = (await client.post("/compaction", {"topic": "t"})).json()["partitions"]
        assert run["records"] > 0, "the age that the topic's settings ask for is none"
        found = (await client.get(AT)).json()
        assert found["compacted_bytes"] > 0
        assert "COMPACTED" in [each["source"] for each in found["objects"]]
        state = (await client.get("/compaction?topic=t")).json()["partitions"][0]
        assert found["cursor"] == state["cursor"]
        assert found["lag_records"] == state["lag_records"]
        live = [each for each in found["objects"] if not each.get("stale")]
        assert sum(each["records"] for each in live) == 4
        await client.post("/topics/t/partitions/0/trim", {"offset": 4})
        trimmed = (await client.get(AT)).json()
        assert trimmed["earliest"] == 4
        assert all(each["end_offset"] >= 4 for each in trimmed["objects"])


async def test_objects_of_what_is_not_there() -> None:
    async with serving() as (_, client):
        assert (await client.get(AT)).status == 404
        await client.post("/topics", {"topic": "t"})
        assert (await client.get(AT)).json()["objects"] == []
        assert (await client.get("/topics/t/partitions/7/objects")).status == 404
        for wrong in ("?from=x", "?from=-1", f"?limit={OBJECTS_MAX + 1}"):
            assert (await client.get(AT + wrong)).status == 400


async def test_cost_is_measured_now_and_estimated_elsewhere() -> None:
    async with serving() as (_, client):
        for number in range(4):
            await client.produce("t", 0, [str(number)])
        found = (await client.get(PATHS.COST)).json()
        assert found["batch_max_delay_ms"] == 1
        assert found["flushes_per_second"] > 0
        # With the first topic the store was asked whose it is, twice, and given the name of its log.
        once_s = 1 / found["window_seconds"]
        assert found["requests_per_second"]["put"] == pytest.approx(found["flushes_per_second"] + once_s)
        assert found["requests_per_second"]["get"] == pytest.approx(2 * once_s)
        by_delay = {each["batch_max_delay_ms"]: each for each in found["intervals"]}
        assert [each["current"] for each in found["intervals"]].count(True) == 1
        assert by_delay[1]["dollars_per_month"] == pytest.approx(found["dollars_per_month"])
        puts = (found["flushes_per_second"] + once_s) * 0.005 / 1000 * MONTH_S
        gets = 2 * once_s * 0.0004 / 1000 * MONTH_S
        assert found["dollars_per_month"] == pytest.approx(puts + gets)
        costs = [each["dollars_per_month"] for each in found["intervals"]]
        assert costs == sorted(costs, reverse=True)


async def test_broker_that_only_reads_has_no_flush_intervals() -> None:
    async with serving(BrokerConfig(roles=(ROLES[1],))) as (_, client):
        found = (await client.get(PATHS.COST)).json()
        assert (found["intervals"], found["dollars_per_month"]) == ([], 0)


async def test_cost_and_objects_need_a_token_that_allows_them() -> None:
    made = parts()
    tokens = Tokens(made.coordinator, clock=made.clock)
    _, watcher = await tokens.issue("watcher", actions=[Action.MONITOR])
    _, reader = await tokens.issue("reader", actions=[Action.READ, Action.APPEND], prefix="t")
    monitor, read = {"Authorization": f"Bearer {watcher}"}, {"Authorization": f"Bearer {reader}"}
    async with serving(made_of=made, require_tokens=True) as (_, client):
        body = {"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"]}]}
        assert (await client.post("/produce", body, read)).status == 200
        statuses = {
            (path, who): (await client.get(path, headers)).status
            for path in (PATHS.COST, AT)
            for who, headers in (("nobody", {}), ("watcher", monitor), ("reader", read))
        }
        assert statuses == {
            (PATHS.COST, "nobody"): 401,
            (PATHS.COST, "watcher"): 200,
            (PATHS.COST, "reader"): 403,
            (AT, "nobody"): 401,
            (AT, "watcher"): 403,
            (AT, "reader"): 200,
        }


@pytest.mark.parametrize(
    ("delay_ms", "load", "expected"),
    [
        # Flushes follow each other: ten times the delay, a tenth of the flushes.
        (1_000, Load(requests=500, flushes=10, bytes=1_000, batch_max_bytes=1 << 22, delay_ms=100), 1.0),
        # One request a second: a shorter delay saves nothing, since each is a flush of its own already.
        (1, Load(requests=1, flushes=1 / 1.1, bytes=1_000, batch_max_bytes=1 << 22, delay_ms=100), 0.999),
        # Bytes fill the batches: a longer delay changes nothing.
        (5_000, Load(requests=500, flushes=20, bytes=20_000, batch_max_bytes=1_000, delay_ms=100), 20.0),
        # Never more flushes than requests.
        (1, Load(requests=12, flushes=10, bytes=1_000, batch_max_bytes=1 << 22, delay_ms=100), 12.0),
        (100, Load(requests=0, flushes=0, bytes=0, batch_max_bytes=1 << 22, delay_ms=100), 0.0),
        (0, Load(requests=50, flushes=10, bytes=1_000, batch_max_bytes=1 << 22, delay_ms=100), 50.0),
    ],
)
def test_flushes_follow_from_the_delay(delay_ms: int, load: Load, expected: float) -> None:
    assert flushes_at(delay_ms, load) == pytest.approx(expected, rel=0.01)
