"""What the client does when a server misbehaves on the wire. Everything here runs against a fake."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from forebay.coordination._api import Delete, Put, WriteResult, children
from forebay.coordination._oxia import OxiaCoordinator, _write_stream, open_oxia
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._assignments import STARTUP_PAUSE_S
from forebay.coordination._oxia._config import parse_url
from forebay.errors import Closed, NotDone, OutcomeUnknown, Unavailable, UsageError
from forebay.kit.clock import SystemClock

# Helpers are imported as `tests.coordination...`, wherever pytest was started.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.coordination.oxia_fake import Context, FakeOxia, fail, store_writes

Requests = AsyncIterator[pb.WriteRequest]
Responses = AsyncIterator[pb.WriteResponse]
WEDGE = "oxia: failed to append to wal: 8 can not immediately follow 8: invalid next offset in wal"


@pytest.fixture
async def fake() -> AsyncIterator[FakeOxia]:
    async with FakeOxia() as server:
        yield server
        assert server.sins == []


@pytest.fixture
async def client(fake: FakeOxia) -> AsyncIterator[OxiaCoordinator]:
    async with open_oxia(fake.url()) as coordinator:
        yield coordinator


class Gate:
    """A write stream that reads everything and answers only when it is told to."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def __call__(self, fake: FakeOxia, requests: Requests, _: Context) -> Responses:
        responses: asyncio.Queue[pb.WriteResponse | None] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                responses.put_nowait(fake.apply(request))
            responses.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await responses.get()) is not None:
                await self.permits.acquire()
                yield response
        finally:
            reading.cancel()


def permit(gate: Gate, count: int) -> None:
    for _ in range(count):
        gate.permits.release()


# -- writes


async def test_stream_names_namespace_and_shard(fake: FakeOxia, client: OxiaCoordinator) -> None:
    await client.put("a/b", b"")
    assert fake.metadata[0]["namespace"] == "default"
    assert fake.metadata[0]["shard-id"] == "0"


async def test_one_stream_per_shard_carries_all_writes() -> None:
    async with FakeOxia(shards=4) as fake, open_oxia(fake.url()) as client:
        await asyncio.gather(*[client.put(f"a/{n}", b"") for n in range(200)])
        await asyncio.gather(*[client.put(f"a/{n}", b"") for n in range(200)])
        assert fake.calls["write"] == 4
        assert fake.sins == []
        assert len(fake.keys) == 200


async def test_what_queues_up_while_a_request_is_under_way_travels_together(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    fake.write = gate = Gate()
    first = asyncio.create_task(client.put("a/first", b""))
    await fake.until(lambda: len(fake.requests) == 1)
    others = [asyncio.create_task(client.put(f"a/{n}", b"")) for n in range(100)]
    permit(gate, 10)
    assert len(set(await asyncio.gather(first, *others))) == 101
    assert len(fake.requests) == 2


async def test_no_more_requests_are_under_way_than_configured(fake: FakeOxia) -> None:
    fake.write = gate = Gate()
    async with open_oxia(fake.url(requests_in_flight=3)) as client:
        # Requests with deletes cannot be joined with later puts, so each of these is one.
        operations = [client.write([Put(f"a/{n}", b""), Delete(f"b/{n}")]) for n in range(10)]
        tasks = [asyncio.ensure_future(operation) for operation in operations]
        await fake.until(lambda: len(fake.requests) == 1)
        permit(gate, 1)
        await fake.until(lambda: len(fake.requests) == 4)
        assert fake.unanswered <= 3
        permit(gate, 9)
        assert _errors([result for each in await asyncio.gather(*tasks) for result in each]) == []
        assert len(fake.requests) == 10


async def test_a_new_stream_waits_for_its_first_answer(fake: FakeOxia, client: OxiaCoordinator) -> None:
    fake.write = gate = Gate()
    tasks = [asyncio.create_task(client.write([Put("a/x", b""), Delete("b/x")])) for _ in range(5)]
    await fake.until(lambda: len(fake.requests) == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fake.requests) == 1
    permit(gate, 5)
    await asyncio.gather(*tasks)


async def test_close_answers_everything_before_it_ends_the_stream(fake: FakeOxia) -> None:
    """A server that sees the end of the requests stops answering, though it applied them all."""

    async def impatient(fake: FakeOxia, requests: Requests, _: Context) -> Responses:
        ended = asyncio.Event()
        queue: asyncio.Queue[pb.WriteRequest] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                queue.put_nowait(request)
            ended.set()

        reading = asyncio.create_task(read())
        try:
            while not ended.is_set():
                getting = asyncio.create_task(queue.get())
                ending = asyncio.create_task(ended.wait())
                await asyncio.wait([getting, ending], return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if getting.cancel():
                    return
                yield fake.apply(getting.result())
        finally:
            reading.cancel()

    fake.write = impatient
    client = open_oxia(fake.url())
    writes = [asyncio.create_task(client.put(f"a/{n}", b"")) for n in range(50)]
    await fake.until(lambda: len(fake.requests) >= 1)
    await client.close()
    assert len(await asyncio.gather(*writes)) == 50


async def test_stream_that_ends_with_unanswered_requests_leaves_their_outcome_unknown(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    async def apply_and_hang_up(fake: FakeOxia, requests: Requests, _: Context) -> Responses:
        fake.write = store_writes
        async for request in requests:
            fake.apply(request)
            return
        yield pb.WriteResponse()

    fake.write = apply_and_hang_up
    with pytest.raises(OutcomeUnknown) as raised:
        await client.put("a/b", b"1")
    assert "a/b" in raised.value.message
    assert (await client.put("a/c", b"2")) == 1
    assert fake.keys["a/b"] == (b"1", 0)


async def test_what_was_not_sent_before_the_break_is_sent_on_the_next_stream(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    broken = asyncio.Event()

    async def break_later(fake: FakeOxia, requests: Requests, context: Context) -> Responses:
        async for _ in requests:
            await broken.wait()
            fake.write = store_writes
            await fail(context, "oxia: resource is already closed")
        yield pb.WriteResponse()

    fake.write = break_later
    first = asyncio.create_task(client.put("a/sent", b""))
    await fake.until(lambda: len(fake.requests) == 1)
    second = asyncio.create_task(client.put("a/waiting", b""))
    broken.set()
    assert await second == 0
    with pytest.raises(OutcomeUnknown):
        await first
    assert list(fake.keys) == ["a/waiting"]


async def test_server_that_turns_the_stream_away_unread_costs_nothing(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    async def not_leader(fake: FakeOxia, requests: Requests, context: Context) -> Responses:
        if fake.calls["write"] >= 3:
            fake.write = store_writes
        await fail(context, "node is not leader for shard 0")
        yield pb.WriteResponse()

    fake.write = not_leader
    assert await client.put("a/b", b"") == 0
    assert fake.calls["write"] == 4


async def test_writes_follow_the_leader_to_another_server(fake: FakeOxia, client: OxiaCoordinator) -> None:
    async with FakeOxia() as other:

        async def step_down(fake: FakeOxia, requests: Requests, context: Context) -> Responses:
            fake.leader = other.address
            fake.assignments_end.set()
            await fail(context, "node is not leader for shard 0")
            yield pb.WriteResponse()

        fake.write = step_down
        await client.put("a/b", b"1")
        assert other.keys == {"a/b": (b"1", 0)}
        assert await client.get("a/b") is not None


async def test_wedged_shard_is_named_with_its_remedy_and_not_tried_for_ever(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    async def wedged(fake: FakeOxia, requests: Requests, context: Context) -> Responses:
        async for _ in requests:
            await fail(context, WEDGE)
        yield pb.WriteResponse()

    fake.write = wedged
    results = await asyncio.gather(*[client.put(f"a/{n}", b"") for n in range(3)], return_exceptions=True)
    for error in results:
        assert isinstance(error, Unavailable)
        assert "invalid next offset in wal" in error.message
        assert "0.14.2" in error.hint
    assert fake.calls["write"] == 1
    fake.write = store_writes
    await client.put("a/b", b"")


async def test_wedge_under_several_requests_leaves_them_unknown_with_the_remedy(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    async def wedge_at_the_third(fake: FakeOxia, requests: Requests, context: Context) -> Responses:
        async for request in requests:
            if len(fake.requests) == 1:
                yield fake.apply(request)
            elif len(fake.requests) == 3:
                await fail(context, WEDGE)

    fake.write = wedge_at_the_third
    await client.put("a/first", b"")
    tasks = [asyncio.create_task(client.write([Put(f"a/{n}", b""), Delete("b/x")])) for n in range(2)]
    errors = _errors([result for each in await asyncio.gather(*tasks) for result in each])
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, OutcomeUnknown)
        assert "0.14.2" in error.hint


async def test_answer_that_does_not_fit_the_request_is_not_believed(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    async def too_many(fake: FakeOxia, requests: Requests, _: Context) -> Responses:
        async for _request in requests:
            yield pb.WriteResponse(puts=[pb.PutResponse(), pb.PutResponse()])

    fake.write = too_many
    with pytest.raises(OutcomeUnknown, match="does not fit"):
        await client.put("a/b", b"")


async def test_unanswered_write_is_unknown_at_its_deadline_and_unsent_one_not_done(fake: FakeOxia) -> None:
    fake.write = Gate()
    async with open_oxia(fake.url(timeout_ms=400)) as client:
        sent = asyncio.create_task(client.put("a/sent", b""))
        await fake.until(lambda: len(fake.requests) == 1)
        waiting = asyncio.create_task(client.put("a/waiting", b""))
        with pytest.raises(OutcomeUnknown):
            await sent
        with pytest.raises(Unavailable, match="not sent in time"):
            await waiting
        assert len(fake.requests) == 1


async def test_cancelled_write_that_was_not_sent_is_never_sent(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    fake.write = gate = Gate()
    first = asyncio.create_task(client.put("a/first", b""))
    await fake.until(lambda: len(fake.requests) == 1)
    cancelled = asyncio.create_task(client.put("a/cancelled", b""))
    await asyncio.sleep(0)
    cancelled.cancel()
    permit(gate, 5)
    await first
    await client.put("a/last", b"")
    assert sorted(fake.keys) == ["a/first", "a/last"]


async def test_full_queue_makes_callers_wait_and_loses_nothing(
    fake: FakeOxia, client: OxiaCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_write_stream, "QUEUE_OPERATIONS_MAX", 3)
    await asyncio.gather(*[client.put(f"a/{n}", b"") for n in range(50)])
    assert len(fake.keys) == 50
    assert all(len(request.puts) <= 3 for request in fake.requests)


# -- assignments


async def test_assignments_are_subscribed_again_after_a_normal_end(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    fake.assignments_end.set()
    await client.put("a/b", b"")
    await fake.until(lambda: fake.calls["assignments"] >= 3)
    assert await client.get("a/b") is not None


class NotingClock(SystemClock):
    """Notes how often a server was asked for assignments by the time of each pause."""

    def __init__(self, fake: FakeOxia) -> None:
        self.fake = fake
        self.pauses: list[int] = []

    async def sleep(self, seconds: float) -> None:
        if seconds == STARTUP_PAUSE_S:
            self.pauses.append(self.fake.calls["assignments"])
        await super().sleep(seconds)


async def test_connection_stands_a_while_before_every_question_for_assignments(fake: FakeOxia) -> None:
    """A 0.14 server that has just opened its port dies of the question."""
    clock = NotingClock(fake)
    fake.assignments_end.set()
    async with OxiaCoordinator(parse_url(fake.url()), clock=clock) as client:
        await client.put("a/b", b"")
        await fake.until(lambda: fake.calls["assignments"] >= 3)
    assert clock.pauses[:3] == [0, 1, 2]


async def test_leader_may_be_another_server_than_the_service(fake: FakeOxia) -> None:
    async with FakeOxia() as other, open_oxia(fake.url()) as client:
        fake.leader = other.address
        await client.put("a/b", b"")
        assert list(other.keys) == ["a/b"]
        assert fake.keys == {}


async def test_missing_namespace_is_reported_at_once(fake: FakeOxia) -> None:
    fake.namespace_error = "oxia: namespace not found"
    async with open_oxia(fake.url(timeout_ms=300_000)) as client:
        with pytest.raises(Unavailable) as raised:
            await client.get("a/b")
        assert "namespace" in raised.value.hint
        [result] = await client.write([Put("a/b", b"")])
        assert isinstance(result.error, Unavailable)


# -- reads


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNKNOWN, "node is not leader for shard 0"),
        (grpc.StatusCode.UNKNOWN, "oxia: resource is already closed"),
        (grpc.StatusCode.UNAVAILABLE, "socket closed"),
    ],
)
async def test_reads_are_tried_again_while_the_deadline_allows(
    fake: FakeOxia, client: OxiaCoordinator, code: grpc.StatusCode, text: str
) -> None:
    fake.keys["a/b"] = b"1", 0
    fake.read_failures = [(code, text)] * 3
    record = await client.get("a/b")
    assert record is not None
    assert record.value == b"1"


async def test_read_that_never_works_ends_with_the_servers_words(fake: FakeOxia) -> None:
    async with open_oxia(fake.url(timeout_ms=500)) as client:
        fake.read_failures = [(grpc.StatusCode.UNKNOWN, "node is not leader for shard 0")] * 1000
        with pytest.raises(Unavailable, match=r"not leader|in time"):
            await client.get("a/b")


async def test_lookup_that_hits_a_record_of_the_server_finds_nothing(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    fake.read_failures = [(grpc.StatusCode.UNKNOWN, "failed to Deserialize storage entry: unexpected EOF")]
    assert await client.floor("a/b") is None


async def test_scan_takes_messages_beyond_the_default_limit_and_stops_at_its_own(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    value = bytes(1024 * 1024)
    fake.scan_message = pb.RangeScanResponse(
        records=[
            pb.GetResponse(key=f"a/{n}", value=value, version=pb.Version(version_id=n)) for n in range(6)
        ]
    )
    records = await client.range_scan(*children("a"), limit=5)
    assert [record.key for record in records] == [f"a/{n}" for n in range(5)]


async def test_scan_ends_where_another_directory_begins(fake: FakeOxia, client: OxiaCoordinator) -> None:
    keys = ["a/1", "a/2", "b/1", "a/3"]
    fake.scan_message = pb.RangeScanResponse(
        records=[pb.GetResponse(key=key, version=pb.Version(version_id=0)) for key in keys]
    )
    assert [record.key for record in await client.range_scan(*children("a"))] == ["a/1", "a/2"]


# -- life


async def test_unreachable_server_is_not_done_and_says_where(fake: FakeOxia) -> None:
    async with open_oxia("oxia://127.0.0.1:1?timeout_ms=300") as client:
        with pytest.raises(Unavailable) as raised:
            await client.get("a/b")
        assert "127.0.0.1:1" in raised.value.message
        assert raised.value.hint
        [result] = await client.write([Put("a/b", b"")])
        assert isinstance(result.error, NotDone)
        with pytest.raises(Unavailable):
            await client.open_session()
        with pytest.raises(Unavailable):
            async with client.watch("a"):
                pass


async def test_server_that_is_no_oxia_is_called_that() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_oxia(f"oxia://127.0.0.1:{port}?timeout_ms=300000") as client:
        with pytest.raises(Unavailable) as raised:
            await client.get("a/b")
        assert "Oxia server" in raised.value.hint
    await server.stop(None)


async def test_after_close_every_call_says_so(fake: FakeOxia) -> None:
    client = open_oxia(fake.url())
    await client.put("a/b", b"")
    await client.close()
    await client.close()
    for call in (client.get("a/b"), client.put("a/b", b""), client.open_session()):
        with pytest.raises(Closed):
            await call


async def test_close_leaves_no_task_behind(fake: FakeOxia) -> None:
    before = asyncio.all_tasks()
    client = open_oxia(fake.url())
    await client.put("a/b", b"")
    await client.get("a/b")
    await client.open_session()
    async with client.watch("a"):
        await client.close()
    assert _of_client(asyncio.all_tasks() - before) == []


async def test_close_does_not_wait_for_ever_for_a_silent_server(fake: FakeOxia) -> None:
    fake.write = Gate()
    client = open_oxia(fake.url(timeout_ms=300))
    write = asyncio.create_task(client.put("a/b", b""))
    await fake.until(lambda: len(fake.requests) == 1)
    await client.close()
    with pytest.raises(OutcomeUnknown):
        await write


async def test_coordinators_of_one_loop_share_the_write_stream_until_the_last_is_closed(
    fake: FakeOxia,
) -> None:
    first, second = open_oxia(fake.url()), open_oxia(fake.url(timeout_ms=30_000))
    await asyncio.gather(*[each.put(f"a/{n}", b"") for n in range(10) for each in (first, second)])
    assert fake.calls["write"] == 1
    await first.close()
    await second.put("a/b", b"")
    await second.close()
    assert fake.calls["write"] == 1
    async with open_oxia(fake.url()) as third:
        await third.put("a/c", b"")
    assert fake.calls["write"] == 2


async def test_read_under_way_at_the_close_is_told_so(fake: FakeOxia) -> None:
    fake.read_hangs = True
    client = open_oxia(fake.url())
    reading = asyncio.create_task(client.get("a/b"))
    await fake.until(lambda: fake.calls["read"] == 1)
    await client.close()
    with pytest.raises(Closed, match="meanwhile"):
        await reading


async def test_tls_is_not_silently_left_out(fake: FakeOxia) -> None:
    async with open_oxia(fake.url(timeout_ms=500, tls="true")) as client:
        with pytest.raises(Unavailable):
            await client.get("a/b")
    assert fake.calls["assignments"] == 0


async def test_use_on_another_event_loop_is_refused(fake: FakeOxia, client: OxiaCoordinator) -> None:
    await client.put("a/b", b"")

    def elsewhere() -> None:
        with pytest.raises(UsageError, match="event loop"):
            asyncio.run(client.get("a/b"))

    await asyncio.to_thread(elsewhere)
    assert await client.get("a/b") is not None


async def test_use_after_a_fork_is_refused(
    fake: FakeOxia, client: OxiaCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.put("a/b", b"")
    own = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(UsageError, match="another process") as raised:
            await client.get("a/b")
    assert "child" in raised.value.hint
    assert await client.get("a/b") is not None


def _errors(results: list[WriteResult]) -> list[Exception]:
    return [result.error for result in results if result.error is not None]


def _of_client(tasks: set[asyncio.Task[object]]) -> list[asyncio.Task[object]]:
    """Tasks of ours. Those of gRPC end a few rounds of the loop later, the fake's with the fake."""
    return [task for task in tasks if task.get_name().startswith("oxia ")]
