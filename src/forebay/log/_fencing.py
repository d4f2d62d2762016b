"""Shutting writers out of a partition, with an epoch that only grows.

    fence     OPEN or FENCED, epoch e   ->  FENCED, epoch above e    nobody appends
    unfence   FENCED, epoch e           ->  OPEN, epoch e            only whoever holds e, or takes no part

The state and the epoch live in the control record, the one that a commit replaces: a fence is atomic with
every append, and what is in the log before it is final when `fence` returns. A boolean would not do. A writer
that stalls through fence and un-fence would go on as if nothing had happened; with its epoch in the append it
is refused for ever.

Lost replies. A fence that finds the epoch it wanted already there cannot know whether it was itself that set
it, so it takes the next one: an epoch has one owner. Where the caller named the epoch, the name is the proof.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from forebay.coordination import Coordinator, Put
from forebay.errors import ForebayError, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import Fenced
from forebay.log._keys import PartitionKeys
from forebay.log._numbers import whole
from forebay.log._records import Control, Cursor, decode_record, encode_record
from forebay.log._topics import Catalog, TopicDeleted

__all__ = ["FenceState", "Fencing"]


class _Change(Protocol):
    def __call__(self, control: Control, *, again: bool) -> Control | None:
        """The new record; None where it is as it should be. `again`: an earlier try may have been done."""


@dataclass(frozen=True, slots=True)
class FenceState:
    """Whether a partition takes appends, and from whom."""

    topic: str
    partition: int
    log_state: Literal["OPEN", "FENCED"]
    epoch: int
    """Appends with a lower epoch are refused for ever."""
    next_offset: int
    """Next offset to be given. Final while the partition is fenced."""


class Fencing:
    """Fences, un-fences and tells the state."""

    def __init__(
        self,
        coordinator: Coordinator,
        catalog: Catalog,
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._catalog = catalog
        self._clock = clock
        self._random = randomness
        self._policy = policy or RetryPolicy(attempts_max=60, base_ms=10, cap_ms=1_000)

    async def state(self, topic: str, partition: int) -> FenceState:
        """The present state; raises `UnknownTopic`."""
        keys = PartitionKeys(topic, partition)
        return await self._retry(lambda: self._state(keys))

    async def fence(self, topic: str, partition: int, *, epoch: int | None = None) -> FenceState:
        """Refuse all appends from now on, under a new epoch: the one given, or the next one.

        When it returns, every append that will ever be acknowledged under a lower epoch is in the log, below
        `next_offset`. Raises `Fenced` where the epoch given is not above the present one.
        """
        keys = PartitionKeys(topic, partition)
        wanted = None if epoch is None else whole("epoch", epoch, 1)

        def change(control: Control, *, again: bool) -> Control | None:
            if wanted is None:
                return msgspec.structs.replace(control, log_state="FENCED", epoch=control.epoch + 1)
            if again and control.epoch == wanted and control.log_state == "FENCED":
                return None
            if wanted <= control.epoch:
                raise Fenced(str(keys), state=control.log_state, epoch=control.epoch, writer_epoch=wanted)
            return msgspec.structs.replace(control, log_state="FENCED", epoch=wanted)

        return await self._change(keys, change)

    async def unfence(self, topic: str, partition: int, epoch: int) -> FenceState:
        """Take appends again. Only under the present epoch, which stays; raises `Fenced` otherwise."""
        keys = PartitionKeys(topic, partition)

        def change(control: Control, *, again: bool) -> Control | None:
            if control.epoch != epoch:
                raise Fenced(str(keys), state=control.log_state, epoch=control.epoch, writer_epoch=epoch)
            if control.log_state == "OPEN":
                return None
            return msgspec.structs.replace(control, log_state="OPEN")

        return await self._change(keys, change)

    async def _change(self, keys: PartitionKeys, change: _Change) -> FenceState:
        attempts = 0

        async def attempt() -> FenceState:
            nonlocal attempts
            control, version = await self._read(keys)
            if version is not None:
                control = await self._of_topic(keys, control)
            wanted = change(control, again=attempts > 0)
            if wanted is None:
                return _shown(keys, control)
            attempts += 1
            home = keys.partition_key
            puts = [
                Put(
                    keys.control,
                    encode_record(wanted),
                    ABSENT if version is None else version,
                    partition_key=home,
                )
            ]
            if version is None:
                cursor = encode_record(Cursor(offset=wanted.sequence_counter))
                puts.append(Put(keys.cursor, cursor, ABSENT, partition_key=home))
            (await self._coordinator.write(puts))[0].unwrap()
            return _shown(keys, wanted)

        return await self._retry(attempt)

    async def _of_topic(self, keys: PartitionKeys, control: Control) -> Control:
        """The record, or the one its partition begins with where it is left over from a deleted topic.

        Raises `TopicDeleted` where the topic is being deleted: its partitions stay fenced.

        Looked at after the control record, so that a deletion that begins later meets what is written here or
        has it refused. An append to a partition that was opened again would go with the topic, acknowledged
        or not, under offsets that the next topic of this name gives out once more.
        """
        found = await self._catalog.find(keys.topic)
        if found is not None and found.state != "ACTIVE":
            raise TopicDeleted(keys.topic)
        if found is not None and control.start_offset < found.first_offset:
            return Control.of_new(found.first_offset)
        return control

    async def _state(self, keys: PartitionKeys) -> FenceState:
        control, _ = await self._read(keys)
        return _shown(keys, control)

    async def _read(self, keys: PartitionKeys) -> tuple[Control, int | None]:
        """The control record and its version; for a partition never written the one it would begin with."""
        record = await self._coordinator.get(keys.control, partition_key=keys.partition_key)
        if record is not None:
            return decode_record(Control, record.key, record.value), record.version
        topic = await self._catalog.describe(keys.topic)
        topic.check_partition(keys.partition)
        if topic.state != "ACTIVE":
            # A record that is put behind a deletion's back would be found, fenced, by the next topic.
            raise TopicDeleted(keys.topic)
        return Control.of_new(topic.first_offset), None

    async def _retry(self, operation: Callable[[], Awaitable[FenceState]]) -> FenceState:
        return await retry(
            operation,
            policy=self._policy,
            clock=self._clock,
            randomness=self._random,
            retryable=_again,
        )


def _again(error: ForebayError) -> bool:
    # Every attempt reads first; see above for what it makes of its own earlier work.
    return isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed)


def _shown(keys: PartitionKeys, control: Control) -> FenceState:
    return FenceState(keys.topic, keys.partition, control.log_state, control.epoch, control.sequence_counter)
