"""Metrics for Prometheus, and a word for whoever asks whether the process lives."""

from __future__ import annotations

from forebay.dataflow._http import Answer, HttpServer, Request
from forebay.dataflow._settings import parse_address
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import PROMETHEUS_CONTENT_TYPE, prometheus_text

__all__ = ["MetricsPage"]


class MetricsPage:
    """`GET /metrics` and `GET /healthz` on an address like `127.0.0.1:9464`."""

    def __init__(self, address: str, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._server = HttpServer(parse_address(address), self._handle, body_bytes_max=0)

    @property
    def address(self) -> str:
        """Where it listens; with a real port after the start."""
        return str(self._server.address)

    async def start(self) -> None:
        """Listen. Raises `Unavailable` where the address is taken."""
        await self._server.start()

    async def stop(self) -> None:
        """End."""
        await self._server.stop(0)

    async def _handle(self, request: Request) -> Answer:
        page = request.target.partition(b"?")[0]
        if page not in (b"/metrics", b"/healthz"):
            return Answer(404, b"there is /metrics and /healthz\n")
        if request.method not in ("GET", "HEAD"):
            return Answer(405, b"use GET\n", headers=(("allow", "GET, HEAD"),))
        if page == b"/healthz":
            return Answer(200, b"ok\n")
        return Answer(200, prometheus_text(self._registry).encode(), PROMETHEUS_CONTENT_TYPE)
