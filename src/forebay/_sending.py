"""The producer of the front door: send now, learn later.

`send` never waits. What it is given goes to the batching producer at once where that has room and the
partition is known; otherwise into an inbox, in order, from which one task moves it on. So the records of one
caller keep their order per partition, whichever way they took. Everything that is not durable yet is bounded
in bytes; above the bound `send` raises `Backpressure`, and `room` waits for it to end.

A failed send is told by its receipt. Where nobody asks the receipt, `flush` or `close` raises it, once: a
failure is neither told twice nor lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from forebay.errors import Backpressure, Closed, ForebayError, OutcomeUnknown, UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.record_routing import route
from forebay.kit.clock import Clock
from forebay.log import AppendGroup, AppendResult, BatchingProducer, Catalog, LogWriter, ProducerConfig

__all__ = ["Delivery", "PartlyDelivered", "Producer", "Receipt"]

PARTITION_COUNTS_TTL_S = 30.0
"""Seconds for which the number of a topic's partitions is remembered."""
UNSEEN_FAILURES_MAX = 1_000
"""Failures remembered for `flush` and `close`, of receipts that nobody asked."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Records that are durable, and where they are."""

    topic: str
    parts: tuple[AppendResult, ...]
    """One per partition that the records went to."""

    @property
    def count(self) -> int:
        """Records in all."""
        return sum(part.count for part in self.parts)

    @property
    def partition(self) -> int:
        """The partition, where there is one."""
        return self._only().partition

    @property
    def start_offset(self) -> int:
        """Offset of the first record, where all went to one partition."""
        offset = self._only().start_offset
        assert offset is not None
        return offset

    @property
    def end_offset(self) -> int:
        """Offset of the last record, where all went to one partition."""
        offset = self._only().end_offset
        assert offset is not None
        return offset

    def _only(self) -> AppendResult:
        if len(self.parts) != 1:
            raise UsageError(
                f"the records went to {len(self.parts)} partitions", hint="look at each of `parts`"
            )
        return self.parts[0]


class PartlyDelivered(ForebayError):
    """Some of the partitions that records were sent to took them, others did not."""

    def __init__(self, topic: str, parts: Sequence[AppendResult]) -> None:
        failed = [part for part in parts if part.error is not None]
        super().__init__(
            f"{len(failed)} of {len(parts)} partitions of {topic!r} did not take their records: "
            f"{failed[0].error}",
            hint="`parts` says which; send those records again",
        )
        self.topic = topic
        self.parts = tuple(parts)


def settled(topic: str, parts: Sequence[AppendResult]) -> Delivery | ForebayError:
    """What a sender learns in the end."""
    errors = [part.error for part in parts if part.error is not None]
    if not errors:
        return Delivery(topic, tuple(parts))
    return errors[0] if len(parts) == 1 else PartlyDelivered(topic, parts)


class Receipt:
    """Becomes a `Delivery` once the records are durable. Await it, or `result(timeout)`."""

    def __init__(self, seen: Callable[[Receipt], None]) -> None:
        self._future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._seen = seen

    def __await__(self) -> Generator[object, None, Delivery]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> Delivery:
        """The delivery; raises what went wrong, or `OutcomeUnknown` where the time is up."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._future), timeout)
        except TimeoutError:
            raise not_yet(timeout) from None
        except ForebayError:
            self._seen(self)
            raise

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._future.done()

    def settle(self, outcome: Delivery | ForebayError) -> None:
        """Tell the sender."""
        if self._future.done():
            return
        if isinstance(outcome, Delivery):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
            self._future.exception()  # Nobody is obliged to look: the producer's close raises it then.


def not_yet(timeout: float | None) -> OutcomeUnknown:
    """The error of a receipt that was asked too early."""
    return OutcomeUnknown(
        "send", reason=f"not durable after {timeout} s", hint="ask the receipt again, it goes on"
    )


@dataclass(slots=True)
class Outgoing:
    """One send on its way."""

    topic: str
    partition: int | None
    batch: BytesBatch
    size_bytes: int
    tell: Callable[[Delivery | ForebayError], None]
    receipt: object
    """Whoever is told: a failure that it was asked for is not raised again."""

    def __post_init__(self) -> None:
        # The integers of numpy and the like. A bool is left as it is, and refused where it is used.
        if type(self.partition) is not int and not isinstance(self.partition, bool | None):
            with contextlib.suppress(TypeError):
                self.partition = operator.index(self.partition)


class Producer:
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    def __init__(
        self,
        writer: LogWriter,
        catalog: Catalog,
        *,
        clock: Clock,
        config: ProducerConfig,
        on_close: Callable[[Producer], None],
    ) -> None:
        self._batching = BatchingProducer(writer, clock=clock, config=config)
        self._catalog = catalog
        self._clock = clock
        self.pending_bytes_max = config.pending_max_bytes
        self._on_close = on_close
        self._inbox: deque[Outgoing] = deque()
        self._mover: asyncio.Task[None] | None = None
        self._pending_bytes = 0
        self._room: list[asyncio.Future[None]] = []
        self._counts: dict[str, tuple[int, float]] = {}
        """Partitions of a topic, and until when that is believed."""
        self._turn = 0
        self._unseen: dict[object, ForebayError] = {}
        """Failures that nobody has asked for, by receipt."""
        self._closed = False

    async def start(self) -> None:
        """Begin the background work of the batching producer."""
        await self._batching.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes that are not durable yet."""
        return self._pending_bytes

    def send(
        self,
        topic: str,
        records: Sequence[bytes],
        *,
        partition: int | None = None,
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        headers: Sequence[dict[str, bytes | None] | None] | None = None,
    ) -> Receipt:
        """Send records; returns at once. Without a partition, it is chosen by key or in turn.

        Raises `Backpressure` where too much is not durable yet: wait for `room`.
        """
        batch = BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers)
        size_bytes = size_of(batch)
        if self._pending_bytes >= self.pending_bytes_max:
            raise Backpressure(
                f"{self._pending_bytes:,} bytes are not durable yet", hint="await producer.room() first"
            )
        receipt = Receipt(self.saw)
        self.offer(Outgoing(topic, partition, batch, size_bytes, receipt.settle, receipt))
        return receipt

    async def room(self) -> None:
        """Return once something may be sent again."""
        while self._pending_bytes >= self.pending_bytes_max:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter

    def offer(self, item: Outgoing) -> None:
        """Take a send; its outcome is told later, a refusal too."""
        if self._closed:
            item.tell(Closed("the producer is closed", hint="open another one"))
            return
        self._pending_bytes += item.size_bytes
        if not self._inbox and self._send_at_once(item):
            return
        self._inbox.append(item)
        if self._mover is None:
            self._mover = asyncio.get_running_loop().create_task(self._move(), name="forebay producer inbox")

    def _send_at_once(self, item: Outgoing) -> bool:
        count = 1 if item.partition is not None else self._known_count(item.topic)
        if count is None:
            return False
        try:
            groups = self._groups(item, count)
            tickets = self._batching.append_nowait(groups)
        except Backpressure:
            return False
        except Exception as error:
            self._finish(item, _as_ours(error))
            return True
        _Waiting(item, groups, tickets, self._finish)
        return True

    async def _move(self) -> None:
        """Move the inbox on, in order, until it is empty."""
        while self._inbox:
            item = self._inbox[0]
            try:
                count = 1 if item.partition is not None else await self._count(item.topic)
                groups = self._groups(item, count)
                tickets = await self._batching.append(groups)
            except Exception as error:
                # Whatever it is: the sends behind this one must not wait for ever.
                self._finish(item, _as_ours(error))
            else:
                _Waiting(item, groups, tickets, self._finish)
            self._inbox.popleft()
        self._mover = None

    def _groups(self, item: Outgoing, count: int) -> list[AppendGroup]:
        if item.partition is not None:
            return [AppendGroup(item.topic, item.partition, item.batch)]
        self._turn += 1
        parts = route(item.batch, count, self._turn)
        return [AppendGroup(item.topic, partition, part) for partition, part in parts]

    def _known_count(self, topic: str) -> int | None:
        known = self._counts.get(topic)
        return known[0] if known is not None and known[1] > self._clock.monotonic() else None

    async def _count(self, topic: str) -> int:
        count = self._known_count(topic)
        if count is None:
            found = await self._catalog.find(topic)
            # An unknown topic is made by its first append, with one partition.
            count = 1 if found is None else found.partitions
            self._counts[topic] = (count, self._clock.monotonic() + PARTITION_COUNTS_TTL_S)
        return count

    def _finish(self, item: Outgoing, outcome: Delivery | ForebayError) -> None:
        self._pending_bytes -= item.size_bytes
        waiters, self._room = self._room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if isinstance(outcome, ForebayError) and len(self._unseen) < UNSEEN_FAILURES_MAX:
            self._unseen[item.receipt] = outcome
        item.tell(outcome)

    def saw(self, receipt: object) -> None:
        """Somebody was told of the failure of this receipt."""
        self._unseen.pop(receipt, None)

    def _raise_unseen(self) -> None:
        unseen, self._unseen = self._unseen, {}
        if unseen:
            error = next(iter(unseen.values()))
            if len(unseen) > 1:
                error.add_note(f"{len(unseen)} sends failed whose receipts nobody asked; this is the first")
            raise error

    async def flush(self) -> None:
        """Wait until everything sent before is durable; raises what went wrong and nobody asked for."""
        if self._mover is not None:
            await asyncio.shield(self._mover)
        with contextlib.suppress(ForebayError):  # Each failure is told by its receipt, or below.
            await self._batching.flush()
        self._raise_unseen()

    async def close(self) -> None:
        """Refuse further sends, wait until all is durable; raises what went wrong and nobody asked for."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        if self._mover is not None:
            await asyncio.shield(self._mover)
        with contextlib.suppress(ForebayError):
            await self._batching.close()
        self._raise_unseen()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _Waiting:
    """Gathers the answers to the groups of one send."""

    def __init__(
        self,
        item: Outgoing,
        groups: Sequence[AppendGroup],
        tickets: Sequence[asyncio.Future[AppendResult]],
        finish: Callable[[Outgoing, Delivery | ForebayError], None],
    ) -> None:
        self._item = item
        self._groups = groups
        self._tickets = tickets
        self._finish = finish
        self._left = len(tickets)
        for ticket in tickets:
            ticket.add_done_callback(self._answered)

    def _answered(self, _: asyncio.Future[AppendResult]) -> None:
        self._left -= 1
        if not self._left:
            pairs = zip(self._groups, self._tickets, strict=True)
            parts = [_result(group, ticket) for group, ticket in pairs]
            self._finish(self._item, settled(self._item.topic, parts))


def _result(group: AppendGroup, ticket: asyncio.Future[AppendResult]) -> AppendResult:
    error = asyncio.CancelledError() if ticket.cancelled() else ticket.exception()
    if error is None:
        return ticket.result()
    return AppendResult(group.topic, group.partition, None, None, len(group.batch), error=_as_ours(error))


def _as_ours(error: BaseException) -> ForebayError:
    """What a sender is told: of a defect of ours, or a cancellation, nobody knows how far it got."""
    return error if isinstance(error, ForebayError) else OutcomeUnknown("send", reason=repr(error))


def size_of(batch: BytesBatch) -> int:
    """Bytes of a batch in memory."""
    return AppendGroup("", 0, batch).size_bytes
