"""The broker: a log, its handlers and a listener, started and stopped as one.

    async with Broker(parts, BrokerConfig(port=0)) as broker:
        print(broker.url)

Stopping, in this order: nobody new is let in; requests that wait are answered with what there is; what was
accepted is flushed at once, so that producers are answered without waiting for the batch to fill; what is
left after `stop_timeout_ms` is cut off, never having been acknowledged; the log is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from types import TracebackType
from typing import Self

from forebay._connect import Parts
from forebay.broker._app import App
from forebay.broker._auth import Auth
from forebay.broker._config import BrokerConfig
from forebay.broker._console import console_routes
from forebay.broker._engines import Engines
from forebay.broker._openapi import openapi_route
from forebay.broker._routes import Router
from forebay.broker._server import HttpServer
from forebay.broker._status import Status
from forebay.broker._table import routes
from forebay.broker._tokens import Tokens, TokenTable
from forebay.errors import ForebayError, UsageError

__all__ = ["Broker"]


class Broker:
    """One broker process. The parts belong to it from now on, and are closed with it."""

    def __init__(self, parts: Parts, config: BrokerConfig | None = None) -> None:
        self.config = config or BrokerConfig()
        self.metrics = parts.metrics
        self.engines = Engines(parts, self.config)
        self.tokens = Tokens(self.engines.coordinator, clock=parts.clock)
        self._address = (self.config.host, self.config.port)
        self._tls = False
        self.status = Status(
            self.engines, address=lambda: self._address, stopping=lambda: self.server.stopping
        )
        table = [*routes(self.engines, self.status), *console_routes()]
        self.router = Router([*table, openapi_route(table)])
        refresh_ms = self.config.token_refresh_ms
        self.app = App(
            self.config,
            self.router,
            Auth(self.config, TokenTable(self.tokens, clock=parts.clock, refresh_ms=refresh_ms)),
            clock=parts.clock,
            ids=parts.ids,
            metrics=parts.metrics,
            stopping=lambda: self.server.stopping,
        )
        self.server = HttpServer(self.app.take, self.app, clock=parts.clock, limits=self.config.limits)
        self.metrics.gauge_function(
            "http.connections", "Open connections", lambda: float(len(self.server.connections))
        )
        self.metrics.gauge_function(
            "http.bodies_bytes", "Bytes of bodies being held", lambda: float(self.server.body_bytes)
        )
        self.engines.answer_bytes = lambda: self.server.answer_bytes
        self.metrics.gauge_function(
            "http.answers_bytes", "Bytes of answers that wait to be taken", self.engines.answer_bytes
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._address
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen. Raises `UsageError` where the address needs tokens and there are none."""
        try:
            await self._check_tokens()
            await self.engines.start()
            self._tls = tls is not None
            self._address = await self.server.start(self.config.host, self.config.port, tls)
        except BaseException:
            with contextlib.suppress(ForebayError):
                await self.engines.close()
            raise

    async def _check_tokens(self) -> None:
        if self.config.needs_tokens and not await self.tokens.list():
            raise UsageError(
                f"{self.config.host} can be reached by others, and there are no tokens",
                hint="forebay tokens issue NAME --can read --can append; or serve with --insecure",
            )

    async def stop(self) -> bool:
        """End; whether every request under way was answered. Stopping twice is fine."""
        await self.server.close_listener()
        flush = asyncio.get_running_loop().create_task(self._flush())
        try:
            in_time = await self.server.stop(self.config.stop_timeout_ms / 1000)
        finally:
            flush.cancel()
            with contextlib.suppress(asyncio.CancelledError, ForebayError):
                await flush
            with contextlib.suppress(ForebayError):  # Each failure was told to whoever sent the records.
                await self.engines.close()
        return in_time

    async def _flush(self) -> None:
        """Keep flushing while requests are being answered: some may just have been accepted."""
        while "write" in self.config.roles:
            with contextlib.suppress(ForebayError):
                await self.engines.producer.flush()
            await self.engines.clock.sleep(0.01)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
