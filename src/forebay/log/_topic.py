"""A topic as the catalog keeps it, and what can be wrong with one."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from forebay.errors import NotDone, UsageError
from forebay.log._errors import UnknownPartition
from forebay.log._keys import PARTITION_MAX
from forebay.log._numbers import WHOLE_MAX, whole

__all__ = ["TARGET_BYTES_MAX", "Topic", "TopicDeleted", "TopicExists", "TopicSettings", "TopicState"]

TopicState = Literal["ACTIVE", "FENCING", "REMOVING", "DELETED"]

TARGET_BYTES_MAX: Final = 512 * 1024 * 1024
"""Largest size that compaction can be asked to aim at."""
_SETTINGS: Final = (
    ("retention_ms", 1, WHOLE_MAX),
    ("retention_bytes", 1, WHOLE_MAX),
    ("compact_min_age_ms", 0, WHOLE_MAX),
    ("target_bytes", 1, TARGET_BYTES_MAX),
)
_NEEDED: Final = ("compact_min_age_ms", "target_bytes")


class TopicExists(NotDone):
    """There is a topic of this name already."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} exists already", hint="use it, or choose another name")
        self.topic = topic


class TopicDeleted(NotDone):
    """The topic is being deleted."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} is being deleted", hint=f"finish it first: forebay topics delete {topic}"
        )
        self.topic = topic


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a topic is kept."""

    retention_ms: int | None = None
    """Milliseconds after which records may be trimmed. At least 1, or None: for ever."""
    retention_bytes: int | None = None
    """Bytes per partition above which the oldest records may be trimmed. At least 1, or None: no bound."""
    compaction: bool = True
    """Whether small appends are folded into large objects."""
    compact_min_age_ms: int = 120_000
    """Milliseconds for which an append is left alone: longer than a writer may take to learn the outcome of
    its commit, which it looks up in the index. At least 0."""
    target_bytes: int = 64 * 1024 * 1024
    """Bytes that a compacted object should have. 1 to 512 MiB."""

    def __post_init__(self) -> None:
        for name, low, high in _SETTINGS:
            value = getattr(self, name)
            if (value is not None or name in _NEEDED) and type(value) is not int:
                raise UsageError(f"{name} is {value!r}", hint="it is an integer")
            if value is not None:
                whole(name, value, low, high)
        if type(self.compaction) is not bool:
            raise UsageError(f"compaction is {self.compaction!r}", hint="it is True or False")


class Topic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One topic, as the catalog knows it."""

    topic: str
    topic_id: str
    """Unique: a topic created again under an old name has another."""
    partitions: int
    created_at_ms: int
    revision: str = ""
    """Unique to the last change of this record."""
    settings: TopicSettings = TopicSettings()
    grows: bool = False
    """Whether appending to a higher partition adds it: so for topics that were created by an append."""
    state: TopicState = "ACTIVE"
    first_offset: int = 1
    """First offset of new partitions: above 1 where an earlier topic of this name was deleted."""

    def __post_init__(self) -> None:
        # Where it is read from the catalog this becomes `StorageDamaged`. Everybody counts up to the number
        # of partitions, so a wrong one must not get far.
        if not 1 <= self.partitions <= PARTITION_MAX + 1 or self.first_offset < 1:
            raise ValueError(f"{self.partitions} partitions from offset {self.first_offset}")

    def check_partition(self, partition: int) -> None:
        """Raise `UnknownPartition` where there is no such partition."""
        if not 0 <= partition < self.partitions:
            raise UnknownPartition(self.topic, partition, hint=f"it has 0 to {self.partitions - 1}")
