"""GET /cost: what the requests of this broker cost per month now, and would at other flush intervals.

Rates are differences of counters between two looks. A broker whose cost nobody asks for keeps one look, that
of its start; each question adds one, at most one in `SPACING_S`, and those older than `WINDOW_S` are let go.

The estimate. A flush begins with a record, ends `delay` later, and the next begins with the next record. With
F flushes a second now, the wait for that record is g = 1/F - delay on average, or none where flushes follow
each other. At another delay there are 1/(delay + g) flushes a second: not fewer than the bytes fill, and not
more than there are requests. All other requests to the store are taken to stay as they are, which is fair for
readers at the tail and compaction; readers far behind pay one request per flush they read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from forebay.broker._bodies import json_response
from forebay.broker._engines import Engines
from forebay.broker._http import Response
from forebay.broker._routes import Action, Call, Route
from forebay.formats.http_messages import JSON, PATHS, CostAt, CostView
from forebay.kit.metrics import CounterFamily, HistogramFamily, MetricsRegistry
from forebay.log._billing import PRICE_BASIS, PRICES_PER_1000

__all__ = ["Load", "cost_routes", "flushes_at"]

WINDOW_S: Final = 60.0
"""Seconds that a rate looks back, where somebody looked then."""
WINDOW_MIN_S: Final = 5.0
"""Seconds that a rate looks back at least, where the broker is that old."""
SPACING_S: Final = 1.0
"""Seconds between two looks that are kept."""
INTERVALS_MS: Final = (10, 25, 50, 100, 250, 500, 1_000, 2_000, 5_000)
"""Flush intervals shown beside the broker's own."""
MONTH_S: Final = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Load:
    """What comes in, per second."""

    requests: float
    flushes: float
    bytes: float
    batch_max_bytes: int
    delay_ms: int


def flushes_at(delay_ms: int, load: Load) -> float:
    """Flushes per second at another delay; see the head of this module."""
    if load.flushes <= 0:
        return 0.0
    wait_s = max(0.0, 1 / load.flushes - load.delay_ms / 1000)
    cycle_s = delay_ms / 1000 + wait_s
    by_time = 1 / cycle_s if cycle_s > 0 else load.requests
    return min(max(by_time, load.bytes / load.batch_max_bytes), max(load.requests, load.flushes))


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    store: dict[str, float]
    requests: float
    flushes: float
    bytes: float


class Cost:
    """The handler."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._looks = deque([self._look()], maxlen=int(WINDOW_S / SPACING_S) + 2)

    async def __call__(self, call: Call) -> Response:
        """Measure, price, and price again."""
        now = self._look()
        before = self._before(now)
        if now.at - self._looks[-1].at >= SPACING_S:
            self._looks.append(now)
        return json_response(self._view(before, now))

    def _before(self, now: _Look) -> _Look:
        """The look to compare with: the oldest in the window, or the newest before it."""
        looks = self._looks
        while len(looks) > 1 and now.at - looks[1].at >= WINDOW_MIN_S and now.at - looks[0].at > WINDOW_S:
            looks.popleft()
        return looks[0]

    def _look(self) -> _Look:
        metrics = self._engines.metrics
        store = _counted(metrics, "log.store_requests")
        return _Look(
            at=self._engines.clock.monotonic(),
            store={labels[0]: value for labels, value in store.items()},
            requests=sum(
                value
                for labels, value in _counted(metrics, "http.requests").items()
                if labels[1] == PATHS.PRODUCE
            ),
            flushes=sum(_counted(metrics, "log.flushes").values()),
            bytes=_summed(metrics, "log.blob_bytes"),
        )

    def _view(self, before: _Look, now: _Look) -> CostView:
        seconds = max(now.at - before.at, 0.001)
        config = self._engines.config
        rates = {name: (now.store[name] - before.store.get(name, 0)) / seconds for name in now.store}
        load = Load(
            requests=(now.requests - before.requests) / seconds,
            flushes=(now.flushes - before.flushes) / seconds,
            bytes=(now.bytes - before.bytes) / seconds,
            batch_max_bytes=config.producer.batch_max_bytes,
            delay_ms=config.producer.batch_max_delay_ms,
        )
        dollars = sum(PRICES_PER_1000.get(name, 0.0) / 1000 * rate for name, rate in rates.items()) * MONTH_S
        return CostView(
            broker_id=config.broker_id,
            basis=PRICE_BASIS,
            window_seconds=seconds,
            batch_max_delay_ms=load.delay_ms,
            produce_requests_per_second=load.requests,
            flushes_per_second=load.flushes,
            wal_bytes_per_second=load.bytes,
            requests_per_second=rates,
            dollars_per_month=dollars,
            intervals=_intervals(load, dollars) if "write" in config.roles else [],
        )


def _intervals(load: Load, dollars: float) -> list[CostAt]:
    put = PRICES_PER_1000["put"] / 1000 * MONTH_S
    found = []
    for delay_ms in sorted({*INTERVALS_MS, load.delay_ms}):
        current = delay_ms == load.delay_ms
        flushes = load.flushes if current else flushes_at(delay_ms, load)
        found.append(
            CostAt(
                batch_max_delay_ms=delay_ms,
                flushes_per_second=flushes,
                dollars_per_month=max(0.0, dollars + (flushes - load.flushes) * put),
                current=current,
            )
        )
    return found


def _counted(metrics: MetricsRegistry, name: str) -> dict[tuple[str, ...], float]:
    for family in metrics.families():
        if family.name == name and isinstance(family, CounterFamily):
            return {labels: series.value for labels, series in family.series()}
    return {}


def _summed(metrics: MetricsRegistry, name: str) -> float:
    for family in metrics.families():
        if family.name == name and isinstance(family, HistogramFamily):
            return sum(series.value.sum for _, series in family.series())
    return 0.0


def cost_routes(engines: Engines) -> list[Route]:
    """The route."""
    return [
        Route(
            "GET",
            PATHS.COST,
            Cost(engines),
            "What the requests to the store cost, now and at other flush intervals.",
            action=Action.MONITOR,
            gives={JSON: CostView},
        )
    ]
