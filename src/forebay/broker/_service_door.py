"""The HTTP door of a background service: how it is, and what it has counted.

    GET /health               its health as JSON; 503 where it failed or is stopped, so that a probe sees it
    GET /metrics              every series as JSON, and the estimate of what its requests cost
    GET /metrics/prometheus   every series as Prometheus reads them

For services that run in a process of their own, as the compactor; a broker shows these beside everything else
it has. Nothing can be changed through it, and it asks nobody: what it says is what the process knows. It has
no tokens, so it listens on loopback unless somebody says otherwise.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from forebay._version import __version__
from forebay.broker._bodies import json_response
from forebay.broker._errors import error_response, refusal
from forebay.broker._http import Reply, Request, Response
from forebay.broker._limits import HttpLimits
from forebay.broker._routes import Access, Call, Route, Router
from forebay.broker._server import HttpServer, Refuser
from forebay.errors import ForebayError
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import PROMETHEUS_CONTENT_TYPE, as_json, prometheus_text
from forebay.kit.service import HealthStatus, Service
from forebay.log._billing import estimate

__all__ = ["ServiceDoor"]

STOP_S = 2.0
"""Seconds that a stop gives to answers under way."""
LIMITS = HttpLimits(body_max_bytes=1, bodies_max_bytes=1, connections_max=64)
"""Nothing is sent to it, and few ask."""
_log = logging.getLogger("forebay.broker")


class ServiceDoor(Refuser):
    """Answers for one service."""

    def __init__(self, service: Service, metrics: MetricsRegistry, *, clock: Clock) -> None:
        self._service = service
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._router = Router(
            [
                Route("GET", "/health", self._health, "How the service is."),
                Route("GET", "/metrics", self._json, "Every series as JSON."),
                Route("GET", "/metrics/prometheus", self._prometheus, "Every series, for Prometheus."),
            ]
        )
        self._server = HttpServer(self.take, self, clock=clock, limits=LIMITS)
        self._address = "", 0

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, host: str, port: int) -> None:
        """Listen; with port 0 on any that is free."""
        self._address = await self._server.start(host, port)

    async def stop(self) -> None:
        """Answer what is under way, then end."""
        await self._server.stop(STOP_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # -- requests

    def take(self, request: Request, reply: Reply) -> Coroutine[Any, Any, None] | None:
        """The handler of the server. Never raises."""
        request.request_id = f"door-{next(self._numbers):x}"
        try:
            route, params = self._router.find(request)
            assert route.act is not None
            return self._answer(route.act, Call(request, Access(), params), reply)
        except ForebayError as error:
            reply(error_response(error, request.request_id))
        return None

    async def _answer(self, act: Callable[[Call], Awaitable[Response]], call: Call, reply: Reply) -> None:
        request_id = call.request.request_id
        try:
            response = await act(call)
        except Exception as error:
            _log.error("request %s failed", request_id, exc_info=error)
            response = refusal(500, "InternalError", "this is a defect", "see the log", request_id)
        reply(response)

    def refused(self, status: int, kind: str, message: str, hint: str) -> Response:
        """The answer to a request that was not whole."""
        response = refusal(status, kind, message, hint, f"door-{next(self._numbers):x}")
        response.close = True
        return response

    async def _health(self, call: Call) -> Response:
        health = self._service.health()
        well = health.status in (HealthStatus.HEALTHY, HealthStatus.DEGRADED)
        document = {"service": self._service.name, "version": __version__, **health.as_json()}
        return json_response(document, HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _json(self, call: Call) -> Response:
        return json_response({"billing": estimate(self._metrics), "series": as_json(self._metrics)})

    async def _prometheus(self, call: Call) -> Response:
        return Response(200, prometheus_text(self._metrics).encode(), PROMETHEUS_CONTENT_TYPE)
