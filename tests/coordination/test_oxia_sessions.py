"""Sessions and watches against a fake server and a clock that is stepped by hand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from forebay.coordination._api import Put, Session
from forebay.coordination._memory import MemoryCoordinator
from forebay.coordination._oxia import OxiaCoordinator, open_oxia
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._config import parse_url
from forebay.errors import Closed, SessionExpired, Unsupported, UsageError

# Helpers are imported as `tests.coordination...`, wherever pytest was started.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.coordination.oxia_fake import FakeOxia, SteppedClock

GONE = (grpc.StatusCode.UNKNOWN, "oxia: session not found")
DOWN = (grpc.StatusCode.UNAVAILABLE, "socket closed")


@pytest.fixture
async def fake() -> AsyncIterator[FakeOxia]:
    async with FakeOxia() as server:
        yield server
        assert server.sins == []


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def client(fake: FakeOxia, clock: SteppedClock) -> AsyncIterator[OxiaCoordinator]:
    async with OxiaCoordinator(parse_url(fake.url()), clock=clock) as coordinator:
        yield coordinator


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; the test's own timeout is the bound."""
    while not condition():  # noqa: ASYNC110 - there is no event for what a client has noticed
        await asyncio.sleep(0.001)


async def renewed(fake: FakeOxia, clock: SteppedClock, step_s: float) -> None:
    """Pass time, and wait until the server saw a renewal for it."""
    before = fake.calls["keep_alive"]
    await clock.advance(step_s)
    await fake.until(lambda: fake.calls["keep_alive"] > before)


async def test_session_renews_itself_three_times_within_its_timeout(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    session = await client.open_session(9_000)
    for _ in range(10):
        await renewed(fake, clock, 3.01)
        await eventually(lambda: session.alive)


async def test_session_with_id_zero_makes_keys_ephemeral(fake: FakeOxia, client: OxiaCoordinator) -> None:
    session = await client.open_session()
    assert session.id == 0
    await client.put("a/b", b"", session=session)
    [put] = fake.requests[0].puts
    assert put.HasField("session_id")
    assert put.session_id == 0


async def test_silent_server_puts_the_session_in_doubt_before_it_can_expire(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    session = await client.open_session(10_000)
    fake.keep_alive_error = DOWN
    await clock.advance(6.9)
    assert session.alive
    await clock.advance(0.2)
    assert not session.alive
    written = len(fake.requests)
    with pytest.raises(SessionExpired, match="in doubt"):
        await client.put("a/claim", b"", session=session)
    assert len(fake.requests) == written


async def test_doubt_passes_when_a_renewal_comes_through_in_time(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    session = await client.open_session(10_000)
    fake.keep_alive_error = DOWN
    await renewed(fake, clock, 7.5)
    assert not session.alive
    fake.keep_alive_error = None
    await renewed(fake, clock, 1)
    await eventually(lambda: session.alive)
    await client.put("a/claim", b"", session=session)


async def test_renewal_answered_after_the_timeout_proves_nothing(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    """A 0.14 server answers renewals of a session that it is just removing."""
    session = await client.open_session(10_000)
    fake.keep_alive_error = DOWN
    await renewed(fake, clock, 4)
    await clock.advance(10)
    fake.keep_alive_error = None
    await eventually(lambda: not _renewing(session))
    assert not session.alive
    with pytest.raises(SessionExpired):
        await client.put("a/claim", b"", session=session)


async def test_session_the_server_does_not_know_is_over_for_good(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    session = await client.open_session(10_000)
    fake.keep_alive_error = GONE
    await renewed(fake, clock, 4)
    await eventually(lambda: not session.alive)
    fake.keep_alive_error = None
    assert not session.alive
    await session.close()


async def test_refused_ephemeral_put_does_not_stop_the_other_operations(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    session = await client.open_session(2_000)
    await session.close()
    results = await client.write([Put("a/1", b""), Put("a/2", b"", session=session), Put("a/3", b"")])
    assert [type(result.error) for result in results] == [type(None), SessionExpired, type(None)]
    assert sorted(fake.keys) == ["a/1", "a/3"]


async def test_put_whose_session_ends_in_the_queue_is_not_sent(
    fake: FakeOxia, clock: SteppedClock, client: OxiaCoordinator
) -> None:
    session = await client.open_session(2_000)
    allowed = asyncio.Event()

    async def slow(
        fake: FakeOxia, requests: AsyncIterator[pb.WriteRequest], _: object
    ) -> AsyncIterator[object]:
        async for request in requests:
            await allowed.wait()
            yield fake.apply(request)

    fake.write = slow  # type: ignore[assignment]
    first = asyncio.create_task(client.put("a/first", b""))
    await fake.until(lambda: len(fake.requests) == 1)
    claim = asyncio.create_task(client.write([Put("a/claim", b"", session=session), Put("a/other", b"")]))
    await asyncio.sleep(0)
    fake.keep_alive_error = DOWN
    await clock.advance(1.9)
    allowed.set()
    await first
    assert [type(result.error) for result in await claim] == [SessionExpired, type(None)]
    assert sorted(fake.keys) == ["a/first", "a/other"]


async def test_sessions_are_opened_and_closed_in_a_moment_without_writes(
    fake: FakeOxia, client: OxiaCoordinator
) -> None:
    """On the server both are writes, and 0.14.0 stops for good when two writes race."""

    async def write() -> None:
        for n in range(30):
            await client.put(f"a/{n}", b"")

    async def sessions() -> None:
        for _ in range(5):
            async with await client.open_session():
                await asyncio.sleep(0)

    await asyncio.gather(*[write() for _ in range(8)], sessions())
    assert fake.calls["create_session"] == fake.calls["close_session"] == 5
    assert fake.calls["write"] == 1


async def test_session_extends_to_a_shard_with_its_first_key_there() -> None:
    async with FakeOxia(shards=4) as fake, open_oxia(fake.url()) as client:
        session = await client.open_session()
        assert fake.calls["create_session"] == 1
        await asyncio.gather(*[client.put(f"a/{n}", b"", session=session) for n in range(40)])
        assert fake.calls["create_session"] == 4
        identities = {put.client_identity for request in fake.requests for put in request.puts}
        assert identities == {f"forebay-session-{session.id}"}
        await session.close()
        assert sorted(fake.sessions_closed) == [0, 1, 2, 3]
        assert fake.sins == []


async def test_closing_the_coordinator_ends_its_sessions(fake: FakeOxia) -> None:
    client = open_oxia(fake.url())
    session = await client.open_session()
    await client.close()
    assert fake.sessions_closed == [session.id]
    assert not session.alive


async def test_session_of_another_coordinator_is_refused(fake: FakeOxia, client: OxiaCoordinator) -> None:
    async with open_oxia(fake.url()) as other, MemoryCoordinator() as memory:
        for opener in (other, memory):
            session = await opener.open_session()
            with pytest.raises(UsageError, match="another coordinator"):
                await client.put("a/b", b"", session=session)
    assert fake.requests == []


@pytest.mark.parametrize("timeout_ms", [0, 1_999, 300_001])
async def test_timeout_a_server_refuses_is_refused_before(client: OxiaCoordinator, timeout_ms: int) -> None:
    with pytest.raises(UsageError, match="timeout"):
        await client.open_session(timeout_ms)


# -- watches


def change(key: str, *, range_end: str | None = None) -> pb.NotificationBatch:
    batch = pb.NotificationBatch()
    notification = batch.notifications[key]
    notification.change = pb.KEY_MODIFIED if range_end is None else pb.KEY_RANGE_DELETED
    if range_end is not None:
        notification.key_range_last = range_end
    return batch


async def settled(watch_changed: asyncio.Task[None]) -> bool:
    """Whether it has ended by the time everything already on its way has been delivered."""
    await asyncio.wait([watch_changed], timeout=0.05)
    return watch_changed.done()


async def test_watch_wakes_for_its_directory_only(fake: FakeOxia) -> None:
    async with open_oxia(fake.url()) as client, client.watch("a") as watch, client.watch("b") as other:
        fake.notify.put_nowait(change("b/x"))
        await other.changed()
        waiting = asyncio.create_task(watch.changed())
        assert not await settled(waiting)
        fake.notify.put_nowait(change("a/x"))
        await waiting


@pytest.mark.parametrize(("start", "end"), [("a/1", "a/9"), ("a/", "a//"), ("Z/", "z/")])
async def test_watch_wakes_for_range_deletes_that_touch_it(fake: FakeOxia, start: str, end: str) -> None:
    async with open_oxia(fake.url()) as client, client.watch("a") as watch:
        fake.notify.put_nowait(change(start, range_end=end))
        await watch.changed()


async def test_many_changes_while_nobody_looks_are_one_wake(fake: FakeOxia) -> None:
    async with open_oxia(fake.url()) as client, client.watch("a") as watch, client.watch("b") as last:
        for _ in range(5):
            fake.notify.put_nowait(change("a/x"))
        fake.notify.put_nowait(change("b/x"))
        await last.changed()
        await watch.changed()
        waiting = asyncio.create_task(watch.changed())
        assert not await settled(waiting)
        waiting.cancel()


async def test_every_watch_wakes_after_the_stream_was_interrupted(fake: FakeOxia) -> None:
    """Also when the server ended it normally: something may have changed meanwhile."""
    async with open_oxia(fake.url()) as client, client.watch("a") as first, client.watch("b") as second:
        fake.notify.put_nowait(None)
        await asyncio.gather(first.changed(), second.changed())
        assert fake.calls["notifications"] == 2
        fake.notify.put_nowait(change("a/x"))
        await first.changed()


async def test_watches_share_one_stream_per_shard_which_ends_with_the_last(fake: FakeOxia) -> None:
    async with open_oxia(fake.url()) as client:
        async with client.watch("a"), client.watch("a"), client.watch("b"):
            assert fake.calls["notifications"] == 1
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("oxia notifications")]


async def test_server_without_notifications_is_reported_when_the_watch_begins(fake: FakeOxia) -> None:
    fake.notification_error = (
        grpc.StatusCode.UNKNOWN,
        "oxia: notifications not enabled on namespace",
    )
    async with open_oxia(fake.url(timeout_ms=300_000)) as client:
        with pytest.raises(Unsupported) as raised:
            async with client.watch("a"):
                pass
        assert "notifications" in raised.value.hint


async def test_waiting_watch_is_let_go_when_the_coordinator_closes(fake: FakeOxia) -> None:
    client = open_oxia(fake.url())
    async with client.watch("a") as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Closed):
            await waiting


async def test_two_tasks_cannot_wait_on_one_watch(fake: FakeOxia) -> None:
    async with open_oxia(fake.url()) as client, client.watch("a") as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="two tasks"):
            await watch.changed()
        waiting.cancel()


def _renewing(session: Session) -> bool:
    return any(task.get_name().startswith(f"oxia session {session.id} ") for task in asyncio.all_tasks())
