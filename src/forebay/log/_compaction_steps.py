"""The steps of a compaction in the coordinator: any process can take any of them, at any time, twice.

    meta/compaction put if absent                 the slot: one compaction per partition at a time
      |   cursor read again: not start_offset ->  drop the record, nothing was touched
      v
    WRITING_COMPACTED_INDEX     1  index/{end} = COMPACTED, by the version of the WAL entry it replaces
      v   state changed by version
    DELETING_OLD                2  delete_range index [start, end)
      v   state changed by version
    UPDATING_CURSOR             3  cursor = end + 1, by version, never backwards
      v   record deleted by version

Invariants, and what keeps them:

* **Every committed offset is covered at every moment.** The end key is replaced before the lower keys go, and
  the lower keys only go when the end key was seen to hold this very compaction.
* **The cursor moves only through the slot.** While a record is in the slot whose `start_offset` was seen to
  be the cursor, nobody else can move it, so a range is folded once. A record that was put too late, after a
  rival finished another range, finds the cursor elsewhere and is dropped, by its maker or by anybody.
* **A stalled process does no harm when it wakes.** Whatever it still sends carries a version that is gone, or
  is a range delete below the cursor where only stale keys can be.

Crash points: between any two of these requests. Whoever comes next reads the record and goes on from its
state; before the record exists there is only an object that nobody names, which vacuum removes.

A *skip* is a record that is born in UPDATING_CURSOR: it moves the cursor over offsets that were trimmed, or
over a compacted range that was left behind without a record. It takes the same slot for the same reason.

Nothing is concluded from a reply that was lost: the record is read again, and what it says is done.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import msgspec

from forebay.coordination import ABSENT, Coordinator, Delete, Operation
from forebay.errors import (
    ForebayError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StorageDamaged,
    Unavailable,
)
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import DataLost
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta, located, read_meta
from forebay.log._records import (
    Compaction,
    CompactionState,
    Cursor,
    IndexEntry,
    decode_record,
    encode_record,
)
from forebay.log._uris import key_of
from forebay.storage import ObjectStore

__all__ = ["STEP_POLICY", "CompactionSteps", "Ended"]

T = TypeVar("T")

STEP_POLICY: Final = RetryPolicy(attempts_max=20, base_ms=50, cap_ms=2_000, deadline_ms=60_000)
"""How patiently a compaction is brought to its end. Another process can go on where this one stops."""
ROUNDS_MAX: Final = 20
"""How often a call looks again because another process took a step."""
SWEEP_ENTRIES_MAX: Final = 1_000
"""Most index entries looked at by one sweep of stale keys."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a record left the slot."""

    record: Compaction
    outcome: Literal["finished", "dropped"]
    found_in: CompactionState
    """The state it was found in."""


@dataclass(slots=True)
class CompactionSteps:
    """Takes compactions through their states."""

    store: ObjectStore
    coordinator: Coordinator
    clock: Clock
    randomness: random.Random
    policy: RetryPolicy = STEP_POLICY
    on_step: Callable[[str, float], None] = field(default=lambda name, seconds: None)
    """Hears of every step that was done, and how many seconds it took."""

    async def meta(self, keys: PartitionKeys) -> PartitionMeta:
        """The small records of a partition now."""
        return await self._patiently(lambda: read_meta(self.coordinator, keys))

    async def begin(self, keys: PartitionKeys, record: Compaction) -> None:
        """Offer a record to the slot. Whether it got in is seen by looking: `resume` does."""

        async def put() -> None:
            try:
                await self.coordinator.put(
                    keys.compaction, encode_record(record), ABSENT, partition_key=keys.partition_key
                )
            except (PreconditionFailed, OutcomeUnknown):
                return

        await self._patiently(put)

    async def resume(self, keys: PartitionKeys) -> Ended | None:
        """Bring the compaction in the slot to its end, whoever began it. None: the slot is empty."""
        first: list[Compaction] = []

        async def attempt() -> Ended | None:
            for _ in range(ROUNDS_MAX):
                try:
                    return await self._resume_once(keys, first)
                except PreconditionFailed:
                    continue  # Somebody else took a step: see where it stands now.
            raise Unavailable(f"{keys}: others are faster at every step", hint="leave it to them")

        return await retry(
            attempt,
            policy=self.policy,
            clock=self.clock,
            randomness=self.randomness,
            retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown),
        )

    async def _resume_once(self, keys: PartitionKeys, first: list[Compaction]) -> Ended | None:
        """`first` remembers, over attempts, which record this call set out to finish."""
        meta = await read_meta(self.coordinator, keys)
        record, version = meta.compaction, meta.compaction_version
        if record is None or version is None:
            # What we began to finish is gone from the slot: somebody else took the last step.
            return Ended(first[0], "finished", first[0].state) if first else None
        if first and record.compaction_id != first[0].compaction_id:
            return Ended(first[0], "finished", first[0].state)
        first.append(record)
        outcome = await self._advance(meta, record, version)
        return Ended(first[0], outcome, first[0].state)

    async def _advance(
        self, meta: PartitionMeta, record: Compaction, version: int
    ) -> Literal["finished", "dropped"]:
        keys = meta.keys
        if record.state == "WRITING_COMPACTED_INDEX":
            if not self._starts_at_cursor(meta, record):
                await self._drop(keys, version)
                return "dropped"
            if not await self._timed("index", self._write_index(meta, record)):
                await self._drop(keys, version)
                return "dropped"
            record, version = await self._change(keys, record, version, "DELETING_OLD")
        if record.state == "DELETING_OLD":
            await self._timed("delete", self._delete_old(meta, record))
            record, version = await self._change(keys, record, version, "UPDATING_CURSOR")
        await self._timed("cursor", self._move_cursor(keys, record.end_offset + 1))
        await self._drop(keys, version)
        return "finished"

    def _starts_at_cursor(self, meta: PartitionMeta, record: Compaction) -> bool:
        """Whether the range is still the next one. The cursor was read after the record was put."""
        return meta.cursor == record.start_offset

    async def _write_index(self, meta: PartitionMeta, record: Compaction) -> bool:
        """Step 1. False: the compacted object is gone, and nothing names it yet."""
        keys = meta.keys
        found = await self.coordinator.get(keys.index(record.end_offset), partition_key=keys.partition_key)
        if found is None:
            await self._check_trimmed(meta, record, "no entry")
            return True
        tail = located(keys, found)
        if tail.entry.type == "COMPACTED":
            if tail.entry.data_key != record.data_key:
                await self._check_trimmed(meta, record, f"a compacted entry of {tail.entry.data_key}")
            return True
        if record.tail_start_offset not in (None, tail.start_offset):
            await self._check_trimmed(meta, record, f"an entry that starts at {tail.start_offset}")
            return True
        if not await self._object_is_whole(record):
            return False
        await self.coordinator.put(
            found.key, encode_record(_entry_of(record)), found.version, partition_key=keys.partition_key
        )
        return True

    async def _object_is_whole(self, record: Compaction) -> bool:
        """Whether the object is there: a record that was delayed for long may name one that vacuum took."""
        try:
            info = await self.store.head(key_of(self.store, record.data_key))
        except NotFound:
            return False
        if record.size_bytes is not None and info.size != record.size_bytes:
            raise DataLost(
                f"{record.data_key} has {info.size} bytes, {record.size_bytes} were written",
                hint="delete meta/compaction of this partition after looking at the object",
            )
        return True

    async def _delete_old(self, meta: PartitionMeta, record: Compaction) -> None:
        """Step 2, after a last look that the end key holds what the lower keys are deleted for."""
        keys = meta.keys
        if not await self._end_key_is_compacted(keys, record):
            await self._check_trimmed(meta, record, "no compacted entry, in a state that says there is one")
        await self.coordinator.delete_range(
            keys.index(record.start_offset),
            keys.index(record.end_offset),
            partition_key=keys.partition_key,
        )

    async def _end_key_is_compacted(self, keys: PartitionKeys, record: Compaction) -> bool:
        found = await self.coordinator.get(keys.index(record.end_offset), partition_key=keys.partition_key)
        if found is None:
            return False
        entry = decode_record(IndexEntry, found.key, found.value)
        return entry.type == "COMPACTED" and entry.data_key == record.data_key

    async def _check_trimmed(self, meta: PartitionMeta, record: Compaction, found: str) -> None:
        """The end key is not what it should be: right only if the whole range was trimmed meanwhile."""
        now = await read_meta(self.coordinator, meta.keys)
        if now.compaction is None or now.compaction.compaction_id != record.compaction_id:
            raise PreconditionFailed(meta.keys.compaction, expected=record.compaction_id)
        if record.end_offset >= now.earliest:
            raise _unexpected(meta.keys, record, found)

    async def _move_cursor(self, keys: PartitionKeys, offset: int) -> None:
        """Step 3. It only grows."""
        meta = await read_meta(self.coordinator, keys)
        if meta.cursor < offset:
            when = ABSENT if meta.cursor_version is None else meta.cursor_version
            await self.coordinator.put(
                keys.cursor, encode_record(Cursor(offset=offset)), when, partition_key=keys.partition_key
            )

    async def _change(
        self, keys: PartitionKeys, record: Compaction, version: int, state: CompactionState
    ) -> tuple[Compaction, int]:
        changed = msgspec.structs.replace(record, state=state)
        new = await self.coordinator.put(
            keys.compaction, encode_record(changed), version, partition_key=keys.partition_key
        )
        return changed, new

    async def _drop(self, keys: PartitionKeys, version: int) -> None:
        await self.coordinator.delete(keys.compaction, version, partition_key=keys.partition_key)

    async def sweep(self, keys: PartitionKeys, first: int, cursor: int) -> int:
        """Delete stale WAL keys with `first` <= end < `cursor`, by version; how many went.

        They come from index puts that arrived after their range was compacted. Readers step over them; this
        keeps their way short.
        """
        records = await self._patiently(
            lambda: self.coordinator.range_scan(
                keys.index(first),
                keys.index(cursor),
                limit=SWEEP_ENTRIES_MAX,
                partition_key=keys.partition_key,
            )
        )
        stale: list[Operation] = [
            Delete(record.key, record.version, keys.partition_key)
            for record in records
            if located(keys, record).entry.type == "WAL"
        ]
        if not stale:
            return 0
        results = await self.coordinator.write(stale)
        return sum(result.error is None for result in results)

    async def covering(self, keys: PartitionKeys, offset: int) -> IndexEntry | None:
        """The entry whose key is exactly this offset."""
        found = await self._patiently(
            lambda: self.coordinator.get(keys.index(offset), partition_key=keys.partition_key)
        )
        return None if found is None else decode_record(IndexEntry, found.key, found.value)

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        return await retry(operation, policy=self.policy, clock=self.clock, randomness=self.randomness)

    async def _timed(self, name: str, work: Awaitable[T]) -> T:
        began = self.clock.monotonic()
        result = await work
        self.on_step(name, self.clock.monotonic() - began)
        return result


def _entry_of(record: Compaction) -> IndexEntry:
    return IndexEntry(
        type="COMPACTED",
        msg_count=record.msg_count,
        data_key=record.data_key,
        encoding=record.encoding,
        created_at_ms=record.last_time_ms if record.last_time_ms is not None else record.created_at_ms,
        crc32c=record.crc32c,
        size_bytes=record.size_bytes,
        first_time_ms=record.first_time_ms,
    )


def _unexpected(keys: PartitionKeys, record: Compaction, found: str) -> ForebayError:
    return StorageDamaged(
        f"{keys}: compaction {record.compaction_id} of offsets {record.start_offset} to {record.end_offset} "
        f"found {found} at its end key",
        hint="nothing was changed; `forebay log verify` shows the state of the partition",
    )
