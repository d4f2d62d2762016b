"""From words and times to offsets, by asking the broker."""

from __future__ import annotations

import operator
from datetime import UTC, datetime
from typing import Literal, SupportsIndex, TypeAlias

from forebay.client._reading import TopicPartition
from forebay.client._session import Session, path_of
from forebay.client._topics import Topics
from forebay.errors import UsageError
from forebay.formats.http_messages import PATHS, OffsetsView

__all__ = ["Places", "Position", "time_ms"]

Position: TypeAlias = int | datetime | Literal["earliest", "latest"]
"""An offset, a time (with its zone), or one of the two ends."""


class Places:
    """Knows partitions and their offsets."""

    def __init__(self, session: Session, topics: Topics) -> None:
        self._session = session
        self._topics = topics

    async def of_topic(self, topic: str) -> list[TopicPartition]:
        """Its partitions; raises `NotFound`."""
        found = await self._topics.describe(topic)
        return [TopicPartition(topic, number) for number in range(found.topic.partitions)]

    async def offsets(self, place: TopicPartition, at_ms: int | None = None) -> OffsetsView:
        """Where a partition begins and ends, and the first offset of a time."""
        query = None if at_ms is None else {"time_ms": at_ms}
        path = path_of(PATHS.OFFSETS, query, topic=place.topic, partition=place.partition)
        return await self._session.get(path, OffsetsView)

    async def resolve(self, place: TopicPartition, position: Position) -> int:
        """The offset that a position means now."""
        if isinstance(position, datetime):
            found = await self.offsets(place, time_ms(position))
            return found.next if found.at is None else found.at
        if isinstance(position, SupportsIndex) and not isinstance(position, bool):
            return operator.index(position)
        if position in ("earliest", "latest"):
            ends = await self.offsets(place)
            return ends.earliest if position == "earliest" else ends.next
        raise UsageError(
            f"{position!r} is no position in a log", hint="an offset, a datetime, 'earliest' or 'latest'"
        )


def time_ms(time: datetime) -> int:
    """Milliseconds since the Unix epoch. A time without a zone is refused: whose would it be?"""
    if time.tzinfo is None:
        raise UsageError(f"{time} has no time zone", hint="for example datetime.now(timezone.utc)")
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // (datetime.resolution * 1000)
