"""Reads of a log: random, by time, many partitions at once, and scans as Arrow.

A read of a batch that is not cached costs one look at the control record, one lookup in the index and one
range request for the slice; a batch that is still pending saves the lookup. Several partitions are looked up
at the same time, and slices of one object are fetched together.

Whatever happens between lookup and fetch (compaction, vacuum, trim) shows as an object that is missing or an
offset that nothing covers. The answer is always the same: look again, from the control record on, with the
compaction cursor. What is missing after several looks is lost, and said to be so; nothing is ever skipped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from forebay.coordination import Coordinator
from forebay.errors import ForebayError, NotFound, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.log._errors import DataLost, OffsetOutOfRange, UnknownTopic
from forebay.log._fetch import Fetcher
from forebay.log._fetched import Fetched, FetchedBatch, ReaderConfig, ReadRequest, fitting
from forebay.log._keys import PartitionKeys
from forebay.log._numbers import WHOLE_MAX, whole
from forebay.log._resolve import Located, PartitionOffsets, PartitionView, Resolver, Unresolved, check_range
from forebay.log._scan import Scan
from forebay.log._tail_cache import TailCache
from forebay.log._time_lookup import TimeLookup
from forebay.log._waiting import wait_for_change
from forebay.storage import ObjectStore

__all__ = ["LogReader"]


@dataclass(slots=True)
class _Ask:
    """One request of a `read_many`, over several lookups."""

    request: ReadRequest
    keys: PartitionKeys
    bytes_max: int
    answer: Fetched | ForebayError | None = None
    view: PartitionView | None = None
    located: list[Located] = field(default_factory=list)
    trouble: ForebayError | None = None
    """Why the last lookup or fetch came to nothing."""


class LogReader:
    """Reads any partition of a log. One per process is enough; calls may run at the same time."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        randomness: random.Random,
        config: ReaderConfig | None = None,
        metrics: MetricsRegistry | None = None,
        tail_cache: TailCache | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._random = randomness
        self._config = config or ReaderConfig()
        self._cache = tail_cache
        registry = metrics or MetricsRegistry()
        policy = self._config.retry
        self._resolver = Resolver(coordinator, clock=clock, randomness=randomness, policy=policy)
        self._fetcher = Fetcher(
            store,
            clock=clock,
            randomness=randomness,
            policy=policy,
            cache_bytes_max=self._config.cache_bytes_max,
            requests_max=self._config.requests_max,
            maps_objects=self._config.maps_objects,
            metrics=registry,
        )
        self._reads = registry.counter("log.reads", "Reads of a partition")
        self._records = registry.counter("log.read_records", "Records returned by log readers")
        self._again = registry.counter("log.read_lookups_again", "Lookups made again: an object had gone")
        self._tail_hits = registry.counter("log.tail_cache_hits", "Reads answered without a request")

    async def offsets(self, topic: str, partition: int) -> PartitionOffsets:
        """Where the partition begins and ends. One request."""
        return (await self._view(PartitionKeys(topic, partition))).offsets

    async def offsets_each(
        self, partitions: Sequence[tuple[str, int]]
    ) -> list[PartitionOffsets | ForebayError]:
        """`offsets` of many partitions in one round trip, each with an answer or an error of its own."""
        found = await self._resolver.views([PartitionKeys(*each) for each in partitions])
        return [view.offsets if isinstance(view, PartitionView) else view for view in found]

    async def offsets_many(self, partitions: Sequence[tuple[str, int]]) -> list[PartitionOffsets]:
        """`offsets` of many partitions at the same time."""
        return list(await asyncio.gather(*(self.offsets(*each) for each in partitions)))

    async def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int | None = None,
        max_records: int | None = None,
    ) -> Fetched:
        """Records from `offset` on: at least one where there is one, none at the end of the log.

        Raises `OffsetOutOfRange`, which names the earliest offset, `UnknownTopic`, or `DataLost`.
        """
        [answer] = await self.read_many([ReadRequest(topic, partition, offset, max_bytes, max_records)])
        if isinstance(answer, ForebayError):
            raise answer
        return answer

    async def read_many(
        self,
        requests: Sequence[ReadRequest],
        *,
        before_fetch: Callable[[int], Awaitable[None]] | None = None,
    ) -> list[Fetched | ForebayError]:
        """Many partitions at once, each with an answer or an error of its own, in the order asked for.

        `before_fetch` is given the bytes that are about to be fetched, and may make the fetch wait. What it
        raises ends the whole read.
        """
        asks = [self._ask(request) for request in requests]
        for attempt in range(1, self._config.attempts_max + 1):
            unanswered = [ask for ask in asks if ask.answer is None]
            if not unanswered:
                break
            if attempt > 1:
                self._again.inc(len(unanswered))
                await self._clock.sleep(self._config.retry.wait_s(attempt - 1, self._random))
            await asyncio.gather(*(self._look_up(ask) for ask in unanswered))
            found = [ask for ask in unanswered if ask.answer is None and ask.located]
            if before_fetch is not None and found:
                await before_fetch(sum([each.stored_bytes for ask in found for each in ask.located]))
            await self._fetch(found)
        return [_lost(ask) if ask.answer is None else ask.answer for ask in asks]

    def scan(
        self, topic: str, partition: int, start: int | None = None, end: int | None = None
    ) -> AsyncIterator[pa.RecordBatch]:
        """Every record from `start` (None: the earliest) to before `end`, in order, as Arrow.

        Without `end` it stops where the log ended when the scan began. Raises as `read` does.
        """
        return self._as_arrow(self.scan_batches(topic, partition, start, end))

    def scan_batches(
        self, topic: str, partition: int, start: int | None = None, end: int | None = None
    ) -> AsyncIterator[FetchedBatch]:
        """`scan`, as batches of bytes."""
        start = start if start is None or type(start) is int else whole("offset", start)
        end = end if end is None or type(end) is int else whole("offset", end)
        scan = Scan(
            PartitionKeys(topic, partition),
            resolver=self._resolver,
            fetcher=self._fetcher,
            clock=self._clock,
            randomness=self._random,
            config=self._config,
        )
        return scan.batches(start, end)

    async def _as_arrow(self, batches: AsyncIterator[FetchedBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            self._records.inc(len(batch))
            yield batch.to_arrow()

    async def offset_for_time(
        self, topic: str, partition: int, time_ms: int, *, whole_entries: bool = False
    ) -> int:
        """The first offset whose append is not older than `time_ms`; the next offset where there is none.

        With `whole_entries` it may be earlier, by up to a compacted range, and no object is read for it.
        """
        time_ms = whole("time", time_ms, -WHOLE_MAX)
        lookup = TimeLookup(self._resolver, self._fetcher, config=self._config)
        return await lookup.offset(PartitionKeys(topic, partition), time_ms, whole_entries=whole_entries)

    async def offset_for_bytes(self, topic: str, partition: int, bytes_max: int) -> int:
        """The first offset such that all entries from it on hold at most `bytes_max` bytes, as stored.

        The newest entry always counts as within: a bound never empties a log. Reads the whole index.
        """
        keys = PartitionKeys(topic, partition)
        cursor = await self._resolver.cursor(keys)
        view = await self._view(keys)
        entries = [each async for each in self._resolver.entries(view, cursor)]
        size = 0
        offset = entries[-1].start_offset if entries else view.next
        for located in reversed(entries):
            size += located.stored_bytes
            if size > bytes_max:
                break
            offset = located.start_offset
        return max(offset, view.earliest)

    async def time_of(self, topic: str, partition: int, offset: int) -> int | None:
        """About when the record at `offset` was appended; None where it is not written yet.

        Inside a compacted range it is the time of the range's first append: one lookup, no object is read.
        """
        offset = whole("offset", offset)
        keys = PartitionKeys(topic, partition)
        for _ in range(self._config.attempts_max):
            view = await self._view(keys)
            check_range(view, offset)
            if offset == view.next:
                return None
            try:
                [found, *_] = await self._resolver.locate(
                    view,
                    offset,
                    offset + 1,
                    entries_max=1,
                    bytes_max=1,
                    cursor=await self._resolver.cursor(keys),
                )
            except Unresolved:
                continue
            return found.entry.first_time_ms or found.entry.created_at_ms
        raise DataLost(f"{keys}: nothing covers offset {offset}", hint="run `forebay log verify`")

    async def wait_for_data(
        self, wanted: Sequence[tuple[str, int, int]], *, timeout_s: float
    ) -> list[tuple[str, int]]:
        """Wait until one of (topic, partition, offset) can be read; which can. Empty after the timeout.

        While nothing changes it sends nothing: the coordinator tells of changes, and a tail cache of this
        process or machine tells of its own appends without a request.
        """
        return await wait_for_change(
            wanted,
            timeout_s=timeout_s,
            coordinator=self._coordinator,
            next_offset=self._next_offset,
            cache=self._cache,
            clock=self._clock,
        )

    async def _next_offset(self, topic: str, partition: int) -> int:
        return (await self._view(PartitionKeys(topic, partition))).next

    async def _view(self, keys: PartitionKeys) -> PartitionView:
        asked_at = self._clock.monotonic()
        try:
            view = await self._resolver.view(keys)
        except UnknownTopic:
            self._forget(keys)
            raise
        self._tell_cache(view, asked_at)
        return view

    def _forget(self, keys: PartitionKeys) -> None:
        """The topic was deleted: what is cached of it is not served any longer."""
        if self._cache is not None:
            self._cache.forget(keys.topic, keys.partition)

    def _tell_cache(self, view: PartitionView, asked_at: float) -> None:
        if self._cache is not None:
            keys = view.keys
            self._cache.saw_control(keys.topic, keys.partition, view.earliest, view.next, asked_at)

    def _ask(self, request: ReadRequest) -> _Ask:
        bytes_max = self._config.bytes_max
        if request.bytes_max is not None:
            bytes_max = whole("max_bytes", request.bytes_max, 1)
        if request.records_max is not None:
            request = replace(request, records_max=whole("max_records", request.records_max, 1))
        if type(request.offset) is not int:
            request = replace(request, offset=whole("offset", request.offset))
        ask = _Ask(request, PartitionKeys(request.topic, request.partition), bytes_max)
        self._reads.inc()
        if self._cache is not None:
            ask.answer = self._cache.read(request, bytes_max)
            if ask.answer is not None:
                self._tail_hits.inc()
                self._records.inc(len(ask.answer))
        return ask

    async def _look_up(self, ask: _Ask) -> None:
        """Set what to fetch, or the answer where there is nothing to fetch."""
        try:
            asked_at = self._clock.monotonic()
            view, above = await self._resolver.view_at(ask.keys, max(ask.request.offset, 0))
            ask.view = view
            self._tell_cache(view, asked_at)
            check_range(view, ask.request.offset)
            if ask.request.offset == view.next:
                ask.answer = _answer(ask, view, [])
                return
            # The cursor costs a request, so it is read only after something had gone.
            cursor = 0 if ask.trouble is None else await self._resolver.cursor(ask.keys)
            entries_max, until = self._config.lookup_entries_max, view.next
            if ask.request.records_max is not None:
                entries_max = min(entries_max, ask.request.records_max)
                until = min(until, ask.request.offset + ask.request.records_max)
            ask.located = await self._resolver.locate(
                view,
                ask.request.offset,
                until,
                entries_max=entries_max,
                bytes_max=ask.bytes_max,
                cursor=cursor,
                above=above,
            )
        except Unresolved as error:
            ask.located, ask.trouble = [], error
        except UnknownTopic as error:
            self._forget(ask.keys)
            ask.answer = error
        except ForebayError as error:
            ask.answer = error

    async def _fetch(self, asks: Sequence[_Ask]) -> None:
        pieces = await self._fetcher.fetch([located for ask in asks for located in ask.located])
        position = 0
        for ask in asks:
            batches: list[FetchedBatch] = []
            for located in ask.located:
                piece = pieces[position + len(batches)]
                if isinstance(piece, ForebayError):
                    if not batches:
                        self._note(ask, piece)
                    break
                batches.append(
                    FetchedBatch(
                        located.keys.topic,
                        located.keys.partition,
                        located.start_offset,
                        piece,
                        located.entry.created_at_ms,
                    )
                )
            position += len(ask.located)
            if batches:
                assert ask.view is not None
                ask.answer = _answer(ask, ask.view, batches)
                self._records.inc(len(ask.answer))

    def _note(self, ask: _Ask, error: ForebayError) -> None:
        """A missing or damaged object is looked up again; anything else is the answer."""
        if isinstance(error, NotFound | DataLost):
            ask.trouble = error
        else:
            ask.answer = error


def _answer(ask: _Ask, view: PartitionView, batches: list[FetchedBatch]) -> Fetched:
    request = ask.request
    if batches:
        batches = fitting(_in_order(batches, request.offset, view.next), ask.bytes_max, request.records_max)
    next_offset = batches[-1].end_offset + 1 if batches else request.offset
    return Fetched(request.topic, request.partition, batches, next_offset, view.earliest, view.next)


def _in_order(batches: list[FetchedBatch], position: int, until: int) -> list[FetchedBatch]:
    """Every record once: while a range is being compacted, entries that were found overlap.

    What lies from `until` on is another writer's commit, which the control record did not count yet.
    """
    parts = []
    for batch in batches:
        end = min(batch.end_offset, until - 1)
        if end >= position:
            parts.append(batch.part(position, end - position + 1))
            position = end + 1
    return parts


def _lost(ask: _Ask) -> ForebayError:
    error = ask.trouble
    assert error is not None
    if isinstance(error, DataLost | Unavailable | OffsetOutOfRange):
        return error
    lost = DataLost(
        f"{ask.keys}: the data of offset {ask.request.offset} is gone: {error.message}",
        hint="`forebay log verify` shows what is affected; restore the object, or trim the log behind it",
    )
    lost.__cause__ = error
    return lost
