"""From a subscriber of Quiver to a destination: pull, hand over, acknowledge.

**Invariant.** A segment is acknowledged only after the destination has all of it. A crash anywhere before
means another delivery; Quiver sees to that.

While a destination is down, trying each segment of a long backlog once would write a nack for each of them
and gain nothing. So a failure makes all workers of the pump pause together, longer each time, and the oldest
segments are what they try next. A segment that alone is the trouble does not stop the others: it waits by
Quiver's retry, and the first success ends the pause.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Refused, Sink, parcel_of
from forebay.errors import Closed
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy
from forebay.quiver import Delivery, Quiver, QuiverFailed

__all__ = ["Pump"]

_log = logging.getLogger(__name__)

WORKERS: Final = 4
"""Segments on their way to one destination at once."""
_PAUSE: Final = RetryPolicy(base_ms=500, cap_ms=15_000)


class Pump:
    """All workers of one subscriber."""

    def __init__(
        self,
        quiver: Quiver,
        subscriber: str,
        giver: str,
        sink: Sink,
        *,
        clock: Clock,
        randomness: random.Random,
        metrics: DataflowMetrics,
        on_failure: Callable[[QuiverFailed], None],
    ) -> None:
        self.subscriber = subscriber
        self.failures = 0
        """Failures since the last success."""
        self.changed = asyncio.Event()
        """Set after each outcome."""
        self._quiver = quiver
        self._giver = giver
        self._sink = sink
        self._clock = clock
        self._random = randomness
        self._metrics = metrics
        self._on_failure = on_failure
        self._not_before = 0.0
        self._turn = asyncio.Lock()
        """Of the worker who waits for the next segment. All of them would wake up for each."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(WORKERS)]

    async def stop(self) -> None:
        """End now. What is under way is delivered again after the next start."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    async def _work(self) -> None:
        while True:
            try:
                await self._pause()
                async with self._turn:
                    delivery = await self._quiver.next(self.subscriber)
                if delivery is not None:
                    async with delivery:
                        await self._hand_over(delivery)
            except Closed:
                return
            except Exception as error:
                # The store itself is in trouble, or an outcome could not be written: the claim was released.
                # A worker that ended here would leave its subscriber behind for ever.
                _log.warning("dataflow.pump.failed: %s: %r", self.subscriber, error)
                if isinstance(error, QuiverFailed):
                    self._on_failure(error)
                self._failed()

    async def _pause(self) -> None:
        while (left := self._not_before - self._clock.monotonic()) > 0:
            await self._clock.sleep(left)

    async def _hand_over(self, delivery: Delivery) -> None:
        try:
            parcel = parcel_of(delivery.view, self._giver)
            await self._sink.take(parcel)
        except Refused as error:
            _log.error("dataflow.exporter.refused: %s: %s", self.subscriber, error)
            await delivery.reject()
            self._metrics.rejected.labels(self.subscriber, parcel.signal).inc(error.items)
            self._done(parcel.signal, parcel.items - error.items)
        except Exception as error:
            # Not only what we know of: whatever goes wrong at a destination, the data is not there yet.
            _log.warning("dataflow.exporter.failed: %s: %s", self.subscriber, error)
            await delivery.nack()
            self._failed()
        else:
            await delivery.ack()
            self._done(parcel.signal, parcel.items)

    def _done(self, signal: str, items: int) -> None:
        self._metrics.exported.labels(self.subscriber, signal).inc(items)
        self.failures = 0
        self._not_before = 0.0
        self.changed.set()

    def _failed(self) -> None:
        self.failures += 1
        self._metrics.failures.labels(self.subscriber).inc()
        pause = _PAUSE.wait_s(self.failures, self._random)
        self._not_before = max(self._not_before, self._clock.monotonic() + pause)
        self.changed.set()
