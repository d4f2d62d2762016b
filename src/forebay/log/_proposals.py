"""One attempt to commit: the operations to send, and what holds if they are done.

See `_commit` for the protocol. Here are its parts that talk to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from forebay.coordination import WRITE_BYTES_MAX, WRITE_OPERATIONS_MAX, Put
from forebay.errors import ForebayError
from forebay.kit.conditions import ABSENT
from forebay.log._append import Unit
from forebay.log._partition_cache import PartitionState
from forebay.log._producers import remember
from forebay.log._records import Control, Cursor, Pending, encode_record
from forebay.log._settle import Doubt

__all__ = ["Proposal", "Try", "chunks", "first_control", "propose", "waves"]

OPERATIONS_PER_PARTITION: Final = 2
PARTITIONS_PER_WRITE: Final = WRITE_OPERATIONS_MAX // OPERATIONS_PER_PARTITION
"""Partitions committed in one round trip; a flush with more takes several."""
BYTES_PER_WRITE: Final = WRITE_BYTES_MAX * 3 // 4
"""Bytes of records committed in one round trip: control records of many producers are large."""


class Try(msgspec.Struct, eq=False):
    """A unit on its way into its partition."""

    unit: Unit
    state: PartitionState | None = None
    """What the next attempt builds on; None: to be read."""
    read: bool = False
    """Whether `state` was read for this very append, and not remembered from an earlier one."""
    doubt: Doubt | None = None
    """A write whose outcome is not known yet."""
    failure: ForebayError | None = None
    """Why the last attempt did not succeed."""
    attempts: int = 0
    done: bool = False


class Proposal(msgspec.Struct, eq=False):
    """One attempt: what to send, and what then holds."""

    one: Try
    state: PartitionState
    control: Control
    operations: list[Put]
    size_bytes: int


def propose(one: Try, now_ms: int, writer: str | None) -> Proposal:
    """One attempt on the state that is known."""
    state, unit = one.state, one.unit
    assert state is not None and unit.slice is not None
    before = state.control or first_control(state)
    keys, where = unit.keys, unit.slice
    start = before.sequence_counter
    end = start + where.msg_count - 1
    created_at_ms = max(now_ms, state.floor_ms)
    pending = Pending(
        append_id=unit.append_id,
        start_offset=start,
        end_offset=end,
        msg_count=where.msg_count,
        entry_type="WAL",
        data_key=unit.uri,
        encoding=where.encoding,
        created_at_ms=created_at_ms,
        byte_offset=where.body_offset,
        byte_length=where.body_length,
        crc32c=where.crc32c,
        writer=writer,
    )
    producers = before.producers
    if unit.idempotent:
        producers = remember(before, unit.groups, start, created_at_ms)
    control = msgspec.structs.replace(before, sequence_counter=end + 1, pending=pending, producers=producers)
    home = keys.partition_key
    value = encode_record(control)
    size = len(keys.control) + len(value)
    operations = []
    if state.control is None:
        cursor = encode_record(Cursor(offset=start))
        size += len(keys.cursor) + len(cursor)
        operations.append(Put(keys.cursor, cursor, ABSENT, None, home))
    elif before.pending is not None and not state.indexed:
        entry = encode_record(before.pending.index_entry())
        key = keys.index(before.pending.end_offset)
        size += len(key) + len(entry)
        operations.append(Put(key, entry, ABSENT, None, home))
    expected = ABSENT if state.version is None else state.version
    operations.append(Put(keys.control, value, expected, None, home))
    return Proposal(one, state, control, operations, size)


def first_control(state: PartitionState) -> Control:
    assert state.topic is not None
    return Control.of_new(state.topic.first_offset)


def waves(units: Sequence[Unit]) -> Sequence[Sequence[Unit]]:
    """Units such that no wave holds a partition twice, and each partition's are in order."""
    if len({unit.keys.partition_key for unit in units}) == len(units):
        return [units]
    waves: list[list[Unit]] = []
    depth: dict[str, int] = {}
    for unit in units:
        name = unit.keys.partition_key
        number = depth.get(name, 0)
        depth[name] = number + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(unit)
    return waves


def chunks(proposals: Sequence[Proposal]) -> list[Sequence[Proposal]]:
    """The proposals as so many round trips as their number and size take: nearly always one."""
    if len(proposals) <= PARTITIONS_PER_WRITE and sum([each.size_bytes for each in proposals]) <= (
        BYTES_PER_WRITE
    ):
        return [proposals]
    chunks: list[list[Proposal]] = [[]]
    size = 0
    for proposal in proposals:
        full = len(chunks[-1]) >= PARTITIONS_PER_WRITE or size + proposal.size_bytes > BYTES_PER_WRITE
        if full and chunks[-1]:
            chunks.append([])
            size = 0
        chunks[-1].append(proposal)
        size += proposal.size_bytes
    return list(chunks)
