"""Clocks that tests move by hand. The shipped world of `forebay.testing` stands on the kit, not under it."""

from __future__ import annotations

import asyncio
import heapq
import itertools

import pytest


class ManualClock:
    """Time stands still until `advance`; sleepers wake in the order of their times."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.epoch_ms = 1_700_000_000_000
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return self.epoch_ms + int((self.seconds - 1000.0) * 1000)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.seconds + seconds, next(self._order), future))
        await future

    async def settle(self) -> None:
        """Let everything that is ready run. Nothing here does I/O, so a bounded number of turns is enough."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        await self.settle()
        end = self.seconds + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self.seconds, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
                await self.settle()
        self.seconds = end
        await self.settle()

    @property
    def sleeping(self) -> int:
        """Sleeps that nobody has woken or cancelled."""
        return sum(not future.done() for _, _, future in self._sleepers)


class LeapingClock:
    """Every sleep is over at once, and time has moved by it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now_ms(self) -> int:
        return int(self.seconds * 1000)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds
        await asyncio.sleep(0)


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def leaping_clock() -> LeapingClock:
    return LeapingClock()
