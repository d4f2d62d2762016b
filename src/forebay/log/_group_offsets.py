"""The offsets of a group: claimed by compare-and-set, committed by compare-and-set.

Invariant: at any moment at most one party can commit for a partition, namely the one that wrote its record
last. A claim rewrites the record with the claimant's generation and leaves the offset as it is; from then on
every commit of the previous owner fails, because it names a version that is gone. There is no lease in this
and no clock: a member that slept for a week and wakes up in the middle of a commit is refused.

A claim is refused where the record has a higher generation. So an old member that is slow to claim cannot
take back what a newer generation has, and between two claims of one generation the first wins, because an
assignment gives a partition to one member only.

Every write carries an id of its own. A lost reply is settled by reading: our id, then it was done; the
version we named, then it may be sent again; anything else, then somebody else was first.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from forebay.coordination import Coordinator, Put, Record, When
from forebay.errors import ForebayError, OutcomeUnknown, PreconditionFailed, StorageDamaged, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._group_records import GroupOffset, TopicPartition
from forebay.log._keys import GroupKeys
from forebay.log._records import decode_record, encode_record

__all__ = ["GroupOffsets", "Held", "Refused"]


@dataclass(frozen=True, slots=True)
class Held:
    """A record and its version: the right to write the next one."""

    record: GroupOffset
    version: When


@dataclass(frozen=True, slots=True)
class Refused:
    """Something else was written first; what is there now."""

    found: Held


class GroupOffsets:
    """Reads and writes the offset records of one group."""

    def __init__(
        self,
        coordinator: Coordinator,
        keys: GroupKeys,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        policy: RetryPolicy,
    ) -> None:
        self._coordinator = coordinator
        self._keys = keys
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self._policy = policy

    async def read(self) -> dict[TopicPartition, Held]:
        """All records of the group; raises `StorageDamaged` where one cannot be read."""
        found, damaged = await self.survey()
        for error in damaged.values():
            raise error
        return found

    async def survey(self) -> tuple[dict[TopicPartition, Held], dict[str, StorageDamaged]]:
        """All records that can be read, and what is wrong with each of the others, by key."""

        async def attempt() -> tuple[dict[TopicPartition, Held], dict[str, StorageDamaged]]:
            found: dict[TopicPartition, Held] = {}
            damaged: dict[str, StorageDamaged] = {}
            async for record in self._coordinator.scan_all(
                *self._keys.offsets_range(), partition_key=self._keys.partition_key
            ):
                try:
                    held = Held(self._decoded(record), record.version)
                except StorageDamaged as error:
                    damaged[record.key] = error
                else:
                    found[held.record.place] = held
            return found, damaged

        return await retry(attempt, policy=self._policy, clock=self._clock, randomness=self._random)

    def _decoded(self, record: Record) -> GroupOffset:
        """The record, if it is one and lies where it belongs; raises `StorageDamaged`."""
        try:
            found = decode_record(GroupOffset, record.key, record.value)
        except StorageDamaged as error:
            raise StorageDamaged(error.message, hint=self._way_out()) from error
        if record.key != self._keys.offset(found.topic, found.partition):
            raise StorageDamaged(f"{record.key!r} is the place of {found.place}", hint=self._way_out())
        return found

    def _way_out(self) -> str:
        group = self._keys.group
        return f"something else wrote this key; delete it, or all of the group: forebay groups delete {group}"

    def absent(self, place: TopicPartition) -> Held:
        """What to build on where there is no record."""
        return Held(GroupOffset(topic=place.topic, partition=place.partition), ABSENT)

    async def write(
        self, changes: Mapping[TopicPartition, tuple[Held, GroupOffset]]
    ) -> dict[TopicPartition, Held | Refused | ForebayError]:
        """Replace records, each if it is still the one that is held; all in one round trip.

        An error as an answer means that nothing was written, or, as `OutcomeUnknown`, that it is not known.
        """
        answers: dict[TopicPartition, Held | Refused | ForebayError] = {}
        left = {
            place: (held, msgspec.structs.replace(record, commit_id=self._ids.token()))
            for place, (held, record) in changes.items()
        }
        doubtful: set[TopicPartition] = set()
        attempt = 1
        while left:
            await self._attempt(left, doubtful, answers)
            if not left:
                break
            if attempt >= self._policy.attempts_max:
                for place in left:
                    answers[place] = self._given_up(place, doubtful)
                break
            await self._clock.sleep(self._policy.wait_s(attempt, self._random))
            await self._settle(left, doubtful, answers)
            attempt += 1
        return answers

    async def _attempt(
        self,
        left: dict[TopicPartition, tuple[Held, GroupOffset]],
        doubtful: set[TopicPartition],
        answers: dict[TopicPartition, Held | Refused | ForebayError],
    ) -> None:
        places = list(left)
        results = await self._coordinator.write([self._put(*left[place]) for place in places])
        for place, result in zip(places, results, strict=True):
            if result.error is None:
                assert result.version is not None
                answers[place] = Held(left.pop(place)[1], result.version)
            elif isinstance(result.error, OutcomeUnknown | PreconditionFailed):
                # Refused counts as doubtful too: a copy of our own request may have come first.
                doubtful.add(place)
            elif not isinstance(result.error, Unavailable):
                answers[place] = result.error
                del left[place]

    async def _settle(
        self,
        left: dict[TopicPartition, tuple[Held, GroupOffset]],
        doubtful: set[TopicPartition],
        answers: dict[TopicPartition, Held | Refused | ForebayError],
    ) -> None:
        """Find out what became of writes that were refused or not answered."""
        if not doubtful & left.keys():
            return
        try:
            found, _ = await self.survey()
        except ForebayError:
            return
        for place in sorted(doubtful & left.keys()):
            held, record = left[place]
            now = found.get(place, self.absent(place))
            if now.record.commit_id == record.commit_id:
                answers[place] = now
                del left[place]
            elif now.version != held.version:
                answers[place] = Refused(now)
                del left[place]

    def _put(self, held: Held, record: GroupOffset) -> Put:
        return Put(
            self._keys.offset(record.topic, record.partition),
            encode_record(record),
            held.version,
            partition_key=self._keys.partition_key,
        )

    def _given_up(self, place: TopicPartition, doubtful: set[TopicPartition]) -> ForebayError:
        what = f"a commit of group {self._keys.group!r} for {place}"
        if place in doubtful:
            return OutcomeUnknown(what, hint="look at the committed offset before going on")
        return Unavailable(f"{what} was not sent", hint="the coordinator cannot be reached; try again")
