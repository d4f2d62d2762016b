"""The producer of the front door: send now, learn later.

`send` never waits. What it is given goes to the batching producer at once where that has room and the
partition is known; otherwise into an inbox, in order, from which one task moves it on. So the records of one
caller keep their order per partition, whichever way they took. What is bounded, and how a failure is told, is
in `_outgoing.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay._outgoing import Outgoing, Sending
from forebay._receipts import DeliveryOf, PartlyDeliveredOf, ReceiptFor, settled
from forebay.errors import Backpressure, Closed, ForebayError, OutcomeUnknown
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.record_routing import route
from forebay.kit.clock import Clock
from forebay.log import AppendGroup, AppendResult, BatchingProducer, Catalog, LogWriter, ProducerConfig

__all__ = ["Delivery", "PartlyDelivered", "Producer", "Receipt"]


@dataclass(frozen=True, slots=True)
class Delivery(DeliveryOf[AppendResult]):
    """Records that are durable, and where they are."""


class PartlyDelivered(PartlyDeliveredOf[AppendResult]):
    """Some of the partitions that records were sent to took them, others did not."""


class Receipt(ReceiptFor[Delivery]):
    """Becomes a `Delivery` once the records are durable. Await it, or `result(timeout)`."""


class Producer(Sending[Delivery, Receipt]):
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    _receipt = Receipt

    def __init__(
        self,
        writer: LogWriter,
        catalog: Catalog,
        *,
        clock: Clock,
        config: ProducerConfig,
        on_close: Callable[[Producer], None],
    ) -> None:
        async def partition_count(topic: str) -> int:
            found = await catalog.find(topic)
            # An unknown topic is made by its first append, with one partition.
            return 1 if found is None else found.partitions

        super().__init__(clock, pending_bytes_max=config.pending_max_bytes, partition_count=partition_count)
        self._batching = BatchingProducer(writer, clock=clock, config=config)
        self._on_close = on_close
        self._inbox: deque[Outgoing[Delivery]] = deque()
        self._mover: asyncio.Task[None] | None = None
        self._turn = 0
        self._closed = False

    async def start(self) -> None:
        """Begin the background work of the batching producer."""
        await self._batching.start()

    def checked(self, batch: BytesBatch) -> BytesBatch:
        """The batch; raises once the producer is closed, when nobody would raise what a receipt holds."""
        if self._closed:
            raise Closed("the producer is closed", hint="open another one")
        return batch

    def offer(self, item: Outgoing[Delivery]) -> None:
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

    def _send_at_once(self, item: Outgoing[Delivery]) -> bool:
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

    def _groups(self, item: Outgoing[Delivery], count: int) -> list[AppendGroup]:
        if item.partition is not None:
            return [AppendGroup(item.topic, item.partition, item.batch)]
        self._turn += 1
        parts = route(item.batch, count, self._turn)
        return [AppendGroup(item.topic, partition, part) for partition, part in parts]

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


class _Waiting:
    """Gathers the answers to the groups of one send."""

    def __init__(
        self,
        item: Outgoing[Delivery],
        groups: Sequence[AppendGroup],
        tickets: Sequence[asyncio.Future[AppendResult]],
        finish: Callable[[Outgoing[Delivery], Delivery | ForebayError], None],
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
            self._finish(self._item, settled(self._item.topic, parts, Delivery, PartlyDelivered))


def _result(group: AppendGroup, ticket: asyncio.Future[AppendResult]) -> AppendResult:
    error = asyncio.CancelledError() if ticket.cancelled() else ticket.exception()
    if error is None:
        return ticket.result()
    return AppendResult(group.topic, group.partition, None, None, len(group.batch), error=_as_ours(error))


def _as_ours(error: BaseException) -> ForebayError:
    """What a sender is told: of a defect of ours, or a cancellation, nobody knows how far it got."""
    return error if isinstance(error, ForebayError) else OutcomeUnknown("send", reason=repr(error))
