"""The producer: send now, learn later, over HTTP.

`send` never waits. Records gather per partition (`_lane.py`) until there are enough of them or the first has
lingered; then they go out, the partitions that are ready in one request, several requests at a time. While
all requests are under way nothing is gained by cutting small batches, so what waits goes on growing.

What a request's end means for each batch in it:

    answered ok                      told: durable, at these offsets
    refused, try again               sent again after a wait with full jitter: certainly not appended
    refused for good                 told: certainly not appended
    answer lost                      sent again under the same number, so that it is appended once; and if the
                                     time is up before anybody answers, told as `OutcomeUnknown`
    refused after a lost answer      `OutcomeUnknown` as well: the refusal speaks of the last attempt only

What is bounded, and how a failure is told, is in `forebay._outgoing`, as for the embedded producer.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from forebay._outgoing import Outgoing, PartitionCount, Sending
from forebay._receipts import settled
from forebay.client._config import ProducerConfig
from forebay.client._connection import Response
from forebay.client._errors import OUT_OF_SEQUENCE, Refused, error_from, is_transient
from forebay.client._lane import Batch, Lane, Part
from forebay.client._receipts import Delivered, Delivery, PartlyDelivered, Receipt
from forebay.client._session import Session, decoded
from forebay.errors import Closed, ForebayError, OutcomeUnknown, UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.http_frames import request_of_frames
from forebay.formats.http_messages import (
    MSGPACK,
    PATHS,
    ProducePartitionPacked,
    ProduceResponse,
    ProduceResult,
)
from forebay.formats.record_routing import route
from forebay.kit.ids import IdSource

__all__ = ["Producer"]

OUT_OF_SEQUENCE_PATIENCE_S = 10.0
"""Seconds for which a batch whose answer was lost, and whose number is refused, is sent again."""


class Producer(Sending[Delivery, Receipt]):
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    _receipt = Receipt

    def __init__(
        self,
        session: Session,
        *,
        partition_count: PartitionCount,
        ids: IdSource,
        config: ProducerConfig,
        on_close: Callable[[Producer], None] = lambda _: None,
    ) -> None:
        super().__init__(
            session.clock, pending_bytes_max=config.pending_bytes_max, partition_count=partition_count
        )
        self._session = session
        self._ids = ids
        self._config = config
        self._on_close = on_close
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._ready: dict[Lane, None] = {}
        """Lanes that may have something to send, in turn."""
        self._linger: asyncio.TimerHandle | None = None
        self._flushes = 0
        """Flushes under way: nothing lingers then."""
        self._requests = 0
        self._not_before = 0.0
        """The broker asked not to be asked again before, on the monotonic clock."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox: deque[Outgoing[Delivery]] = deque()
        self._mover: asyncio.Task[None] | None = None
        self._turn = 0
        self._untold: dict[Outgoing[Delivery], None] = {}
        """Every send whose outcome is not known."""
        self._marks: list[tuple[set[Outgoing[Delivery]], asyncio.Future[None]]] = []
        """What each flush still waits for."""
        self._closed = False

    async def start(self) -> None:
        """Nothing yet; here so that code for the embedded producer works unchanged."""

    def checked(self, batch: BytesBatch) -> BytesBatch:
        """The batch; raises `UsageError` where no broker would take it, so that it spoils no request."""
        if not len(batch):
            raise UsageError("no records", hint="send at least one")
        if batch.values.null_count:
            raise UsageError("a record is None", hint="an empty record is b''")
        for column in (batch.keys, batch.timestamps_ms, batch.headers):
            if column is not None and len(column) != len(batch):
                raise UsageError(
                    f"a column of {len(column)} for {len(batch)} records", hint="give one per record"
                )
        return batch

    def offer(self, item: Outgoing[Delivery]) -> None:
        """Take a send; its outcome is told later, a refusal too."""
        if self._closed:
            item.tell(Closed("the producer is closed", hint="open another one"))
            return
        self._pending_bytes += item.size_bytes
        self._untold[item] = None
        count = 1 if item.partition is not None else self._known_count(item.topic)
        if count is not None and not self._inbox:
            self._accept(item, count)
            return
        self._inbox.append(item)
        if self._mover is None:
            self._mover = self._start(self._move())

    # -- from sends to lanes

    async def _move(self) -> None:
        """Move on, in order, what had to wait for the number of partitions."""
        while self._inbox:
            item = self._inbox[0]
            try:
                count = 1 if item.partition is not None else await self._count(item.topic)
            except ForebayError as error:
                self._finish(item, error)
            else:
                self._accept(item, count)
            self._inbox.popleft()
        self._mover = None

    def _accept(self, item: Outgoing[Delivery], count: int) -> None:
        try:
            if item.partition is not None:
                parts = [(item.partition, item.batch)]
            else:
                self._turn += 1
                parts = list(route(item.batch, count, self._turn))
            sizes = [item.size_bytes] if len(parts) == 1 else [batch.size_bytes for _, batch in parts]
        except ForebayError as error:
            self._finish(item, error)
            return
        gather = _Gather(item, len(parts), self._finish)
        deadline = self._clock.monotonic() + self._config.delivery_timeout_ms / 1000
        for place, ((partition, batch), size) in enumerate(zip(parts, sizes, strict=True)):
            tell = functools.partial(gather.told, place)
            self._add(self._lane(item.topic, partition), Part(batch, size, tell, deadline))

    def _lane(self, topic: str, partition: int) -> Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = Lane(topic, partition, self._ids.token)
        return lane

    def _add(self, lane: Lane, part: Part) -> None:
        lane.add(part)
        if lane.waiting_bytes >= self._config.batch_bytes or self._flushes:
            lane.due = lane.due or self._flushes > 0
            self._ready[lane] = None
            self._pump()
        elif self._linger is None:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(self._config.linger_ms / 1000, self._lingered)

    def _lingered(self) -> None:
        """What waits has waited long enough, all of it: one request then carries many partitions."""
        self._linger = None
        for lane in self._lanes.values():
            if lane.waiting:
                lane.due = True
                self._ready[lane] = None
        self._pump()

    # -- from lanes to requests

    def _pump(self) -> None:
        """Send while there is something to send and a request to spare."""
        while self._ready and self._requests < self._config.requests_max:
            batches = self._collect()
            if not batches:
                return
            self._requests += 1
            _ = self._start(self._deliver(batches))

    def _collect(self) -> list[Batch]:
        config = self._config
        batches: list[Batch] = []
        size = 0
        for lane in list(self._ready):
            batch = lane.take(config.batch_bytes, config.in_flight_per_partition)
            del self._ready[lane]
            if batch is None:
                continue
            lane.leaving = True
            batches.append(batch)
            size += batch.size_bytes
            if size >= config.request_bytes:
                break
        return batches

    async def _deliver(self, batches: list[Batch]) -> None:
        lanes = [batch.lane for batch in batches]
        try:
            outcomes = await self._request(batches)
            if len(batches) > 1 and isinstance(outcomes[0], UsageError):
                # The request as a whole was refused, for one of them perhaps: each by itself then.
                outcomes = [(await self._request([batch]))[0] for batch in batches]
        except BaseException:
            # Cancelled: the loop is ending. Nobody will learn more than this.
            for batch in batches:
                batch.lane.in_flight.discard(batch)
                batch.fail(OutcomeUnknown("send", reason="the client was closed meanwhile"))
            raise
        finally:
            self._requests -= 1
            self._left(lanes)
        for batch, outcome in zip(batches, outcomes, strict=True):
            self._answered(batch, outcome)
        self._pump()

    def _left(self, lanes: Sequence[Lane]) -> None:
        """Their batches are out of our hands: the next ones may follow."""
        for lane in lanes:
            if lane.leaving:
                lane.leaving = False
                self._ready[lane] = None
        self._pump()

    async def _request(self, batches: list[Batch]) -> Sequence[ProduceResult | ForebayError]:
        """One request; an outcome for every batch."""
        try:
            body = self._body(batches)
            response = await self._session.pool.request(
                "POST",
                PATHS.PRODUCE,
                body=body,
                content_type=MSGPACK,
                on_sent=functools.partial(self._left, [batch.lane for batch in batches]),
            )
            self._heed(response)
            if response.status not in (200, 409, 503):
                raise self._session.error(response, "produce")
            try:
                answer = decoded(response, ProduceResponse, "produce")
            except OutcomeUnknown:
                # A 503 may be somebody else's; a 200 that cannot be read says nothing about the records.
                if response.status == 200:
                    raise
                raise self._session.error(response, "produce") from None
            if len(answer.results) != len(batches):
                raise OutcomeUnknown("produce", reason=f"{len(answer.results)} results for {len(batches)}")
            return answer.results
        except ForebayError as error:
            return [error] * len(batches)

    def _heed(self, response: Response) -> None:
        """Wait as long as the broker asks, within reason."""
        asked = response.headers.get("retry-after", "")
        if asked.isdecimal():
            wait_s = min(int(asked), self._config.retry.cap_ms / 1000)
            self._not_before = self._clock.monotonic() + wait_s

    def _body(self, batches: list[Batch]) -> list[bytes | memoryview]:
        now_ms = self._clock.now_ms()
        entries = []
        for batch in batches:
            batch.attempts += 1
            entry = ProducePartitionPacked(
                topic=batch.lane.topic,
                partition=batch.lane.partition,
                producer_id=batch.producer_id,
                sequence=batch.sequence,
            )
            entries.append((entry, batch.encoded(now_ms)))
        return request_of_frames(entries)

    # -- from answers to receipts

    def _answered(self, batch: Batch, outcome: ProduceResult | ForebayError) -> None:
        lane = batch.lane
        self._ready[lane] = None
        if isinstance(outcome, ProduceResult):
            if outcome.ok and outcome.start_offset is not None:
                lane.in_flight.discard(batch)
                batch.succeed(outcome.start_offset)
                return
            outcome = error_from(
                outcome.error_type or "Refused",
                outcome.error or "",
                hint=outcome.hint or "",
                operation=f"the append to {lane.topic}:{lane.partition}",
            )
        self._failed(batch, outcome)

    def _failed(self, batch: Batch, error: ForebayError) -> None:
        lane = batch.lane
        if isinstance(error, OutcomeUnknown):
            batch.lost = error.reason or error.message
        now = self._clock.monotonic()
        overtook = _out_of_sequence(error) and (
            not lane.is_first(batch) or self._may_be_under_way(batch, now)
        )
        if now >= batch.deadline:
            self._give_up(batch, error)
            for part in lane.expired(now):
                part.tell(Delivered(lane.topic, lane.partition, None, None, len(part.batch), error))
        elif isinstance(error, OutcomeUnknown) or is_transient(error) or overtook:
            self._again(batch)
        elif _out_of_sequence(error) and not batch.lost:
            # The partition has forgotten this id, or a batch before it was given up.
            lane.broken = True
            self._again(batch)
        else:
            self._give_up(batch, error)

    def _may_be_under_way(self, batch: Batch, now: float) -> bool:
        """Whether an earlier attempt may still be on its way to being durable.

        The number is recognised once it is; until then the same number a second time is out of sequence.
        """
        if not batch.lost:
            return False
        if batch.out_of_sequence_since is None:
            batch.out_of_sequence_since = now
        return now - batch.out_of_sequence_since < OUT_OF_SEQUENCE_PATIENCE_S

    def _give_up(self, batch: Batch, error: ForebayError) -> None:
        batch.lane.give_up(batch)
        batch.fail(_final(batch, error))

    def _again(self, batch: Batch) -> None:
        lane = batch.lane
        lane.put_back(batch)
        if not lane.paused:
            lane.paused = True
            wait_s = self._config.retry.wait_s(batch.attempts, self._session.randomness)
            wait_s = max(wait_s, self._not_before - self._clock.monotonic())
            asyncio.get_running_loop().call_later(wait_s, self._resume, lane)

    def _resume(self, lane: Lane) -> None:
        lane.paused = False
        self._ready[lane] = None
        self._pump()

    def _finish(self, item: Outgoing[Delivery], outcome: Delivery | ForebayError) -> None:
        self._untold.pop(item, None)
        super()._finish(item, outcome)
        for left, waiter in self._marks:
            left.discard(item)
            if not left and not waiter.done():
                waiter.set_result(None)

    # -- flushing and closing

    async def flush(self) -> None:
        """Wait until everything sent before is durable; raises what went wrong and nobody asked for."""
        mark = (set(self._untold), asyncio.get_running_loop().create_future())
        self._marks.append(mark)
        self._flushes += 1
        try:
            if self._linger is not None:
                self._linger.cancel()
            self._lingered()
            if mark[0]:
                await mark[1]
        finally:
            self._flushes -= 1
            self._marks.remove(mark)
        self._raise_unseen()

    async def close(self) -> None:
        """Refuse further sends, wait until all is durable; raises what went wrong and nobody asked for."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        await self.flush()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="forebay producer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Gather:
    """Gathers what became of the parts of one send."""

    def __init__(
        self,
        item: Outgoing[Delivery],
        parts: int,
        finish: Callable[[Outgoing[Delivery], Delivery | ForebayError], None],
    ) -> None:
        self._item = item
        self._parts: list[Delivered | None] = [None] * parts
        self._left = parts
        self._finish = finish

    def told(self, place: int, part: Delivered) -> None:
        """One part is settled."""
        self._parts[place] = part
        self._left -= 1
        if not self._left:
            parts = [part for part in self._parts if part is not None]
            self._finish(self._item, settled(self._item.topic, parts, Delivery, PartlyDelivered))


def _out_of_sequence(error: ForebayError) -> bool:
    return isinstance(error, Refused) and error.error_type == OUT_OF_SEQUENCE


def _final(batch: Batch, error: ForebayError) -> ForebayError:
    """What the senders are told of a batch that is given up."""
    if not batch.lost:
        return error
    return OutcomeUnknown(
        f"the append of {batch.count} records to {batch.lane.topic}:{batch.lane.partition}",
        reason=f"{batch.lost}; {batch.attempts} attempts",
        hint="it may have been appended: read the end of the partition before sending it again",
    )
