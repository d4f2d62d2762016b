"""A scan: entries looked up by the hundred, their objects fetched ahead, batches handed out in order.

The control record comes with the first entry at or above the start, in one request, so a scan of one batch is
one lookup and one range, as a read is.

What is fetched ahead is bounded by bytes, whatever the objects' sizes: a slow consumer holds the window, not
the log. It is checked and decoded when its turn comes: whoever takes it then finds its bytes in the caches of
the processor, where the checksum has just brought them.

Where an object has gone since it was looked up, the window is dropped and the scan looks again from the first
offset it has not handed out, with the compaction cursor; so it never skips and never repeats.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import TypeAlias

from forebay.coordination import Record
from forebay.errors import ForebayError, NotFound, UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.kit.clock import Clock
from forebay.log._errors import DataLost
from forebay.log._fetch import Fetcher, Loaded
from forebay.log._fetched import FetchedBatch, ReaderConfig
from forebay.log._keys import PartitionKeys
from forebay.log._resolve import Located, PartitionView, Resolver, Unresolved, check_range

__all__ = ["Scan"]

_Coming: TypeAlias = Loaded | asyncio.Task[Loaded | ForebayError]


class Scan:
    """One pass over a partition."""

    def __init__(
        self,
        keys: PartitionKeys,
        *,
        resolver: Resolver,
        fetcher: Fetcher,
        clock: Clock,
        randomness: random.Random,
        config: ReaderConfig,
    ) -> None:
        self._keys = keys
        self._resolver = resolver
        self._fetcher = fetcher
        self._clock = clock
        self._random = randomness
        self._config = config
        self._view: PartitionView | None = None
        self._above: Record | None = None
        """The first entry at or above the start, until it is used."""
        self._cursor = 0

    async def batches(self, start: int | None, end: int | None) -> AsyncIterator[FetchedBatch]:
        """Everything from `start` to before `end`, or to the end of the log as it is now."""
        view, above = await self._resolver.view_at(self._keys, 0 if start is None else max(start, 0))
        position = view.earliest if start is None else start
        check_range(view, position)
        if end is not None and end < position:
            raise UsageError(f"a scan from {position} to {end}", hint="the end is not below the start")
        until = view.next if end is None else min(end, view.next)
        self._view, self._above, failures = view, above, 0
        while position < until:
            window = _Window(self._fetcher, self._config.prefetch_bytes_max)
            try:
                async for batch in self._window(window, position, until):
                    yield batch
                    position, failures = batch.end_offset + 1, 0
            except (Unresolved, NotFound, DataLost) as error:
                failures += 1
                if failures >= self._config.attempts_max:
                    raise _lost(self._keys, position, error) from error
                await self._look_again(position, failures)
            finally:
                window.drop()

    async def _look_again(self, position: int, failures: int) -> None:
        await self._clock.sleep(self._config.retry.wait_s(failures, self._random))
        self._view = await self._resolver.view(self._keys)
        check_range(self._view, position)
        self._cursor = await self._resolver.cursor(self._keys)

    async def _window(self, window: _Window, position: int, until: int) -> AsyncIterator[FetchedBatch]:
        """Batches from `position` on until the first trouble."""
        ahead = position
        known: deque[Located] = deque()
        while position < until:
            if not known and ahead < until and window.open:
                known.extend(await self._locate(ahead, until))
                ahead = known[-1].end_offset + 1
            while known and window.open:
                window.add(known.popleft())
            located, piece = await window.next()
            batch = FetchedBatch(
                self._keys.topic,
                self._keys.partition,
                located.start_offset,
                piece,
                located.entry.created_at_ms,
            )
            last = min(located.end_offset, until - 1)
            yield batch.part(position, last - position + 1)
            position = located.end_offset + 1

    async def _locate(self, position: int, until: int) -> list[Located]:
        assert self._view is not None
        above, self._above = self._above, None
        if above is not None and above.key < self._keys.index(position):
            above = None  # A left-over below the start of the log.
        return await self._resolver.locate(
            self._view,
            position,
            until,
            entries_max=self._config.scan_entries_max,
            bytes_max=self._config.prefetch_bytes_max * 4,
            cursor=self._cursor,
            above=above,
        )


class _Window:
    """Fetches under way and done, in order. Errors are values here, so a dropped task leaves none behind."""

    def __init__(self, fetcher: Fetcher, bytes_max: int) -> None:
        self._fetcher = fetcher
        self._bytes_max = bytes_max
        self._bytes = 0
        self._coming: deque[tuple[Located, _Coming]] = deque()

    @property
    def open(self) -> bool:
        """Whether there is room for one more."""
        return not self._coming or self._bytes < self._bytes_max

    def add(self, located: Located) -> None:
        """Begin to fetch."""
        self._bytes += located.stored_bytes
        coming: _Coming | None = self._fetcher.at_hand(located)
        if coming is None:
            coming = asyncio.get_running_loop().create_task(self._fetcher.load(located))
        self._coming.append((located, coming))

    async def next(self) -> tuple[Located, BytesBatch]:
        """The next batch in order; raises what went wrong with it."""
        located, coming = self._coming[0]
        loaded = await coming if isinstance(coming, asyncio.Task) else coming
        self._coming.popleft()
        self._bytes -= located.stored_bytes
        if isinstance(loaded, ForebayError):
            raise loaded
        return located, self._fetcher.decoded(located, loaded)

    def drop(self) -> None:
        """Forget everything that is under way."""
        for _, coming in self._coming:
            if isinstance(coming, asyncio.Task):
                coming.cancel()
        self._coming.clear()


def _lost(keys: PartitionKeys, position: int, error: ForebayError) -> DataLost:
    if isinstance(error, DataLost):
        return error
    return DataLost(
        f"{keys}: the data of offset {position} is gone: {error.message}",
        hint="`forebay log verify` shows what is affected; restore the object, or trim the log behind it",
    )
