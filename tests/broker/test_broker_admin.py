"""Topics, groups, fencing, compaction and retention over HTTP, and the views of health and metrics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.broker.bed import serving, until

from forebay.errors import Unavailable
from forebay.log import ProducerConfig
from forebay.log._keys import GroupKeys, PartitionKeys


async def test_topics_are_created_listed_changed_and_deleted() -> None:
    async with serving() as (_, client):
        made = await client.post("/topics", {"topic": "t", "partitions": 2, "settings": {"retention_ms": 5}})
        assert made.status == 201
        assert made.json()["settings"]["retention_ms"] == 5
        assert made.json()["settings"]["compaction"] is True
        again = await client.post("/topics", {"topic": "t"})
        assert (again.status, again.json()["error"]["type"]) == (409, "TopicExists")
        await client.produce("t", 1, ["a"])
        found = (await client.get("/topics/t")).json()
        assert [(each["partition"], each["records"]) for each in found["offsets"]] == [(0, 0), (1, 1)]
        patch = json.dumps({"partitions": 3}).encode()
        changed = await client.request("PATCH", "/topics/t", patch)
        assert changed.json()["partitions"] == 3
        fewer = await client.request("PATCH", "/topics/t", json.dumps({"partitions": 1}).encode())
        assert fewer.status == 400
        assert [each["topic"] for each in (await client.get("/topics")).json()["topics"]] == ["t"]
        assert (await client.request("DELETE", "/topics/t")).json() == {"name": "t", "deleted": True}
        assert (await client.request("DELETE", "/topics/t")).status == 404
        assert (await client.get("/topics/t")).status == 404


async def test_offsets_of_a_time_and_a_trim() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a", "b", "c"])
        found = (await client.get("/topics/t/partitions/0/offsets")).json()
        assert (found["earliest"], found["next"], found["log_state"]) == (1, 4, "OPEN")
        assert (await client.get("/topics/t/partitions/0/offsets?time_ms=0")).json()["at"] == 1
        trimmed = (await client.post("/topics/t/partitions/0/trim", {"offset": 3})).json()
        assert (trimmed["before"], trimmed["earliest"], trimmed["records"]) == (1, 3, 2)
        assert (await client.post("/topics/t/partitions/0/trim", {"offset": 99})).status == 409
        assert (await client.consume("t", 0, 1)).status == 409
        assert (await client.get("/topics/t/partitions/7/offsets")).status == 404
        assert (await client.get("/topics/t/partitions/x/offsets")).status == 404
        assert (await client.get("/topics/t/partitions/0/offsets?time_ms=x")).status == 400


async def test_fence_shuts_writers_out_until_its_epoch_opens() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        fenced = (await client.post("/topics/t/partitions/0/fence", {})).json()
        assert (fenced["log_state"], fenced["epoch"], fenced["next_offset"]) == ("FENCED", 1, 2)
        assert (await client.produce("t", 0, ["b"])).json()["results"][0]["error_type"] == "Fenced"
        assert (await client.get("/topics/t/partitions/0/fence")).json()["log_state"] == "FENCED"
        assert (await client.post("/topics/t/partitions/0/unfence", {"epoch": 0})).status == 409
        assert (await client.post("/topics/t/partitions/0/unfence", {"epoch": 1})).status == 200
        assert (await client.produce("t", 0, ["b"], epoch=1)).status == 200
        assert (await client.produce("t", 0, ["b"], epoch=0)).status == 409


async def test_explain_names_the_object_of_a_record() -> None:
    async with serving() as (_, client):
        uri = (await client.produce("t", 0, ["a", "bc"])).json()["results"][0]["wal_uri"]
        found = (await client.get("/topics/t/partitions/0/explain?offset=2")).json()
        assert (found["object"], found["value_bytes"], found["writer"]) == (uri, 2, "broker-1")
        assert (await client.get("/topics/t/partitions/0/explain?offset=9")).status == 409
        assert (await client.get("/topics/t/partitions/0/explain")).status == 400


async def test_group_commits_lags_and_is_reset() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a", "b", "c"])
        place = {"topic": "t", "partition": 0, "offset": 2}
        assert (await client.post("/groups/g/offsets", {"offsets": [place]})).status == 200
        assert (await client.get("/groups")).json() == {"groups": ["g"]}
        found = (await client.get("/groups/g")).json()
        assert (found["lag_records"], found["partitions"][0]["committed"]) == (2, 2)
        back = await client.post("/groups/g/offsets", {"offsets": [{**place, "offset": 1}]})
        assert back.status == 400
        dry = (await client.post("/groups/g/reset", {"to": "earliest", "dry_run": True})).json()
        assert dry["partitions"] == [{"topic": "t", "partition": 0, "before": 2, "after": 1}]
        assert (await client.get("/groups/g")).json()["partitions"][0]["committed"] == 2
        await client.post("/groups/g/reset", {"to": 3, "topic": "t", "partition": 0})
        assert (await client.get("/groups/g")).json()["partitions"][0]["committed"] == 3
        for wrong in ({}, {"to": "earliest", "to_time_ms": 1}, {"to": "earliest", "partition": 0}):
            assert (await client.post("/groups/g/reset", wrong)).status == 400
        assert (await client.request("DELETE", "/groups/g?force=maybe")).status == 400
        assert (await client.request("DELETE", "/groups/g")).json()["deleted"] is True
        assert (await client.get("/groups/g")).status == 404


async def test_compaction_and_retention_run_on_request() -> None:
    async with serving() as (_, client):
        settings = {"retention_bytes": 1}
        await client.post("/topics", {"topic": "t", "settings": settings})
        for number in range(3):
            await client.produce("t", 0, [str(number)])
        [state] = (await client.get("/compaction?topic=t")).json()["partitions"]
        assert (state["lag_records"], state["cursor"], state["next"]) == (3, 1, 4)
        [run] = (await client.post("/compaction", {"topic": "t"})).json()["partitions"]
        assert run["error"] == ""
        dry = (await client.post("/retention", {"dry_run": True})).json()
        assert [trim["records"] for trim in dry["trimmed"]] == [2]
        assert (await client.post("/retention", {"topic": "t"})).json()["trimmed"][0]["earliest"] == 3
        assert (await client.get("/topics/t/partitions/0/offsets")).json()["earliest"] == 3
        assert (await client.post("/compaction", {"topic": "nope"})).status == 404
        assert (await client.post("/retention", {"topic": "nope"})).status == 404
        assert (await client.get("/compaction")).status == 400


# -- health and metrics


async def test_ready_tells_when_the_coordinator_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (broker, client):
        assert (await client.get("/ready")).json()["ready"] is True

        async def away(key: str, *, partition_key: str | None = None) -> Any:
            raise Unavailable("nobody there")

        monkeypatch.setattr(broker.engines.parts.coordinator, "get", away)
        monkeypatch.setattr(broker.status, "_looked_at", float("-inf"))
        answer = await client.get("/ready")
        assert answer.status == 503
        assert "nobody there" in answer.json()["reasons"][0]
        assert (await client.get("/health")).status == 200


async def test_metrics_have_every_family_of_the_specification() -> None:
    settings = ProducerConfig(batch_max_delay_ms=3)
    scenario = {"name": "smoke"}
    async with serving(producer=settings, broker_id="b-7", scenario=scenario) as (_, client):
        await client.produce("t", 0, ["abc", "de"])
        await client.consume("t", 0, 1)
        await client.post("/groups/g/offsets", {"offsets": [{"topic": "t", "partition": 0, "offset": 2}]})
        found = (await client.get("/metrics")).json()
        assert found["broker"]["broker_id"] == "b-7"
        assert found["broker"]["roles"] == ["write", "read"]
        assert found["batch"]["batch_max_delay_ms"] == 3
        assert found["loadtest"] == scenario
        assert {"requests", "request_duration_seconds", "in_flight", "connections"} <= set(found["http"])
        assert found["produce"]["records"] == 2
        assert found["consume"]["records"] == 2
        assert found["consume"]["bytes"] == 5
        assert found["batcher"]["pending_groups"] == 0
        assert found["batcher"]["flushes_committed"] == 1
        assert sum(found["batcher"]["closed_by"].values()) == 1
        assert found["wal"]["blobs"] == 1
        assert found["wal"]["bytes"] > 5
        assert found["coordination"]["requests"]
        assert found["store"]["requests"]["total"]
        # The object of the flush, and with the first topic the name of the log.
        assert found["billing"]["requests"]["put"] == 2
        assert found["billing"]["request_dollars"] > 0
        assert found["lag"]["lag_records"] == [
            {"labels": {"group": "g", "topic": "t", "partition": "0"}, "value": 1}
        ]


async def test_a_damaged_record_hides_neither_its_group_nor_others() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a"])
        await client.produce("t", 1, ["b"])
        places = [{"topic": "t", "partition": number, "offset": 1} for number in (0, 1)]
        for name in ("a", "b"):
            assert (await client.post(f"/groups/{name}/offsets", {"offsets": places})).status == 200
        keys = GroupKeys("a")
        await broker.engines.coordinator.put(keys.offset("t", 0), b"torn", partition_key=keys.partition_key)
        found = (await client.get("/groups/a")).json()
        assert [each["partition"] for each in found["partitions"]] == [1]
        assert [keys.offset("t", 0) in text for text in found["problems"]] == [True]
        lag = (await client.get("/metrics")).json()["lag"]["lag_records"]
        shown = [(each["labels"]["group"], each["labels"]["partition"]) for each in lag]
        assert shown == [("a", "1"), ("b", "0"), ("b", "1")]
        assert broker.metrics.counter("group.lag_failures", "").labels().value == 1


async def test_a_damaged_partition_hides_no_other_of_its_topic() -> None:
    async with serving() as (broker, client):
        for number in (0, 1, 2):
            await client.produce("t", number, ["a"])
        keys = PartitionKeys("t", 1)
        await broker.engines.coordinator.put(keys.control, b"torn", partition_key=keys.partition_key)
        topic = (await client.get("/topics/t")).json()
        assert [each["partition"] for each in topic["offsets"]] == [0, 2]
        compaction = (await client.get("/compaction?topic=t")).json()
        assert [each["partition"] for each in compaction["partitions"]] == [0, 2]
        for answer in (topic, compaction):
            assert [keys.control in text for text in answer["problems"]] == [True]


async def test_a_commit_to_no_topic_or_beyond_the_end_is_refused() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        for topic, offset, status in (("u", 1, 404), ("t", 3, 409), ("t", 2, 200)):
            place = {"topic": topic, "partition": 0, "offset": offset}
            assert (await client.post("/groups/g/offsets", {"offsets": [place]})).status == status


async def test_bill_counts_what_the_writer_sends_and_what_lies_in_the_store() -> None:
    async with serving() as (broker, client):
        await client.produce("t", 0, ["x" * 1_000])
        assert (await client.get("/metrics")).json()["billing"]["requests"]["put"] == 2
        await until(lambda: broker.engines.stored.found)
        found = (await client.get("/metrics")).json()
        [sent] = [each for each in found["store"]["bytes"]["total"] if each["labels"]["direction"] == "sent"]
        assert found["wal"]["bytes"] == found["billing"]["storage"]["stored_bytes"]
        # With the first topic the store was given the name of the log.
        assert sent["value"] == found["wal"]["bytes"] + 32
        assert found["billing"]["storage"]["stored_objects"] == 1
        assert found["billing"]["storage"]["storage_dollars_per_month"] > 0
        # One listing serves every look until the interval is over.
        assert found["billing"]["requests"]["list"] == 1
        [cost] = found["series"]["counters"]["log.store_request_cost_dollars"]
        assert cost["value"] == pytest.approx(found["billing"]["request_dollars"])
        page = (await client.get("/metrics/prometheus")).body.decode()
        assert f"billing_stored_bytes {found['wal']['bytes']}" in page


async def test_listing_that_fails_is_counted_and_no_size_is_made_up() -> None:
    async with serving() as (broker, client):

        async def refuse(*_: object, **__: object) -> AsyncIterator[list[object]]:
            raise Unavailable("no listing today")
            yield []

        broker.engines.store.list_pages = refuse  # type: ignore[method-assign,assignment]
        await client.get("/metrics")
        failures = broker.metrics.counter("billing.scan_failures", "Listings of the store that failed")
        await until(lambda: failures.labels().value)
        assert (await client.get("/metrics")).json()["billing"]["storage"] is None


async def test_prometheus_page_is_one_and_has_histograms() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["abc"])
        answer = await client.get("/metrics/prometheus")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
        assert families["produce_records"].samples[0].value == 1
        assert families["http_request_duration_seconds"].type == "histogram"
        assert families["log_append_duration_seconds"].type == "histogram"
        assert families["broker_info"].samples[0].labels["broker_id"] == "broker-1"
