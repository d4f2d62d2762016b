"""The document says what the broker does, and nothing that follows it makes the broker fail."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import hypothesis
import pytest
from tests.broker.bed import FAST, parts, serving

from forebay.broker import Broker, BrokerConfig, HttpLimits
from forebay.broker._openapi import document
from forebay.formats.http_messages import PATHS

EXAMPLES = int(os.environ.get("FOREBAY_SEEDS", "4"))


async def test_every_route_is_in_the_document_with_its_messages() -> None:
    async with serving() as (broker, client):
        found = (await client.get("/openapi.json")).json()
        assert found["openapi"] == "3.1.0"
        listed = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
        assert listed == {(route.method, route.path) for route in broker.router.routes}
        schemas = found["components"]["schemas"]
        for route in broker.router.routes:
            operation = found["paths"][route.path][route.method.lower()]
            assert str(route.success) in operation["responses"]
            for kind in (*route.takes.values(), *route.gives.values()):
                assert kind is None or kind.__name__ in schemas
        names = [
            operation["operationId"] for paths in found["paths"].values() for operation in paths.values()
        ]
        assert len(set(names)) == len(names)


async def test_every_path_of_the_contract_is_a_route() -> None:
    async with serving() as (broker, _):
        served = {route.path for route in broker.router.routes}
        known = {value for name, value in vars(PATHS).items() if name.isupper()}
        assert known <= served


async def test_document_is_made_from_the_routes() -> None:
    async with serving() as (broker, _):
        [first, *_] = broker.router.routes
        assert list(document([first])["paths"]) == [first.path]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A broker in a loop of its own, for a tool that calls from outside."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Broker:
        limits = HttpLimits(wait_max_ms=20, body_max_bytes=100_000)
        broker = Broker(parts(), BrokerConfig(port=0, producer=FAST, limits=limits))
        await broker.start()
        return broker

    broker = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield broker.url
    finally:
        asyncio.run_coroutine_threadsafe(broker.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.mark.filterwarnings("ignore")
def test_nothing_that_is_made_from_the_document_is_a_500(served: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{served}/openapi.json")
    calls = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == PATHS.TAIL:
            continue  # A stream without an end; its queries are tested by hand.

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def never_fails(case) -> None:  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            answer = case.call(timeout=60)
            assert answer.status_code < 500 or answer.status_code == 503, (case.method, answer.text)
            assert str(answer.status_code) in case.operation.definition.raw["responses"] or (
                answer.status_code == 405
            ), (case.method, case.path, answer.status_code, answer.text)

        never_fails()
    assert calls >= 20
