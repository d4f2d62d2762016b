"""Outcomes told as they are: unknown is never failed; and the same broker on real servers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from tests.broker.bed import FAST, Client, parts, serving

from forebay._connect import open_parts
from forebay.broker import Broker, BrokerConfig
from forebay.errors import Unsupported
from forebay.testing.servers import OxiaServer, SeaweedServer


async def test_append_that_is_late_is_an_unknown_outcome_and_its_repetition_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_of = parts()
    put, may_go_on = made_of.store.put, asyncio.Event()

    async def slow(key: str, data: Any, *more: Any) -> str:
        await may_go_on.wait()
        return await put(key, data, *more)

    monkeypatch.setattr(made_of.store, "put", slow)
    async with serving(made_of=made_of, produce_timeout_ms=50) as (broker, client):
        answer = await client.produce("t", 0, ["a"], producer_id="p", sequence=0)
        assert answer.status == 409
        assert "Retry-After" not in answer.headers
        [result] = answer.json()["results"]
        assert (result["ok"], result["error_type"]) == (False, "OutcomeUnknown")
        assert "look before" in result["hint"]
        may_go_on.set()
        await broker.engines.producer.flush()
        again = result
        while again.get("error_type") == "OutcomeUnknown":  # Late once more, where the machine is busy.
            again = (await client.produce("t", 0, ["a"], producer_id="p", sequence=0)).json()["results"][0]
        assert (again["ok"], again["duplicate"], again["start_offset"]) == (True, True, 1)
        assert (await client.consume("t", 0, 1)).json()["results"][0]["high_watermark"] == 2


async def test_defect_of_a_handler_is_a_500_that_tells_nothing_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (broker, client):

        async def broken() -> list[Any]:
            raise KeyError("secret detail")

        monkeypatch.setattr(broker.engines.catalog, "list", broken)
        answer = await client.get("/topics", {"X-Request-Id": "r-1"})
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert "r-1" in caplog.text
        assert (await client.get("/health")).status == 200


async def test_broker_on_a_bucket_and_oxia(seaweed: SeaweedServer, oxia: OxiaServer) -> None:
    topic = f"orders-{uuid.uuid4()}"
    made_of = open_parts(seaweed.url("broker"), oxia.url())
    broker = Broker(made_of, BrokerConfig(port=0, producer=FAST))
    await broker.start()
    try:
        client = Client("127.0.0.1", int(broker.url.rsplit(":", 1)[1]))
        assert (await client.get("/ready")).status == 200
        done = (await client.produce(topic, 0, ["a", "b"])).json()["results"][0]
        assert done["wal_uri"].startswith("s3://")
        assert done["end_offset"] == 2
        poll = asyncio.create_task(client.consume(topic, 0, 3, max_wait_ms=60_000))
        while not broker.engines.followers.waiting:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        await client.produce(topic, 0, ["c"])
        [result] = (await poll).json()["results"]
        assert [record["value"] for record in result["records"]] == ["c"]
        assert [
            record["value"] for record in (await client.consume(topic, 0, 1)).json()["results"][0]["records"]
        ] == ["a", "b", "c"]
    finally:
        await broker.stop()


async def test_without_the_parser_the_broker_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.broker import _connection

    monkeypatch.setattr(_connection, "PARSER_INSTALLED", False)
    with pytest.raises(Unsupported, match="not installed") as caught:
        await Broker(parts(), BrokerConfig(port=0)).start()
    assert "forebay[broker]" in caught.value.hint
