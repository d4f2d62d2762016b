"""Reading by time: which segments can hold what is asked for, and which of their rows do.

A segment knows the range of its event times and of its ingestion times, so most are left out without a look
at their data. Within a segment rows are filtered by the event time column and by the ingestion time of the
batch they came with. Both ends of a range are included; None leaves an end open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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
            if ends is not None and None not in ends and ends[0] > ends[1]:
                raise UsageError(f"{name} is {ends}", hint="the first end is not above the second")

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
        """The rows of a segment that are asked for; an empty table where there are none."""
        table = view.table()
        if not self.wants(view.meta):
            return table.slice(0, 0)
        if self.ingested_ms is not None:
            times = np.repeat(
                np.array([each.time_ms for each in view.meta.sources], np.int64),
                np.array([each.rows for each in view.meta.sources], np.int64),
            )
            mask = _within(pa.array(times[view.row_indices()]), self.ingested_ms)
            table = table.filter(mask)
        if self.event_ns is not None:
            column = table[event_time_column]
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("ns")).cast(pa.int64())
            table = table.filter(_within(column, self.event_ns))
        return table


def _overlap(wanted: Range, has: tuple[int, int]) -> bool:
    first, last = wanted
    return (first is None or first <= has[1]) and (last is None or has[0] <= last)


def _within(column: pa.ChunkedArray | pa.Array, wanted: Range) -> pa.ChunkedArray | pa.Array:
    first, last = wanted
    mask = pc.is_valid(column)
    if first is not None:
        mask = pc.and_(mask, pc.greater_equal(column, first))
    if last is not None:
        mask = pc.and_(mask, pc.less_equal(column, last))
    return mask
