"""The client while its server dies, restarts and hangs. Every test has a server of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from forebay.coordination._api import Put, children
from forebay.coordination._oxia import OxiaCoordinator, open_oxia
from forebay.errors import NotDone, OutcomeUnknown, Unavailable
from forebay.kit.conditions import ABSENT
from forebay.testing.pytest_plugin import cannot_be_had
from forebay.testing.servers import OxiaServer, ServerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("oxia"), pytest.mark.real_server("oxia")]

WRITERS = 16


@pytest.fixture
def server() -> Iterator[OxiaServer]:
    try:
        own = OxiaServer()
    except ServerUnavailable as error:
        cannot_be_had(error)
    with own:
        yield own


@pytest.fixture
async def client(server: OxiaServer) -> AsyncIterator[OxiaCoordinator]:
    async with open_oxia(server.url() + "?timeout_ms=60000") as coordinator:
        yield coordinator


class Load:
    """Writers that put keys nobody else puts, and remember what they were told about each."""

    def __init__(self, client: OxiaCoordinator) -> None:
        self._client = client
        self.acked: dict[str, int] = {}
        self.unknown: set[str] = set()
        self.not_done: set[str] = set()
        self.stop = False
        self._progress = asyncio.Condition()

    async def writer(self, number: int) -> None:
        step = 0
        while not self.stop:
            keys = [f"load/{number:03d}-{step:06d}-{part}" for part in range(3)]
            step += 1
            results = await self._client.write([Put(key, key.encode(), ABSENT) for key in keys])
            for key, result in zip(keys, results, strict=True):
                if isinstance(result.error, OutcomeUnknown):
                    self.unknown.add(key)
                elif result.error is not None:
                    assert isinstance(result.error, NotDone)
                    self.not_done.add(key)
                else:
                    assert result.version is not None
                    self.acked[key] = result.version
            async with self._progress:
                self._progress.notify_all()

    async def more(self, count: int) -> None:
        """Wait until this many more writes were acknowledged."""
        goal = len(self.acked) + count
        async with self._progress:
            await self._progress.wait_for(lambda: len(self.acked) >= goal)

    async def check(self) -> None:
        """Every acknowledged write is there as acknowledged; what was called not done is not."""
        found = {record.key: record async for record in self._client.scan_all(*children("load"))}
        assert {key: found[key].version for key in self.acked} == self.acked
        assert not self.not_done & found.keys()
        assert found.keys() <= self.acked.keys() | self.unknown
        assert all(record.value == key.encode() for key, record in found.items())


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_restart_under_load_loses_nothing_acknowledged_and_service_resumes(
    server: OxiaServer, client: OxiaCoordinator, how: str
) -> None:
    load = Load(client)
    ending: Callable[[], None] = getattr(server, how)
    async with asyncio.TaskGroup() as group:
        for number in range(WRITERS):
            group.create_task(load.writer(number))
        for _ in range(3):
            await load.more(300)
            await asyncio.to_thread(ending)
            await asyncio.to_thread(server.start)
        await load.more(300)
        load.stop = True
    await load.check()
    assert server.pid is not None, "a client that comes back at once must not kill a server that starts"


async def test_writes_wait_for_a_server_that_is_down_for_a_moment(
    server: OxiaServer, client: OxiaCoordinator
) -> None:
    await client.put("a/before", b"")
    await asyncio.to_thread(server.stop)
    waiting = [asyncio.create_task(client.put(f"a/{n}", b"")) for n in range(10)]
    reading = asyncio.create_task(client.get("a/before"))
    await asyncio.sleep(0)
    await asyncio.to_thread(server.start)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    # Those handed to the dying stream may be in doubt; none may have failed.
    assert all(isinstance(result, int | OutcomeUnknown) for result in results)
    assert await reading is not None
    await client.put("a/after", b"")


async def test_hanging_server_meets_every_deadline_and_recovers(server: OxiaServer) -> None:
    async with open_oxia(server.url() + "?timeout_ms=700") as client:
        await client.put("a/b", b"")
        server.pause()
        with pytest.raises(OutcomeUnknown):
            await client.put("a/sent", b"")
        with pytest.raises(NotDone):
            await client.open_session()
        with pytest.raises(Unavailable):
            await client.get("a/b")
        with pytest.raises(Unavailable):
            await client.range_scan(*children("a"))
        with pytest.raises(Unavailable):
            async with client.watch("a"):
                pass
        server.resume()
        async with asyncio.timeout(120):
            while not await _works(client):
                pass


async def test_server_that_hangs_before_the_first_call_is_unavailable(server: OxiaServer) -> None:
    server.pause()
    async with open_oxia(server.url() + "?timeout_ms=300") as client:
        with pytest.raises(Unavailable):
            await client.get("a/b")
        [result] = await client.write([Put("a/b", b"")])
        assert isinstance(result.error, NotDone)
        server.resume()
        async with asyncio.timeout(120):
            while not await _works(client):
                pass


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_watch_wakes_after_a_restart_and_goes_on(
    server: OxiaServer, client: OxiaCoordinator, how: str
) -> None:
    async with client.watch("a") as watch:
        ending: Callable[[], None] = getattr(server, how)
        await asyncio.to_thread(ending)
        await asyncio.to_thread(server.start)
        await watch.changed()
        await client.put("a/b", b"")
        await watch.changed()


async def test_session_and_its_keys_survive_a_quick_restart(
    server: OxiaServer, client: OxiaCoordinator
) -> None:
    async with await client.open_session(60_000) as session:
        await client.put("a/claim", b"", session=session)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        record = await client.get("a/claim")
        assert record is not None
        assert record.session_id == session.id
        assert session.alive
        await client.put("a/claim-2", b"", session=session)
    assert await client.list(*children("a")) == []


async def test_closing_beside_a_dead_server_ends_and_says_what_is_left(server: OxiaServer) -> None:
    client = open_oxia(server.url() + "?timeout_ms=500")
    session = await client.open_session(30_000)
    await client.put("a/claim", b"", session=session)
    await asyncio.to_thread(server.kill)
    with pytest.raises(OutcomeUnknown, match="session") as raised:
        await session.close()
    assert "30000" in raised.value.hint
    await client.close()


async def _works(client: OxiaCoordinator) -> bool:
    try:
        await client.put("a/again", b"")
        return await client.get("a/again") is not None
    except (NotDone, OutcomeUnknown):
        return False
