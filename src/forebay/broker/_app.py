"""From a request to an answer: name it, find its route, see who asks, call the handler, count.

Whatever a handler raises becomes an answer. An error that nobody foresaw becomes a 500 that names the request
and nothing else; it is printed with its traceback where the process logs, and the connection goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from forebay.broker._auth import Auth
from forebay.broker._config import BrokerConfig
from forebay.broker._errors import HttpRefusal, error_response, refusal
from forebay.broker._http import Reply, Request, Response
from forebay.broker._routes import Access, Call, Route, Router
from forebay.broker._server import Refuser
from forebay.errors import ForebayError
from forebay.formats.http_messages import REQUEST_ID
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import Counter, Histogram, MetricsRegistry

__all__ = ["App"]

REQUEST_ID_CHARS_MAX: Final = 128
"""Longest request id that is taken over; of a longer one, or one with odd characters, a new one is made."""
_log = logging.getLogger("forebay.broker")


class App(Refuser):
    """The handler of the server."""

    def __init__(
        self,
        config: BrokerConfig,
        router: Router,
        auth: Auth,
        *,
        clock: Clock,
        ids: IdSource,
        metrics: MetricsRegistry,
        stopping: Callable[[], bool],
    ) -> None:
        self._config = config
        self._router = router
        self._auth = auth
        self._clock = clock
        self._made_ids = map(f"{ids.ulid()}-{{:x}}".format, itertools.count(1))
        """One ULID for the process, a number for the request: a ULID for each costs more than routing it."""
        self._stopping = stopping
        self._requests = metrics.counter("http.requests", "Requests answered", ("method", "path", "status"))
        self._seconds = metrics.histogram(
            "http.request_duration_seconds", "From whole to answered", ("path",)
        )
        self._series: dict[tuple[str | None, str, int], tuple[Counter, Histogram]] = {}
        self._working = 0
        metrics.gauge_function("http.in_flight", "Requests being worked on", lambda: float(self._working))
        self._received = metrics.counter("http.body_bytes_received", "Bytes of bodies").labels()
        self._sent = metrics.counter("http.body_bytes_sent", "Bytes of answers, without streams").labels()

    def take(self, request: Request, reply: Reply) -> Coroutine[Any, Any, None] | None:
        """The handler of the server. Never raises."""
        asked = _Asked(self, request, reply, self._clock.monotonic())
        self._received.inc(len(request.body))
        request.request_id = self._name(request.headers.get("x-request-id", ""))
        self._working += 1
        try:
            route, params = self._router.find(request)
            asked.route = route
            if self._stopping() and not route.open:
                raise _stopping()
            access = self._auth.access_now(request, route, params)
            if access is None or route.begin is None:
                return self._wait(asked, route, access, params)
            self._check_role(route)
            route.begin(Call(request, access, params), asked.answer)
        except Exception as error:
            asked.fail(error)
        return None

    async def _wait(
        self, asked: _Asked, route: Route, access: Access | None, params: Mapping[str, str]
    ) -> None:
        request = asked.request
        try:
            if access is None:
                access = await self._auth.access(request, route, params)
            self._check_role(route)
            call = Call(request, access, params)
            if route.begin is not None:
                route.begin(call, asked.answer)
            elif route.act is not None:
                asked.answer(await route.act(call))
        except Exception as error:
            asked.fail(error)
        except BaseException:  # Cancelled: nobody gets an answer.
            self._working -= 1
            raise

    def _check_role(self, route: Route) -> None:
        if route.role is not None and route.role not in self._config.roles:
            raise HttpRefusal(
                404, "NotFound", f"this broker has no role {route.role!r}", hint="ask another broker"
            )

    async def __call__(self, request: Request) -> Response:
        """The answer to a request that came by no connection."""
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def reply(response: Response) -> None:
            if not answered.done():
                answered.set_result(response)

        work = self.take(request, reply)
        if work is not None:
            await work
        return await answered

    def _name(self, given: str) -> str:
        fits = 0 < len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable()
        return given if fits else next(self._made_ids)

    def answered(self, request: Request, route: Route | None, response: Response, began: float) -> None:
        """Name the request in its answer, and count both."""
        response.headers = (*response.headers, (REQUEST_ID, request.request_id))
        self._working -= 1
        key = (None if route is None else route.path, request.method, response.status)
        series = self._series.get(key)
        if series is None:
            path, method = ("unknown", "any") if route is None else (route.path, route.method)
            series = self._requests.labels(method, path, response.status), self._seconds.labels(path)
            if route is not None:
                self._series[key] = series
        series[0].inc()
        series[1].observe(self._clock.monotonic() - began)
        self._sent.inc(len(response.body))

    def refused(self, status: int, kind: str, message: str, hint: str) -> Response:
        """The answer to a request that was not whole."""
        request_id = next(self._made_ids)
        headers: tuple[tuple[str, str], ...] = ((REQUEST_ID, request_id),)
        if status == 503:
            headers = (*headers, ("Retry-After", "1"))
        response = refusal(status, kind, message, hint, request_id, headers)
        response.close = True
        self._requests.labels("any", "refused", status).inc()
        return response


class _Asked:
    """A request until it is answered, which it is once: whatever comes later is too late."""

    __slots__ = ("_app", "_began", "_reply", "request", "route")

    def __init__(self, app: App, request: Request, reply: Reply, began: float) -> None:
        self._app = app
        self._reply: Reply | None = reply
        self._began = began
        self.request = request
        self.route: Route | None = None

    def answer(self, response: Response) -> None:
        """Count it and pass it on."""
        reply, self._reply = self._reply, None
        if reply is not None:
            self._app.answered(self.request, self.route, response, self._began)
            reply(response)

    def fail(self, error: Exception) -> None:
        """Answer with the error."""
        request_id = self.request.request_id
        if isinstance(error, ForebayError):
            self.answer(error_response(error, request_id))
            return
        _log.error("request %s failed", request_id, exc_info=error)
        what, where = "the broker has a defect", "its log has the details, under this request id"
        self.answer(refusal(500, "InternalError", what, where, request_id))


def _stopping() -> HttpRefusal:
    error = HttpRefusal(503, "Stopping", "the broker is stopping", hint="ask another one")
    error.headers = (("Retry-After", "1"),)
    return error
