"""The contract of watches: they may wake without a reason, and never sleep through one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.coordination import Coordinator, DeleteRange, Put, children
from forebay.errors import Closed, InvalidKey


async def test_change_before_waiting_is_not_missed(coordinator: Coordinator, directory: str) -> None:
    async with coordinator.watch(directory) as watch:
        await coordinator.put(f"{directory}/a", b"")
        await watch.changed()


@pytest.mark.parametrize("change", ["put", "overwrite", "delete", "delete_range", "write"])
async def test_every_kind_of_change_by_another_client_wakes(tenant: Any, directory: str, change: str) -> None:
    here, there = tenant.open(), tenant.open()
    await there.put(f"{directory}/old", b"")
    async with here.watch(directory) as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        if change == "put":
            await there.put(f"{directory}/new", b"")
        elif change == "overwrite":
            await there.put(f"{directory}/old", b"again")
        elif change == "delete":
            await there.delete(f"{directory}/old")
        elif change == "delete_range":
            await there.delete_range(*children(directory))
        else:
            await there.write([Put(f"{directory}/w", b""), DeleteRange(f"{directory}/x", f"{directory}/y")])
        await waiting


async def test_reader_that_scans_after_each_wake_sees_the_last_change(tenant: Any, directory: str) -> None:
    here, there = tenant.open(), tenant.open()
    total = 40

    async def write() -> None:
        for number in range(total):
            await there.put(f"{directory}/{number % 3}", str(number).encode())
            await asyncio.sleep(0)

    async with here.watch(directory) as watch:
        writing = asyncio.create_task(write())
        highest = -1
        while highest < total - 1:
            await watch.changed()
            values = [int(record.value) for record in await here.range_scan(*children(directory))]
            assert max(values, default=-1) >= highest
            highest = max(values, default=-1)
        await writing


async def test_two_watches_wake_independently(tenant: Any, directory: str) -> None:
    here, there = tenant.open(), tenant.open()
    async with here.watch(directory) as first, here.watch(directory) as second:
        await there.put(f"{directory}/a", b"")
        await first.changed()
        await second.changed()
        await there.put(f"{directory}/a", b"")
        await asyncio.gather(first.changed(), second.changed())


async def test_watch_ends_with_its_block(coordinator: Coordinator, directory: str) -> None:
    for _ in range(3):
        async with coordinator.watch(directory) as watch:
            await coordinator.put(f"{directory}/a", b"")
            await watch.changed()


async def test_cancelled_wait_loses_no_change(coordinator: Coordinator, directory: str) -> None:
    async with coordinator.watch(directory) as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await coordinator.put(f"{directory}/a", b"")
        await watch.changed()


async def test_closing_the_coordinator_frees_whoever_waits(coordinator: Coordinator, directory: str) -> None:
    async with coordinator.watch(directory) as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        await coordinator.close()
        with pytest.raises(Closed):
            while True:
                await waiting
                waiting = asyncio.create_task(watch.changed())


@pytest.mark.parametrize("directory", ["", "/", "a/", "a//b", "__oxia"])
async def test_bad_directories_are_refused(coordinator: Coordinator, directory: str) -> None:
    with pytest.raises(InvalidKey):
        coordinator.watch(directory)
