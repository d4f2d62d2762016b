"""The listener: sockets, connections, what they hold together, and how they end.

`stop` has three steps, each bounded by what is left of one timeout: no new connections; handlers that wait
are told, everything under way is answered; what is left is cut off. A request that was accepted is answered
unless the time is up, and an unanswered one was never promised anything.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine
from typing import Any

from forebay.broker import _connection
from forebay.broker._connection import Connection
from forebay.broker._http import Handler, Reply, Request, Response
from forebay.broker._limits import HttpLimits
from forebay.errors import Unavailable, Unsupported, UsageError
from forebay.kit.clock import Clock

__all__ = ["HttpServer", "Refuser"]

_log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Seconds between two looks for connections that are overdue; less where a timeout is shorter."""
BACKLOG = 1_024
INBOX_BYTES = 256 * 1024
"""Bytes that are taken from a socket at a time, unless they go to where the body stays. A request of 100 KiB
comes with one read then, and copying its body out of memory that is in the cache costs less than a second."""


class Refuser:
    """Makes the answers to requests that no handler saw."""

    def refused(self, status: int, kind: str, message: str, hint: str) -> Response:
        """An error as the broker writes them."""
        raise NotImplementedError


class HttpServer:
    """Serves one handler on one address."""

    def __init__(self, handler: Handler, refuser: Refuser, *, clock: Clock, limits: HttpLimits) -> None:
        self.limits = limits
        self.stopping = False
        self.inbox = memoryview(bytearray(INBOX_BYTES))
        self.connections: set[Connection] = set()
        self.body_bytes = 0
        """Bytes of bodies that have come and are not answered."""
        self.answer_bytes = 0
        """Bytes of answers that their clients have not taken."""
        self._handler = handler
        self._refuser = refuser
        self._clock = clock
        self._whole: list[tuple[Request, Reply]] = []
        """Requests that the handler has not seen."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Listen; the address that was bound."""
        if not _connection.PARSER_INSTALLED:
            raise Unsupported("the HTTP parser is not installed", hint="pip install 'forebay[broker]'")
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if tls is not None:
            options = {"ssl": tls, "ssl_handshake_timeout": self.limits.head_timeout_ms / 1000}
        try:
            self._server = await loop.create_server(
                lambda: Connection(self), host, port, backlog=BACKLOG, **options
            )
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                hint="another process may have the port; choose one with --port",
            ) from error
        except OverflowError as error:
            raise UsageError(f"port {port}", hint="a port is a number from 0 to 65535") from error
        self._sweeper = loop.create_task(self._sweep(), name="forebay http sweep")
        bound = self._server.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    async def close_listener(self) -> None:
        """Take no new connections; tell handlers that wait, close what is idle."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.stop()

    async def stop(self, timeout_s: float) -> bool:
        """Answer what is under way, then end everything; whether all was answered in time."""
        await self.close_listener()
        if self.connections:
            self._idle = asyncio.get_running_loop().create_future()
            timer = asyncio.get_running_loop().create_task(self._clock.sleep(timeout_s))
            await asyncio.wait([self._idle, timer], return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
        in_time = not any(connection.busy for connection in self.connections)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return in_time

    # -- what connections ask for

    def opened(self, connection: Connection) -> bool:
        """Note a new connection; whether there is room for it."""
        self.connections.add(connection)
        return len(self.connections) <= self.limits.connections_max

    @property
    def crowded(self) -> bool:
        """Whether so many connections are open that a further one is not even told so."""
        return len(self.connections) > self.limits.connections_max + self.limits.refusals_max

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        if not self.connections and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def has_room(self, size: int) -> bool:
        """Whether there is room for a body of so many bytes now."""
        return self.body_bytes + size <= self.limits.bodies_max_bytes

    def take_body(self, size: int) -> bool:
        """Reserve bytes for a body; whether there is room."""
        if not self.has_room(size):
            return False
        self.body_bytes += size
        return True

    def give_body(self, size: int) -> None:
        """Give them back."""
        self.body_bytes -= size

    def refused(self, status: int, kind: str, message: str, hint: str) -> Response:
        """The answer to a request that was not handed on."""
        return self._refuser.refused(status, kind, message, hint)

    def hand_on(self, request: Request, reply: Reply) -> None:
        """Call the handler a moment later, for all requests that came meanwhile.

        One after the other they find what they need in the caches of the processor. Where the handler is
        called as each request comes, between two reads of sockets, it takes a third more time.
        """
        if not self._whole:
            asyncio.get_running_loop().call_soon(self._handle)
        self._whole.append((request, reply))

    def _handle(self) -> None:
        whole, self._whole = self._whole, []
        for request, reply in whole:
            try:
                work = self._handler(request, reply)
            except Exception:
                # Handlers do not raise. Should one do so, those that came with it are served all the same.
                _log.exception("a handler failed")
                answer = self.refused(
                    500, "InternalError", "the broker has a defect", "its log has the details"
                )
                asyncio.get_running_loop().call_soon(reply, answer)
                continue
            if work is not None:
                self.run(work)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; it is ended with the server."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        limits = self.limits
        shortest_ms = min(
            limits.head_timeout_ms, limits.body_timeout_ms, limits.idle_timeout_ms, limits.write_timeout_ms
        )
        loop = asyncio.get_running_loop()
        while True:
            await self._clock.sleep(min(SWEEP_S, shortest_ms / 4000))
            now = loop.time()
            for connection in list(self.connections):
                connection.overdue(now)
