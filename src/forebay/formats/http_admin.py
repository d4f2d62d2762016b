"""Messages of the broker's HTTP door that are not about records: topics, groups, compaction, retention.

`forebay.formats.http_messages` offers them together with the rest.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forebay.formats._http_fields import Number, Offset, Partition, TimeMs, TopicName

__all__ = [
    "CommitRequest",
    "CommittedOffset",
    "CompactionRequest",
    "CompactionResponse",
    "CompactionRun",
    "CompactionState",
    "CompactionStates",
    "Deleted",
    "ExplainResponse",
    "FenceRequest",
    "FenceView",
    "GroupList",
    "GroupMemberView",
    "GroupPartition",
    "GroupView",
    "OffsetsView",
    "ResetRequest",
    "ResetResponse",
    "ResetResult",
    "RetentionRequest",
    "RetentionResponse",
    "TopicAlter",
    "TopicCreate",
    "TopicList",
    "TopicSettingsView",
    "TopicView",
    "TrimRequest",
    "TrimView",
    "UnfenceRequest",
]


# -- topics


class TopicSettingsView(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a topic is kept. What is left out has its default."""

    retention_ms: Annotated[int, Meta(ge=1, le=(1 << 62))] | None = None
    retention_bytes: Annotated[int, Meta(ge=1, le=(1 << 62))] | None = None
    compaction: bool = True
    compact_min_age_ms: Number = 120_000
    target_bytes: Annotated[int, Meta(ge=1, le=(1 << 29))] = 64 * 1024 * 1024


class OffsetsView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where a partition begins and ends."""

    topic: str
    partition: int
    earliest: int
    next: int
    records: int
    log_state: str
    epoch: int
    at: int | None = None
    """The offset of the time that was asked for."""


class TopicView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One topic. `offsets` and `problems` only where a single one was asked for."""

    topic: str
    topic_id: str
    partitions: int
    created_at_ms: int
    state: str
    settings: TopicSettingsView
    offsets: list[OffsetsView] | None = None
    problems: list[str] = []
    """What is wrong with each partition that cannot be read: it is not in `offsets`."""


class TopicList(msgspec.Struct):
    """Answer of GET /topics."""

    topics: list[TopicView]


class TopicCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /topics."""

    topic: TopicName
    partitions: Annotated[int, Meta(ge=1, le=100_000)] = 1
    settings: TopicSettingsView | None = None


class TopicAlter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of PATCH /topics/{topic}: more partitions, other settings."""

    partitions: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    settings: TopicSettingsView | None = None


class Deleted(msgspec.Struct):
    """Answer of a DELETE."""

    name: str
    deleted: bool


class TrimRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST .../trim: the offset that becomes the earliest."""

    offset: Offset


class TrimView(msgspec.Struct, kw_only=True):
    """What a trim changed."""

    topic: str
    partition: int
    before: int
    earliest: int
    next: int
    records: int


class FenceRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST .../fence."""

    epoch: Annotated[int, Meta(ge=1, le=(1 << 62))] | None = None
    """None: the next one."""


class UnfenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST .../unfence: the epoch that `fence` answered."""

    epoch: Number


class FenceView(msgspec.Struct, kw_only=True):
    """Whether a partition takes appends, and from whom."""

    topic: str
    partition: int
    log_state: str
    epoch: int
    next_offset: int


class ExplainResponse(msgspec.Struct, kw_only=True):
    """Where a record is stored."""

    topic: str
    partition: int
    offset: int
    source: str
    object: str
    byte_offset: int
    byte_length: int
    batch_start: int
    batch_end: int
    committed_at_ms: int
    writer: str | None
    index_key: str | None
    timestamp_ms: int | None
    value_bytes: int
    key_bytes: int | None


# -- groups


class GroupPartition(msgspec.Struct, kw_only=True):
    """How far a group is behind in one partition."""

    topic: str
    partition: int
    committed: int | None
    earliest: int
    next: int
    lag_records: int
    lag_seconds: float
    owner: str
    generation: int


class GroupMemberView(msgspec.Struct, kw_only=True):
    """A live member."""

    member_id: str
    topics: list[str]
    joined_at_ms: int


class GroupView(msgspec.Struct, kw_only=True):
    """A group, its members and its lag."""

    group: str
    generation: int
    members: list[GroupMemberView]
    partitions: list[GroupPartition]
    lag_records: int
    lag_seconds: float
    problems: list[str] = []
    """What cannot be read: it is in none of the others."""


class GroupList(msgspec.Struct):
    """Answer of GET /groups."""

    groups: list[str]


class CommittedOffset(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Next offset that a group wants to read."""

    topic: TopicName
    partition: Partition
    offset: Offset


class CommitRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /groups/{group}/offsets."""

    offsets: Annotated[list[CommittedOffset], Meta(min_length=1)]
    generation: Number = 0
    """A commit is refused where the partition was committed under a higher one."""


class ResetRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /groups/{group}/reset: exactly one of `to` and `to_time_ms`."""

    to: Literal["earliest", "latest"] | Offset | None = None
    to_time_ms: TimeMs | None = None
    topic: TopicName | None = None
    """None: every partition the group knows."""
    partition: Partition | None = None
    dry_run: bool = False
    force: bool = False
    """Also while members are alive."""


class ResetResult(msgspec.Struct, kw_only=True):
    """What a reset did, or would do, to one partition."""

    topic: str
    partition: int
    before: int | None
    after: int


class ResetResponse(msgspec.Struct):
    """Answer of POST /groups/{group}/reset."""

    partitions: list[ResetResult]
    dry_run: bool


# -- compaction and retention


class CompactionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /compaction: one pass over a topic, or one of its partitions."""

    topic: TopicName
    partition: Partition | None = None


class CompactionRun(msgspec.Struct, kw_only=True):
    """What a pass did to one partition."""

    topic: str
    partition: int
    runs: int
    records: int
    bytes_written: int
    lag_records: int
    reason: str
    error: str


class CompactionResponse(msgspec.Struct):
    """Answer of POST /compaction."""

    partitions: list[CompactionRun]


class CompactionState(msgspec.Struct, kw_only=True):
    """How far a partition is compacted."""

    topic: str
    partition: int
    earliest: int
    next: int
    cursor: int
    """First offset that is not compacted."""
    lag_records: int
    state: str
    """Step of the compaction under way; empty: none."""


class CompactionStates(msgspec.Struct, omit_defaults=True):
    """Answer of GET /compaction?topic=T."""

    partitions: list[CompactionState]
    problems: list[str] = []
    """What is wrong with each partition that cannot be read: it is not in `partitions`."""


class RetentionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /retention: one pass over all topics, or one."""

    topic: TopicName | None = None
    dry_run: bool = False


class RetentionResponse(msgspec.Struct):
    """Answer of POST /retention."""

    trimmed: list[TrimView]
    errors: dict[str, str]
    dry_run: bool
