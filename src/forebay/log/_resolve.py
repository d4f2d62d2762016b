"""From an offset to the entries that hold it.

Invariant: every committed offset from the start of the log on is covered, at every moment, by an entry of the
index or by the pending append of the control record. What makes a lookup correct while writers, compactors,
trimmers and late index puts are at work:

* The control record is read **before** the index. Whatever it counts and does not hold as pending was in the
  index when it was read, since the index entry is put in the same step that replaces the pending append.
* An entry that is found tells the truth about the offsets it covers, whoever put it and however late: the
  append was committed with exactly these offsets. But the lowest key at or above an offset need not cover it:
  a late put may have landed inside a compacted range. Such entries are stepped over until one covers.
* An entry of the write-ahead log that lies below the compaction cursor may name an object that vacuum has
  removed. The object is simply asked for; where it is missing, the lookup is made again, now with the cursor,
  and steps over such entries. So the cursor costs a request only after a miss.
* A control record that has nothing but its first append may be left over from a deleted topic: the request
  that made it came late. It begins below its topic then, and counts as none. The catalog is asked for that
  once per such record, and never again for a partition that was appended to twice.
* No entry covers the offset: trimmed since, or compacted between two pages of one lookup. Again from the
  control record, a bounded number of times.

A random read asks for the control record and the first entry at or above its offset in one request, in this
order. Where that entry is enough, and it is for records of one batch, nothing more is looked up. Otherwise
one range scan follows. It sees one moment, never leaves the partition, steps over what does not cover without
a further request, and finds the entries that follow as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from forebay.coordination import SCAN_RECORDS_MAX, Coordinator, Record
from forebay.errors import ForebayError, StorageDamaged
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import OffsetOutOfRange, UnknownPartition, UnknownTopic
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.log._records import Control, Cursor, IndexEntry, Pending, decode_record

__all__ = ["Located", "PartitionOffsets", "PartitionView", "Resolver", "Unresolved", "check_range"]

T = TypeVar("T")

LOOKUP_ENTRIES_MIN: Final = 4
"""Fewest entries one lookup asks for: room to step over a few that do not cover."""
CONFIRMED_MAX: Final = 10_000
"""New partitions that a reader remembers to be of their topic; with more it begins anew."""


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """Where a partition begins and ends."""

    topic: str
    partition: int
    earliest: int
    """First offset that can be read."""
    next: int
    """Offset of the next record to be written: one past the last."""
    log_state: str = "OPEN"
    epoch: int = 0

    @property
    def records(self) -> int:
        """Records that can be read."""
        return self.next - self.earliest


@dataclass(frozen=True, slots=True)
class PartitionView:
    """The control record of a partition at one moment."""

    keys: PartitionKeys
    earliest: int
    next: int
    pending: Pending | None
    log_state: str
    epoch: int

    @property
    def offsets(self) -> PartitionOffsets:
        """The public part."""
        keys = self.keys
        return PartitionOffsets(
            keys.topic, keys.partition, self.earliest, self.next, self.log_state, self.epoch
        )


@dataclass(frozen=True, slots=True)
class Located:
    """An entry and the offsets it covers."""

    keys: PartitionKeys
    start_offset: int
    end_offset: int
    """The last offset it covers."""
    entry: IndexEntry

    @property
    def stored_bytes(self) -> int:
        """Bytes to fetch, as far as the entry tells."""
        return self.entry.byte_length or self.entry.size_bytes or 0


class Unresolved(ForebayError):
    """No entry covers an offset that was committed. Never leaves this package: it is looked up again."""


class _Listed(msgspec.Struct):
    """What a lookup needs of a topic's catalog entry."""

    partitions: int
    state: str = "ACTIVE"
    first_offset: int = 1


class Resolver:
    """Looks up offsets of any partition."""

    def __init__(
        self, coordinator: Coordinator, *, clock: Clock, randomness: random.Random, policy: RetryPolicy
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._random = randomness
        self._policy = policy
        self._confirmed: dict[str, int] = {}
        """Versions of control records that are not left over, by partition. A version never comes back."""

    async def view(self, keys: PartitionKeys) -> PartitionView:
        """The control record now. A partition that was created and never written to is empty."""
        return await self._as_view(keys, await self._get(keys.control, keys.partition_key))

    async def views(self, partitions: Sequence[PartitionKeys]) -> list[PartitionView | ForebayError]:
        """`view` of many, each with an error of its own; one round trip where all were written to.

        The entries of their topics are read along, so that new partitions need no look of their own.
        """
        topics = list(dict.fromkeys(keys.topic for keys in partitions))
        names = [(keys.control, keys.partition_key) for keys in partitions]
        names += [(topic_key(topic), CATALOG_PARTITION_KEY) for topic in topics]
        records = await self._patiently(lambda: self._coordinator.get_many(names))
        entries = dict(zip(topics, records[len(partitions) :], strict=True))
        return list(
            await asyncio.gather(
                *(
                    self._view_or_error(keys, record, entries[keys.topic])
                    for keys, record in zip(partitions, records, strict=False)
                )
            )
        )

    async def _view_or_error(
        self, keys: PartitionKeys, record: Record | None, entry: Record | None
    ) -> PartitionView | ForebayError:
        try:
            return await self._as_view(keys, record, entry)
        except (StorageDamaged, UnknownTopic) as error:
            return error

    async def view_at(self, keys: PartitionKeys, offset: int) -> tuple[PartitionView, Record | None]:
        """`view`, and the first entry of the index at or above `offset` a moment later, in one request."""
        control, above = await self._patiently(
            lambda: self._coordinator.get_and_ceiling(
                keys.control, keys.index(offset), partition_key=keys.partition_key
            )
        )
        return await self._as_view(keys, control), above

    async def _as_view(
        self, keys: PartitionKeys, record: Record | None, entry: Record | None = None
    ) -> PartitionView:
        if record is not None:
            control = decode_record(Control, keys.control, record.value)
            if not control.just_begun or not await self._is_left_over(keys, record.version, control, entry):
                return PartitionView(
                    keys,
                    control.start_offset,
                    control.sequence_counter,
                    control.pending,
                    control.log_state,
                    control.epoch,
                )
        first = await self._first_offset(keys)
        return PartitionView(keys, first, first, None, "OPEN", 0)

    async def _is_left_over(
        self, keys: PartitionKeys, version: int, control: Control, entry: Record | None
    ) -> bool:
        """Whether a late request has made the record, after its topic was deleted.

        `entry` is that of the topic, if it was read along. It may be older than the record, so it is good for
        one answer and is not remembered.
        """
        if self._confirmed.get(keys.partition_key) == version:
            return False
        try:
            listed = await self._listed(keys) if entry is None else _decoded(entry)
        except StorageDamaged:
            return False  # Nobody knows. What can be read stays readable.
        if listed is not None and control.is_left_over(listed.state, listed.first_offset):
            return True
        if entry is not None:
            return False
        if len(self._confirmed) >= CONFIRMED_MAX:
            self._confirmed.clear()
        self._confirmed[keys.partition_key] = version
        return False

    async def cursor(self, keys: PartitionKeys) -> int:
        """The first offset that is not compacted."""
        record = await self._get(keys.cursor, keys.partition_key)
        return 1 if record is None else decode_record(Cursor, keys.cursor, record.value).offset

    async def locate(
        self,
        view: PartitionView,
        offset: int,
        until: int,
        *,
        entries_max: int,
        bytes_max: int,
        cursor: int = 0,
        above: Record | None = None,
    ) -> list[Located]:
        """Entries that cover `offset` and what follows, without a gap, in order; at least one.

        `above` is the first entry at or above `offset` where that is known: with it the lookup may need no
        request. `until` is exclusive and at most `view.next`. Entries of the write-ahead log that end below
        `cursor` are stepped over. Raises `Unresolved` where nothing covers `offset`.
        """
        pending = view.pending
        tail = view.next if pending is None else pending.start_offset
        walk = _Walk(view.keys, offset, cursor)
        if offset < tail:
            await self._walk_index(walk, min(until, tail), entries_max, bytes_max, above)
        if pending is not None and pending.start_offset <= walk.position < min(until, view.next):
            walk.take(pending.start_offset, pending.end_offset, pending.index_entry())
        if not walk.found:
            raise Unresolved(f"{view.keys}: nothing in the index covers offset {offset}")
        return walk.found

    async def _walk_index(
        self, walk: _Walk, until: int, entries_max: int, bytes_max: int, above: Record | None
    ) -> None:
        keys = walk.keys
        start, (_, end) = keys.index(walk.position), keys.index_range()
        limit = min(max(entries_max, LOOKUP_ENTRIES_MIN), SCAN_RECORDS_MAX)

        def done(record: Record) -> bool:
            walk.step(record)
            enough = len(walk.found) >= entries_max or walk.bytes >= bytes_max
            return enough or walk.position >= until

        if above is not None:
            if done(above):
                return
            start = above.key + "\0"
        while True:
            records = await self._scan(start, end, limit, keys.partition_key)
            if any(done(record) for record in records):
                return
            if len(records) < limit:
                return
            start, limit = records[-1].key + "\0", SCAN_RECORDS_MAX

    async def scan_entries(self, keys: PartitionKeys, offset: int, limit: int) -> list[Located]:
        """The first entries whose end is at or above `offset`, covering it or not."""
        _, end = keys.index_range()
        records = await self._scan(keys.index(offset), end, limit, keys.partition_key)
        return [_located(keys, record) for record in records]

    async def entries(self, view: PartitionView, cursor: int) -> AsyncIterator[Located]:
        """Every entry from the earliest offset on, in order, the pending append last.

        Entries inside compacted ranges are left out. The pages are not from one moment.
        """
        position = view.earliest
        while page := await self.scan_entries(view.keys, position, SCAN_RECORDS_MAX):
            for located in page:
                position = located.end_offset + 1
                if located.entry.type == "COMPACTED" or located.end_offset >= cursor:
                    yield located
        if view.pending is not None and view.pending.end_offset >= position:
            pending = view.pending
            yield Located(view.keys, pending.start_offset, pending.end_offset, pending.index_entry())

    async def _first_offset(self, keys: PartitionKeys) -> int:
        """Where a partition without a control record will begin; raises `UnknownTopic`."""
        listed = await self._listed(keys)
        if listed is None or listed.state == "DELETED":
            raise UnknownTopic(keys.topic)
        if keys.partition >= listed.partitions:
            raise UnknownPartition(keys.topic, keys.partition, hint=f"it has 0 to {listed.partitions - 1}")
        return listed.first_offset

    async def _listed(self, keys: PartitionKeys) -> _Listed | None:
        key = topic_key(keys.topic)
        record = await self._get(key, CATALOG_PARTITION_KEY)
        return None if record is None else _decoded(record)

    async def _get(self, key: str, partition_key: str) -> Record | None:
        return await self._patiently(lambda: self._coordinator.get(key, partition_key=partition_key))

    async def _scan(self, start: str, end: str, limit: int, partition_key: str) -> list[Record]:
        return await self._patiently(
            lambda: self._coordinator.range_scan(start, end, limit=limit, partition_key=partition_key)
        )

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        return await retry(operation, policy=self._policy, clock=self._clock, randomness=self._random)


class _Walk:
    """A way up through the index: which entries to take, which to step over."""

    def __init__(self, keys: PartitionKeys, position: int, cursor: int) -> None:
        self.keys = keys
        self.position = position
        """First offset that is not covered yet."""
        self.bytes = 0
        self.found: list[Located] = []
        self._cursor = cursor

    def step(self, record: Record) -> None:
        """Take the entry if it covers the position and may be trusted to have an object."""
        located = _located(self.keys, record)
        stale = located.entry.type == "WAL" and located.end_offset < self._cursor
        if not stale and located.start_offset <= self.position <= located.end_offset:
            self.take(located.start_offset, located.end_offset, located.entry)

    def take(self, start_offset: int, end_offset: int, entry: IndexEntry) -> None:
        located = Located(self.keys, start_offset, end_offset, entry)
        self.found.append(located)
        self.bytes += located.stored_bytes
        self.position = end_offset + 1


def _decoded(entry: Record) -> _Listed:
    return decode_record(_Listed, entry.key, entry.value)


def _located(keys: PartitionKeys, record: Record) -> Located:
    entry = decode_record(IndexEntry, record.key, record.value)
    end = keys.end_offset(record.key)
    if entry.msg_count < 1 or entry.start_offset(end) < 1:
        raise StorageDamaged(
            f"{record.key!r} counts {entry.msg_count} records",
            hint="something else wrote this key; `forebay log verify` shows what is affected",
        )
    return Located(keys, entry.start_offset(end), end, entry)


def check_range(view: PartitionView, offset: int) -> None:
    """Raise `OffsetOutOfRange` unless `offset` is in the log or is the next to be written."""
    if not view.earliest <= offset <= view.next:
        raise OffsetOutOfRange(str(view.keys), offset, earliest=view.earliest, next_offset=view.next)
