"""GET /health, /ready and the two views of the metrics.

`/health` says that the process answers; it asks nobody. `/ready` says whether requests can be served: it
asks the coordinator, once in `READY_TTL_S` at most. The JSON view of the metrics is grouped as people look
for things, and holds every series once more, by name, for programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay._version import __version__
from forebay.broker._bodies import json_response
from forebay.broker._engines import Engines
from forebay.broker._http import Response
from forebay.broker._lag import LagGauges
from forebay.broker._routes import Call
from forebay.errors import ForebayError
from forebay.formats.http_messages import HealthResponse, ReadyResponse
from forebay.kit.metrics import HistogramFamily
from forebay.kit.metrics_views import PROMETHEUS_CONTENT_TYPE, as_json, prometheus_text
from forebay.log._billing import estimate

__all__ = ["Status"]

READY_TTL_S = 2.0
"""Seconds for which the last look at the coordinator is believed."""
MONTH_S = 30 * 86_400


class Status:
    """How the broker is, and what it has done."""

    def __init__(
        self, engines: Engines, *, address: Callable[[], tuple[str, int]], stopping: Callable[[], bool]
    ) -> None:
        self._engines = engines
        self._config = engines.config
        self._address = address
        self._stopping = stopping
        self.started_at_ms = engines.clock.now_ms()
        self._started = engines.clock.monotonic()
        self._looked_at = float("-inf")
        self._problem = ""
        self._lag = LagGauges(engines.groups, engines.metrics, clock=engines.clock)
        self._gauges()

    def _gauges(self) -> None:
        metrics, config = self._engines.metrics, self._config
        info = metrics.gauge("broker.info", "Who this is", ("broker_id", "roles", "version"))
        info.labels(config.broker_id, "+".join(config.roles), __version__).set(1)
        metrics.gauge_function("broker.uptime_seconds", "Seconds since the start", self._uptime_s)
        batch = metrics.gauge("broker.batch_setting", "How batches are made", ("name",))
        for name in _SETTINGS:
            batch.labels(name).set(float(getattr(config.producer, name)))
        if config.scenario:
            scenario = metrics.gauge("loadtest.scenario", "What is being run", tuple(sorted(config.scenario)))
            scenario.labels(*(config.scenario[name] for name in sorted(config.scenario))).set(1)
        if "write" in config.roles:
            self._batcher_gauges()

    def _batcher_gauges(self) -> None:
        metrics, engines = self._engines.metrics, self._engines
        for name, text, value in (
            ("pending_groups", "Batches accepted and not yet durable", lambda p: p.pending_groups),
            ("pending_bytes", "Bytes accepted and not yet durable", lambda p: p.pending_bytes),
            ("flushes_committed", "Flushes that were committed", lambda p: p.stats.batches_committed),
            ("flushes_failed", "Flushes that failed as a whole", lambda p: p.stats.batches_failed),
            ("commits", "Commits, each of one or more flushes", lambda p: p.stats.commits),
            ("groups_failed", "Batches that were not appended", lambda p: p.stats.items_failed),
        ):
            metrics.gauge_function(f"batcher.{name}", text, _of(engines, value))

    def _uptime_s(self) -> float:
        return self._engines.clock.monotonic() - self._started

    # -- handlers

    async def health(self, call: Call) -> Response:
        """The process answers."""
        host, port = self._address()
        return json_response(
            HealthResponse(
                status="ok",
                broker_id=self._config.broker_id,
                host=host,
                port=port,
                started_at_ms=self.started_at_ms,
            )
        )

    async def ready(self, call: Call) -> Response:
        """Requests can be served."""
        reasons = []
        if self._stopping():
            reasons.append("the broker is stopping")
        else:
            await self._look()
            if self._problem:
                reasons.append(self._problem)
        message = ReadyResponse(
            ready=not reasons,
            broker_id=self._config.broker_id,
            roles=list(self._config.roles),
            reasons=reasons,
        )
        response = json_response(message, 503 if reasons else 200)
        if reasons:
            response.headers = (("Retry-After", "1"),)
        return response

    async def _look(self) -> None:
        clock = self._engines.clock
        if clock.monotonic() - self._looked_at < READY_TTL_S:
            return
        try:
            await self._engines.coordinator.get("llog-catalog/ready", partition_key="llog-catalog")
            self._problem = ""
        except ForebayError as error:
            self._problem = f"the coordinator does not answer: {error.message}"
        self._looked_at = clock.monotonic()

    async def metrics_json(self, call: Call) -> Response:
        """All metrics as one document."""
        self._engines.stored.look()
        await self._lag.refresh()
        return json_response(self.snapshot())

    async def metrics_prometheus(self, call: Call) -> Response:
        """All metrics as Prometheus reads them."""
        self._engines.stored.look()
        await self._lag.refresh()
        text = prometheus_text(self._engines.metrics)
        return Response(200, text.encode(), PROMETHEUS_CONTENT_TYPE)

    # -- the document

    def snapshot(self) -> dict[str, Any]:
        """The metrics, grouped."""
        view = as_json(self._engines.metrics)
        host, port = self._address()
        config = self._config
        return {
            "broker": {
                "broker_id": config.broker_id,
                "host": host,
                "port": port,
                "roles": list(config.roles),
                "version": __version__,
                "started_at_ms": self.started_at_ms,
                "uptime_seconds": self._uptime_s(),
            },
            "batch": {name: getattr(config.producer, name) for name in _SETTINGS},
            "loadtest": dict(config.scenario),
            "http": _group(view, "http."),
            "produce": _group(view, "produce."),
            "consume": _group(view, "consume."),
            "batcher": {**_group(view, "batcher."), "closed_by": self._closed_by()},
            "wal": {
                "blobs": _value(view, "log.flushes"),
                "bytes": self._blob_bytes(),
                "records": _value(view, "log.records_appended"),
            },
            "coordination": _group(view, "coordination."),
            "store": {
                "requests": _group(view, "log.store_requests"),
                "bytes": _group(view, "log.store_bytes"),
            },
            "billing": self._billing(),
            "lag": _group(view, "group."),
            "series": view,
        }

    def _closed_by(self) -> dict[str, int]:
        if "write" not in self._config.roles:
            return {}
        return dict(self._engines.producer.stats.closed)

    def _blob_bytes(self) -> float:
        for family in self._engines.metrics.families():
            if family.name == "log.blob_bytes" and isinstance(family, HistogramFamily):
                return sum(series.value.sum for _, series in family.series())
        return 0.0

    def _billing(self) -> dict[str, Any]:
        known = estimate(self._engines.metrics)
        uptime_s = max(self._uptime_s(), 1.0)
        per_month = known["request_dollars"] * MONTH_S / uptime_s
        return {**known, "request_dollars_per_month": per_month, "storage": self._engines.stored.found}


_SETTINGS = (
    "batch_max_bytes",
    "batch_max_delay_ms",
    "batch_max_groups",
    "pending_max_bytes",
    "pending_max_groups",
    "uploads_max",
)


def _of(engines: Engines, value: Callable[[Any], float]) -> Callable[[], float]:
    return lambda: float(value(engines.producer))


def _group(view: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The series whose names begin so, with one value where there are no labels."""
    found: dict[str, Any] = {}
    for kind in ("counters", "gauges", "histograms"):
        for name, series in view[kind].items():
            if name.startswith(prefix):
                short = name.removeprefix(prefix).lstrip(".") or "total"
                plain = len(series) == 1 and not series[0]["labels"] and "value" in series[0]
                found[short] = series[0]["value"] if plain else series
    return found


def _value(view: dict[str, Any], name: str) -> float:
    return float(sum(series["value"] for series in view["counters"].get(name, ())))
