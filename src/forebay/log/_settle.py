"""Did our write happen? The question after every lost reply, answered by reading.

See `_commit` for why the answer is definite. The order of the reads matters where compaction is at work: it
creates its record, removes index entries, moves the cursor, removes its record. Reading the index first, then
the record, then the cursor sees at least one trace of it. Trim moves the start in the control record before
it removes entries, and a deletion removes both at once; so the control record is read last once more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from forebay.coordination import Coordinator
from forebay.errors import OutcomeUnknown
from forebay.log._append import Unit
from forebay.log._keys import PartitionKeys
from forebay.log._partition_cache import PartitionState
from forebay.log._records import Compaction, Control, Cursor, IndexEntry, decode_record
from forebay.log._writer_metrics import WriterMetrics

__all__ = ["Doubt", "Verdict", "settle"]


@dataclass(frozen=True, slots=True)
class Doubt:
    """A control write whose outcome is not known."""

    version: int | None
    """The version it builds on; None: it creates the record."""
    start_offset: int
    end_offset: int


class Verdict(enum.Enum):
    """What became of it."""

    OPEN = "open"
    """Nothing was in doubt, or the write may still land: sending the same again is safe."""
    COMMITTED = "committed"
    NOT_COMMITTED = "not_committed"
    """And never will be."""
    UNKNOWN = "unknown"
    """The traces are gone."""


async def settle(
    coordinator: Coordinator,
    unit: Unit,
    doubt: Doubt | None,
    state: PartitionState,
    metrics: WriterMetrics,
) -> Verdict:
    """Compare a partition as it is now with what was sent; answers the unit where that ends the matter."""
    pending = state.control.pending if state.control is not None else None
    if pending is not None and unit.append_id and pending.append_id == unit.append_id:
        # Also where nothing was in doubt: a refusal may come from a copy of the request itself.
        unit.succeed(pending.start_offset, pending.data_key, pending.created_at_ms)
        verdict = Verdict.COMMITTED
    elif doubt is None or state.version == doubt.version:
        return Verdict.OPEN
    else:
        verdict = await _look(coordinator, unit, doubt, state, metrics)
    metrics.resolved[verdict.value].inc()
    return verdict


async def _look(
    coordinator: Coordinator,
    unit: Unit,
    doubt: Doubt,
    state: PartitionState,
    metrics: WriterMetrics,
) -> Verdict:
    """The control record has moved on without our append as its last one."""
    if state.control is not None and state.control.sequence_counter <= doubt.end_offset:
        return Verdict.NOT_COMMITTED
    if _holds(state.control, doubt):
        keys = unit.keys
        metrics.coordination_requests["get"].inc()
        record = await coordinator.get(keys.index(doubt.end_offset), partition_key=keys.partition_key)
        entry = None if record is None else decode_record(IndexEntry, record.key, record.value)
        if entry is not None and entry.append_id == unit.append_id:
            unit.succeed(doubt.start_offset, entry.data_key, entry.created_at_ms)
            return Verdict.COMMITTED
        if entry is not None and entry.type == "WAL":
            return Verdict.NOT_COMMITTED
        if (
            entry is None
            and not await _compacted(coordinator, keys, doubt.end_offset, metrics)
            and await _untrimmed(coordinator, unit, doubt, state, metrics)
        ):
            return Verdict.NOT_COMMITTED
    unit.fail(
        OutcomeUnknown(
            f"append to {unit.keys}",
            reason="its reply was lost, and compaction, trim or deletion have removed its traces",
        )
    )
    return Verdict.UNKNOWN


def _holds(control: Control | None, doubt: Doubt) -> bool:
    """Whether an entry for these offsets would still be there."""
    return control is not None and control.start_offset <= doubt.start_offset


async def _untrimmed(
    coordinator: Coordinator, unit: Unit, doubt: Doubt, before: PartitionState, metrics: WriterMetrics
) -> bool:
    """Whether it is still the partition that was read `before`, with the start it had then."""
    keys = unit.keys
    metrics.coordination_requests["get"].inc()
    record = await coordinator.get(keys.control, partition_key=keys.partition_key)
    now = None if record is None else decode_record(Control, record.key, record.value)
    if now is None or before.control is None or not _holds(now, doubt):
        return False
    # A request that came late may have made it anew after a deletion, at offsets of long ago.
    last = now.sequence_counter if now.pending is None else now.pending.start_offset
    return now.sequence_counter >= before.control.sequence_counter and last >= doubt.start_offset


async def _compacted(
    coordinator: Coordinator, keys: PartitionKeys, offset: int, metrics: WriterMetrics
) -> bool:
    metrics.coordination_requests["get"].inc(2)
    record = await coordinator.get(keys.compaction, partition_key=keys.partition_key)
    if record is not None and decode_record(Compaction, record.key, record.value).start_offset <= offset:
        return True
    record = await coordinator.get(keys.cursor, partition_key=keys.partition_key)
    return record is not None and decode_record(Cursor, record.key, record.value).offset > offset
