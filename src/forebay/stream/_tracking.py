"""What a stream remembers of its producers and consumers, rebuilt from the last segment alone.

A segment begins with a snapshot of everything, if there is anything; deltas and trailers change it. So the
state after a restart is the last segment's snapshot and what followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.formats import osiris_chunk, osiris_tracking
from forebay.formats.osiris_chunk import Chunk
from forebay.formats.osiris_entry import SubBatch, decode_entries
from forebay.formats.osiris_tracking import OFFSET, SEQUENCE, TIMESTAMP, Track

__all__ = ["Tracking"]

SEQUENCES_MAX = 255
"""Producers that a snapshot remembers: those that wrote last."""


@dataclass(slots=True)
class Tracking:
    """The state at one moment."""

    sequences: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Per producer: chunk that brought its last sequence, and the sequence."""
    offsets: dict[bytes, int] = field(default_factory=dict)
    timestamps: dict[bytes, int] = field(default_factory=dict)

    def apply(self, chunk: Chunk) -> None:
        """Take in what one chunk says."""
        kind = chunk.header.type
        if kind == osiris_chunk.USER:
            self._add(osiris_tracking.decode(chunk.trailer), chunk.header.chunk_id)
            return
        for entry in decode_entries(chunk.data, chunk.header.entries):
            if not isinstance(entry, SubBatch):
                snapshot = kind == osiris_chunk.TRACKING_SNAPSHOT
                if snapshot:
                    self.sequences, self.offsets, self.timestamps = {}, {}, {}
                self._add(osiris_tracking.decode(entry, snapshot=snapshot), chunk.header.chunk_id)

    def _add(self, tracks: list[Track], chunk_id: int) -> None:
        for track in tracks:
            if track.kind == SEQUENCE:
                brought_by = chunk_id if track.chunk_id is None else track.chunk_id
                self.sequences[track.id] = (brought_by, track.value)
            elif track.kind == OFFSET:
                self.offsets[track.id] = track.value
            else:
                self.timestamps[track.id] = track.value

    def snapshot(self, first_offset: int, first_timestamp: int) -> list[Track]:
        """The blocks of a snapshot; what points before the stream's beginning is forgotten."""
        newest = sorted(self.sequences.items(), key=lambda item: item[1][0], reverse=True)[:SEQUENCES_MAX]
        self.sequences = dict(sorted(newest))
        self.offsets = {name: value for name, value in self.offsets.items() if value >= first_offset}
        self.timestamps = {name: at for name, at in self.timestamps.items() if at >= first_timestamp}
        return [
            *(Track(SEQUENCE, name, value, at) for name, (at, value) in self.sequences.items()),
            *(Track(OFFSET, name, value) for name, value in sorted(self.offsets.items())),
            *(Track(TIMESTAMP, name, value) for name, value in sorted(self.timestamps.items())),
        ]
