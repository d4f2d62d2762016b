"""Consumer groups seen from outside: list, describe with lag, commit, reset, delete.

Lag in records is the number of records between the committed offset and the end. Lag in seconds is the age of
the oldest record that is not consumed, and nothing where all are; inside a compacted range it counts from the
range's first append, so it may be too high there, never too low.

A commit from outside a group (a Spark job, an HTTP client) is fenced by a generation of its own choosing: it
is refused where the partition was committed under a higher one, and where a live member owns it. A reset or a
deletion rewrites or removes the records that members hold, so it fences them all; it is refused while there
are any, unless forced.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from forebay.coordination import Coordinator, Delete, DeleteRange, Operation, Record
from forebay.errors import (
    ForebayError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StorageDamaged,
    Unavailable,
    UsageError,
)
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.kit.retry import retry
from forebay.log._errors import DataLost, OffsetOutOfRange
from forebay.log._group_consumer import GroupConsumer, StartAt
from forebay.log._group_member import GroupConfig, GroupMember, enter_group
from forebay.log._group_offsets import GroupOffsets, Held, Refused
from forebay.log._group_records import (
    GenerationFenced,
    GroupBusy,
    GroupOffset,
    GroupState,
    MemberRecord,
    TopicPartition,
    valid_generation,
    valid_offsets,
    valid_place,
)
from forebay.log._keys import CATALOG_PARTITION_KEY, GroupKeys, group_key, groups_range, unescaped
from forebay.log._numbers import WHOLE_MAX, whole
from forebay.log._reader import LogReader
from forebay.log._records import decode_record
from forebay.log._resolve import PartitionOffsets
from forebay.log._topics import Catalog

__all__ = ["GroupDescription", "GroupLag", "GroupReset", "Groups", "ResetTo"]

ResetTo: TypeAlias = Literal["earliest", "latest"] | int
"""One of the two ends, or an offset."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group is behind in one partition."""

    topic: str
    partition: int
    committed: int | None
    """Next offset to be read; None: nothing was committed."""
    earliest: int
    next: int
    """Next offset to be written."""
    records: int
    """Records not consumed."""
    seconds: float
    """Age of the oldest of them; 0 where there is none."""
    owner: str
    """The member that reads it; empty: none."""
    generation: int


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group, its members and its lag."""

    group: str
    generation: int
    members: tuple[MemberRecord, ...]
    """Those that are alive."""
    partitions: tuple[GroupLag, ...]
    damaged: tuple[ForebayError, ...] = ()
    """What is wrong with each record or partition that cannot be read: it is in none of the others."""

    @property
    def records(self) -> int:
        """Lag of all partitions."""
        return sum(each.records for each in self.partitions)

    @property
    def seconds(self) -> float:
        """Lag of the slowest partition."""
        return max((each.seconds for each in self.partitions), default=0.0)


@dataclass(frozen=True, slots=True)
class GroupReset:
    """What a reset did, or would do, to one partition."""

    topic: str
    partition: int
    before: int | None
    after: int


class Groups:
    """All consumer groups of a log."""

    def __init__(
        self,
        coordinator: Coordinator,
        reader: LogReader,
        catalog: Catalog,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        config: GroupConfig | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._reader = reader
        self._catalog = catalog
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self._config = config or GroupConfig()
        self._entered: set[str] = set()

    def member(self, group: str, topics: Iterable[str], *, name: str = "member") -> GroupMember:
        """A member of a group: `async with groups.member("billing", ["orders"]) as member: ...`"""
        return GroupMember(
            self._coordinator,
            self._catalog,
            group,
            topics,
            clock=self._clock,
            ids=self._ids,
            randomness=self._random,
            config=replace(self._config, member_name=name),
        )

    def consumer(
        self, group: str, topics: Iterable[str], *, name: str = "member", start_at: StartAt = "earliest"
    ) -> GroupConsumer:
        """A member that reads: `async with groups.consumer("billing", ["orders"]) as consumer: ...`"""
        member = self.member(group, topics, name=name)
        return GroupConsumer(member, self._reader, clock=self._clock, start_at=start_at)

    # -- looking

    async def committed(self, group: str) -> dict[TopicPartition, GroupOffset]:
        """What was committed, by partition. One request."""
        return {place: held.record for place, held in (await self._offsets(group).read()).items()}

    async def describe(self, group: str) -> GroupDescription:
        """Members and lag; raises `NotFound` where there is no such group.

        What cannot be read is named and hides nothing else.
        """
        keys = GroupKeys(group)
        await self._check_exists(group)
        damaged: list[ForebayError] = []
        state = await self._state(keys, damaged)
        members = await self._members(keys, damaged)
        held, unreadable = await self._offsets(group).survey()
        found = _places({place: each.record for place, each in held.items()}, state)
        lags: list[GroupLag] = []
        for lag in await asyncio.gather(*(self._lag_or_damage(offset) for offset in found)):
            if isinstance(lag, GroupLag):
                lags.append(lag)
            elif lag is not None:
                damaged.append(lag)
        damaged += unreadable.values()
        return GroupDescription(group, state.generation, tuple(members), tuple(lags), tuple(damaged))

    async def _state(self, keys: GroupKeys, damaged: list[ForebayError]) -> GroupState:
        record = await self._get(keys.state, keys.partition_key)
        try:
            return GroupState() if record is None else decode_record(GroupState, keys.state, record.value)
        except StorageDamaged as error:
            damaged.append(error)
            return GroupState()

    async def lag(self, group: str, topic: str, partition: int) -> GroupLag | None:
        """How far the group is behind in one partition; None where there is no such partition."""
        place = TopicPartition(topic, partition)
        found = (await self.committed(group)).get(place)
        return await self._lag(found or GroupOffset(topic=topic, partition=partition))

    async def _lag_or_damage(self, offset: GroupOffset) -> GroupLag | ForebayError | None:
        try:
            return await self._lag(offset)
        except (DataLost, StorageDamaged, UsageError) as error:
            return error

    async def _lag(self, offset: GroupOffset) -> GroupLag | None:
        try:
            ends = await self._reader.offsets(offset.topic, offset.partition)
            position = max(ends.earliest, ends.earliest if offset.offset is None else offset.offset)
            records = max(0, ends.next - position)
            time_ms = None
            if records:
                time_ms = await self._time_of(offset.topic, offset.partition, position)
        except LookupError:
            return None  # The topic was deleted: there is nothing to be behind of.
        age_ms = 0 if time_ms is None else max(0, self._clock.now_ms() - time_ms)
        return GroupLag(
            offset.topic,
            offset.partition,
            offset.offset,
            ends.earliest,
            ends.next,
            records,
            age_ms / 1000,
            offset.owner,
            offset.generation,
        )

    async def _time_of(self, topic: str, partition: int, position: int) -> int | None:
        """When the record at a position was appended; of the earliest one where a trim has passed it."""
        while True:
            try:
                return await self._reader.time_of(topic, partition, position)
            except OffsetOutOfRange as error:
                if error.earliest <= position:
                    return None
                position = error.earliest

    # -- changing

    async def commit(self, group: str, offsets: Mapping[TopicPartition, int], *, generation: int = 0) -> None:
        """Commit from outside: next offsets to be read. Two round trips, whatever the number of partitions.

        Raises `GenerationFenced` where a partition belongs to a live member or to a higher generation,
        `UnknownTopic` where there is no such partition, and `OffsetOutOfRange` beyond the end of the log:
        nobody has read that, and a group that stood there would pass over what is written meanwhile. The
        others are committed.
        """
        generation = valid_generation(generation)
        wanted = valid_offsets(offsets)
        store = self._offsets(group)
        found, ends = await asyncio.gather(
            store.read(), self._reader.offsets_each([(place.topic, place.partition) for place in wanted])
        )
        live = (
            {member.member_id for member in await self._members(GroupKeys(group))} if _owned(found) else set()
        )
        changes: dict[TopicPartition, tuple[Held, GroupOffset]] = {}
        refused: list[ForebayError] = []
        for (place, offset), end in zip(wanted.items(), ends, strict=True):
            held = found.get(place, store.absent(place))
            problem = _unread(place, offset, end)
            if problem is None and (held.record.generation > generation or held.record.owner in live):
                problem = _fenced(group, place, generation, held.record)
            if problem is None and held.record.offset is not None and offset < held.record.offset:
                problem = UsageError(
                    f"{place} is committed up to {held.record.offset}", hint="reset the group instead"
                )
            if problem is None:
                changes[place] = (held, self._moved(held.record, offset, generation))
            else:
                refused.append(problem)
        if changes and group not in self._entered:
            await enter_group(self._coordinator, group, self._retry)
            self._entered.add(group)
        refused += _problems(group, generation, await store.write(changes))
        if refused:
            raise refused[0]

    async def reset(
        self,
        group: str,
        partitions: Sequence[TopicPartition] | None = None,
        *,
        to: ResetTo | None = None,
        to_time_ms: int | None = None,
        dry_run: bool = False,
        force: bool = False,
        damaged: list[ForebayError] | None = None,
    ) -> list[GroupReset]:
        """Move a group to one end, an offset or a time: in the partitions named, or all it knows that exist.

        An offset outside the log becomes the nearer end. Raises `NotFound` where no partition is named and
        there is no such group, and `GroupBusy` where members are alive, unless forced: they are fenced then,
        claim again with their next look at the group, and go on from the new offset.

        What is wrong with a partition or record that cannot be read is added to `damaged`, and the others are
        moved. Where there is no such list it is raised, and nothing is moved.
        """
        if (to is None) == (to_time_ms is None):
            raise UsageError("a reset goes to one place", hint="give either `to` or `to_time_ms`")
        to = to if to is None else _valid_place_to(to)
        to_time_ms = to_time_ms if to_time_ms is None else whole("time", to_time_ms, -WHOLE_MAX)
        if partitions is not None:
            partitions = [valid_place(place) for place in partitions]
        found, unreadable = await self._offsets(group).survey()
        if partitions is None and not found:
            await self._check_exists(group)
        keys = GroupKeys(group)
        left_out: list[ForebayError] = list(unreadable.values())
        chosen = sorted(found) if partitions is None else partitions
        chosen = [place for place in chosen if keys.offset(place.topic, place.partition) not in unreadable]
        targets = await self._targets(chosen, to, to_time_ms, left_out, named=partitions is not None)
        for error in left_out:
            if damaged is None:
                raise error
            damaged.append(error)
        plan = [
            GroupReset(
                place.topic, place.partition, found[place].record.offset if place in found else None, after
            )
            for place, after in targets.items()
        ]
        if targets and not dry_run:
            await self._check_idle(keys, force)
            await enter_group(self._coordinator, group, self._retry)
            await self._retry(lambda: self._reset(group, targets, force))
        return plan

    async def _reset(self, group: str, targets: dict[TopicPartition, int], force: bool) -> None:
        """One attempt at what is left of the targets. A commit that came in between is reset as well."""
        store = self._offsets(group)
        found, _ = await store.survey()
        changes = {}
        for place, after in targets.items():
            held = found.get(place, store.absent(place))
            changes[place] = (held, self._moved(held.record, after, held.record.generation))
        answers = await store.write(changes)
        for place, answer in answers.items():
            if isinstance(answer, Held):
                del targets[place]
        for answer in answers.values():
            if isinstance(answer, ForebayError):
                raise answer
        if targets:
            await self._check_idle(GroupKeys(group), force)
            raise Unavailable(
                f"group {group!r} commits faster than it can be reset in {len(targets)} partitions",
                hint="stop its members, then reset it again",
            )

    async def delete(self, group: str, *, force: bool = False) -> None:
        """Forget a group and its offsets.

        Raises `NotFound` where there is none, and `GroupBusy` where members are alive, unless forced.
        """
        keys = GroupKeys(group)
        if not await self._has_offsets(group):
            # Offsets without a name are what a deletion that was cut short has left.
            await self._check_exists(group)
        await self._check_idle(keys, force)
        home = keys.partition_key
        operations: list[Operation] = [
            DeleteRange(*keys.offsets_range(), partition_key=home),
            Delete(keys.state, partition_key=home),
            Delete(group_key(group), partition_key=CATALOG_PARTITION_KEY),
        ]

        async def attempt() -> None:
            for result in await self._coordinator.write(operations):
                result.unwrap()

        await self._retry(attempt)
        self._entered.discard(group)

    async def _has_offsets(self, group: str) -> bool:
        try:
            return bool(await self._offsets(group).read())
        except StorageDamaged:
            return True  # It can be forgotten for that, and is.

    async def _check_exists(self, group: str) -> None:
        if await self._get(group_key(group), CATALOG_PARTITION_KEY) is None:
            raise NotFound(group, hint="a group comes into being with its first member or commit")

    async def _check_idle(self, keys: GroupKeys, force: bool) -> None:
        unreadable: list[ForebayError] = []
        alive = len(await self._members(keys, unreadable)) + len(unreadable)
        if alive and not force:
            raise GroupBusy(keys.group, alive)

    async def _targets(
        self,
        places: Sequence[TopicPartition],
        to: ResetTo | None,
        to_time_ms: int | None,
        damaged: list[ForebayError],
        *,
        named: bool,
    ) -> dict[TopicPartition, int]:
        """Where each goes. What cannot be read is added to `damaged`."""
        targets: dict[TopicPartition, int] = {}
        found = await asyncio.gather(
            *(self._target(place, to, to_time_ms) for place in places), return_exceptions=True
        )
        for place, after in zip(places, found, strict=True):
            if isinstance(after, LookupError) and not named:
                continue  # The topic was deleted after the group had read it: there is no place to go to.
            if isinstance(after, DataLost | StorageDamaged):
                damaged.append(after)
            elif isinstance(after, BaseException):
                raise after
            else:
                targets[place] = after
        return targets

    async def _target(self, place: TopicPartition, to: ResetTo | None, to_time_ms: int | None) -> int:
        ends = await self._reader.offsets(place.topic, place.partition)
        if to_time_ms is not None:
            return await self._reader.offset_for_time(place.topic, place.partition, to_time_ms)
        if to == "earliest":
            return ends.earliest
        if to == "latest":
            return ends.next
        assert isinstance(to, int)
        return min(max(to, ends.earliest), ends.next)

    def _moved(self, record: GroupOffset, offset: int, generation: int) -> GroupOffset:
        return msgspec.structs.replace(
            record, offset=offset, generation=generation, owner="", committed_at_ms=self._clock.now_ms()
        )

    # -- parts

    def _offsets(self, group: str) -> GroupOffsets:
        return GroupOffsets(
            self._coordinator,
            GroupKeys(group),
            clock=self._clock,
            ids=self._ids,
            randomness=self._random,
            policy=self._config.retry,
        )

    async def _members(
        self, keys: GroupKeys, damaged: list[ForebayError] | None = None
    ) -> list[MemberRecord]:
        """Those that are alive. What cannot be read is added to `damaged`, or raised where there is none."""

        async def attempt() -> list[Record]:
            low, high = f"{keys.members}/", f"{keys.members}//"
            scan = self._coordinator.scan_all(low, high, partition_key=keys.partition_key)
            return [record async for record in scan]

        members: list[MemberRecord] = []
        for record in await self._retry(attempt):
            try:
                members.append(decode_record(MemberRecord, record.key, record.value))
            except StorageDamaged as error:
                if damaged is None:
                    raise
                damaged.append(error)
        return members

    async def _get(self, key: str, partition_key: str) -> Any:
        return await self._retry(lambda: self._coordinator.get(key, partition_key=partition_key))

    async def _retry(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        return await retry(
            operation,
            policy=self._config.retry,
            clock=self._clock,
            randomness=self._random,
            retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed),
        )

    async def list(self) -> list[str]:
        """Every group, by name. (Last in the class: its name hides the builtin from annotations.)"""

        async def attempt() -> Any:
            scan = self._coordinator.scan_all(*groups_range(), partition_key=CATALOG_PARTITION_KEY)
            return sorted([unescaped(record.key.rpartition("/")[2]) async for record in scan])

        found: list[str] = await self._retry(attempt)
        return found


def _valid_place_to(to: ResetTo) -> ResetTo:
    if to in ("earliest", "latest"):
        return to
    try:
        # Any integer: one outside the log becomes the nearer end.
        return to if type(to) is int else whole("offset", to)
    except UsageError:
        raise UsageError(f"{to!r} is no place in a log", hint="'earliest', 'latest' or an offset") from None


def _places(found: dict[TopicPartition, GroupOffset], state: GroupState) -> list[GroupOffset]:
    """Every partition that was committed or is assigned."""
    for member, places in state.assignment.items():
        for topic, partition in places:
            blank = GroupOffset(topic=topic, partition=partition, owner=member)
            found.setdefault(TopicPartition(topic, partition), blank)
    return [found[place] for place in sorted(found)]


def _unread(place: TopicPartition, offset: int, ends: PartitionOffsets | ForebayError) -> ForebayError | None:
    """What speaks against having read a partition up to an offset."""
    if isinstance(ends, ForebayError) or offset <= ends.next:
        return ends if isinstance(ends, ForebayError) else None
    return OffsetOutOfRange(str(place), offset, earliest=ends.earliest, next_offset=ends.next)


def _owned(found: Mapping[TopicPartition, Held]) -> bool:
    return any(held.record.owner for held in found.values())


def _fenced(group: str, place: TopicPartition, generation: int, record: GroupOffset) -> GenerationFenced:
    return GenerationFenced(group, place, generation=generation, current=record.generation)


def _problems(
    group: str, generation: int, answers: Mapping[TopicPartition, Held | Refused | ForebayError]
) -> list[ForebayError]:
    problems: list[ForebayError] = []
    for place, answer in answers.items():
        if isinstance(answer, Refused):
            problems.append(_fenced(group, place, generation, answer.found.record))
        elif isinstance(answer, ForebayError):
            problems.append(answer)
    return problems
