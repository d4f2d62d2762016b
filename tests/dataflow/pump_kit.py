"""A pump on a store of its own."""

from __future__ import annotations

import random

from tests.dataflow.otlp_kit import logs

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Parcel, Sink, record_batch
from forebay.dataflow._pump import Pump
from forebay.kit.clock import SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import Delivery, Quiver


class WatchedQuiver(Quiver):
    """Counts who waits for a segment, and who got one."""

    waiting = waiting_most = handed_out = 0

    async def next(self, name: str, timeout_s: float | None = None) -> Delivery | None:
        self.waiting += 1
        self.waiting_most = max(self.waiting, self.waiting_most)
        try:
            delivery = await super().next(name, timeout_s)
        finally:
            self.waiting -= 1
        self.handed_out += 1
        return delivery


def pump_to(sink: Sink, quiver: Quiver) -> Pump:
    """A pump of the subscriber `out`."""
    return Pump(
        quiver,
        "out",
        "store",
        sink,
        clock=SystemClock(),
        randomness=random.Random(1),
        metrics=DataflowMetrics(MetricsRegistry()),
        on_failure=lambda error: None,
    )


async def add_segment(quiver: Quiver) -> None:
    """One request, in a segment of its own."""
    data = logs("a")
    await quiver.ingest(record_batch([Parcel("logs", (data,), 1, len(data))]), signal="logs")
    await quiver.flush()
