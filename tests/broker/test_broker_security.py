"""Tokens, origins, TLS: who is let in, and who is not."""

from __future__ import annotations

import asyncio
import json
import ssl
import stat
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.broker.bed import FAST, Client, parts, serving, until

from forebay.broker import Action, Broker, BrokerConfig, self_signed, server_tls
from forebay.broker._tokens import Tokens, TokenTable
from forebay.errors import Unavailable, UsageError
from forebay.kit.clock import SystemClock
from forebay.log import AppendGroup

GUARDED = BrokerConfig(producer=FAST, require_tokens=True, token_refresh_ms=20)


@asynccontextmanager
async def guarded(**changes: Any) -> AsyncIterator[tuple[Broker, Client, str]]:
    """A broker that wants tokens, and one that allows everything."""
    made_of = parts(str(uuid.uuid4()))
    broker = Broker(made_of, replace(GUARDED, port=0, **changes))
    _, token = await broker.tokens.issue("root", actions=list(Action))
    await broker.start()
    try:
        host, port = broker.url.removeprefix("http://").rsplit(":", 1)
        yield broker, Client(host, int(port)), token
    finally:
        await broker.stop()


def bearing(client: Client, token: str) -> Client:
    return replace(client, headers={"Authorization": f"Bearer {token}"})


async def test_nothing_but_health_and_pages_is_served_without_a_token() -> None:
    async with guarded() as (broker, client, token):
        for route in broker.router.routes:
            path = route.path.replace("{", "").replace("}", "").replace("partition/", "0/")
            answer = await client.request(route.method, path, b"{}", {"Content-Type": "application/json"})
            if route.open:
                assert answer.status in (200, 307, 404), route.path
            else:
                assert answer.status == 401, route.path
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert (await bearing(client, token).produce("t", 0, ["a"])).status == 200


@pytest.mark.parametrize(
    "change",
    [
        lambda token: "",
        lambda token: token[:-1],
        lambda token: token + "x",
        lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
        lambda token: token.rpartition("_")[0] + "_",
        lambda token: "fb_",
        lambda token: "fb__",
        lambda token: "fb_000000000000_" + token.rpartition("_")[2],
        lambda token: "x" * 5000,
        lambda token: "\xff\xfe",
    ],
)
async def test_forged_tokens_are_401(change: Any) -> None:
    async with guarded() as (_, client, token):
        answer = await bearing(client, change(token)).get("/topics")
        assert answer.status == 401
        answer = await client.get("/topics", {"Authorization": f"Basic {token}"})
        assert answer.status == 401


async def test_token_allows_its_actions_on_its_prefix_and_nothing_else() -> None:
    async with guarded() as (broker, client, root):
        _, token = await broker.tokens.issue("eu", actions=[Action.APPEND, Action.READ], prefix="eu.")
        await bearing(client, root).produce("us.orders", 0, ["secret"])
        some = bearing(client, token)
        await asyncio.sleep(0.03)
        assert (await some.produce("eu.orders", 0, ["a"])).status == 200
        assert (await some.consume("eu.orders", 0, 1)).status == 200
        for answer in (
            await some.produce("us.orders", 0, ["a"]),
            await some.consume("us.orders", 0, 1),
            await some.get("/tail?topic=us.orders"),
            await some.get("/topics/us.orders"),
            await some.get("/topics/us.orders/partitions/0/offsets"),
            await some.get("/topics/us.orders/partitions/0/explain?offset=1"),
            await some.get("/compaction?topic=us.orders"),
            await some.get("/metrics"),
            await some.get("/metrics/prometheus"),
            await some.get("/groups"),
            await some.post("/topics", {"topic": "eu.more"}),
            await some.request("DELETE", "/topics/eu.orders"),
            await some.post("/topics/eu.orders/partitions/0/fence", {}),
            await some.post("/topics/eu.orders/partitions/0/trim", {"offset": 1}),
            await some.post("/compaction", {"topic": "eu.orders"}),
            await some.post("/retention", {}),
            await some.post("/groups/g/reset", {"to": "earliest"}),
            await some.post(
                "/groups/g/offsets", {"offsets": [{"topic": "us.orders", "partition": 0, "offset": 1}]}
            ),
        ):
            assert answer.status == 403, answer.body
            assert b"secret" not in answer.body
        topics = (await some.get("/topics")).json()["topics"]
        assert [topic["topic"] for topic in topics] == ["eu.orders"]


async def test_one_forbidden_batch_refuses_the_whole_request() -> None:
    async with guarded() as (broker, client, root):
        _, token = await broker.tokens.issue("eu", actions=[Action.APPEND], prefix="eu.")
        await asyncio.sleep(0.03)
        batches = [{"topic": topic, "partition": 0, "records": ["a"]} for topic in ("eu.a", "us.a")]
        answer = await bearing(client, token).post("/produce", {"topic_partitions": batches})
        assert answer.status == 403
        assert (await bearing(client, root).get("/topics")).json() == {"topics": []}


async def test_revoked_and_expired_tokens_end() -> None:
    async with guarded() as (broker, client, _):
        record, token = await broker.tokens.issue("gone", actions=[Action.READ])
        _, short = await broker.tokens.issue("short", actions=[Action.READ], expires_in_ms=200)
        await asyncio.sleep(0.03)
        assert (await bearing(client, token).get("/topics")).status == 200
        assert (await bearing(client, short).get("/topics")).status == 200
        await broker.tokens.revoke(record.token_id)
        await asyncio.sleep(0.2)
        assert (await bearing(client, token).get("/topics")).status == 401
        assert (await bearing(client, short).get("/topics")).status == 401


async def test_event_stream_ends_when_its_token_is_revoked() -> None:
    async with guarded(tail_heartbeat_ms=20) as (broker, client, root):
        record, token = await broker.tokens.issue("tail", actions=[Action.READ])
        await bearing(client, root).produce("t", 0, ["a"])
        await asyncio.sleep(0.03)
        wire = await bearing(client, token).open()
        await wire.send("GET", "/tail?topic=t")
        assert (await wire.head()).status == 200
        await broker.tokens.revoke(record.token_id)
        async for _ in wire.events():
            pass
        await wire.close()


async def test_long_poll_gives_nothing_that_was_written_after_its_token_was_revoked() -> None:
    async with guarded() as (broker, client, root):
        record, token = await broker.tokens.issue("poll", actions=[Action.READ])
        await bearing(client, root).produce("t", 0, ["a"])
        wire = await bearing(client, token).open()
        place = {"topic": "t", "partition": 0, "fetch_offset": 2}
        message = {"topic_partitions": [place], "max_wait_ms": 60_000}
        await wire.send("POST", "/consume", json.dumps(message).encode())
        await until(lambda: broker.engines.followers.waiting)
        await broker.tokens.revoke(record.token_id)
        await until(lambda: not broker.app._auth._tokens.fresh)
        [ticket] = await broker.engines.producer.append([AppendGroup.of("t", 0, [b"secret"])])
        await ticket
        answer = await wire.answer()
        assert (answer.status, b"secret" in answer.body) == (401, False)
        await wire.close()


async def test_requests_that_come_together_have_the_tokens_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with guarded(token_refresh_ms=60_000) as (broker, client, token):
        readings, read = 0, broker.tokens.list

        async def counted() -> Any:
            nonlocal readings
            readings += 1
            await until(lambda: broker.app._working == 50)
            await asyncio.sleep(0)  # The others have their turn: this coordinator answers without a pause.
            return await read()

        monkeypatch.setattr(broker.tokens, "list", counted)
        answers = await asyncio.gather(*(bearing(client, token).get("/topics") for _ in range(50)))
        assert [answer.status for answer in answers] == [200] * 50
        assert readings == 1


async def test_tokens_that_cannot_be_read_are_believed_for_a_while_and_not_asked_for_by_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_of = parts()
    tokens, clock = Tokens(made_of.coordinator, clock=made_of.clock), Moved()
    _, token = await tokens.issue("reader", actions=[Action.READ])
    table = TokenTable(tokens, clock=clock, refresh_ms=1_000)
    await table.refresh()
    readings = 0

    async def away() -> Any:
        nonlocal readings
        readings += 1
        raise Unavailable("gone", hint="wait")

    monkeypatch.setattr(tokens, "list", away)
    clock.seconds += 30
    for _ in range(5):
        await table.refresh()
        assert table.access(token).valid
    assert readings == 1
    clock.seconds += 40
    with pytest.raises(Unavailable):
        await table.refresh()
    await made_of.close()


class Moved(SystemClock):
    """A clock that is moved by hand."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


async def test_busy_event_stream_ends_when_its_token_is_revoked() -> None:
    async with guarded(tail_heartbeat_ms=60_000) as (broker, client, root):
        record, token = await broker.tokens.issue("tail", actions=[Action.READ])
        await bearing(client, root).produce("t", 0, ["a"])
        await asyncio.sleep(0.03)
        wire = await bearing(client, token).open()
        await wire.send("GET", "/tail?topic=t&from=earliest")
        assert (await wire.head()).status == 200
        await broker.tokens.revoke(record.token_id)
        # No other request comes that would have the table of tokens read again.
        async with asyncio.TaskGroup() as group:
            feeding = group.create_task(_feed(broker))
            async for _ in wire.events():
                pass
            feeding.cancel()
        await wire.close()


async def _feed(broker: Broker) -> None:
    while True:
        [ticket] = await broker.engines.producer.append([AppendGroup.of("t", 0, [b"more"])])
        await ticket


async def test_a_token_learns_of_a_group_only_what_concerns_its_topics() -> None:
    async with guarded() as (broker, client, _):
        await broker.engines.catalog.create("eu.orders", partitions=1)
        await broker.engines.catalog.create("us.orders", partitions=1)
        groups = broker.engines.groups
        async with groups.member("both", ["eu.orders", "us.orders"]), groups.member("us", ["us.orders"]):
            _, eu = await broker.tokens.issue("eu", actions=[Action.READ], prefix="eu.")
            _, appends = await broker.tokens.issue("app", actions=[Action.APPEND])
            await asyncio.sleep(0.03)
            seen = (await bearing(client, eu).get("/groups/both")).json()
            assert [member["topics"] for member in seen["members"]] == [["eu.orders"]]
            assert (await bearing(client, eu).get("/groups/us")).status == 403
            assert (await bearing(client, appends).get("/groups/us")).status == 403


async def test_secrets_are_not_stored() -> None:
    async with guarded() as (broker, _, token):
        [record] = await broker.tokens.list()
        secret = token.removeprefix(f"fb_{record.token_id}_")
        assert len(secret) >= 43  # 256 bits
        stored = await broker.engines.coordinator.get(
            f"broker-tokens/{record.token_id}", partition_key="broker-tokens"
        )
        assert stored is not None
        assert secret.encode() not in stored.value
        assert len(json.loads(stored.value)["digest"]) == 64


async def test_address_that_others_reach_needs_tokens_or_a_word() -> None:
    broker = Broker(parts(), BrokerConfig(host="0.0.0.0", port=0))
    with pytest.raises(UsageError, match="no tokens") as caught:
        await broker.start()
    assert "forebay tokens issue" in caught.value.hint
    assert "--insecure" in caught.value.hint
    broker = Broker(parts(), BrokerConfig(host="0.0.0.0", port=0, insecure=True))
    await broker.start()
    await broker.stop()


async def test_pages_of_other_sites_may_not_use_a_local_broker() -> None:
    async with serving() as (_, client):
        own = f"http://{client.host}:{client.port}"
        body = b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"]}]}'
        for origin, status in ((own, 200), ("http://evil.example", 403), ("null", 403), ("http://[", 403)):
            answer = await client.request("POST", "/produce", body, {"Origin": origin})
            assert answer.status == status, origin
        assert (await client.get("/topics", {"Host": "evil.example:8080"})).status == 403
        for host in (f"localhost:{client.port}", "127.0.0.1", "[::1]:8080"):
            assert (await client.get("/topics", {"Host": host})).status == 200


async def test_console_comes_with_strict_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from forebay.broker import _console

    (tmp_path / "index.html").write_text("<!doctype html><title>Forebay</title>")
    (tmp_path / "app.js").write_text("'use strict'")
    (tmp_path.parent / "outside.txt").write_text("no")
    monkeypatch.setattr(_console, "FOLDER", tmp_path)
    _console._files.cache_clear()
    try:
        async with serving() as (_, client):
            answer = await client.get("/console/")
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert (await client.get("/console")).headers["Location"] == "/console/"
            assert (await client.get("/console/app.js")).headers["Content-Type"].startswith("text/javascript")
            for path in ("../outside.txt", "..%2foutside.txt", "%2e%2e/outside.txt", "a/../../outside.txt"):
                assert (await client.get(f"/console/{path}")).status == 404
    finally:
        _console._files.cache_clear()


async def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path / "tls", "127.0.0.1")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    broker = Broker(parts(), BrokerConfig(port=0, producer=FAST))
    await broker.start(server_tls(certificate, key))
    try:
        assert broker.url.startswith("https://")
        port = int(broker.url.rsplit(":", 1)[1])
        trusting = ssl.create_default_context(cafile=str(certificate))
        client = Client("127.0.0.1", port, tls=trusting)
        assert (await client.produce("t", 0, ["a"])).status == 200
        with pytest.raises(ssl.SSLError):
            await Client("127.0.0.1", port, tls=ssl.create_default_context()).get("/health")
        wire = await Client("127.0.0.1", port).open()
        await wire.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not (await wire.ended()).startswith(b"HTTP/1.1 200")
        await wire.close()
        assert (await client.get("/health")).status == 200
        await until(lambda: not broker.server.connections)
    finally:
        await broker.stop()


def test_files_that_are_no_certificate_are_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nonsense")
    with pytest.raises(UsageError, match="cannot be used"):
        server_tls(tmp_path / "x", tmp_path / "x")
    with pytest.raises(UsageError, match="cannot be used"):
        server_tls(tmp_path / "absent", tmp_path / "x")
