"""From a subscriber of Quiver to a destination: pull, hand over, acknowledge.

**Invariant.** A segment is acknowledged only after the destination has all of it. A crash anywhere before
means another delivery; Quiver sees to that.

While a destination is down, trying each segment of a long backlog once would write a nack for each of them
and gain nothing. So a failure makes all workers of the pump pause, longer each time, and then one of them
tries the oldest segment while the others wait for how that ends. A destination that says how long it wants to
be left alone is left alone for that long, within a bound. A segment that alone is the trouble does not stop
the others: it waits by Quiver's retry, and with the first success all workers go on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from forebay.dataflow._dispatch import RoundRobin
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import AskedToWait, Refused, Sink, parcel_of
from forebay.errors import Closed
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy
from forebay.quiver import Delivery, Quiver, QuiverFailed

__all__ = ["Pump"]

_log = logging.getLogger(__name__)

WORKERS: Final = 4
"""Segments on their way to one destination at once."""
ASKED_WAIT_S_MAX: Final = 300.0
"""Longest pause that a destination can ask for."""
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
        # Destinations that take turns count what each of them got.
        self._counts_items = not isinstance(sink, RoundRobin)
        self._not_before = 0.0
        self._turn = asyncio.Lock()
        """Of the worker who waits for the next segment, for all of them would wake up for each; and of the
        one who tries whether the destination is back."""
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
                async with self._turn:
                    await self._pause()
                    delivery = await self._quiver.next(self.subscriber)
                    if self.failures:
                        await self._deliver(delivery)
                        continue
                await self._deliver(delivery)
            except Closed:
                return
            except Exception as error:
                # The store itself is in trouble, or an outcome could not be written: the claim was released.
                # A worker that ended here would leave its subscriber behind for ever.
                _log.warning("dataflow.pump.failed: %s: %r", self.subscriber, error)
                if isinstance(error, QuiverFailed):
                    self._on_failure(error)
                self._failed()

    def _pause_s(self) -> float:
        return self._not_before - self._clock.monotonic()

    async def _pause(self) -> None:
        while (left := self._pause_s()) > 0:
            await self._clock.sleep(left)

    async def _deliver(self, delivery: Delivery | None) -> None:
        if delivery is not None:
            async with delivery:
                # Whoever waited for it while another worker failed gives it back and pauses too.
                if self._pause_s() <= 0:
                    await self._hand_over(delivery)

    async def _hand_over(self, delivery: Delivery) -> None:
        try:
            parcel = parcel_of(delivery.view, self._giver)
            await self._sink.take(parcel)
        except Refused as error:
            _log.error("dataflow.exporter.refused: %s: %s", self.subscriber, error)
            await delivery.reject()
            self._done(parcel.signal, parcel.items - error.items, error.items)
        except Exception as error:
            # Not only what we know of: whatever goes wrong at a destination, the data is not there yet.
            _log.warning("dataflow.exporter.failed: %s: %s", self.subscriber, error)
            await delivery.nack()
            self._failed(_asked_wait_s(error))
        else:
            await delivery.ack()
            self._done(parcel.signal, parcel.items)

    def _done(self, signal: str, items: int, refused: int = 0) -> None:
        if self._counts_items:
            self._metrics.exported.labels(self.subscriber, signal).inc(items)
            if refused:
                self._metrics.rejected.labels(self.subscriber, signal).inc(refused)
        self.failures = 0
        self._not_before = 0.0
        self.changed.set()

    def _failed(self, asked_s: float = 0.0) -> None:
        self.failures += 1
        self._metrics.failures.labels(self.subscriber).inc()
        pause = max(_PAUSE.wait_s(self.failures, self._random), min(asked_s, ASKED_WAIT_S_MAX))
        self._not_before = max(self._not_before, self._clock.monotonic() + pause)
        self.changed.set()


def _asked_wait_s(error: BaseException | None) -> float:
    """What the destination asked for, also where a part of the parcel arrived before that."""
    while error is not None and not isinstance(error, AskedToWait):
        error = error.__cause__
    return 0.0 if error is None else error.wait_s
