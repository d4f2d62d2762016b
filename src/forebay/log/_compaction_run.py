"""Which entries a compaction folds together.

A run starts exactly at the cursor and ends exactly at the end of an entry. An entry that leaves a gap, that
straddles, that is compacted already or too young ends it, so a range never has two owners and the next run
can always start where this one ended.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Literal

from forebay.coordination import Coordinator
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._keys import PartitionKeys
from forebay.log._meta import located
from forebay.log._resolve import Located

__all__ = ["Run", "RunLimits", "entries_from", "select_run"]

SCAN_PAGE: Final = 1_000
"""Index entries of one request."""

RunEnd = Literal["target", "tail", "young", "gap", "compacted"]
"""Why a run does not go on."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Where a run ends."""

    target_bytes: int
    """Stored bytes it may hold; a single larger entry is a run of its own."""
    entries_max: int
    young_ms: int
    """Entries made after this moment are left alone, in milliseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Run:
    """Entries that may be folded together: contiguous, from the cursor on."""

    entries: list[Located]
    bytes: int
    """Stored bytes, as far as the entries tell."""
    ended_by: RunEnd

    @property
    def start_offset(self) -> int:
        """First offset."""
        return self.entries[0].start_offset

    @property
    def end_offset(self) -> int:
        """Last offset."""
        return self.entries[-1].end_offset

    @property
    def first_time_ms(self) -> int:
        """When the first of them was appended."""
        return self.entries[0].entry.created_at_ms


async def select_run(entries: AsyncIterator[Located], cursor: int, limits: RunLimits) -> Run | None:
    """The next run of `entries`, which are those of the index from the cursor on; None: none starts there."""
    chosen: list[Located] = []
    size, expected = 0, cursor
    ended_by: RunEnd = "tail"
    async for entry in entries:
        reason = _why_not(entry, expected, limits)
        grown = size + entry.stored_bytes
        full = chosen and grown > limits.target_bytes
        if reason is None and (full or len(chosen) >= limits.entries_max):
            reason = "target"
        if reason is not None:
            ended_by = reason
            break
        chosen.append(entry)
        size = grown
        expected = entry.end_offset + 1
    return Run(chosen, size, ended_by) if chosen else None


def _why_not(entry: Located, expected: int, limits: RunLimits) -> RunEnd | None:
    if entry.start_offset != expected:
        return "gap"
    if entry.entry.type != "WAL":
        return "compacted"
    return "young" if entry.entry.created_at_ms > limits.young_ms else None


async def entries_from(
    coordinator: Coordinator,
    keys: PartitionKeys,
    offset: int,
    *,
    clock: Clock,
    randomness: random.Random,
    policy: RetryPolicy,
) -> AsyncIterator[Located]:
    """The entries whose end is at or above `offset`, in order, scan after scan."""
    start, (_, end) = keys.index(offset), keys.index_range()
    while True:
        first = start
        records = await retry(
            lambda first=first: coordinator.range_scan(  # type: ignore[misc]
                first, end, limit=SCAN_PAGE, partition_key=keys.partition_key
            ),
            policy=policy,
            clock=clock,
            randomness=randomness,
        )
        for record in records:
            yield located(keys, record)
        if len(records) < SCAN_PAGE:
            return
        start = records[-1].key + "\0"
