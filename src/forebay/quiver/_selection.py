"""Reading by time: which segments can hold what is asked for, and which of their rows do.

A segment knows the range of its event times and of its ingestion times, so most are left out without a look
at their data. Within a segment rows are filtered by the event time column and by the ingestion time of the
batch they came with. Both ends of a range are included; None leaves an end open.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import UsageError
from forebay.formats.quiver_segment import SegmentMeta
from forebay.quiver._reading import SegmentView
from forebay.quiver._segment_file import SegmentInfo

__all__ = ["Selection"]

Range: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to read. Without anything: everything."""

    event_ns: Range | None = None
    """Event times in nanoseconds, first and last. A segment without event times is left out."""
    ingested_ms: Range | None = None
    """Ingestion times in milliseconds since the epoch, first and last."""
    signal: str | None = None

    def __post_init__(self) -> None:
        for name in ("event_ns", "ingested_ms"):
            ends = getattr(self, name)
            if ends is not None:
                _check_range(name, ends)
        if self.signal is not None and not isinstance(self.signal, str):
            raise UsageError(f"signal is {self.signal!r:.80}", hint="the name of a signal type")

    def wants(self, segment: SegmentInfo | SegmentMeta) -> bool:
        """Whether a segment can hold rows that are asked for."""
        if self.signal is not None and segment.signal != self.signal:
            return False
        if self.event_ns is not None and (
            segment.event_ns is None or not _overlap(self.event_ns, segment.event_ns)
        ):
            return False
        return self.ingested_ms is None or _overlap(self.ingested_ms, segment.ingested_ms)

    def rows(self, view: SegmentView, event_time_column: str = "timestamp") -> pa.Table:
        """The rows of a segment that are asked for; an empty table where there are none.

        `event_time_column` is the one that the store was told of, needed for event times only.
        """
        table = view.table()
        if not self.wants(view.meta):
            return table.slice(0, 0)
        if self.ingested_ms is not None:
            times = np.repeat(
                np.array([each.time_ms for each in view.meta.sources], np.int64),
                np.array([each.rows for each in view.meta.sources], np.int64),
            )
            mask = _within(pa.array(times[view.row_indices()]), self.ingested_ms)
            table = _filtered(table, mask)
        if self.event_ns is not None:
            column = _event_times(table, event_time_column)
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("ns")).cast(pa.int64())
            table = _filtered(table, _within(column, self.event_ns))
        return table


def _check_range(name: str, ends: Any) -> None:
    is_pair = isinstance(ends, tuple | list) and len(ends) == 2
    if not is_pair or not all(each is None or isinstance(each, Integral) for each in ends):
        raise UsageError(f"{name} is {ends!r:.80}", hint="a pair of integers, or None for an open end")
    if None not in ends and ends[0] > ends[1]:
        raise UsageError(f"{name} is {ends}", hint="the first end is not above the second")


def _event_times(table: pa.Table, name: str) -> pa.ChunkedArray:
    if table.schema.names.count(name) == 1:
        column = table[name]
        if pa.types.is_timestamp(column.type) or pa.types.is_integer(column.type):
            return column
    raise UsageError(f"{name!r:.80} is no column of event times", hint="name the store's event_time_column")


def _overlap(wanted: Range, has: tuple[int, int]) -> bool:
    first, last = wanted
    return (first is None or first <= has[1]) and (last is None or has[0] <= last)


def _within(column: pa.ChunkedArray | pa.Array, wanted: Range) -> pa.ChunkedArray | pa.Array:
    first, last = wanted
    mask = pc.is_valid(column)
    if first is not None:
        mask = pc.and_(mask, pc.greater_equal(column, _clamped(first)))
    if last is not None:
        mask = pc.and_(mask, pc.less_equal(column, _clamped(last)))
    return mask


def _filtered(table: pa.Table, mask: pa.ChunkedArray | pa.Array) -> pa.Table:
    try:
        return table.filter(mask)
    except pa.ArrowNotImplementedError:
        # Views and run-end encoded columns: Arrow cannot pick their rows, but it can cut and join them.
        wanted = np.flatnonzero(np.asarray(mask))
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1) if len(wanted) else []
        pieces = [table.slice(int(run[0]), len(run)) for run in runs]
        return pa.concat_tables([table.slice(0, 0), *pieces]).combine_chunks()


def _clamped(end: int) -> int:
    """An end that Arrow can compare with. Where none of the times is within, `wants` has said so before."""
    return min(max(int(end), -(1 << 63)), (1 << 63) - 1)
