"""Removing the oldest records of a partition.

    1  control.start_offset = the new start          compare-and-set; from here on nothing below is readable
    2  delete the index entries that end below it    an entry that straddles the start stays whole

The first step is the trim; the second only tidies up and is repeated by every later trim, so a crash between
the two leaves nothing that matters. The start only grows and never passes the counter, and the counter is not
touched: offsets go on where they were, also when nothing is left. Objects are left to the vacuum, which takes
what no entry names any more.

Repeating a trim is harmless, so a lost reply is settled by reading the start again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from forebay.coordination import Coordinator, DeleteRange
from forebay.errors import ForebayError, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import OffsetOutOfRange
from forebay.log._keys import PartitionKeys
from forebay.log._numbers import whole
from forebay.log._records import Control, decode_record, encode_record
from forebay.log._resolve import Resolver

__all__ = ["Trimmed", "Trimmer"]

TRIM_POLICY = RetryPolicy(attempts_max=60, base_ms=10, cap_ms=1_000)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a trim changed."""

    topic: str
    partition: int
    before: int
    """Earliest offset before."""
    earliest: int
    """Earliest offset now."""
    next: int
    """Next offset to be written."""

    @property
    def records(self) -> int:
        """Records that can no longer be read."""
        return self.earliest - self.before


class Trimmer:
    """Moves the start of partitions."""

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
        self._policy = policy or TRIM_POLICY

    async def trim(self, topic: str, partition: int, offset: int) -> Trimmed:
        """Make `offset` the earliest, if it is above the present one. Up to the next offset: all records.

        Raises `OffsetOutOfRange` beyond that, and `UnknownTopic`.
        """
        offset = whole("a trim to", offset)
        keys = PartitionKeys(topic, partition)
        first: list[int] = []

        async def attempt() -> Trimmed:
            record = await self._coordinator.get(keys.control, partition_key=keys.partition_key)
            if record is None:
                return await self._unwritten(keys, offset)
            control = decode_record(Control, record.key, record.value)
            first.append(control.start_offset)
            start = max(control.start_offset, offset)
            if start > control.sequence_counter:
                raise OffsetOutOfRange(
                    str(keys), offset, earliest=control.start_offset, next_offset=control.sequence_counter
                )
            if start > control.start_offset:
                moved = encode_record(msgspec.structs.replace(control, start_offset=start))
                await self._coordinator.put(
                    keys.control, moved, record.version, partition_key=keys.partition_key
                )
            await self._tidy(keys, start)
            # The first look tells what was there before: a later one may see our own work.
            return Trimmed(topic, partition, first[0], start, control.sequence_counter)

        return await retry(
            attempt,
            policy=self._policy,
            clock=self._clock,
            randomness=self._random,
            retryable=_again,
        )

    async def _unwritten(self, keys: PartitionKeys, offset: int) -> Trimmed:
        """A partition that was never written to has nothing to trim. Raises where there is none."""
        resolver = Resolver(
            self._coordinator, clock=self._clock, randomness=self._random, policy=self._policy
        )
        view = await resolver.view(keys)
        if offset > view.next:
            raise OffsetOutOfRange(str(keys), offset, earliest=view.earliest, next_offset=view.next)
        return Trimmed(keys.topic, keys.partition, view.earliest, view.earliest, view.next)

    async def _tidy(self, keys: PartitionKeys, start: int) -> None:
        """Remove every index entry that ends below the start."""
        low, _ = keys.index_range()
        [result] = await self._coordinator.write(
            [DeleteRange(low, keys.index(start), partition_key=keys.partition_key)]
        )
        result.unwrap()


def _again(error: ForebayError) -> bool:
    return isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed)
