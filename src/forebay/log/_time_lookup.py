"""From a time to an offset, by bisection of the index.

Appends of a partition carry times that never go back along the offsets (a writer takes the later of its own
clock and the previous append's time), and the entry of a compacted range carries the latest of its appends.
So "created at or after t" is false up to some entry and true from it on. Each probe reads a page of entries
and halves what is left; the rest depends on the logarithm of the log's length, not on the length.

Times are those of the appends. A record that brings a time of its own, perhaps years old, is found by when it
was appended: an index by such times could not be bisected.

Entries of the write-ahead log below the compaction cursor are ignored, as in every lookup: what lay before
such a leftover is folded away, so its start says nothing. Since compaction may move on during the search, the
answer stands only if the cursor is still where it was.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.errors import ForebayError, NotFound
from forebay.log._errors import DataLost
from forebay.log._fetch import Fetcher
from forebay.log._fetched import ReaderConfig
from forebay.log._keys import PartitionKeys
from forebay.log._resolve import Located, PartitionView, Resolver

__all__ = ["TimeLookup"]

PROBE_ENTRIES: Final = 32
"""Entries one probe of the bisection reads."""


class TimeLookup:
    """Looks up offsets by the time of their append."""

    def __init__(self, resolver: Resolver, fetcher: Fetcher, *, config: ReaderConfig) -> None:
        self._resolver = resolver
        self._fetcher = fetcher
        self._attempts_max = config.attempts_max

    async def offset(self, keys: PartitionKeys, time_ms: int, *, whole_entries: bool = False) -> int:
        """The first offset appended at or after `time_ms`; the next offset where there is none.

        With `whole_entries` the start of the entry that holds it: no object is read.
        """
        cursor = await self._resolver.cursor(keys)
        for _ in range(self._attempts_max):
            view = await self._resolver.view(keys)
            found = await self._search(view, time_ms, cursor)
            before, cursor = cursor, await self._resolver.cursor(keys)
            if cursor != before:
                continue
            if found is None:
                return self._in_tail(view, time_ms)
            offset = found.start_offset if whole_entries else await self._inside(found, time_ms)
            if offset is not None:
                return max(offset, view.earliest)
        raise DataLost(
            f"{keys}: no stable view of the index in {self._attempts_max} attempts",
            hint="compaction moves very fast, or an object is missing: run `forebay log verify`",
        )

    @staticmethod
    def _in_tail(view: PartitionView, time_ms: int) -> int:
        pending = view.pending
        if pending is not None and pending.created_at_ms >= time_ms:
            return max(pending.start_offset, view.earliest)
        return view.next

    async def _search(self, view: PartitionView, time_ms: int, cursor: int) -> Located | None:
        """The lowest entry created at or after `time_ms`, or None."""
        low, high = view.earliest, view.next
        best: Located | None = None
        # Every entry that ends below `low` is too old; `best`, if any, ends at or above `high`.
        while low < high:
            middle = (low + high) // 2
            entries = await self._probe(view, middle, cursor)
            late = next((n for n, each in enumerate(entries) if each.entry.created_at_ms >= time_ms), None)
            if late is None and entries:
                low = entries[-1].end_offset + 1
            elif late is None:
                # Nothing ends at or above the middle: what is left lies below it.
                high = middle
            else:
                best = entries[late]
                if late:
                    break
                high = min(middle, best.start_offset)
        return best

    async def _probe(self, view: PartitionView, offset: int, cursor: int) -> list[Located]:
        """The first entries at or above `offset`; none only if there are none up to the end."""
        while True:
            page = await self._resolver.scan_entries(view.keys, offset, PROBE_ENTRIES)
            entries = [each for each in page if not _is_stale(each, cursor)]
            if entries or len(page) < PROBE_ENTRIES:
                return entries
            offset = page[-1].end_offset + 1

    async def _inside(self, located: Located, time_ms: int) -> int | None:
        """The offset within an entry; None where its object has gone meanwhile."""
        entry = located.entry
        if entry.first_time_ms is None or entry.first_time_ms >= time_ms:
            return located.start_offset
        [batch] = await self._fetcher.fetch([located])
        if isinstance(batch, NotFound):
            return None
        if isinstance(batch, ForebayError):
            raise batch
        times = batch.timestamps_ms
        if times is None or _not_append_times(times, entry.first_time_ms, entry.created_at_ms):
            # Records with times of their own: when each was appended is no longer known. Too early is safe.
            return located.start_offset
        return located.start_offset + int(np.searchsorted(times, time_ms, side="left"))


def _is_stale(located: Located, cursor: int) -> bool:
    return located.entry.type == "WAL" and located.end_offset < cursor


def _not_append_times(times: np.ndarray[tuple[int], np.dtype[np.int64]], first: int, last: int) -> bool:
    ordered = bool(np.all(times[1:] >= times[:-1]))
    return not ordered or int(times[0]) < first or int(times[-1]) > last
