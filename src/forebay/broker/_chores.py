"""Compaction and retention over HTTP: look, and run one pass now."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from forebay.broker._admin_topics import trim_view
from forebay.broker._bodies import json_response, read
from forebay.broker._engines import Engines
from forebay.broker._errors import BadRequest, TooManyWaits
from forebay.broker._http import Response
from forebay.broker._routes import Action, Call
from forebay.errors import ForebayError, StorageDamaged
from forebay.formats.http_messages import (
    CompactionRequest,
    CompactionResponse,
    CompactionRun,
    CompactionState,
    CompactionStates,
    RetentionRequest,
    RetentionResponse,
)
from forebay.log import Topic
from forebay.log._keys import PartitionKeys
from forebay.log._meta import read_meta

__all__ = ["ChoreHandlers"]

PASSES_MAX = 2
"""Passes of compaction or retention that requests may have under way at once."""
STATES_MAX = 1_000
"""Partitions shown in one answer."""


class ChoreHandlers:
    """One method per route."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._running = 0

    async def states(self, call: Call) -> Response:
        """Cursor, lag and the compaction under way, of every partition of a topic."""
        name = call.request.query.get("topic")
        if not name:
            raise BadRequest("the query names no topic", hint="?topic=T")
        call.access.check(Action.READ, name)
        topic = await self._engines.catalog.describe(name)
        numbers = range(min(topic.partitions, STATES_MAX))
        found = await asyncio.gather(*(self._state(name, number) for number in numbers))
        states = [each for each in found if isinstance(each, CompactionState)]
        problems = [each.message for each in found if isinstance(each, StorageDamaged)]
        return json_response(CompactionStates(states, problems))

    async def _state(self, topic: str, partition: int) -> CompactionState | StorageDamaged:
        try:
            meta = await read_meta(self._engines.coordinator, PartitionKeys(topic, partition))
        except StorageDamaged as error:
            return error
        return CompactionState(
            topic=topic,
            partition=partition,
            earliest=meta.earliest,
            next=meta.next,
            cursor=meta.cursor,
            lag_records=meta.lag,
            state="" if meta.compaction is None else meta.compaction.state,
        )

    async def compact(self, call: Call) -> Response:
        """Fold what is old enough, now."""
        message = read(call.request, CompactionRequest)
        call.access.check(Action.ADMIN, message.topic)
        topic = await self._engines.catalog.describe(message.topic)
        numbers = list(range(topic.partitions))
        if message.partition is not None:
            topic.check_partition(message.partition)
            numbers = [message.partition]
        self._begin()
        try:
            runs = [await self._run(topic, number) for number in numbers]
        finally:
            self._running -= 1
        return json_response(CompactionResponse(runs))

    async def _run(self, topic: Topic, partition: int) -> CompactionRun:
        results, error = [], ""
        compactor, settings = self._engines.compactor, topic.settings
        config = replace(
            compactor.config, min_age_ms=settings.compact_min_age_ms, target_bytes=settings.target_bytes
        )
        try:
            results = await compactor.compact_all(topic.topic, partition, config=config)
        except ForebayError as failure:
            error = failure.message
        return CompactionRun(
            topic=topic.topic,
            partition=partition,
            runs=sum(each.outcome in ("compacted", "resumed") for each in results),
            records=sum(each.records for each in results),
            bytes_written=sum(each.bytes_written for each in results),
            lag_records=results[-1].lag_records if results else 0,
            reason=results[-1].reason if results else "",
            error=error,
        )

    async def retain(self, call: Call) -> Response:
        """Trim what the settings of the topics do not keep."""
        message = read(call.request, RetentionRequest)
        call.access.check(Action.ADMIN, message.topic)
        if message.topic is not None:
            await self._engines.catalog.describe(message.topic)
        asked_at = self._engines.clock.monotonic()
        self._begin()
        try:
            report = await self._engines.retention.run_once(
                topics=None if message.topic is None else [message.topic], dry_run=message.dry_run
            )
        finally:
            self._running -= 1
        for trimmed in () if message.dry_run else report.trimmed:
            self._engines.trimmed(trimmed, asked_at)
        return json_response(
            RetentionResponse(
                [trim_view(each) for each in report.trimmed],
                {place: error.message for place, error in report.failed.items()},
                message.dry_run,
            )
        )

    def _begin(self) -> None:
        if self._running >= PASSES_MAX:
            raise TooManyWaits("PASSES_MAX", PASSES_MAX)
        self._running += 1
