"""Topics over HTTP, with the calls of `forebay.aio.Topics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.client._session import Session, path_of, struct_of
from forebay.errors import NotFound
from forebay.formats.http_messages import (
    PATHS,
    Deleted,
    OffsetsView,
    TopicAlter,
    TopicCreate,
    TopicList,
    TopicSettingsView,
    TopicView,
)

__all__ = ["TopicDescription", "Topics"]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic and where each of its partitions stands."""

    topic: TopicView
    partitions: tuple[OffsetsView, ...]

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self.topic.topic

    @property
    def records(self) -> int:
        """Records that can be read, in all partitions."""
        return sum(each.records for each in self.partitions)


class Topics:
    """Creates, lists, describes and deletes topics."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(self, name: str, *, partitions: int = 1, settings: Any = None) -> TopicView:
        """Create a topic; raises `Refused` with `TopicExists`. `settings`: fields of `TopicSettingsView`."""
        message = TopicCreate(topic=name, partitions=partitions, settings=_settings(settings))
        return await self._session.call("POST", PATHS.TOPICS, TopicView, message)

    async def describe(self, name: str) -> TopicDescription:
        """The topic with the ends of its partitions; raises `NotFound`."""
        found = await self._session.get(path_of(PATHS.TOPIC, topic=name), TopicView)
        return TopicDescription(found, tuple(found.offsets or ()))

    async def count(self, name: str) -> int:
        """How many partitions it has. A topic that is not there yet gets one, with its first append."""
        try:
            return (await self._session.get(path_of(PATHS.TOPIC, topic=name), TopicView)).partitions
        except NotFound:
            return 1

    async def alter(self, name: str, *, partitions: int | None = None, settings: Any = None) -> TopicView:
        """Add partitions, or replace the settings."""
        message = TopicAlter(partitions=partitions, settings=_settings(settings))
        return await self._session.call("PATCH", path_of(PATHS.TOPIC, topic=name), TopicView, message)

    async def delete(self, name: str) -> None:
        """Remove a topic with its records; raises `NotFound`."""
        _ = await self._session.call("DELETE", path_of(PATHS.TOPIC, topic=name), Deleted)

    async def list(self) -> list[TopicView]:
        """Every topic, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return (await self._session.get(PATHS.TOPICS, TopicList)).topics


def _settings(settings: Any) -> TopicSettingsView | None:
    return None if settings is None else struct_of(TopicSettingsView, settings)
