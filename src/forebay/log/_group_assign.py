"""Who gets which partition: balanced, and as it was where that is possible.

A pure function, so that any member can work it out. The members do not have to agree on it: whoever is first
to write the new state decides, and the others take what is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.log._group_records import TopicPartition

__all__ = ["assign"]


def assign(
    members: Mapping[str, Sequence[str]],
    partitions: Mapping[str, int],
    before: Mapping[str, Sequence[TopicPartition]],
) -> dict[str, list[TopicPartition]]:
    """Partitions of every member.

    `members`: topics by member. `partitions`: number of partitions by topic. `before`: the assignment so far.
    Members with the same topics differ by at most one partition; a partition stays where it was unless its
    owner is gone or has too many.
    """
    chosen: dict[str, list[TopicPartition]] = {member: [] for member in sorted(members)}
    wanted = [
        TopicPartition(topic, number)
        for topic in sorted(partitions)
        for number in range(partitions[topic])
        if any(topic in topics for topics in members.values())
    ]
    owners = {place: member for member, places in before.items() for place in places}
    homeless: list[TopicPartition] = []
    quota = -(-len(wanted) // max(1, len(members)))
    for place in wanted:
        owner = owners.get(place)
        if owner in chosen and place.topic in members[owner] and len(chosen[owner]) < quota:
            chosen[owner].append(place)
        else:
            homeless.append(place)
    for place in homeless:
        takers = [member for member in chosen if place.topic in members[member]]
        least = min(takers, key=lambda member: (len(chosen[member]), member))
        chosen[least].append(place)
    _level(chosen, members)
    return {member: sorted(places) for member, places in chosen.items()}


def _level(chosen: dict[str, list[TopicPartition]], members: Mapping[str, Sequence[str]]) -> None:
    """Move partitions from the fullest to the emptiest until they differ by one at most, where allowed."""
    moved = True
    while moved:
        moved = False
        for low in sorted(chosen, key=lambda member: (len(chosen[member]), member)):
            for high in sorted(chosen, key=lambda member: (-len(chosen[member]), member)):
                if len(chosen[high]) - len(chosen[low]) < 2:
                    break
                movable = [place for place in chosen[high] if place.topic in members[low]]
                if movable:
                    chosen[high].remove(movable[-1])
                    chosen[low].append(movable[-1])
                    moved = True
                    break
            if moved:
                break
