"""Messages of the broker's HTTP door that somebody looks at: objects of a partition, cost by flush interval.

`forebay.formats.http_messages` offers them together with the rest.
"""

from __future__ import annotations

import msgspec

__all__ = ["CompactionUnderWay", "CostAt", "CostView", "ObjectView", "ObjectsView"]


class ObjectView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One append or one compacted range, and the object that holds it."""

    start_offset: int
    end_offset: int
    records: int
    source: str
    """`WAL`, `COMPACTED`, or `pending`: the last append, whose index entry comes with the next one."""
    object: str
    """Full URI. A write-ahead object is shared by many partitions."""
    encoding: str
    created_at_ms: int
    byte_offset: int | None = None
    """First byte in a shared object; left out: the whole object."""
    bytes: int | None = None
    """Stored bytes; left out where the entry does not tell."""
    first_time_ms: int | None = None
    """Earliest append inside a compacted range; `created_at_ms` is the latest."""
    writer: str | None = None
    stale: bool = False
    """Covered by a compacted range, or trimmed: nobody reads it any more, and it will be removed."""


class CompactionUnderWay(msgspec.Struct, kw_only=True):
    """A compaction that somebody has begun and anybody can finish."""

    compaction_id: str
    state: str
    start_offset: int
    end_offset: int
    object: str
    created_at_ms: int


class ObjectsView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where the records of a partition are stored, and how far it is compacted."""

    topic: str
    partition: int
    earliest: int
    next: int
    log_state: str
    epoch: int
    cursor: int
    """First offset that is not compacted."""
    lag_records: int
    """Records committed and not compacted."""
    objects: list[ObjectView]
    """In the order of their offsets."""
    next_from: int | None = None
    """Ask for `from` this offset to go on; left out at the end."""
    compaction: CompactionUnderWay | None = None
    entries: int | None = None
    """Index entries that are read, all of them. The totals are left out where `from` was given."""
    bytes: int | None = None
    """Their stored bytes."""
    compacted_bytes: int | None = None
    """Of these in compacted objects."""
    complete: bool | None = None
    """Whether the totals are those of the whole partition: false where it has too many entries."""


class CostAt(msgspec.Struct, kw_only=True):
    """What the requests would cost at one flush interval."""

    batch_max_delay_ms: int
    flushes_per_second: float
    dollars_per_month: float
    current: bool
    """Whether this is the broker's own setting: measured, not estimated."""


class CostView(msgspec.Struct, kw_only=True):
    """Answer of GET /cost: the requests of this broker to the store, priced. Storage is not in it."""

    broker_id: str
    basis: str
    """Which prices."""
    window_seconds: float
    """What the rates are averages of."""
    batch_max_delay_ms: int
    produce_requests_per_second: float
    flushes_per_second: float
    wal_bytes_per_second: float
    requests_per_second: dict[str, float]
    """Requests to the store by operation."""
    dollars_per_month: float
    """At these rates."""
    intervals: list[CostAt]
    """At other flush intervals, shortest first. Empty: this broker does not write."""
