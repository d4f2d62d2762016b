from __future__ import annotations

import asyncio
import time

from forebay.kit.clock import Clock, SystemClock


async def test_system_clock_fulfils_the_protocol() -> None:
    clock: Clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0)
    assert clock.monotonic() >= before


def test_system_clock_counts_milliseconds_since_the_unix_epoch() -> None:
    low = time.time_ns() // 1_000_000
    now = SystemClock().now_ms()
    assert low <= now <= time.time_ns() // 1_000_000
    assert isinstance(now, int)


async def test_sleep_lasts_at_least_as_long_as_asked() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0.01)
    # The loop may wake a timer early by its clock's resolution.
    assert clock.monotonic() - before >= 0.01 - time.get_clock_info("monotonic").resolution * 2


async def test_sleeping_for_nothing_lets_ready_tasks_run() -> None:
    ran: list[str] = []

    async def other() -> None:
        ran.append("other")

    task = asyncio.create_task(other())
    await SystemClock().sleep(0)
    assert ran == ["other"]
    await task
