"""Where one fragment ends and the next begins.

A fragment is cut when its chunks reach the target size, the crossing chunk included, and at the end of every
segment that is no longer written. The rest of the segment being written waits, until its first chunk is old
enough or somebody insists. Chunks are never split, and a fragment never spans two segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forebay.stream._local import LocalLog, Segment
from forebay.stream._manifest import FragmentInfo

__all__ = ["Cut", "cuts"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Chunks of one segment that are to become a fragment."""

    segment: Segment
    start: int
    """Number of its first chunk in the segment."""
    stop: int
    """Number of the first chunk behind it."""
    sequence: int

    @property
    def first_offset(self) -> int:
        """Offset of its first record."""
        return int(self.segment.records["chunk_id"][self.start])

    @property
    def next_offset(self) -> int:
        """Offset behind its last record."""
        if self.stop < len(self.segment.records):
            return int(self.segment.records["chunk_id"][self.stop])
        return self.segment.next_id

    @property
    def data_bytes(self) -> int:
        """Bytes of its chunks."""
        return self.end - int(self.segment.records["position"][self.start])

    @property
    def end(self) -> int:
        """Where its last chunk ends in the segment file."""
        records = self.segment.records
        return int(records["position"][self.stop]) if self.stop < len(records) else self.segment.end


def cuts(
    log: LocalLog,
    offset: int,
    *,
    target_bytes: int,
    before_ms: int | None,
    last: FragmentInfo | None = None,
) -> Iterator[Cut]:
    """The fragments from `offset` on, which is the first id of a chunk.

    The open end is cut too if its first chunk has a timestamp at or below `before_ms`, or always if that is
    None. `last` is the fragment before: its number goes on where it lies in the same segment.
    """
    sequence_after = {last.chunks_after: last.sequence + 1} if last is not None else {}
    for segment in log.segments:
        if segment.next_id <= offset:
            continue
        if not segment.first_id <= offset:
            return  # A hole in the log: whoever asks for what lies in it is told.
        start = segment.find(offset) if offset > segment.first_id else 0
        positions = segment.positions
        sequence = sequence_after.pop(start, 0) if start else 0
        while start < len(segment.records):
            stop = int(np.searchsorted(positions, positions[start] + target_bytes, side="left"))
            if stop > len(segment.records):
                first_ms = int(segment.records["timestamp"][start])
                if segment.last and before_ms is not None and first_ms > before_ms:
                    return
                stop = len(segment.records)
            yield Cut(segment, start, stop, sequence)
            start, sequence = stop, sequence + 1
        offset = segment.next_id
