"""The small records of a partition, read together.

Control, cursor and the compaction under way are leaves of one directory, so one scan shows all of them as
they were at one moment. Whoever needs them *before* the index (vacuum, verify, the compactor) gets that order
by asking here first: an append can then move from `pending` into the index, but never past both looks.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.coordination import Coordinator, Record, children
from forebay.errors import StorageDamaged
from forebay.log._keys import PartitionKeys
from forebay.log._records import Compaction, Control, Cursor, IndexEntry, decode_record
from forebay.log._resolve import Located

__all__ = ["FIRST_OFFSET", "PartitionMeta", "located", "read_meta"]

FIRST_OFFSET = 1
"""The first offset of every partition, and the cursor of one that was never compacted."""


@dataclass(frozen=True, slots=True)
class PartitionMeta:
    """Control, cursor and compaction of one partition at one moment."""

    keys: PartitionKeys
    control: Control | None
    """None: the partition does not exist."""
    cursor: int
    """First offset that is not compacted."""
    cursor_version: int | None
    """None: there is no cursor record yet."""
    compaction: Compaction | None
    compaction_version: int | None

    @property
    def earliest(self) -> int:
        """First offset that was not trimmed."""
        return FIRST_OFFSET if self.control is None else self.control.start_offset

    @property
    def next(self) -> int:
        """Offset of the next record to be written."""
        return FIRST_OFFSET if self.control is None else self.control.sequence_counter

    @property
    def lag(self) -> int:
        """Records that are committed and not compacted."""
        return max(0, self.next - max(self.cursor, self.earliest))


async def read_meta(coordinator: Coordinator, keys: PartitionKeys) -> PartitionMeta:
    """All of it in one request, from one moment."""
    start, end = children(f"{keys.root}/meta")
    found = {
        record.key: record
        for record in await coordinator.range_scan(start, end, partition_key=keys.partition_key)
    }
    control, cursor, compaction = (found.get(key) for key in (keys.control, keys.cursor, keys.compaction))
    meta = PartitionMeta(
        keys,
        None if control is None else decode_record(Control, control.key, control.value),
        FIRST_OFFSET if cursor is None else decode_record(Cursor, cursor.key, cursor.value).offset,
        None if cursor is None else cursor.version,
        None if compaction is None else decode_record(Compaction, compaction.key, compaction.value),
        None if compaction is None else compaction.version,
    )
    _check(meta)
    return meta


def _check(meta: PartitionMeta) -> None:
    """Refuse records that cannot be together: what lies below the cursor or the start is given up."""
    if meta.control is not None and not max(meta.earliest, meta.cursor, FIRST_OFFSET) <= meta.next:
        raise StorageDamaged(
            f"{meta.keys} ends at {meta.next}, begins at {meta.earliest} and is compacted to {meta.cursor}",
            hint=f"one of the records under {meta.keys.root}/meta is not ours; put it right",
        )


def located(keys: PartitionKeys, record: Record) -> Located:
    """An index entry with the offsets it covers; raises `StorageDamaged` where it covers none."""
    entry = decode_record(IndexEntry, record.key, record.value)
    end = keys.end_offset(record.key)
    start = entry.start_offset(end)
    if entry.msg_count < 1 or start < FIRST_OFFSET:
        raise StorageDamaged(
            f"{record.key!r} counts {entry.msg_count} records",
            hint="something else wrote this key; `forebay log verify` shows what is affected",
        )
    return Located(keys, start, end, entry)
