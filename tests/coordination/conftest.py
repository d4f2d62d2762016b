"""One suite, many tenants: every test that asks for `tenant` or `coordinator` runs on all of them."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from forebay.coordination import Coordinator, MemoryCoordinator, SqliteCoordinator, open_coordinator

CLIENTS_MAX = 100


class ManualClock:
    """Time that moves when a test says so, and lets everybody who slept run before it returns."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        return round(self._now * 1000)

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    def step(self, seconds: float) -> None:
        """Move without letting anybody run."""
        self._now = round(self._now + seconds, 6)

    async def advance(self, seconds: float) -> None:
        """Move in small steps, so that whoever sleeps in between wakes in between."""
        for _ in range(20):
            await _let_others_run()
            self._now = round(self._now + seconds / 20, 6)
            for end, future in self._sleepers:
                if end <= self._now and not future.done():
                    future.set_result(None)
            self._sleepers = [(end, future) for end, future in self._sleepers if not future.done()]
        await _let_others_run()


async def _let_others_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Tenant:
    """One store of keys, and as many clients of it as a test wants."""

    def __init__(self, name: str, connect: Callable[[], Coordinator], clock: ManualClock | None) -> None:
        self.name = name
        self._connect = connect
        self._clock = clock
        self._clients: list[Coordinator] = []

    def open(self) -> Coordinator:
        assert len(self._clients) < CLIENTS_MAX
        self._clients.append(self._connect())
        return self._clients[-1]

    @property
    def clock(self) -> ManualClock:
        """The clock its sessions go by. Skips the test for tenants that go by a server's."""
        if self._clock is None:
            pytest.skip(f"{self.name} keeps its own time")
        return self._clock

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def _memory(shards: int) -> Tenant:
    clock = ManualClock()
    state = MemoryCoordinator(clock, shards).state
    return Tenant(f"memory with {shards} shards", lambda: MemoryCoordinator(state=state), clock)


def _sqlite(path: Path) -> Tenant:
    clock = ManualClock()
    return Tenant("sqlite", lambda: SqliteCoordinator(path, now_ms=clock.now_ms), clock)


TENANTS = [
    "memory",
    "memory-4-shards",
    "sqlite",
    pytest.param("oxia", marks=[pytest.mark.integration, pytest.mark.real_server("oxia")]),
]


@pytest.fixture(params=TENANTS)
async def tenant(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tenant]:
    if request.param == "oxia":
        url = request.getfixturevalue("oxia").url()
        made = Tenant("oxia", lambda: open_coordinator(url), None)
    elif request.param == "sqlite":
        made = _sqlite(tmp_path / "coordination.db")
    else:
        made = _memory(4 if request.param.endswith("shards") else 1)
    yield made
    await made.close()


@pytest.fixture
def coordinator(tenant: Tenant) -> Coordinator:
    return tenant.open()


@pytest.fixture
def directory() -> str:
    """A directory of keys that no other test uses: real servers are shared."""
    return f"suite/{uuid.uuid4().hex}"


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[object]]], Awaitable[object]]:
    """Await a check again and again until it holds. The test's own timeout bounds it."""

    async def wait(check: Callable[[], Awaitable[object]]) -> object:
        for attempt in itertools.count():
            if (found := await check()) or attempt > 10_000:
                return found
            await asyncio.sleep(0.01)
        raise AssertionError("unreachable")

    return wait
