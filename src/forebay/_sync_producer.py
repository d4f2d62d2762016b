"""A producer for threads, around one on an event loop: embedded or over HTTP.

Threads leave what they send in an outbox, in their order, and wake the loop once; the loop hands all of it to
its producer. Where too much is not durable yet, `send` waits.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from forebay._loop_thread import LoopThread
from forebay._outgoing import Outgoing, Sending
from forebay._receipts import not_yet
from forebay.errors import Backpressure, Closed, ForebayError, OutcomeUnknown
from forebay.formats.bytes_batch import BytesBatch

__all__ = ["SyncReceiptFor", "SyncSending"]

D = TypeVar("D")


class SyncReceiptFor(Generic[D]):
    """Becomes a `Delivery` once the records are durable."""

    def __init__(self, seen: Callable[[object], None]) -> None:
        self.future: concurrent.futures.Future[D] = concurrent.futures.Future()
        self._seen = seen

    def result(self, timeout: float | None = None) -> D:
        """The delivery; raises what went wrong, or `OutcomeUnknown` where the time is up."""
        try:
            return self.future.result(timeout)
        except TimeoutError:
            raise not_yet(timeout) from None
        except ForebayError:
            self._seen(self)
            raise

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.future.done()


R = TypeVar("R", bound=SyncReceiptFor[Any])


class SyncSending(Generic[D, R]):
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    _receipt: type[R]
    """What `send` returns."""
    _owner: ClassVar[str]
    """What a user closes, where it is told that this happened."""

    def __init__(self, thread: LoopThread, producer: Sending[D, Any]) -> None:
        self._thread = thread
        self._producer = producer
        self._bytes_max = producer.pending_bytes_max
        self._changed = threading.Condition()
        self._bytes = 0
        self._outbox: deque[Outgoing[D]] = deque()
        """Sent and not yet taken over by the loop. A wake-up is on its way while it is not empty."""
        self._open: set[concurrent.futures.Future[D]] = set()
        """Receipts that are not told yet."""
        self._closed = False

    def send(
        self,
        topic: str,
        records: Sequence[bytes],
        *,
        partition: int | None = None,
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        headers: Sequence[dict[str, bytes | None] | None] | None = None,
        timeout: float | None = None,
    ) -> R:
        """Send records; returns at once. Without a partition, it is chosen by key or in turn.

        Where too much is not durable yet it waits for room; after `timeout` seconds it raises `Backpressure`.
        """
        batch = self._producer.checked(
            BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers)
        )
        receipt, size = self._receipt(self._producer.saw), batch.size_bytes
        tell = functools.partial(self._tell, receipt.future, size)
        item = Outgoing(topic, partition, batch, size, tell, receipt)
        # Before the lock, which a thread that is not part of a forked child may have held.
        self._thread.check()
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room(size), timeout):
                raise Backpressure(
                    f"{self._bytes:,} bytes are not durable yet", hint="wait for earlier receipts"
                )
            if self._closed:
                raise Closed("the producer is closed", hint="open another one")
            # First the wake-up, which may be refused: what is in the outbox is always on its way.
            if not self._outbox:
                self._thread.call_soon(self._take_over)
            self._bytes += size
            self._open.add(receipt.future)
            self._outbox.append(item)
        return receipt

    def _has_room(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= self._bytes_max

    def _take_over(self) -> None:
        """On the loop: hand everything that was sent to the producer there."""
        with self._changed:
            items = list(self._outbox)
            self._outbox.clear()
        for item in items:
            self._producer.offer(item)

    def _tell(self, future: concurrent.futures.Future[D], size: int, outcome: D | ForebayError) -> None:
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()
            if future not in self._open:
                return
            self._open.discard(future)
        if isinstance(outcome, ForebayError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def shut(self) -> None:
        """Refuse further sends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take_over(self) -> None:
        """Hand on what was sent before `shut`."""
        self._take_over()

    def abandon(self) -> None:
        """The loop has ended: tell those who still wait, as nobody else will."""
        with self._changed:
            left, self._open = self._open, set()
        for future in left:
            future.set_exception(
                OutcomeUnknown("send", reason=f"the {self._owner} was closed meanwhile", hint="read the tail")
            )

    async def _drain(self) -> None:
        self._take_over()
        await self._producer.flush()

    async def _finish(self) -> None:
        self._take_over()
        await self._producer.close()

    def flush(self) -> None:
        """Wait until everything sent before is durable; raises what went wrong."""
        self._thread.run(self._drain())

    def close(self) -> None:
        """Refuse further sends, wait until all is durable; raises what went wrong and nobody asked for."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.run(self._finish())

    def __enter__(self) -> Self:
        self._thread.run(self._producer.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
