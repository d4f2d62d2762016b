"""POST /produce: batches for many partitions in, an answer for each out.

    body -> groups -> one call of the producer ... told the results -> answer

No task waits for the results. Whatever is done with a request before the producer has it happens in the step
in which it arrived, so requests that come one after the other on a connection are appended in that order; the
answers to all requests of a flush are made in the step in which it is known to be durable. Records are the
sections of one buffer all the way: strings of JSON are joined into it, a ready frame is checked and passed on
as it is.

A request is taken or refused as a whole where it meets back-pressure; after that every batch has its own end.
A batch that is not answered in time has an unknown outcome, and its answer says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

import msgspec
import pyarrow as pa

from forebay.broker._bodies import (
    decode_json,
    decode_msgpack,
    given,
    integer_query,
    json_response,
    packed_response,
)
from forebay.broker._engines import Engines
from forebay.broker._errors import RETRY_AFTER_S, BadRequest, type_of
from forebay.broker._http import Reply, Request, Response
from forebay.broker._produce_columns import (
    Columns,
    arrow_columns,
    check_frames,
    frame_columns,
    json_columns,
    packed_columns,
)
from forebay.broker._routes import Action, Call
from forebay.errors import Backpressure, ForebayError, FormatError, LimitExceeded, OutcomeUnknown, UsageError
from forebay.formats.http_messages import (
    ARROW,
    BACKPRESSURE,
    JSON,
    MSGPACK,
    ProducePartition,
    ProducePartitionPacked,
    ProduceRequest,
    ProduceRequestPacked,
    ProduceResponse,
    ProduceResult,
)
from forebay.kit.batcher import Tell
from forebay.log import AppendGroup, AppendResult

__all__ = ["Produce"]

PARTITION_MAX: Final = 99_999
"""Highest partition that a query string may name."""
SEQUENCE_MAX: Final = 1 << 62
"""Highest sequence or epoch that a query string may name."""


class Produce:
    """The handler."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._limits = engines.config.limits
        self._patience = _Patience(engines.config.produce_timeout_ms / 1000)
        metrics = engines.metrics
        self._records = metrics.counter("produce.records", "Records acknowledged").labels()
        self._bytes = metrics.counter("produce.bytes", "Bytes of records acknowledged, in memory").labels()
        batches = metrics.counter("produce.batches", "Batches answered, by outcome", ("outcome",))
        self._outcomes = {
            name: batches.labels(name) for name in ("ok", "duplicate", "backpressure", "refused", "unknown")
        }

    def __call__(self, call: Call, reply: Reply) -> None:
        """Append, and answer once it is known what became of it."""
        request = call.request
        kind = given(request, JSON, MSGPACK, ARROW)
        groups = self._groups(kind, request)
        # What is still needed of it is in the groups; while they wait, the next body can have its memory.
        request.body = b""
        for group in groups:
            call.access.check(Action.APPEND, group.topic)
        waiting = _Waiting(self, groups, reply, packed=kind == MSGPACK)
        try:
            self._engines.producer.append_told(groups, waiting.tells())
        except Backpressure as error:
            waiting.end(error)
        else:
            self._patience.limit(waiting)

    # -- in

    def _groups(self, kind: str, request: Request) -> list[AppendGroup]:
        limits = self._limits
        try:
            if kind == JSON:
                batches: Sequence[ProducePartition | ProducePartitionPacked]
                batches = decode_json(request.body, ProduceRequest).topic_partitions
            elif kind == MSGPACK:
                packed = decode_msgpack(request.body, ProduceRequestPacked).topic_partitions
                check_frames(packed, bytes_max=limits.body_max_bytes)
                batches = packed
            else:
                return [self._arrow_group(request)]
            if len(batches) > limits.partitions_max:
                raise LimitExceeded("partitions_max", limit=limits.partitions_max, actual=len(batches))
            left = limits.records_max
            groups = []
            for batch in batches:
                columns = self._columns(batch, left, len(request.body))
                left -= columns.count
                groups.append(_group(batch, columns))
            return groups
        except (FormatError, LimitExceeded, pa.ArrowException) as error:
            raise BadRequest(f"the records cannot be taken: {error}") from None

    def _columns(
        self, batch: ProducePartition | ProducePartitionPacked, left: int, body_bytes: int
    ) -> Columns:
        limits = self._limits
        if isinstance(batch, ProducePartition):
            columns = json_columns(batch)
        elif batch.frame is not None:
            columns = frame_columns(batch)
        else:
            columns = packed_columns(batch)
        columns.check_count(left, limits.records_max)
        # Nothing in a small body is large, unless it was compressed.
        if body_bytes > limits.record_max_bytes or columns.compressed:
            columns.check_sizes(limits.record_max_bytes)
        return columns

    def _arrow_group(self, request: Request) -> AppendGroup:
        given = _query(request)
        columns = arrow_columns(request.body, bytes_max=self._limits.body_max_bytes)
        columns.check_count(self._limits.records_max, self._limits.records_max)
        columns.check_sizes(self._limits.record_max_bytes)
        return _group(given, columns)

    # -- out

    def response(
        self,
        groups: Sequence[AppendGroup],
        outcomes: Sequence[AppendResult | ForebayError],
        *,
        packed: bool,
    ) -> Response:
        """The answer to a request with these groups, of which this became."""
        results = [self._result(group, outcome) for group, outcome in zip(groups, outcomes, strict=True)]
        errors = len([result for result in results if not result.ok])
        message = ProduceResponse(results, len(results) - errors, errors)
        respond = packed_response if packed else json_response
        if not errors:
            return respond(message)
        if any(result.error_type != BACKPRESSURE for result in results):
            return respond(message, 409)
        response = respond(message, 503)
        response.headers = (("Retry-After", str(RETRY_AFTER_S)),)
        return response

    def _result(self, group: AppendGroup, outcome: AppendResult | ForebayError) -> ProduceResult:
        if isinstance(outcome, ForebayError):
            return self._failed(group, outcome)
        if outcome.duplicate:
            self._outcomes["duplicate"].inc()
        else:
            self._outcomes["ok"].inc()
            self._records.inc(outcome.count)
            self._bytes.inc(group.size_bytes)
        return ProduceResult(
            topic=outcome.topic,
            partition=outcome.partition,
            ok=True,
            start_offset=outcome.start_offset,
            end_offset=outcome.end_offset,
            count=outcome.count,
            index_key=outcome.index_key,
            wal_uri=outcome.wal_uri,
            duplicate=outcome.duplicate,
        )

    def _failed(self, group: AppendGroup, error: ForebayError) -> ProduceResult:
        if isinstance(error, Backpressure):
            self._outcomes["backpressure"].inc()
        else:
            self._outcomes["unknown" if isinstance(error, OutcomeUnknown) else "refused"].inc()
        return ProduceResult(
            topic=group.topic,
            partition=group.partition,
            ok=False,
            error_type=type_of(error),
            error=error.message,
            hint=error.hint or None,
        )


def _query(request: Request) -> ProducePartitionPacked:
    """Where the records of an Arrow stream go: what other bodies say of a batch, in the query string."""
    query = request.query
    if not query.get("topic") or "partition" not in query:
        raise BadRequest("the query names no topic or no partition", hint="/produce?topic=T&partition=N")
    numbers = {"partition": PARTITION_MAX, "sequence": SEQUENCE_MAX, "epoch": SEQUENCE_MAX}
    if unknown := query.keys() - numbers.keys() - {"topic", "producer_id"}:
        raise BadRequest(f"the query has {min(unknown)[:50]!r}, which means nothing here")
    said: dict[str, str | int | None] = {**query}
    for name in numbers.keys() & query.keys():
        said[name] = integer_query(request, name, low=0, high=numbers[name])
    try:
        batch = msgspec.convert(said, ProducePartitionPacked)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the query is not what it should be: {error}") from None
    return batch


def _group(batch: ProducePartition | ProducePartitionPacked, columns: Columns) -> AppendGroup:
    if (batch.producer_id is None) != (batch.sequence is None):
        raise UsageError("a producer_id and a sequence belong together", hint="send both or none")
    return AppendGroup(
        batch.topic, batch.partition, columns.batch, batch.producer_id, batch.sequence, batch.epoch
    )


class _Waiting:
    """A request whose groups are on their way."""

    __slots__ = ("_groups", "_left", "_outcomes", "_packed", "_produce", "_reply")

    def __init__(
        self, produce: Produce, groups: Sequence[AppendGroup], reply: Reply, *, packed: bool
    ) -> None:
        self._produce = produce
        self._groups: Sequence[AppendGroup] = groups
        self._outcomes: list[AppendResult | ForebayError | None] = [None] * len(groups)
        self._left = len(groups)
        self._reply = reply
        self._packed = packed

    @property
    def done(self) -> bool:
        """Whether it is answered."""
        return not self._left

    def tells(self) -> list[Tell[AppendResult]]:
        """Who is to be told of the groups."""
        return [partial(self._tell, place) for place in range(len(self._groups))]

    def _tell(self, place: int, outcome: AppendResult | Exception) -> None:
        if not self._left:
            return  # It took too long, and was answered.
        if isinstance(outcome, Exception) and not isinstance(outcome, ForebayError):
            outcome = OutcomeUnknown("append", reason=repr(outcome))
        self._outcomes[place] = outcome
        self._left -= 1
        if not self._left:
            self._answer()

    def end(self, error: ForebayError) -> None:
        """Answer now: this is what became of all groups that nothing is known of."""
        self._left = 0
        self._outcomes = [error if outcome is None else outcome for outcome in self._outcomes]
        self._answer()

    def _answer(self) -> None:
        groups, outcomes = self._groups, cast(list[AppendResult | ForebayError], self._outcomes)
        self._groups, self._outcomes = [], []  # It stands in line for a while still; its records need not.
        self._reply(self._produce.response(groups, outcomes, packed=self._packed))


class _Patience:
    """A time limit on requests, the same for all of them: so they stand in line, and one timer is enough.

    A request whose time is up is answered here, as unknown. Its appends go on, and whoever repeats them with
    their producer id learns their end. A timer, a future and a callback per request say the same and cost as
    much as taking the records.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._line: deque[tuple[float, _Waiting]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, waiting: _Waiting) -> None:
        """Give up on this one after the time."""
        line = self._line
        while line and line[0][1].done:
            line.popleft()
        # Kept, since asking for it costs a system call each time.
        loop = self._loop = self._loop or asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        line.append((deadline, waiting))
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        line, loop = self._line, asyncio.get_running_loop()
        now = loop.time()
        while line and (line[0][0] <= now or line[0][1].done):
            _, waiting = line.popleft()
            if not waiting.done:
                late = f"it was not durable after {self._timeout_s:g} s"
                waiting.end(OutcomeUnknown("append", reason=late))
        self._timer = loop.call_at(line[0][0], self._expire) if line else None
