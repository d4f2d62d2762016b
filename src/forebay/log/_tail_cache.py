"""The newest records, kept where they were written: reads of the tail that cost no request.

A writer tells the cache of every append after its commit; readers of the same process ask it first. What it
holds is committed and committed data never changes, so a hit is right without asking anybody. The rest are
rules about what a hit may not hide:

* **Gaps.** Other writers append too. Batches are held with the offsets they have; what lies between two of
  them is a miss, and the read falls back to the log.
* **Trim.** Nothing below the highest start of the log that this process has seen is served. A trim by another
  machine is seen with the next control record that is read, and batches older than `age_max_ms` are dropped,
  so records may outlive a trim elsewhere by that long, never longer.
* **A topic deleted and made again** begins at 1. A control record that was asked for after the cache knew of
  a higher offset, and that counts less, gives it away: everything of the partition is forgotten.
* **The end of the log.** The cache knows a tail, but not whether somebody else has moved it since. It says
  "known to be empty" only within `empty_trust_ms` after it learnt of the tail, by default never; whoever
  turns that on accepts a tail that is so much behind, and saves the request of an idle poll.

Fencing needs no rule: an append that was refused is never told to the cache.
"""

from __future__ import annotations

import abc
import asyncio
from bisect import bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field

from forebay.errors import UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.encoded_batch import EncodedBatch
from forebay.kit.clock import Clock
from forebay.log._fetch import ENTRY_OVERHEAD_BYTES, batch_bytes
from forebay.log._fetched import Fetched, FetchedBatch, ReadRequest, fitting

__all__ = ["MemoryTailCache", "TailCache", "TailCacheConfig"]


@dataclass(frozen=True, slots=True)
class TailCacheConfig:
    """How much is kept, how long, and how far an empty answer is trusted."""

    bytes_max: int = 64 * 1024 * 1024
    """Bytes of all batches together; the oldest go first. At least 1."""
    age_max_ms: int = 60_000
    """Milliseconds after which a batch is no longer served. At least 1."""
    empty_trust_ms: int = 0
    """Milliseconds for which a tail that was seen counts as the end of the log. 0: always ask."""

    def __post_init__(self) -> None:
        if min(self.bytes_max, self.age_max_ms) < 1 or self.empty_trust_ms < 0:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


class TailCache(abc.ABC):
    """What writers tell and readers ask. Never wrong: in doubt it knows nothing."""

    @abc.abstractmethod
    def committed(
        self, topic: str, partition: int, start_offset: int, batch: BytesBatch | EncodedBatch, time_ms: int
    ) -> None:
        """An append was committed. Called by a writer, after the commit."""

    @abc.abstractmethod
    def read(self, request: ReadRequest, bytes_max: int) -> Fetched | None:
        """The answer to a read, or None: ask the log."""

    @abc.abstractmethod
    def known_next(self, topic: str, partition: int) -> int | None:
        """One past the highest offset known to be committed, or None. The log may be longer."""

    @abc.abstractmethod
    def saw_control(
        self, topic: str, partition: int, earliest: int, next_offset: int, asked_at: float
    ) -> None:
        """A control record was read. `asked_at`: the clock's monotonic time before it was asked for."""

    @abc.abstractmethod
    def forget(self, topic: str, partition: int | None = None) -> None:
        """Drop a partition, or all of a topic: it was deleted."""

    @abc.abstractmethod
    async def wait(self) -> None:
        """Return after the next append that this object is told of."""


@dataclass(slots=True, eq=False)
class _Held:
    """A batch as it was told of: most of them are never read."""

    start_offset: int
    batch: BytesBatch | EncodedBatch
    time_ms: int
    at: float
    """When it arrived, monotonic."""

    @property
    def end_offset(self) -> int:
        """Offset of its last record."""
        return self.start_offset + len(self.batch) - 1

    @property
    def size(self) -> int:
        """Bytes it occupies once it was read, about."""
        if isinstance(self.batch, BytesBatch):
            return batch_bytes(self.batch)
        return ENTRY_OVERHEAD_BYTES + self.batch.plain_bytes

    def fetched(self, topic: str, partition: int) -> FetchedBatch:
        """For a reader."""
        batch = self.batch if isinstance(self.batch, BytesBatch) else self.batch.columns()
        return FetchedBatch(topic, partition, self.start_offset, batch, self.time_ms)


@dataclass(slots=True)
class _Tail:
    """What is known of one partition."""

    earliest: int = 1
    next: int = 0
    next_at: float = 0.0
    """When `next` was last learnt, monotonic."""
    starts: list[int] = field(default_factory=list)
    """Sorted start offsets of the batches held."""
    batches: dict[int, _Held] = field(default_factory=dict)
    """By start offset."""


class MemoryTailCache(TailCache):
    """A tail cache inside one process."""

    def __init__(self, clock: Clock, config: TailCacheConfig | None = None) -> None:
        self._clock = clock
        self._config = config or TailCacheConfig()
        self._tails: dict[tuple[str, int], _Tail] = {}
        self._sizes: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        """Batches in the order of their arrival, with their bytes."""
        self._bytes = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self._bytes

    def committed(
        self, topic: str, partition: int, start_offset: int, batch: BytesBatch | EncodedBatch, time_ms: int
    ) -> None:
        """Keep the batch, drop what is too old or too much, wake who waits."""
        now = self._clock.monotonic()
        tail = self._tails.setdefault((topic, partition), _Tail())
        end = start_offset + len(batch)
        if end > tail.next:
            tail.next, tail.next_at = end, now
        held = _Held(start_offset, batch, time_ms, now)
        size = held.size
        fits = size <= self._config.bytes_max and start_offset >= tail.earliest
        if fits and start_offset not in tail.batches:
            insort(tail.starts, start_offset)
            tail.batches[start_offset] = held
            self._sizes[topic, partition, start_offset] = size
            self._bytes += size
        self._evict(now)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def read(self, request: ReadRequest, bytes_max: int) -> Fetched | None:
        """Batches that follow each other from the offset on, or an end of the log that is trusted."""
        tail = self._tails.get((request.topic, request.partition))
        if tail is None or request.offset < tail.earliest:
            return None
        now = self._clock.monotonic()
        batches = self._contiguous(tail, request, bytes_max, now)
        if not batches:
            trusted = (now - tail.next_at) * 1000 < self._config.empty_trust_ms
            if request.offset != tail.next or not trusted:
                return None
        kept = fitting(batches, bytes_max, request.records_max)
        next_offset = kept[-1].end_offset + 1 if kept else request.offset
        return Fetched(
            request.topic, request.partition, kept, next_offset, tail.earliest, tail.next, from_cache=True
        )

    def _contiguous(
        self, tail: _Tail, request: ReadRequest, bytes_max: int, now: float
    ) -> list[FetchedBatch]:
        found: list[FetchedBatch] = []
        offset = request.offset
        place = bisect_right(tail.starts, offset) - 1
        while 0 <= place < len(tail.starts) and bytes_max > 0:
            held = tail.batches[tail.starts[place]]
            fresh = (now - held.at) * 1000 < self._config.age_max_ms
            if not fresh or not held.start_offset <= offset <= held.end_offset:
                break
            batch = held.fetched(request.topic, request.partition)
            part = batch.part(offset, batch.end_offset - offset + 1)
            found.append(part)
            bytes_max -= int(part.batch.values.nbytes)
            offset = batch.end_offset + 1
            place += 1
        return found

    def known_next(self, topic: str, partition: int) -> int | None:
        """One past the highest offset it was told of."""
        tail = self._tails.get((topic, partition))
        return None if tail is None else tail.next

    def saw_control(
        self, topic: str, partition: int, earliest: int, next_offset: int, asked_at: float
    ) -> None:
        """Learn where the log begins and ends."""
        tail = self._tails.get((topic, partition))
        if tail is not None and next_offset < tail.next and asked_at > tail.next_at:
            self.forget(topic, partition)
            tail = None
        if tail is None:
            tail = self._tails.setdefault((topic, partition), _Tail())
        if next_offset >= tail.next:
            tail.next, tail.next_at = next_offset, max(tail.next_at, asked_at)
        if earliest > tail.earliest:
            tail.earliest = earliest
            for start in tail.starts[: bisect_right(tail.starts, earliest)]:
                if tail.batches[start].end_offset < earliest:
                    self._drop((topic, partition, start))

    def forget(self, topic: str, partition: int | None = None) -> None:
        """Drop everything that is known of it."""
        for name, number in [key for key in self._tails if key[0] == topic and partition in (None, key[1])]:
            for start in list(self._tails[name, number].starts):
                self._drop((name, number, start))
            del self._tails[name, number]

    async def wait(self) -> None:
        """Return after the next append."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _evict(self, now: float) -> None:
        while self._sizes:
            oldest = next(iter(self._sizes))
            topic, partition, start = oldest
            at = self._tails[topic, partition].batches[start].at
            if self._bytes <= self._config.bytes_max and (now - at) * 1000 < self._config.age_max_ms:
                return
            self._drop(oldest)

    def _drop(self, key: tuple[str, int, int]) -> None:
        topic, partition, start = key
        tail = self._tails[topic, partition]
        del tail.batches[start]
        tail.starts.remove(start)
        self._bytes -= self._sizes.pop(key)
