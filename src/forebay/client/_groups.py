"""Consumer groups over HTTP: offsets under a name, lag, reset."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

from forebay.client._config import ConsumerConfig
from forebay.client._consumer import Consumer
from forebay.client._places import Places, Position, time_ms
from forebay.client._reading import Fetcher, TopicPartition
from forebay.client._session import Session, path_of
from forebay.errors import NotFound, StorageDamaged
from forebay.formats.http_messages import (
    PATHS,
    CommitRequest,
    CommittedOffset,
    Deleted,
    GroupList,
    GroupView,
    ResetRequest,
    ResetResponse,
    ResetResult,
)

__all__ = ["Groups"]


class Groups:
    """Lists, describes, commits, resets and deletes groups, and makes consumers."""

    def __init__(self, session: Session, places: Places) -> None:
        self._session = session
        self._places = places

    def consumer(
        self,
        group: str,
        topics: Iterable[str],
        *,
        start_at: Literal["earliest", "latest"] = "earliest",
        config: ConsumerConfig | None = None,
    ) -> Consumer:
        """Reads from what the group committed: `async with client.groups.consumer("g", ["orders"]) as c: ...`

        `start_at`: where to begin in a partition without a committed offset.
        """
        chosen, names = config or ConsumerConfig(), list(topics)

        async def begin() -> dict[TopicPartition, int]:
            committed = await self.committed(group)
            places = [place for name in names for place in await self._places.of_topic(name)]
            missing = [place for place in places if place not in committed]
            found = await asyncio.gather(*(self._places.resolve(place, start_at) for place in missing))
            return {place: committed[place] for place in places if place in committed} | dict(
                zip(missing, found, strict=True)
            )

        async def commit(offsets: Mapping[TopicPartition, int]) -> None:
            await self.commit(group, offsets)

        fetcher = Fetcher(self._session, chosen)
        return Consumer(fetcher, begin, commit=commit, max_wait_ms=chosen.max_wait_ms)

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """Next offset to be read, by partition. Empty for a group that is not there yet.

        Raises `StorageDamaged` where not all of it can be read.
        """
        try:
            view = await self.describe(group)
        except NotFound:
            return {}
        if view.problems:
            # Whoever takes it for "nothing was committed" begins somewhere else, and may pass over records.
            raise StorageDamaged(
                f"group {group!r}: {view.problems[0]}", hint=f"forebay groups describe {group} shows the rest"
            )
        return {
            TopicPartition(each.topic, each.partition): each.committed
            for each in view.partitions
            if each.committed is not None
        }

    async def commit(self, group: str, offsets: Mapping[TopicPartition, int], *, generation: int = 0) -> None:
        """Commit next offsets to be read. The same again is harmless, so a lost answer is asked for again."""
        entries = [
            CommittedOffset(topic=place.topic, partition=place.partition, offset=offset)
            for place, offset in offsets.items()
        ]
        message = CommitRequest(offsets=entries, generation=generation)
        path = path_of(PATHS.GROUP_OFFSETS, group=group)
        _ = await self._session.call("POST", path, CommitRequest, message, repeatable=True)

    async def describe(self, group: str) -> GroupView:
        """Members and lag; raises `NotFound`."""
        return await self._session.get(path_of(PATHS.GROUP, group=group), GroupView)

    async def reset(
        self,
        group: str,
        *,
        to: Position,
        topic: str | None = None,
        partition: int | None = None,
        dry_run: bool = False,
        force: bool = False,
    ) -> list[ResetResult]:
        """Move a group to one end, an offset or a time; with `dry_run` only say what would change."""
        message = ResetRequest(
            to=None if isinstance(to, datetime) else to,
            to_time_ms=time_ms(to) if isinstance(to, datetime) else None,
            topic=topic,
            partition=partition,
            dry_run=dry_run,
            force=force,
        )
        path = path_of(PATHS.GROUP_RESET, group=group)
        return (await self._session.call("POST", path, ResetResponse, message, repeatable=True)).partitions

    async def delete(self, group: str, *, force: bool = False) -> None:
        """Forget a group and its offsets."""
        path = path_of(PATHS.GROUP, {"force": "true"} if force else None, group=group)
        _ = await self._session.call("DELETE", path, Deleted)

    async def list(self) -> list[str]:
        """Every group, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return (await self._session.get(PATHS.GROUPS, GroupList)).groups
