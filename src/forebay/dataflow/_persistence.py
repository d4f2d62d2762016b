"""The persistence node: requests into Quiver, segments out of it.

**Invariant.** `take` returns only when Quiver has acknowledged the rows, that is, after a finished sync.
Small requests that arrive together become one record batch: an Arrow batch each would cost more than the
requests themselves. Large ones go alone, because joining means copying. The sync is shared in any case.

**Subscribers.** With `broadcast` each destination is a subscriber under its own name, with its own position.
With `round_robin` and several destinations the port is one subscriber and the destinations take turns; it is
called `NODE.out_port`. A new one begins with the oldest segment there is. One that the file no longer names
is removed at the start, after the new ones are there: a renamed exporter gets everything that the old one
had not confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from forebay.dataflow._dispatch import Counted, port
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Parcel, Sink, pieces, record_batch
from forebay.dataflow._plan import OUT_PORT, Node
from forebay.dataflow._pump import Pump
from forebay.dataflow._settings import PersistenceSettings
from forebay.errors import ForebayError, LimitExceeded
from forebay.kit.batcher import Batcher, BatcherConfig
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import Quiver, QuiverFailed

__all__ = ["Persistence"]

_log = logging.getLogger(__name__)

_BATCHING: Final = BatcherConfig(
    batch_bytes=4 * 1024 * 1024,
    batch_items=4_096,
    age_ms=0,
    pending_items_max=65_536,
    pending_bytes_max=256 * 1024 * 1024,
    uploads_max=4,
)
ALONE_BYTES_MIN: Final = 64 * 1024
"""Requests from this size on become a record batch of their own, without being copied."""
_DRAIN_LOOK_S: Final = 0.1

_SignalBatcher = Batcher[Parcel, int, None]


class Persistence:
    """One store with its subscribers."""

    def __init__(
        self,
        node: Node,
        sinks: Mapping[str, Sink],
        *,
        clock: Clock,
        randomness: random.Random,
        registry: MetricsRegistry,
        metrics: DataflowMetrics,
        on_failure: Callable[[QuiverFailed], None],
    ) -> None:
        assert isinstance(node.settings, PersistenceSettings)
        self.node = node
        self.quiver = Quiver(
            node.settings.path, node.settings.quiver, clock=clock, randomness=randomness, metrics=registry
        )
        self._size_cap = node.settings.quiver.size_cap_bytes
        self._clock = clock
        self._on_failure = on_failure
        self._batchers: dict[str, _SignalBatcher] = {}
        self._is_hurried = False
        self._pumps = [
            Pump(
                self.quiver,
                name,
                node.name,
                sink,
                clock=clock,
                randomness=randomness,
                metrics=metrics,
                on_failure=on_failure,
            )
            for name, sink in _subscriptions(node, sinks, metrics).items()
        ]

    async def start(self) -> None:
        """Open the store, bring the subscribers up to date with the file, begin to hand on."""
        await self.quiver.open()
        try:
            wanted = {pump.subscriber for pump in self._pumps}
            for name in sorted(wanted):
                await self.quiver.register(name)
            for each in self.quiver.stats().subscribers:
                if each.name not in wanted:
                    _log.warning(
                        "dataflow.subscriber.removed: %s, %d segments behind", each.name, each.lag_segments
                    )
                    await self.quiver.unregister(each.name)
        except BaseException:
            await self.quiver.close()
            raise
        for pump in self._pumps:
            pump.start()

    async def take(self, parcel: Parcel) -> None:
        """Return when the parcel is durable."""
        if parcel.size >= ALONE_BYTES_MIN:
            self._check_room(parcel)
            for piece in pieces(parcel):
                await self._ingest([piece], parcel.signal)
            return
        batcher = self._batchers.get(parcel.signal)
        if batcher is None:
            batcher = self._batchers[parcel.signal] = self._batcher(parcel.signal)
        await (await batcher.add(parcel, parcel.size))

    def _check_room(self, parcel: Parcel) -> None:
        # It is in the WAL and in a segment for a while. Whoever sends what an empty store cannot hold would
        # otherwise be asked to try again, for ever.
        half = self._size_cap // 2
        if parcel.size > half:
            raise LimitExceeded(
                "half of retention.size_cap", limit=half, actual=parcel.size, hint="send smaller requests"
            )

    async def _ingest(self, parcels: Sequence[Parcel], signal: str) -> None:
        try:
            await self.quiver.ingest(record_batch(parcels), signal=signal)
        except QuiverFailed as error:
            self._on_failure(error)
            raise

    def _batcher(self, signal: str) -> _SignalBatcher:
        async def upload(parcels: Sequence[Parcel]) -> int:
            await self._ingest(parcels, signal)
            return len(parcels)

        async def commit(uploaded: Sequence[int]) -> Sequence[Sequence[None]]:
            # Quiver's acknowledgement is the commit; here everybody is only told.
            return [[None] * count for count in uploaded]

        return Batcher(upload, commit, config=_BATCHING, clock=self._clock)

    async def drain(self, patience_s: float) -> None:
        """Hand on what is there, until it is done, a destination fails, or patience ends."""
        await self._flush()
        deadline = self._clock.monotonic() + patience_s
        for pump in self._pumps:
            while self._lags(pump.subscriber) and not pump.failures:
                left = min(_DRAIN_LOOK_S, deadline - self._clock.monotonic())
                if left <= 0 or self._is_hurried:
                    return
                pump.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pump.changed.wait(), left)

    def hurry(self) -> None:
        """Drain no more, not even where that has begun."""
        self._is_hurried = True

    async def stop(self) -> None:
        """End. What was not handed on stays in the store."""
        for pump in self._pumps:
            await pump.stop()
        await self._flush()
        await self.quiver.close()

    async def _flush(self) -> None:
        for batcher in self._batchers.values():
            with contextlib.suppress(ForebayError):  # whoever sent it was told
                await batcher.flush()
        try:
            await self.quiver.flush()
        except ForebayError as error:
            _log.warning("dataflow.persistence.flush_failed: %s: %s", self.node.name, error)

    def _lags(self, subscriber: str) -> bool:
        found = [each for each in self.quiver.stats().subscribers if each.name == subscriber]
        return bool(found and found[0].lag_segments)


def _subscriptions(node: Node, sinks: Mapping[str, Sink], metrics: DataflowMetrics) -> dict[str, Sink]:
    if node.strategy == "round_robin" and len(node.destinations) > 1:
        counted = [Counted(each, sinks[each], metrics) for each in node.destinations]
        return {f"{node.name}.{OUT_PORT}": port(counted, node.strategy)}
    return {name: sinks[name] for name in node.destinations}
