"""GET /tail: the records of a partition as server-sent events, old ones first, then as they come.

    id: 42
    data: {"topic": "orders", "partition": 0, "offset": 42, "timestamp_ms": ..., "value": "..."}

A browser that loses the connection comes back with `Last-Event-ID` and goes on behind it. While nothing comes
a comment is sent now and then, so that both sides notice a broken line; the token is looked at again then.
A client that reads too slowly is not sent more until it has taken what it was sent: the stream follows the
log at the client's pace, and nothing is kept for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from forebay.broker._bodies import integer_query
from forebay.broker._consume_forms import json_records
from forebay.broker._engines import Engines
from forebay.broker._errors import BadRequest, TooManyWaits, type_of
from forebay.broker._http import Request, Response
from forebay.broker._routes import Access, Action, Call
from forebay.errors import ForebayError
from forebay.formats.http_messages import SSE, ErrorBody, ErrorDetail, TailEvent
from forebay.log import FetchedBatch

__all__ = ["Tail"]

TAIL_READ_BYTES = 256 * 1024
"""Bytes of records read ahead of one stream."""


class Tail:
    """The handler."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._open = 0
        engines.metrics.gauge_function("tail.streams", "Open event streams", lambda: float(self._open))

    async def __call__(self, call: Call) -> Response:
        """Find the place, then stream."""
        request = call.request
        topic = request.query.get("topic", "")
        if not topic:
            raise BadRequest("the query names no topic", hint="?topic=T&partition=N&from=latest")
        call.access.check(Action.READ, topic)
        partition = integer_query(request, "partition", low=0, high=99_999) or 0
        offset = await self._start(request, topic, partition)
        most = self._engines.config.limits.tails_max
        if self._open >= most:
            raise TooManyWaits("tails_max", most)
        headers = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"))
        stream = self._stream(request, call.access, topic, partition, offset)
        return Response(200, content_type=SSE, headers=headers, stream=stream)

    async def _start(self, request: Request, topic: str, partition: int) -> int:
        ends = await self._engines.reader.offsets(topic, partition)
        last = request.headers.get("last-event-id", "")
        if last.isascii() and last.isdecimal() and len(last) < 20:
            return max(int(last) + 1, ends.earliest)
        where = request.query.get("from", "latest")
        if where == "latest":
            return ends.next
        if where == "earliest":
            return ends.earliest
        number = integer_query(request, "from", low=-(1 << 62), high=1 << 62)
        assert number is not None
        return max(ends.earliest, ends.next + number) if where.startswith("-") else number

    async def _stream(
        self, request: Request, access: Access, topic: str, partition: int, offset: int
    ) -> AsyncGenerator[bytes, None]:
        engines, place = self._engines, (topic, partition)
        beat_s = engines.config.tail_heartbeat_ms / 1000
        self._open += 1
        try:
            yield b": forebay\n\n"
            while not request.gone and access.valid:
                if not engines.followers.is_at_end(place, offset):
                    found = await engines.reader.read(topic, partition, offset, max_bytes=TAIL_READ_BYTES)
                    for batch in found.batches:
                        yield _events(batch)
                    offset = found.next_offset
                    if found.batches:
                        # Also where records never cease to come: a revoked token ends with the next read.
                        await access.renew()
                        continue
                if not await engines.followers.wait({place: offset}, timeout_s=beat_s, gone=request.gone):
                    await access.renew()
                    yield b": still here\n\n"
        except ForebayError as error:
            detail = ErrorDetail(type_of(error), error.message, error.hint, request.request_id)
            yield b"event: error\ndata: %b\n\n" % msgspec.json.encode(ErrorBody(detail))
        finally:
            self._open -= 1


def _events(batch: FetchedBatch) -> bytes:
    return b"".join(
        [
            b"id: %d\ndata: %b\n\n"
            % (
                record.offset,
                msgspec.json.encode(
                    TailEvent(
                        topic=batch.topic,
                        partition=batch.partition,
                        offset=record.offset,
                        timestamp_ms=record.timestamp_ms,
                        value=record.value,
                        key=record.key,
                        headers=record.headers,
                    )
                ),
            )
            for record in json_records(batch)
        ]
    )
