"""Topics and partitions over HTTP: create, look, change, delete, trim, fence."""

from __future__ import annotations

import msgspec

from forebay.broker._bodies import integer_query, json_response, read
from forebay.broker._engines import Engines
from forebay.broker._errors import BadRequest
from forebay.broker._http import Response
from forebay.broker._routes import Action, Call
from forebay.errors import ForebayError, StorageDamaged
from forebay.formats.http_messages import (
    Deleted,
    ExplainResponse,
    FenceRequest,
    FenceView,
    OffsetsView,
    TopicAlter,
    TopicCreate,
    TopicList,
    TopicSettingsView,
    TopicView,
    TrimRequest,
    TrimView,
    UnfenceRequest,
)
from forebay.log import FenceState, PartitionOffsets, Topic, TopicSettings, Trimmed, explain

__all__ = ["TopicHandlers", "trim_view"]

OFFSETS_MAX = 10_000
"""Partitions of a topic whose offsets are looked up for one answer."""


class TopicHandlers:
    """One method per route."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def list_all(self, call: Call) -> Response:
        """Those the caller may know of."""
        topics = [_view(topic) for topic in await self._engines.catalog.list()]
        kept = [topic for topic in topics if _knows(call, topic.topic)]
        return json_response(TopicList(kept))

    async def create(self, call: Call) -> Response:
        """201, or 409 where there is one."""
        message = read(call.request, TopicCreate)
        call.access.check(Action.ADMIN, message.topic)
        topic = await self._engines.catalog.create(
            message.topic, partitions=message.partitions, settings=_settings(message.settings)
        )
        return json_response(_view(topic), 201)

    async def describe(self, call: Call) -> Response:
        """With the ends of its partitions. One that cannot be read hides no other."""
        topic = await self._engines.catalog.describe(call.topic)
        view = _view(topic)
        count = min(topic.partitions, OFFSETS_MAX)
        places = [(topic.topic, number) for number in range(count)]
        view.offsets, view.problems = [], []
        for each in await self._engines.reader.offsets_each(places):
            if isinstance(each, StorageDamaged):
                view.problems.append(each.message)
            elif isinstance(each, ForebayError):
                raise each
            else:
                view.offsets.append(_offsets(each))
        return json_response(view)

    async def alter(self, call: Call) -> Response:
        """What is not named stays."""
        message = read(call.request, TopicAlter)
        topic = await self._engines.catalog.alter(
            call.topic, partitions=message.partitions, settings=_settings(message.settings)
        )
        return json_response(_view(topic))

    async def delete(self, call: Call) -> Response:
        """And let go of what is kept of it in memory."""
        await self._engines.catalog.delete(call.topic)
        self._engines.tail.forget(call.topic)
        return json_response(Deleted(call.topic, True))

    async def offsets(self, call: Call) -> Response:
        """The ends, and the place of a time."""
        time_ms = integer_query(call.request, "time_ms", low=0, high=1 << 62)
        view = _offsets(await self._engines.reader.offsets(call.topic, call.partition))
        if time_ms is not None:
            view.at = await self._engines.reader.offset_for_time(call.topic, call.partition, time_ms)
        return json_response(view)

    async def explain(self, call: Call) -> Response:
        """Object, bytes, batch, writer."""
        offset = integer_query(call.request, "offset", low=0, high=1 << 62)
        if offset is None:
            raise BadRequest("the query names no offset", hint="?offset=N")
        parts = self._engines.parts
        found = await explain(
            self._engines.store,
            self._engines.coordinator,
            call.topic,
            call.partition,
            offset,
            clock=parts.clock,
            randomness=parts.randomness,
        )
        known = found.as_json()
        return json_response(
            ExplainResponse(**{name: known[name] for name in ExplainResponse.__struct_fields__})
        )

    async def trim(self, call: Call) -> Response:
        """The records below are gone when this is answered."""
        message = read(call.request, TrimRequest)
        asked_at = self._engines.clock.monotonic()
        trimmed = await self._engines.trimmer.trim(call.topic, call.partition, message.offset)
        self._engines.trimmed(trimmed, asked_at)
        return json_response(trim_view(trimmed))

    async def fence_state(self, call: Call) -> Response:
        """Open or fenced, and the epoch."""
        return json_response(_fence(await self._engines.fencing.state(call.topic, call.partition)))

    async def fence(self, call: Call) -> Response:
        """What is in the log now is final until somebody opens it again."""
        message = read(call.request, FenceRequest)
        state = await self._engines.fencing.fence(call.topic, call.partition, epoch=message.epoch)
        return json_response(_fence(state))

    async def unfence(self, call: Call) -> Response:
        """Only under the epoch of the fence."""
        message = read(call.request, UnfenceRequest)
        return json_response(
            _fence(await self._engines.fencing.unfence(call.topic, call.partition, message.epoch))
        )


def _knows(call: Call, topic: str) -> bool:
    return any(call.access.allows(action, topic) for action in Action)


def _settings(view: TopicSettingsView | None) -> TopicSettings | None:
    return None if view is None else TopicSettings(**msgspec.structs.asdict(view))


def _view(topic: Topic) -> TopicView:
    settings = msgspec.structs.asdict(topic.settings)
    known = TopicSettingsView.__struct_fields__
    return TopicView(
        topic=topic.topic,
        topic_id=topic.topic_id,
        partitions=topic.partitions,
        created_at_ms=topic.created_at_ms,
        state=topic.state,
        settings=TopicSettingsView(**{name: settings[name] for name in known}),
    )


def _offsets(found: PartitionOffsets) -> OffsetsView:
    return OffsetsView(
        topic=found.topic,
        partition=found.partition,
        earliest=found.earliest,
        next=found.next,
        records=found.records,
        log_state=found.log_state,
        epoch=found.epoch,
    )


def _fence(state: FenceState) -> FenceView:
    return FenceView(
        topic=state.topic,
        partition=state.partition,
        log_state=state.log_state,
        epoch=state.epoch,
        next_offset=state.next_offset,
    )


def trim_view(trimmed: Trimmed) -> TrimView:
    """What a trim changed, as a message."""
    names = ("topic", "partition", "before", "earliest", "next", "records")
    return TrimView(**{name: getattr(trimmed, name) for name in names})
