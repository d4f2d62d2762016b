"""Waiting for new records without asking again and again.

A watch of the partition's control record is begun before the record is read, so an append cannot fall between
the two. From then on nothing is sent until the watch fires, the tail cache hears of an append of this
process, or time is up. A watch may fire for nothing; the record is then read once more, and that is all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from forebay.coordination import Coordinator, Watch
from forebay.errors import UsageError
from forebay.kit.clock import Clock
from forebay.log._keys import PartitionKeys
from forebay.log._tail_cache import TailCache

__all__ = ["wait_for_change"]

NextOffset = Callable[[str, int], Awaitable[int]]


async def wait_for_change(
    wanted: Sequence[tuple[str, int, int]],
    *,
    timeout_s: float,
    coordinator: Coordinator,
    next_offset: NextOffset,
    cache: TailCache | None,
    clock: Clock,
) -> list[tuple[str, int]]:
    """The partitions of `wanted` whose offset can be read; empty after the timeout."""
    if math.isnan(timeout_s):
        raise UsageError(f"a timeout of {timeout_s}", hint="seconds, as a number")  # It would never be over.
    ready = [] if cache is None else _ready_in(cache, wanted)
    if ready or not wanted:
        return ready
    async with AsyncExitStack() as stack:
        watches = [
            await stack.enter_async_context(coordinator.watch(f"{PartitionKeys(topic, partition).root}/meta"))
            for topic, partition, _ in wanted
        ]
        waiting = _Waiting(wanted, watches, next_offset, cache)
        return await waiting.until(clock, timeout_s)


def _ready_in(cache: TailCache, wanted: Sequence[tuple[str, int, int]]) -> list[tuple[str, int]]:
    return [
        (topic, partition)
        for topic, partition, offset in wanted
        if (known := cache.known_next(topic, partition)) is not None and known > offset
    ]


class _Waiting:
    """One wait: a task per watch, one for the cache, one for the time."""

    def __init__(
        self,
        wanted: Sequence[tuple[str, int, int]],
        watches: Sequence[Watch],
        next_offset: NextOffset,
        cache: TailCache | None,
    ) -> None:
        self._wanted = wanted
        self._watches = watches
        self._next_offset = next_offset
        self._cache = cache
        self._tasks: dict[asyncio.Task[object], int] = {}
        """The task of each watch, and its place in `wanted`."""
        self._local: asyncio.Task[object] | None = None
        """Ends with the next append of this process."""

    async def until(self, clock: Clock, timeout_s: float) -> list[tuple[str, int]]:
        """Look, then wait and look again until something is ready or the time is up."""
        ready = await self._look(range(len(self._wanted)))
        if ready or timeout_s <= 0:
            return ready
        timer = _start(clock.sleep(timeout_s))
        self._watch_on(range(len(self._watches)))
        try:
            while not ready and not timer.done():
                local = [] if self._local is None else [self._local]
                await asyncio.wait([timer, *self._tasks, *local], return_when=asyncio.FIRST_COMPLETED)
                ready = await self._after()
            return ready
        finally:
            timer.cancel()
            for task in (*self._tasks, *([self._local] if self._local else [])):
                task.cancel()

    def _watch_on(self, places: Sequence[int]) -> None:
        for place in places:
            self._tasks[_start(self._watches[place].changed())] = place
        if self._cache is not None and self._local is None:
            self._local = _start(self._cache.wait())

    async def _after(self) -> list[tuple[str, int]]:
        """Look where something changed, and watch on."""
        if self._cache is not None and self._local is not None and self._local.done():
            self._local = None
            ready = _ready_in(self._cache, self._wanted)
            if ready:
                return ready
        done = [task for task in self._tasks if task.done()]
        places = [self._tasks.pop(task) for task in done]
        for task in done:
            task.result()
        self._watch_on(places)
        return await self._look(places)

    async def _look(self, places: Sequence[int]) -> list[tuple[str, int]]:
        chosen = [self._wanted[place] for place in places]
        ends = await asyncio.gather(*(self._next_offset(topic, partition) for topic, partition, _ in chosen))
        pairs = zip(chosen, ends, strict=True)
        return [(topic, partition) for (topic, partition, offset), end in pairs if end > offset]


def _start(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    return asyncio.get_running_loop().create_task(work)
