"""Where many partitions stand, and how large the ranges between offsets are: what planners ask.

A planner (Spark's driver, a job) looks at thousands of partitions at once and reads no object. The ends of
any number of partitions come in one round trip to the coordinator, together with a fresh look at the catalog:
the partitions known from the last look are asked for while the catalog is read, and only those that are new
since cost a second one. Sizes come from the index, where every entry says how many bytes it stands for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.coordination import SCAN_RECORDS_MAX, Coordinator
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import DataLost
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topics_range
from forebay.log._records import Control, decode_record
from forebay.log._resolve import Located, PartitionOffsets, PartitionView, Resolver, Unresolved, check_range
from forebay.log._topic import Topic

__all__ = ["Positions", "PositionsSeen", "Span"]

LOOKS_AT_ONCE: Final = 64
"""Partitions whose index is read at the same time."""
ATTEMPTS_MAX: Final = 6
"""Lookups of one offset before it counts as lost."""


@dataclass(frozen=True, slots=True)
class Span:
    """Records of one partition that lie in one object."""

    topic: str
    partition: int
    start: int
    end: int
    """One past the last offset."""
    size_bytes: int
    """Bytes as stored; of a range that begins or ends inside an entry its share by records."""

    @property
    def records(self) -> int:
        """How many."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PositionsSeen:
    """The topics a planner wants and where each of their partitions stands."""

    topics: tuple[Topic, ...]
    offsets: tuple[PartitionOffsets, ...]


class Positions:
    """Asks for many partitions at once. Reads no object and changes nothing."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._random = randomness
        self._policy = policy or RetryPolicy()
        self._resolver = Resolver(coordinator, clock=clock, randomness=randomness, policy=self._policy)

    async def look(self, wanted: Callable[[Topic], bool], known: Sequence[Topic] = ()) -> PositionsSeen:
        """Every wanted topic that is active, by name, and the ends of all their partitions.

        `known` are the topics of an earlier look: with them the catalog and the ends are one round trip.
        """
        listed, early = await asyncio.gather(self._topics(), self._ends(_partitions(known)))
        topics = tuple(topic for topic in listed if topic.state == "ACTIVE" and wanted(topic))
        controls = dict(zip(_partitions(known), early, strict=True))
        new = [keys for keys in _partitions(topics) if keys not in controls]
        controls.update(zip(new, await self._ends(new), strict=True))
        offsets = []
        for topic in topics:
            for keys in _partitions([topic]):
                control = controls[keys]
                first = topic.first_offset
                if control is None or control.is_left_over(topic.state, first):
                    ends = first, first
                else:
                    ends = _range(control)
                offsets.append(PartitionOffsets(keys.topic, keys.partition, *ends))
        return PositionsSeen(topics, tuple(offsets))

    async def spans(
        self, topic: str, partition: int, start: int, end: int, *, bytes_max: int | None = None
    ) -> list[Span]:
        """What lies from `start` to before `end`, in order; with `bytes_max` only until that much is seen.

        Raises `OffsetOutOfRange` where `start` was trimmed.
        """
        keys = PartitionKeys(topic, partition)
        spans: list[Span] = []
        position, seen, failures = start, 0, 0
        view, cursor = await self._resolver.view(keys), 0
        check_range(view, start)
        end = min(end, view.next)
        while position < end and (bytes_max is None or seen < bytes_max):
            try:
                found = await self._locate(view, position, end, bytes_max, cursor)
            except Unresolved as error:
                failures += 1
                if failures >= ATTEMPTS_MAX:
                    raise DataLost(error.message, hint="run `forebay log verify`") from error
                await self._clock.sleep(self._policy.wait_s(failures, self._random))
                view, cursor = await self._resolver.view(keys), await self._resolver.cursor(keys)
                check_range(view, position)
                continue
            for located in found:
                span = _span(located, position, end)
                spans.append(span)
                position, seen = span.end, seen + span.size_bytes
        return spans

    async def spans_many(self, ranges: Iterable[tuple[str, int, int, int]]) -> list[list[Span]]:
        """`spans` of many (topic, partition, start, end), some at a time."""
        turns = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def one(topic: str, partition: int, start: int, end: int) -> list[Span]:
            async with turns:
                return await self.spans(topic, partition, start, end)

        return list(await asyncio.gather(*(one(*each) for each in ranges)))

    async def _locate(
        self, view: PartitionView, position: int, end: int, bytes_max: int | None, cursor: int
    ) -> list[Located]:
        return await self._resolver.locate(
            view, position, end, entries_max=SCAN_RECORDS_MAX, bytes_max=bytes_max or 1 << 62, cursor=cursor
        )

    async def _topics(self) -> list[Topic]:
        async def attempt() -> list[Topic]:
            scan = self._coordinator.scan_all(*topics_range(), partition_key=CATALOG_PARTITION_KEY)
            found = [decode_record(Topic, record.key, record.value) async for record in scan]
            return sorted(found, key=lambda topic: topic.topic)

        return await retry(attempt, policy=self._policy, clock=self._clock, randomness=self._random)

    async def _ends(self, partitions: Sequence[PartitionKeys]) -> list[Control | None]:
        if not partitions:
            return []
        names = [(keys.control, keys.partition_key) for keys in partitions]
        records = await retry(
            lambda: self._coordinator.get_many(names),
            policy=self._policy,
            clock=self._clock,
            randomness=self._random,
        )
        return [
            None if record is None else decode_record(Control, record.key, record.value) for record in records
        ]


def _partitions(topics: Iterable[Topic]) -> list[PartitionKeys]:
    return [PartitionKeys(topic.topic, number) for topic in topics for number in range(topic.partitions)]


def _range(control: Control) -> tuple[int, int]:
    return control.start_offset, control.sequence_counter


def _span(located: Located, position: int, end: int) -> Span:
    last = min(located.end_offset + 1, end)
    whole = located.end_offset - located.start_offset + 1
    size = located.stored_bytes * (last - position) // whole
    return Span(located.keys.topic, located.keys.partition, position, last, size)
