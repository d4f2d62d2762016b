"""POST /consume: records of many partitions from their offsets on, waiting at the end if asked to.

    read what is there -> enough? -> answer
         ^                  no
         +---- woken ---- wait for the partitions that are at their end

A partition that is known to be at its end (it is followed, and nothing has changed) is not read at all: a
client that polls an idle log costs neither the store nor the coordinator anything. Where one partition fails
the others are answered with it at once.

`max_bytes` bounds the answer as a whole: partitions are filled in the order of the request, so a client that
wants fairness rotates it. At least one record is answered where there is one, however large. Room for it is
taken before records are fetched, and given back when the answer is made: from then on the server counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from forebay.broker._answer_room import AnswerRoom, Share
from forebay.broker._bodies import accepted, json_response, packed_response, read
from forebay.broker._consume_forms import (
    arrow_response,
    batch_size,
    is_large,
    json_results,
    large_json,
    large_packed,
    packed_results,
)
from forebay.broker._engines import Engines
from forebay.broker._errors import BadRequest, TooManyWaits, Unauthenticated
from forebay.broker._follow import Place
from forebay.broker._http import Request, Response
from forebay.broker._routes import Access, Action, Call
from forebay.errors import ForebayError, LimitExceeded
from forebay.formats.http_messages import (
    ARROW,
    JSON,
    MSGPACK,
    ConsumePartition,
    ConsumeRequest,
    ConsumeResponse,
    ConsumeResponsePacked,
)
from forebay.log import Fetched, ReadRequest
from forebay.log._fetched import fitting

__all__ = ["Consume"]

RECORD_OVERHEAD_BYTES: Final = 64
"""Bytes that a record takes in an answer beside its value and key, about: offset, time, names of fields."""
FETCH_BYTES_MIN: Final = 64 * 1024
"""Bytes that each partition of a large request may fetch, whatever its share of the whole would be."""


class Consume:
    """The handler."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._limits = engines.config.limits
        self._large = asyncio.Lock()
        self._room = AnswerRoom(self._limits.answers_max_bytes, self._untaken)
        metrics = engines.metrics
        self._requests = metrics.counter("consume.requests", "Requests answered, by why", ("reason",))
        self._records = metrics.counter("consume.records", "Records answered")
        self._bytes = metrics.counter("consume.bytes", "Bytes of values and keys answered")
        self._from_cache = metrics.counter("consume.tail_cache_hits", "Partitions answered from the tail")
        self._skipped = metrics.counter(
            "consume.known_empty", "Partitions not read: known to be at their end"
        )
        self._errors = metrics.counter("consume.errors", "Partitions that failed")
        metrics.gauge_function(
            "consume.waiting", "Requests that wait for records", lambda: float(engines.followers.waiting)
        )
        metrics.gauge_function(
            "consume.making_bytes", "Bytes of answers being made", lambda: float(self._room.making)
        )
        metrics.gauge_function(
            "consume.followed_partitions",
            "Partitions whose end is followed",
            lambda: float(engines.followers.followed),
        )

    async def __call__(self, call: Call) -> Response:
        """Read, wait, answer."""
        request = call.request
        message = read(request, ConsumeRequest)
        form = accepted(request, JSON, MSGPACK, ARROW)
        self._check(message, form)
        for each in message.topic_partitions:
            call.access.check(Action.READ, each.topic)
        with self._room.share() as share:
            answers, reason = await self._collect(message, request, call.access, share)
            response = await self._response(message, answers, form, share)
        self._requests.labels(reason).inc()
        self._count(answers)
        return response

    def _untaken(self) -> int:
        return self._engines.answer_bytes()

    def _check(self, message: ConsumeRequest, form: str) -> None:
        limits, wanted = self._limits, message.topic_partitions
        if len(wanted) > limits.partitions_max:
            raise LimitExceeded(
                "partitions_max", limit=limits.partitions_max, actual=len(wanted), hint="ask for fewer"
            )
        if len({(each.topic, each.partition) for each in wanted}) < len(wanted):
            raise BadRequest("a partition is asked for twice", hint="name each partition once")
        if message.frames and form != MSGPACK:
            raise BadRequest("frames come in msgpack only", hint=f"send Accept: {MSGPACK}")

    # -- collecting

    async def _collect(
        self, message: ConsumeRequest, request: Request, access: Access, share: Share
    ) -> tuple[list[Fetched | ForebayError], str]:
        engines, limits = self._engines, self._limits
        wait_s = min(message.max_wait_ms, limits.wait_max_ms) / 1000
        deadline = engines.clock.monotonic() + wait_s
        most = min(message.max_bytes or limits.consume_max_bytes, limits.consume_max_bytes)
        enough = min(message.min_bytes, most)
        answers: dict[Place, Fetched | ForebayError] = {}
        stale = list(message.topic_partitions)
        while True:
            answers.update(await self._read(stale, most, len(message.topic_partitions), share))
            kept = self._within(message, answers, most)
            left_s = deadline - engines.clock.monotonic()
            if any(isinstance(answer, ForebayError) for answer in kept):
                return kept, "error"
            if sum(map(_size, kept)) >= enough or _more_is_there(kept):
                return kept, "records"
            if left_s <= 0 or request.gone:
                return kept, "time"
            share.hold(0)
            moved = await self._wait(message, answers, left_s, request)
            stale = [each for each in message.topic_partitions if (each.topic, each.partition) in moved]
            if not stale:
                return kept, "time"
            # It may have waited for a minute, and what it is given now was written meanwhile.
            await access.renew()
            if not access.valid:
                raise Unauthenticated("this token was revoked or has expired meanwhile")

    async def _read(
        self, wanted: Sequence[ConsumePartition], most: int, partitions: int, share: Share
    ) -> dict[Place, Fetched | ForebayError]:
        engines = self._engines
        fetched = max(FETCH_BYTES_MIN, 4 * most // max(1, partitions))
        answers: dict[Place, Fetched | ForebayError] = {}
        asks: list[ReadRequest] = []
        for each in wanted:
            place = (each.topic, each.partition)
            if engines.followers.is_at_end(place, each.fetch_offset):
                self._skipped.inc()
                # Nothing is known of the start of the log here; the end is where the client stands.
                end = each.fetch_offset
                earliest = engines.tail.known_earliest(*place)
                answers[place] = Fetched(*place, [], end, min(earliest, end), end, from_cache=True)
            else:
                bytes_max = min(each.partition_max_bytes or most, most, fetched)
                asks.append(ReadRequest(*place, each.fetch_offset, bytes_max, self._limits.records_max))
        if asks:
            found = await engines.reader.read_many(asks, before_fetch=share.take)
            answers.update({(ask.topic, ask.partition): one for ask, one in zip(asks, found, strict=True)})
        return answers

    async def _wait(
        self,
        message: ConsumeRequest,
        answers: dict[Place, Fetched | ForebayError],
        left_s: float,
        request: Request,
    ) -> Sequence[Place]:
        followers, most = self._engines.followers, self._limits.waits_max
        if followers.waiting >= most:
            raise TooManyWaits("waits_max", most)
        ends = {
            (each.topic, each.partition): answer.high_watermark
            for each in message.topic_partitions
            if isinstance(answer := answers[each.topic, each.partition], Fetched)
        }
        return await followers.wait(ends, timeout_s=left_s, gone=request.gone)

    def _within(
        self, message: ConsumeRequest, answers: dict[Place, Fetched | ForebayError], most: int
    ) -> list[Fetched | ForebayError]:
        """The answers in the order of the request, cut to the bytes and records of the whole."""
        kept: list[Fetched | ForebayError] = []
        left, records_left = most, self._limits.records_max
        for each in message.topic_partitions:
            answer = answers[each.topic, each.partition]
            if isinstance(answer, Fetched) and answer.batches:
                first = left == most
                batches = fitting(answer.batches, left, records_left) if left > 0 or first else []
                if not first and sum(map(batch_size, batches)) > left:
                    # `fitting` gives one record at least, which is for the first partition only.
                    batches = []
                end = batches[-1].end_offset + 1 if batches else each.fetch_offset
                answer = Fetched(
                    each.topic,
                    each.partition,
                    batches,
                    end,
                    answer.earliest,
                    answer.high_watermark,
                    answer.from_cache,
                )
                left -= _size(answer)
                records_left -= len(answer)
            kept.append(answer)
        return kept

    async def _response(
        self, message: ConsumeRequest, answers: Sequence[Fetched | ForebayError], form: str, share: Share
    ) -> Response:
        """The answer, if there is room for it now; raises `Backpressure`."""
        size = _made_bytes(answers)
        if form == ARROW and _errors(answers):
            form = JSON
        columns = message.frames or form == ARROW
        if columns or not is_large(answers):
            share.hold(size)
            return _at_once(message, answers, form)
        # One at a time: several would all be done at the end only, and take memory until then.
        async with self._large:
            share.hold(size)
            return await _in_pieces(message, answers, form)

    def _count(self, answers: Sequence[Fetched | ForebayError]) -> None:
        for answer in answers:
            if isinstance(answer, ForebayError):
                self._errors.inc()
            else:
                self._records.inc(len(answer))
                self._bytes.inc(_size(answer))
                if answer.from_cache and answer.batches:
                    self._from_cache.inc()


def _at_once(message: ConsumeRequest, answers: Sequence[Fetched | ForebayError], form: str) -> Response:
    wanted, errors = message.topic_partitions, _errors(answers)
    status = 409 if errors else 200
    if form == MSGPACK:
        packed = packed_results(wanted, answers, frames=message.frames)
        return packed_response(ConsumeResponsePacked(packed, len(packed) - errors, errors), status)
    if form == ARROW:
        return arrow_response(wanted, answers)
    plain = json_results(wanted, answers)
    return json_response(ConsumeResponse(plain, len(plain) - errors, errors), status)


async def _in_pieces(
    message: ConsumeRequest, answers: Sequence[Fetched | ForebayError], form: str
) -> Response:
    wanted, errors = message.topic_partitions, _errors(answers)
    large = large_packed if form == MSGPACK else large_json
    return Response(409 if errors else 200, await large(wanted, answers, errors), form)


def _errors(answers: Sequence[Fetched | ForebayError]) -> int:
    return sum(isinstance(answer, ForebayError) for answer in answers)


def _more_is_there(kept: Sequence[Fetched | ForebayError]) -> bool:
    """Whether a partition has more than its bounds let it give: waiting for others would keep that back."""
    return any(
        isinstance(each, Fetched) and each.batches and each.next_offset < each.high_watermark for each in kept
    )


def _size(answer: Fetched | ForebayError) -> int:
    return 0 if isinstance(answer, ForebayError) else sum(map(batch_size, answer.batches))


def _made_bytes(answers: Sequence[Fetched | ForebayError]) -> int:
    """Bytes of the answer, about."""
    records = sum([len(each) for each in answers if isinstance(each, Fetched)])
    return sum(map(_size, answers)) + records * RECORD_OVERHEAD_BYTES
