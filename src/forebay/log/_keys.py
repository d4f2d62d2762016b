"""Where everything of a log lies: the keys of the coordinator and the keys of the objects.

    llog/{topic}/partitions/{partition}/meta/control             state, counter, pending append
    llog/{topic}/partitions/{partition}/meta/compaction-cursor   first offset not yet compacted
    llog/{topic}/partitions/{partition}/meta/compaction          a compaction under way, or absent
    llog/{topic}/partitions/{partition}/meta/compactor-claim     who compacts, ephemeral
    llog/{topic}/partitions/{partition}/index/{end:020d}         one entry per append or compacted range
    llog-catalog/topics/{topic}                                  topics and their settings
    llog-catalog/groups/{group}                                  names of consumer groups
    llog-catalog/meta/identity                                   a random name that tells this log from others
    llog-groups/{group}/meta/state                               generation, members and who has what
    llog-groups/{group}/members/{member}                         a live member, ephemeral
    llog-groups/{group}/offsets/{topic}:{partition:05d}          how far the group has come, and its owner

    llog-catalog/identity                                        object: the same name
    llog/wal-shared/{uuid}                                       object: batches of many partitions
    llog/{topic}/partitions/{partition}/data/compacted/{uuid}    object: one compacted range
    llog/{topic}/partitions/{partition}/data/wal/{uuid}          object: one batch, older layout, still read

All coordinator keys of a partition carry the partition key `{topic}:{partition}`, so they live on one shard
and one request changes them in one step. All keys of a group carry `llog-group:{group}`. The last part of a
coordinator key may not hold a dot (see the contract of `forebay.coordination`), so names that end a key are
escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from forebay.coordination import children
from forebay.errors import StorageDamaged, UsageError
from forebay.log._numbers import whole

__all__ = [
    "CATALOG_PARTITION_KEY",
    "IDENTITY_KEY",
    "IDENTITY_OBJECT",
    "OFFSET_DIGITS",
    "PARTITION_MAX",
    "ROOT",
    "GroupKeys",
    "PartitionKeys",
    "escaped",
    "group_key",
    "groups_range",
    "shared_wal_key",
    "topic_key",
    "topics_range",
    "unescaped",
    "validate_group",
    "validate_topic",
]

ROOT: Final = "llog"
"""First part of every key of the log."""
CATALOG: Final = "llog-catalog"
GROUPS: Final = "llog-groups"
CATALOG_PARTITION_KEY: Final = "llog-catalog"
"""Topics are few and listed as a whole: they all live on one shard."""
IDENTITY_KEY: Final = f"{CATALOG}/meta/identity"
"""In the coordinator."""
IDENTITY_OBJECT: Final = f"{CATALOG}/identity"
"""In the store."""
OFFSET_DIGITS: Final = 20
TOPIC_CHARS_MAX: Final = 200
"""Longest topic name."""
PARTITION_MAX: Final = 99_999
"""Highest partition number."""

_RESERVED: Final = frozenset({"wal-shared"})
_TOPIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """The keys of one partition. Those that every commit needs are put together once."""

    topic: str
    partition: int
    partition_key: str = field(init=False, compare=False, repr=False)
    """What keeps the partition's keys on one shard."""
    root: str = field(init=False, compare=False, repr=False)
    """The directory of the partition."""
    control: str = field(init=False, compare=False, repr=False)
    """State, counter and pending append."""
    _index: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        validate_topic(self.topic)
        # True and 1.0 are equal to 1 and are written differently: a key must come from an integer.
        if type(self.partition) is not int or not 0 <= self.partition <= PARTITION_MAX:
            object.__setattr__(self, "partition", whole("partition", self.partition, 0, PARTITION_MAX))
        root = f"{ROOT}/{self.topic}/partitions/{self.partition}"
        object.__setattr__(self, "partition_key", f"{self.topic}:{self.partition}")
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "control", f"{root}/meta/control")
        object.__setattr__(self, "_index", f"{root}/index/")

    def __str__(self) -> str:
        return self.partition_key

    @property
    def cursor(self) -> str:
        """The compaction cursor."""
        return f"{self.root}/meta/compaction-cursor"

    @property
    def compaction(self) -> str:
        """The compaction under way."""
        return f"{self.root}/meta/compaction"

    @property
    def claim(self) -> str:
        """Who compacts."""
        return f"{self.root}/meta/compactor-claim"

    def index(self, end_offset: int) -> str:
        """The entry of the append or compacted range that ends at this offset."""
        return self._index + str(end_offset).zfill(OFFSET_DIGITS)

    def index_range(self) -> tuple[str, str]:
        """All index entries."""
        return children(f"{self.root}/index")

    def end_offset(self, index_key: str) -> int:
        """The offset inside an index key of this partition; raises `StorageDamaged` where there is none."""
        name = index_key.rpartition("/")[2]
        # Only what `index` writes: `int` takes signs, spaces and the digits of other scripts as well.
        if len(name) != OFFSET_DIGITS or not (name.isascii() and name.isdigit()):
            raise StorageDamaged(
                f"{index_key!r} is no key of an index", hint="something else wrote this key; delete it"
            )
        return int(name)

    def compacted_object(self, unique: str) -> str:
        """A new compacted object."""
        return f"{self.root}/data/compacted/{unique}"


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of one consumer group."""

    group: str

    def __post_init__(self) -> None:
        validate_group(self.group)

    @property
    def partition_key(self) -> str:
        """What keeps the group's keys on one shard."""
        return f"llog-group:{self.group}"

    @property
    def root(self) -> str:
        """The directory of the group."""
        return f"{GROUPS}/{self.group}"

    @property
    def meta(self) -> str:
        """The directory of the state, to be watched."""
        return f"{self.root}/meta"

    @property
    def state(self) -> str:
        """Generation, members, assignment."""
        return f"{self.root}/meta/state"

    @property
    def members(self) -> str:
        """The directory of the members, to be watched."""
        return f"{self.root}/members"

    def member(self, member_id: str) -> str:
        """One live member."""
        return f"{self.root}/members/{escaped(member_id)}"

    def offset(self, topic: str, partition: int) -> str:
        """How far the group has come in one partition."""
        return f"{self.root}/offsets/{escaped(topic)}:{partition:05d}"

    def offsets_range(self) -> tuple[str, str]:
        """All of them."""
        return children(f"{self.root}/offsets")


def group_key(group: str) -> str:
    """The catalog entry of a group."""
    return f"{CATALOG}/groups/{escaped(validate_group(group))}"


def groups_range() -> tuple[str, str]:
    """All catalog entries of groups."""
    return children(f"{CATALOG}/groups")


def shared_wal_key(unique: str) -> str:
    """A new shared write-ahead object."""
    return f"{ROOT}/wal-shared/{unique}"


def topic_key(topic: str) -> str:
    """The catalog entry of a topic."""
    return f"{CATALOG}/topics/{escaped(validate_topic(topic))}"


def topics_range() -> tuple[str, str]:
    """All catalog entries."""
    return children(f"{CATALOG}/topics")


def validate_topic(topic: str) -> str:
    """Return the name, or raise: letters, digits, `.`, `_`, `-`, not first a dot or dash, up to 200."""
    if not _named(topic) or topic in _RESERVED:
        raise UsageError(
            f"invalid topic name {str(topic)[:TOPIC_CHARS_MAX]!r}",
            hint=f"letters, digits, '.', '_', '-', up to {TOPIC_CHARS_MAX}, first a letter or digit",
        )
    return topic


def _named(name: object) -> bool:
    return isinstance(name, str) and len(name) <= TOPIC_CHARS_MAX and bool(_TOPIC.fullmatch(name))


def validate_group(group: str) -> str:
    """Return the name, or raise: as a topic's."""
    if not _named(group):
        raise UsageError(
            f"invalid group name {str(group)[:TOPIC_CHARS_MAX]!r}",
            hint=f"letters, digits, '.', '_', '-', up to {TOPIC_CHARS_MAX}, first a letter or digit",
        )
    return group


def escaped(name: str) -> str:
    """A name as the last part of a coordinator key: without dots, reversibly."""
    return name.replace("~", "~~").replace(".", "~d")


def unescaped(part: str) -> str:
    """What `escaped` was given."""
    return re.sub("~(.)", lambda match: "." if match[1] == "d" else match[1], part)
