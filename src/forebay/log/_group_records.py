"""What consumer groups keep in the coordinator, and what can go wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from forebay.errors import NotDone, UsageError
from forebay.log._keys import PartitionKeys
from forebay.log._numbers import whole

__all__ = [
    "GenerationFenced",
    "GroupBusy",
    "GroupOffset",
    "GroupState",
    "MemberRecord",
    "TopicPartition",
    "valid_generation",
    "valid_offsets",
    "valid_place",
]

NUMBER_MAX: Final = 2**62
"""Highest offset and generation that can be committed: what is counted up from there still fits 64 bits."""


class GenerationFenced(NotDone):
    """The commit came from somebody who no longer owns the partition. Nothing was committed for it."""

    def __init__(self, group: str, partition: TopicPartition, *, generation: int, current: int) -> None:
        super().__init__(
            f"group {group!r}: {partition} has another owner or was reset; "
            f"the commit came from generation {generation}, the group is at {current}",
            hint="the partition has another owner now, which begins at the last commit; drop what is in hand",
        )
        self.group = group
        self.partition = partition
        self.generation = generation
        self.current = current


class GroupBusy(NotDone):
    """The group has live members, and what was asked would pull the rug from under them."""

    def __init__(self, group: str, members: int) -> None:
        super().__init__(
            f"group {group!r} has {members} live members",
            hint="stop them first, or force it: they are fenced then and begin again",
        )
        self.group = group
        self.members = members


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


class GroupOffset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a group has come in one partition, and who may say so next.

    Whoever wrote the record last owns it: a commit is a compare-and-set on the version of that write.
    """

    topic: str
    partition: int
    offset: int | None = None
    """Next offset to be read; None: nothing was ever committed."""
    generation: int = 0
    """Generation of the owner. It only grows."""
    owner: str = ""
    """Member that owns the partition; empty: nobody."""
    committed_at_ms: int = 0
    commit_id: str = ""
    """Unique to the write that left this record."""

    @property
    def place(self) -> TopicPartition:
        """Which partition."""
        return TopicPartition(self.topic, self.partition)


class GroupState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is in the group, and who has what. Replaced as a whole, under the next generation."""

    generation: int = 0
    assignment: dict[str, list[tuple[str, int]]] = {}
    """Partitions by member; every member is there, also one without partitions."""
    changed_at_ms: int = 0
    revision: str = ""
    """Unique to the write that left this record."""


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live member. Its key vanishes with its session."""

    member_id: str
    topics: list[str]
    joined_at_ms: int


def valid_place(place: TopicPartition) -> TopicPartition:
    """The place with a plain integer in it; raises unless this is a partition that can be."""
    if not isinstance(place, TopicPartition):
        raise UsageError(f"{place!r} is no partition", hint="as TopicPartition('orders', 0)")
    return TopicPartition(place.topic, PartitionKeys(place.topic, place.partition).partition)


def valid_offsets(offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """What is to be committed, in plain integers; raises where something can be no partition or offset."""
    return {
        valid_place(place): whole(f"offset of {place}", offset, 0, NUMBER_MAX)
        for place, offset in offsets.items()
    }


def valid_generation(generation: int) -> int:
    """A plain integer; raises unless a group could come after it."""
    return whole("generation", generation, 0, NUMBER_MAX)
