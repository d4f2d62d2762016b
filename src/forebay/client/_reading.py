"""Reading: fetches of several partitions at once, as Arrow, with a long poll at the end of the log.

The broker answers whole frames (`bytes-batch-v1`), which become Arrow arrays without touching single records.
A stream asks for the next part as soon as the last one has arrived, so that the broker works while the caller
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from forebay.client._config import ConsumerConfig
from forebay.client._errors import error_from, is_transient
from forebay.client._session import Session, strange
from forebay.errors import ForebayError, OutcomeUnknown
from forebay.formats.bytes_batch import decode
from forebay.formats.http_messages import (
    JSON,
    MSGPACK,
    PATHS,
    ConsumePartition,
    ConsumeRequest,
    ConsumeResponsePacked,
    ConsumeResultPacked,
)
from forebay.formats.record_columns import RECORD_SCHEMA, record_batch
from forebay.kit.retry import retry

__all__ = ["Fetched", "Fetcher", "OffsetOutOfRange", "RecordStream", "TopicPartition"]

_decoder = msgspec.msgpack.Decoder(ConsumeResponsePacked)


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


class OffsetOutOfRange(ForebayError):
    """The offset is not in the log: below `earliest` it was trimmed, above `next` it is not written yet."""

    def __init__(self, message: str, *, earliest: int | None, next: int | None, hint: str = "") -> None:  # noqa: A002
        super().__init__(message, hint=hint)
        self.earliest = earliest
        self.next = next


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one partition answered."""

    place: TopicPartition
    batches: list[pa.RecordBatch]
    next_offset: int
    """Where to read on."""
    high_watermark: int
    """One past the last record that is known to be written."""
    earliest: int
    error: ForebayError | None = None


class Fetcher:
    """Fetches records of any partitions of one broker."""

    def __init__(self, session: Session, config: ConsumerConfig) -> None:
        self._session = session
        self._config = config

    async def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait_ms: int = 0,
        max_bytes: int | None = None,
    ) -> list[Fetched]:
        """Records from these offsets on: one answer per partition, its own error in it."""
        config = self._config
        request = ConsumeRequest(
            topic_partitions=[
                ConsumePartition(
                    topic=place.topic,
                    partition=place.partition,
                    fetch_offset=offset,
                    partition_max_bytes=config.partition_max_bytes,
                )
                for place, offset in positions.items()
            ],
            max_wait_ms=max_wait_ms,
            min_bytes=config.min_bytes if max_wait_ms else 0,
            max_bytes=max_bytes or config.max_bytes,
            frames=True,
        )
        body = msgspec.json.encode(request)
        results = await retry(
            lambda: self._once(body, max_wait_ms),
            policy=self._session.config.retry,
            clock=self._session.clock,
            randomness=self._session.randomness,
            # A read may always be repeated.
            retryable=lambda error: is_transient(error) or isinstance(error, OutcomeUnknown),
        )
        return [
            _fetched(place, offset, result)
            for (place, offset), result in zip(positions.items(), results, strict=True)
        ]

    async def _once(self, body: bytes, max_wait_ms: int) -> list[ConsumeResultPacked]:
        session = self._session
        response = await session.pool.request(
            "POST",
            PATHS.CONSUME,
            body=[body],
            content_type=JSON,
            accept=MSGPACK,
            timeout_s=session.config.request_timeout_s + max_wait_ms / 1000,
        )
        if response.status not in (200, 409):
            raise session.error(response, "consume")
        try:
            return _decoder.decode(response.body).results
        except msgspec.DecodeError as error:
            raise strange("consume", error) from None


def _fetched(place: TopicPartition, offset: int, result: ConsumeResultPacked) -> Fetched:
    high = offset if result.high_watermark is None else result.high_watermark
    earliest = 0 if result.earliest_offset is None else result.earliest_offset
    if not result.ok:
        kind, message, hint = result.error_type or "Refused", result.error or "", result.hint or ""
        error = (
            OffsetOutOfRange(message, earliest=result.earliest_offset, next=result.high_watermark, hint=hint)
            if kind == "OffsetOutOfRange"
            else error_from(kind, message, hint=hint, operation="consume")
        )
        return Fetched(place, [], offset, high, earliest, error)
    batches = [
        record_batch(place.topic, place.partition, each.start_offset, decode(each.frame), each.timestamp_ms)
        for each in result.batches or ()
    ]
    return Fetched(place, batches, result.next_offset or offset, high, earliest)


class RecordStream:
    """Record batches in order. Iterate it once, or take all of it with `read_all`."""

    def __init__(self, batches: AsyncIterator[pa.RecordBatch]) -> None:
        self.schema: pa.Schema = RECORD_SCHEMA
        self._batches = batches

    def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        return self._batches

    async def read_all(self) -> pa.Table:
        """Everything that is left, as one table."""
        return pa.Table.from_batches([batch async for batch in self._batches], RECORD_SCHEMA)


async def scan(
    fetcher: Fetcher, place: TopicPartition, start: int, end: int
) -> AsyncIterator[pa.RecordBatch]:
    """The records from `start` to before `end`, which are there already."""
    if start >= end:
        return
    ahead = _ahead(fetcher, place, start)
    try:
        while start < end:
            [fetched] = await ahead
            if fetched.error is not None:
                raise fetched.error
            start = fetched.next_offset
            if start < end:
                ahead = _ahead(fetcher, place, start)
            for batch in fetched.batches:
                left = end - batch.column("offset")[0].as_py()
                if left > 0:
                    yield batch.slice(0, left)
    finally:
        ahead.cancel()


def _ahead(fetcher: Fetcher, place: TopicPartition, start: int) -> asyncio.Task[list[Fetched]]:
    return asyncio.get_running_loop().create_task(fetcher.fetch({place: start}))
