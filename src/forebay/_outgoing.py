"""What the embedded producer and the one over HTTP have in common, up to the moment records are sent on.

Everything that is not durable yet is bounded in bytes; above the bound `send` raises `Backpressure`, and
`room` waits for it to end. A failed send is told by its receipt. Where nobody asks the receipt, `flush` or
`close` raises it, once: a failure is neither told twice nor lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from forebay._receipts import ReceiptFor
from forebay.errors import Backpressure, ForebayError
from forebay.formats.bytes_batch import BytesBatch
from forebay.kit.clock import Clock

__all__ = ["Outgoing", "PartitionCount", "Sending"]

PARTITION_COUNTS_TTL_S = 30.0
"""Seconds for which the number of a topic's partitions is remembered."""
UNSEEN_FAILURES_MAX = 1_000
"""Failures remembered for `flush` and `close`, of receipts that nobody asked."""

PartitionCount = Callable[[str], Coroutine[Any, Any, int]]
"""Asks for the number of a topic's partitions."""
D = TypeVar("D")
R = TypeVar("R", bound=ReceiptFor[Any])


@dataclass(slots=True, eq=False)
class Outgoing(Generic[D]):
    """One send on its way."""

    topic: str
    partition: int | None
    batch: BytesBatch
    size_bytes: int
    tell: Callable[[D | ForebayError], None]
    receipt: object
    """Whoever is told: a failure that it was asked for is not raised again."""

    def __post_init__(self) -> None:
        # The integers of numpy and the like. A bool is left as it is, and refused where it is used.
        if type(self.partition) is not int and not isinstance(self.partition, bool | None):
            with contextlib.suppress(TypeError):
                self.partition = operator.index(self.partition)


class Sending(ABC, Generic[D, R]):
    """A producer but for the way its records take: `offer`, `flush` and `close` are that."""

    _receipt: type[R]
    """What `send` returns."""

    def __init__(self, clock: Clock, *, pending_bytes_max: int, partition_count: PartitionCount) -> None:
        self._clock = clock
        self.pending_bytes_max = pending_bytes_max
        self._partition_count = partition_count
        self._pending_bytes = 0
        self._room: list[asyncio.Future[None]] = []
        self._counts: dict[str, tuple[int, float]] = {}
        """Partitions of a topic, and until when that is believed."""
        self._unseen: dict[object, ForebayError] = {}
        """Failures that nobody has asked for, by receipt."""

    @abstractmethod
    async def start(self) -> None:
        """Begin the background work."""

    @abstractmethod
    def offer(self, item: Outgoing[D]) -> None:
        """Take a send; its outcome is told later, a refusal too."""

    @abstractmethod
    async def flush(self) -> None:
        """Wait until everything sent before is durable; raises what went wrong and nobody asked for."""

    @abstractmethod
    async def close(self) -> None:
        """Refuse further sends, wait until all is durable; raises what went wrong and nobody asked for."""

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
    ) -> R:
        """Send records; returns at once. Without a partition, it is chosen by key or in turn.

        Raises `Backpressure` where too much is not durable yet: wait for `room`.
        """
        batch = self.checked(BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers))
        if self._pending_bytes >= self.pending_bytes_max:
            raise Backpressure(
                f"{self._pending_bytes:,} bytes are not durable yet", hint="await producer.room() first"
            )
        receipt = self._receipt(self.saw)
        self.offer(Outgoing(topic, partition, batch, batch.size_bytes, receipt.settle, receipt))
        return receipt

    def checked(self, batch: BytesBatch) -> BytesBatch:
        """The batch, from any thread. A producer may refuse one here; otherwise its receipt does."""
        return batch

    async def room(self) -> None:
        """Return once something may be sent again."""
        while self._pending_bytes >= self.pending_bytes_max:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter

    def saw(self, receipt: object) -> None:
        """Somebody was told of the failure of this receipt."""
        self._unseen.pop(receipt, None)

    def _known_count(self, topic: str) -> int | None:
        known = self._counts.get(topic)
        return known[0] if known is not None and known[1] > self._clock.monotonic() else None

    async def _count(self, topic: str) -> int:
        count = self._known_count(topic)
        if count is None:
            count = await self._partition_count(topic)
            self._counts[topic] = (count, self._clock.monotonic() + PARTITION_COUNTS_TTL_S)
        return count

    def _finish(self, item: Outgoing[D], outcome: D | ForebayError) -> None:
        self._pending_bytes -= item.size_bytes
        waiters, self._room = self._room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if isinstance(outcome, ForebayError) and len(self._unseen) < UNSEEN_FAILURES_MAX:
            self._unseen[item.receipt] = outcome
        item.tell(outcome)

    def _raise_unseen(self) -> None:
        unseen, self._unseen = self._unseen, {}
        if unseen:
            error = next(iter(unseen.values()))
            if len(unseen) > 1:
                error.add_note(f"{len(unseen)} sends failed whose receipts nobody asked; this is the first")
            raise error

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
