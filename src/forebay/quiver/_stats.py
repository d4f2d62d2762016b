"""Figures about a store and its subscribers."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.quiver._acks import Acks
from forebay.quiver._backlog import Backlog
from forebay.quiver._delivery import Deliveries
from forebay.quiver._finalizer import Finalizer
from forebay.quiver._group_log import GroupLog
from forebay.quiver._segment_file import SegmentInfo

__all__ = ["QuiverStats", "SubscriberStats", "collect"]


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """One subscriber."""

    name: str
    high_water: int
    """Everything up to this segment is resolved."""
    gap_set_size: int
    """Segments resolved above the first hole."""
    lag_segments: int
    """Segments it has not resolved."""
    pinned_bytes: int
    """Their bytes."""
    oldest_pending_ms: int
    """Age of the oldest of them in milliseconds, 0 where there is none."""
    in_flight: int
    is_active: bool
    """Whether it has asked for a segment since the store was opened, and is not paused."""
    is_orphaned: bool
    """Whether nobody has spoken for it since the store was opened."""
    dropped: dict[str, int]
    """Segments it never got, by reason."""


@dataclass(frozen=True, slots=True)
class QuiverStats:
    """The whole store."""

    segments: int
    rows: int
    next_segment: int
    used_bytes: int
    segment_bytes: int
    wal_bytes: int
    ack_bytes: int
    open_bytes: int
    """Logical bytes that are in no segment file yet."""
    losses: dict[str, int]
    """What was dropped since the store was made: `segments.size`, `rows.expired` and so on."""
    subscribers: list[SubscriberStats]


def collect(
    segments: dict[int, SegmentInfo],
    backlog: Backlog,
    acks: Acks,
    wal: GroupLog,
    finalizer: Finalizer,
    deliveries: Deliveries,
    used_bytes: int,
    now_ms: int,
) -> QuiverStats:
    """Look at everything once."""
    subscribers = []
    for who in acks.state.subscribers.values():
        pending, oldest = backlog.of(who.name), backlog.oldest(who.name)
        subscribers.append(
            SubscriberStats(
                name=who.name,
                high_water=who.high_water,
                gap_set_size=len(who.resolved_above),
                lag_segments=pending.segments,
                pinned_bytes=pending.bytes,
                oldest_pending_ms=0 if oldest is None else max(0, now_ms - oldest.ingested_ms[0]),
                in_flight=deliveries.in_flight(who.name),
                is_active=deliveries.is_active(who.name),
                is_orphaned=deliveries.is_orphaned(who.name),
                dropped=dict(who.dropped),
            )
        )
    return QuiverStats(
        segments=len(segments),
        rows=backlog.rows.total(),
        next_segment=finalizer.next_segment,
        used_bytes=used_bytes,
        segment_bytes=backlog.file_bytes,
        wal_bytes=wal.bytes,
        ack_bytes=acks.bytes,
        open_bytes=finalizer.bytes,
        losses=dict(acks.state.losses),
        subscribers=subscribers,
    )
