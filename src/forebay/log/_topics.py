"""The catalog of topics: who exists, with how many partitions, kept how long.

    llog-catalog/topics/{topic}   {topic, topic_id, partitions, created_at_ms, settings, state, ...}

Every change is a compare-and-set of one record that carries a fresh `revision`, so a lost reply is settled by
reading the record back.

A topic is deleted in steps, each of which may be repeated by anybody, and the record says which is next:

    ACTIVE    -> FENCING    the decision; from here on only another delete goes on
    FENCING   -> REMOVING   every partition is fenced, so no counter moves; the highest one is noted
    REMOVING  -> DELETED    keys and compacted objects are gone; shared objects are left to the vacuum

A deleter that sleeps may wake up when another one is done and the name is in use again. So each step looks at
what it is about to change first and at the state second: where the state is still its own, what was seen is
of the topic that is being deleted. Keys go by the versions seen, objects by the names seen, and index entries
only below the first offset of the next topic, so that a request that arrives late meets nothing of it either.

The record of a deleted topic stays, for one number: offsets of a topic created again under the same name
begin behind those that were given out before, and behind the first one of the topic before in any case. A
writer that slept through the deletion may still put the index entry of its last append, if absent. If offsets
began at 1 again, that stale entry would one day stand where a new one belongs. A request that creates a
partition may come as late; the control record that it makes begins below its topic, and whoever is about to
append or to fence takes it for none and replaces it (`Committer._find_topic`).

An entry that cannot be read says nothing of the others. They are listed, and it is named beside them; only
who must know every partition there is, as the vacuum, refuses to go on (`CatalogSurvey.whole`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from forebay.coordination import Coordinator, Delete, DeleteRange, Operation, Put, Record
from forebay.errors import (
    ForebayError,
    OutcomeUnknown,
    PreconditionFailed,
    StorageDamaged,
    Unavailable,
    UsageError,
)
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import UnknownTopic
from forebay.log._identity import LogPair
from forebay.log._keys import (
    CATALOG_PARTITION_KEY,
    PARTITION_MAX,
    ROOT,
    PartitionKeys,
    topic_key,
    topics_range,
    validate_topic,
)
from forebay.log._numbers import whole
from forebay.log._records import Control, decode_record, encode_record
from forebay.log._topic import Topic, TopicDeleted, TopicExists, TopicSettings, TopicState
from forebay.storage import ObjectStore

__all__ = ["Catalog", "CatalogSurvey", "Topic", "TopicDeleted", "TopicExists", "TopicSettings"]

DELETES_PER_CALL: Final = 1_000
"""Objects removed per request to the store."""
PARTITIONS_PER_STEP: Final = 256
"""Partitions fenced or removed per round trip."""

_log = logging.getLogger("forebay.log")

T = TypeVar("T")
_Change = Callable[[Topic | None], Topic | None]
"""From the present record to the new one; None where nothing is to be changed."""


@dataclass(frozen=True, slots=True)
class CatalogSurvey:
    """Everything the catalog holds at the moment of a look."""

    topics: list[Topic]
    """By name, those under deletion too."""
    damaged: list[StorageDamaged]
    """What is wrong with each entry that cannot be read."""
    deleted: list[str]
    """Names of topics that are gone: their entries stay."""

    def whole(self) -> list[Topic]:
        """The topics; raises where an entry cannot be read: nobody knows then what its partitions name."""
        for error in self.damaged:
            raise error
        return self.topics


class Catalog:
    """Creates, lists, changes and deletes topics."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self._policy = policy or RetryPolicy(attempts_max=30)
        self.pair = LogPair(store, coordinator, ids)
        """Whether the two belong together."""

    # -- looking

    async def find(self, topic: str) -> Topic | None:
        """The topic, or None where there is none. One that is being deleted is still found."""
        _, found = await self._read(topic)
        return None if found is None or found.state == "DELETED" else found

    async def describe(self, topic: str) -> Topic:
        """The topic; raises `UnknownTopic`."""
        found = await self.find(topic)
        if found is None:
            raise UnknownTopic(topic)
        return found

    # -- changing

    async def create(
        self, topic: str, *, partitions: int = 1, settings: TopicSettings | None = None
    ) -> Topic:
        """Create a topic; raises `TopicExists`. Its partitions come into being with their first append."""
        partitions = _check_partitions(partitions)
        _check_settings(settings)
        topic_id = self._ids.ulid()

        def create(found: Topic | None) -> Topic | None:
            if found is not None and found.topic_id == topic_id:
                return None
            if found is not None and found.state != "DELETED":
                raise TopicExists(topic) if found.state == "ACTIVE" else TopicDeleted(topic)
            return self._new(topic, topic_id, partitions, found, settings or TopicSettings(), grows=False)

        return await self._change(topic, create)

    async def ensure(self, topic: str, partitions: int) -> Topic:
        """The topic with at least so many partitions, created if there is none.

        A topic that was created by hand keeps its partitions: `check_partition` tells.
        """
        topic_id = self._ids.ulid()

        def ensure(found: Topic | None) -> Topic | None:
            if found is None or found.state == "DELETED":
                return self._new(topic, topic_id, partitions, found, TopicSettings(), grows=True)
            if found.state != "ACTIVE":
                raise TopicDeleted(topic)
            if found.partitions >= partitions or not found.grows:
                return None
            return msgspec.structs.replace(found, partitions=partitions)

        return await self._change(topic, ensure)

    async def alter(
        self, topic: str, *, settings: TopicSettings | None = None, partitions: int | None = None
    ) -> Topic:
        """Replace the settings, or add partitions. There is no way to fewer: their offsets would be lost."""
        _check_settings(settings)

        def alter(found: Topic | None) -> Topic | None:
            active = _active(topic, found)
            count = active.partitions if partitions is None else _check_partitions(partitions)
            if count < active.partitions:
                raise UsageError(
                    f"{topic!r} has {active.partitions} partitions, not fewer", hint="create another topic"
                )
            changed = msgspec.structs.replace(
                active, settings=settings or active.settings, partitions=count, revision=active.revision
            )
            return None if changed == active else changed

        return await self._change(topic, alter)

    async def delete(self, topic: str) -> None:
        """Remove a topic with its keys and its own objects; raises `UnknownTopic`.

        May be called again after a failure, by anybody, and goes on where it stopped. Shared objects that
        hold records of this topic too go with the next vacuum.
        """

        # Objects go by their names, which a topic of another log may have as well.
        await self._retry(self.pair.check)

        def decide(found: Topic | None) -> Topic | None:
            if found is None or found.state == "DELETED":
                raise UnknownTopic(topic)
            return msgspec.structs.replace(found, state="FENCING") if found.state == "ACTIVE" else None

        found = await self._change(topic, decide)
        if found.state == "FENCING":
            highest = await self._fence_all(found)
            # Above its own first one also where nothing was appended: see `Committer._find_topic`.
            first_offset = max(highest, found.first_offset + 1)
            found = await self._advance(found, "FENCING", "REMOVING", first_offset)
        if found.state == "REMOVING":
            await self._remove_keys(found)
            await self._remove_objects(found)
            await self._advance(found, "REMOVING", "DELETED", found.first_offset)

    async def _advance(self, topic: Topic, before: TopicState, after: TopicState, first_offset: int) -> Topic:
        def advance(found: Topic | None) -> Topic | None:
            # Another deleter may be ahead, and the name may even be in use again: then this one is done.
            if found is None or found.topic_id != topic.topic_id or found.state != before:
                return None
            return msgspec.structs.replace(found, state=after, first_offset=first_offset)

        return await self._change(topic.topic, advance)

    # -- deleting, step by step

    async def _fence_all(self, topic: Topic) -> int:
        """Fence every partition, also those never written; the highest counter of all.

        It ends early where another deleter is ahead: then the answer is of no use to anybody.
        """
        highest = 1
        waiting = list(range(topic.partitions))
        for attempt in range(1, self._policy.attempts_max + 1):
            refused: list[int] = []
            for first in range(0, len(waiting), PARTITIONS_PER_STEP):
                step = waiting[first : first + PARTITIONS_PER_STEP]
                counters = await self._fence(topic, step)
                if counters is None:
                    return highest
                refused += [partition for partition in step if partition not in counters]
                highest = max([highest, *counters.values()])
            waiting = refused
            if not waiting:
                return highest
            await self._clock.sleep(self._policy.wait_s(attempt, self._random))
        raise Unavailable(
            f"{len(waiting)} partitions of {topic.topic!r} could not be fenced", hint="delete it again"
        )

    async def _fence(self, topic: Topic, partitions: Sequence[int]) -> dict[int, int] | None:
        """One attempt: the counters of those that are fenced now, for certain; None: not ours to fence.

        Fenced partitions are fenced once more, under an epoch that nobody else holds.
        """
        every = [PartitionKeys(topic.topic, partition) for partition in partitions]
        records = await asyncio.gather(*[self._get(keys.control, keys.partition_key) for keys in every])
        if not await self._is_still(topic, "FENCING"):
            return None
        fenced = [_fenced(topic, record) for record in records]
        puts = [
            Put(
                keys.control,
                encode_record(control),
                ABSENT if record is None else record.version,
                partition_key=keys.partition_key,
            )
            for keys, record, control in zip(every, records, fenced, strict=True)
        ]
        results = await self._coordinator.write(puts)
        return {
            keys.partition: control.sequence_counter
            for keys, control, result in zip(every, fenced, results, strict=True)
            if result.error is None
        }

    async def _remove_keys(self, topic: Topic) -> None:
        for first in range(0, topic.partitions, PARTITIONS_PER_STEP):
            last = min(first + PARTITIONS_PER_STEP, topic.partitions)
            every = [PartitionKeys(topic.topic, partition) for partition in range(first, last)]
            # Refused where something changed in between: it is looked at again.
            await self._retry(lambda every=every: self._remove_keys_of(topic, every))  # type: ignore[misc]

    async def _remove_keys_of(self, topic: Topic, every: Sequence[PartitionKeys]) -> None:
        """One attempt; raises what was in the way."""
        wanted = [
            (key, keys.partition_key)
            for keys in every
            for key in (keys.control, keys.cursor, keys.compaction, keys.claim)
        ]
        records = await self._coordinator.get_many(wanted)
        if not await self._is_still(topic, "REMOVING"):
            return
        operations: list[Operation] = [
            Delete(key, record.version, partition_key=home)
            for (key, home), record in zip(wanted, records, strict=True)
            if record is not None
        ]
        for keys in every:
            low, _ = keys.index_range()
            high = keys.index(topic.first_offset)
            operations.append(DeleteRange(low, high, partition_key=keys.partition_key))
        for result in await self._coordinator.write(operations):
            result.unwrap()

    async def _remove_objects(self, topic: Topic) -> None:
        async def attempt() -> None:
            keys: list[str] = []
            async for page in self._store.list_pages(f"{ROOT}/{topic.topic}/partitions/"):
                keys += [info.key for info in page]
            if not await self._is_still(topic, "REMOVING"):
                return
            for first in range(0, len(keys), DELETES_PER_CALL):
                for result in await self._store.delete(keys[first : first + DELETES_PER_CALL]):
                    if result.error is not None:
                        raise result.error

        await self._retry(attempt)

    async def _is_still(self, topic: Topic, state: TopicState) -> bool:
        """Whether the deletion of this very topic is at this step now."""
        _, found = await self._read(topic.topic)
        return found is not None and (found.topic_id, found.state) == (topic.topic_id, state)

    # -- the record

    def _new(
        self,
        topic: str,
        topic_id: str,
        partitions: int,
        found: Topic | None,
        settings: TopicSettings,
        *,
        grows: bool,
    ) -> Topic:
        return Topic(
            topic=topic,
            topic_id=topic_id,
            partitions=partitions,
            created_at_ms=self._clock.now_ms(),
            settings=settings,
            grows=grows,
            first_offset=1 if found is None else found.first_offset,
        )

    async def _change(self, topic: str, change: _Change) -> Topic:
        """Read, change, compare-and-set, until it is done or `change` raises."""
        validate_topic(topic)
        revision = self._ids.token()

        async def attempt() -> Topic:
            record, found = await self._read_once(topic)
            if found is not None and found.revision == revision:
                return found
            wanted = change(found)
            if wanted is None:
                assert found is not None
                return found
            if found is None or found.state == "DELETED":
                await self.pair.claim()
            wanted = msgspec.structs.replace(wanted, revision=revision)
            await self._coordinator.put(
                topic_key(topic),
                encode_record(wanted),
                ABSENT if record is None else record.version,
                partition_key=CATALOG_PARTITION_KEY,
            )
            return wanted

        return await self._retry(attempt)

    async def _read(self, topic: str) -> tuple[Record | None, Topic | None]:
        return await self._retry(lambda: self._read_once(topic))

    async def _read_once(self, topic: str) -> tuple[Record | None, Topic | None]:
        key = topic_key(topic)
        record = await self._coordinator.get(key, partition_key=CATALOG_PARTITION_KEY)
        return record, None if record is None else _decoded(record)

    async def _get(self, key: str, partition_key: str) -> Record | None:
        return await self._retry(lambda: self._coordinator.get(key, partition_key=partition_key))

    async def _retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        return await retry(
            operation,
            policy=self._policy,
            clock=self._clock,
            randomness=self._random,
            retryable=_again,
        )

    async def survey(self) -> CatalogSurvey:
        """Every topic, and every entry that cannot be read."""

        async def attempt() -> CatalogSurvey:
            found = CatalogSurvey([], [], [])
            async for record in self._coordinator.scan_all(
                *topics_range(), partition_key=CATALOG_PARTITION_KEY
            ):
                try:
                    topic = _decoded(record)
                except StorageDamaged as error:
                    found.damaged.append(error)
                    continue
                if topic.state == "DELETED":
                    found.deleted.append(topic.topic)
                else:
                    found.topics.append(topic)
            found.topics.sort(key=lambda one: one.topic)
            return found

        return await self._retry(attempt)

    async def list(self) -> list[Topic]:
        """Every topic that can be read, by name; the log of the process hears of those that cannot. (Last in
        the class: its name hides the builtin from annotations.)"""
        found = await self.survey()
        for error in found.damaged:
            _log.warning("a topic is left out: %s (%s)", error.message, error.hint)
        return found.topics


def _decoded(record: Record) -> Topic:
    topic = decode_record(Topic, record.key, record.value)
    try:
        expected = topic_key(topic.topic)
    except UsageError:
        expected = ""
    if record.key != expected:
        raise StorageDamaged(
            f"{record.key!r} is the entry of topic {topic.topic!r}",
            hint="something else wrote this key; `forebay log verify` shows what is affected",
        )
    return topic


def _fenced(topic: Topic, record: Record | None) -> Control:
    if record is not None:
        control = decode_record(Control, record.key, record.value)
        return msgspec.structs.replace(control, log_state="FENCED", epoch=control.epoch + 1)
    first = topic.first_offset
    return Control(log_state="FENCED", sequence_counter=first, pending=None, epoch=1, start_offset=first)


def _again(error: ForebayError) -> bool:
    # Every attempt reads first and recognises its own work, so an unknown outcome may be tried again.
    return isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed)


def _active(topic: str, found: Topic | None) -> Topic:
    if found is None or found.state == "DELETED":
        raise UnknownTopic(topic)
    if found.state != "ACTIVE":
        raise TopicDeleted(topic)
    return found


def _check_partitions(partitions: int) -> int:
    return whole("number of partitions", partitions, 1, PARTITION_MAX + 1)


def _check_settings(settings: TopicSettings | None) -> None:
    """Anything else could be written, and then nobody could read the entry any more."""
    if not isinstance(settings, TopicSettings | None):
        raise UsageError(f"settings {settings!r}", hint="as TopicSettings(retention_ms=86_400_000)")
