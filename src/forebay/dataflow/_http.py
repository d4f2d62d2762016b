"""A small HTTP/1.1 server on httptools: requests with a body, answers with a body, keep-alive, limits.

One request at a time and per connection; what a client sends ahead waits in the kernel. A request must have
arrived whole within a time limit, and all bodies that are arriving share a bound, so that clients that are
slow on purpose keep neither places nor memory. Nor do those who ask and do not listen: the next request of a
connection is looked at when its answers are on their way, and who takes none for as long is cut off.

Who is refused before his request has arrived may go on sending it, within the same time: what comes is thrown
away. A connection closed on him would be reset, and most clients then see that instead of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, TypeAlias

import httptools

from forebay.dataflow._settings import Address
from forebay.errors import Unavailable

__all__ = ["Answer", "Handler", "HttpServer", "Request"]

_log = logging.getLogger(__name__)

HEADER_BYTES_MAX: Final = 16 * 1024
"""Bytes of the target and all headers of a request."""
CONNECTIONS_MAX: Final = 1_024
"""Connections at once; further ones are closed."""
READ_TIMEOUT_S: Final = 60.0
"""Longest time for a request to arrive, longest wait for the next one, and for answers to be taken."""
ARRIVING_BODIES_MAX: Final = 16
"""Bodies of the largest size that may be arriving at once, or as many more that are smaller."""
AHEAD_MAX: Final = 16
"""Requests that may arrive in one read."""


@dataclass(slots=True)
class Request:
    """What a client wants."""

    method: str = ""
    target: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What it gets."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


Refuse: TypeAlias = Callable[[Request, int, str], Answer]
"""Makes the answer to a request that does not reach the handler, or that it failed at: status and message."""


def _as_text(request: Request, status: int, message: str) -> Answer:
    retry = (("retry-after", "1"),) if status == 503 else ()
    return Answer(status, message.encode(), headers=retry)


class _Broken(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message


class _Connection(asyncio.Protocol):
    """Called by the loop with bytes and by httptools with parts of requests."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._ready: deque[Request] = deque()
        self._request = Request()
        self._header_bytes = 0
        self._unseen = 0
        self._arriving = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        """Whether it was refused, and nothing that comes is looked at any more."""
        self._is_heard = asyncio.Event()
        """Clear while more of its answers wait to be taken than should."""
        self._is_heard.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._server.connections) >= CONNECTIONS_MAX or self._server.is_stopping:
            transport.close()
            return
        self._server.connections.add(self)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._let_go()
        self._stop_waiting()
        self._is_heard.set()

    def pause_writing(self) -> None:
        self._is_heard.clear()

    def resume_writing(self) -> None:
        self._is_heard.set()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        # The parser gathers a header until its end comes, however long that takes.
        self._unseen += len(data)
        try:
            self._parser.feed_data(data)
            if self._unseen > HEADER_BYTES_MAX:
                self._end(431, "the headers are too large")
        except httptools.HttpParserUpgrade:
            # It is answered as if it had not asked for another protocol, and that is all.
            self._request.keep_alive = False
        except httptools.HttpParserError as error:
            # Errors of our own callbacks come wrapped.
            broken = error.__context__
            if isinstance(broken, _Broken):
                self._end(broken.status, broken.message)
            else:
                self._end(400, "not HTTP/1.1")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._request = Request()
        self._header_bytes = 0
        self._wait()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unseen = 0
        self._count(len(name) + len(value))
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._unseen = 0
        request = self._request
        request.method = self._parser.get_method().decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._server.body_bytes_max:
            raise _Broken(413, "the body is too large")
        if request.headers.get("expect", "").lower() == "100-continue" and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        if len(self._request.body) + len(body) > self._server.body_bytes_max:
            raise _Broken(413, "the body is too large")
        if self._server.arriving_bytes + len(body) > self._server.arriving_bytes_max:
            raise _Broken(503, "too much is arriving at once; try again")
        self._server.arriving_bytes += len(body)
        self._arriving += len(body)
        self._request.body += body

    def on_message_complete(self) -> None:
        self._unseen = 0
        if len(self._ready) >= AHEAD_MAX:
            raise _Broken(400, "too many requests ahead of their answers")
        self._ready.append(self._request)
        self._let_go()
        self._stop_waiting()
        if self._task is None:
            self._transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._server.tasks.add(self._task)
            self._task.add_done_callback(self._server.tasks.discard)

    # Answering.

    async def _work(self) -> None:
        while self._ready:
            request = self._ready.popleft()
            try:
                answer = await self._server.handler(request)
            except Exception:
                _log.exception("dataflow.http.failed")
                answer = self._server.refuse(request, 503, "it failed; try again")
            keep = request.keep_alive and not self._server.is_stopping
            self._write(answer, keep, has_body=request.method != "HEAD")
            if not keep:
                self._close()
                break
            await self._heard()
        self._task = None
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        self._wait()

    async def _heard(self) -> None:
        if not self._is_heard.is_set():
            self._wait()
            await self._is_heard.wait()
            self._stop_waiting()

    def _write(self, answer: Answer, keep: bool, has_body: bool = True) -> None:
        if self._transport.is_closing():
            return
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"content-type: {answer.content_type}",
            f"content-length: {len(answer.body)}",
            f"connection: {'keep-alive' if keep else 'close'}",
            *(f"{name}: {value}" for name, value in answer.headers),
        ]
        body = answer.body if has_body else b""
        self._transport.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    def _end(self, status: int, message: str) -> None:
        if self._task is not None:
            self._close()
            return
        self._is_over = True
        self._let_go()
        self._write(self._server.refuse(self._request, status, message), keep=False)
        self._request = Request()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._wait()

    def _close(self) -> None:
        """Once what was written is on its way, or nobody has taken it for too long."""
        self._transport.close()
        self._wait()

    def _let_go(self) -> None:
        self._server.arriving_bytes -= self._arriving
        self._arriving = 0

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            raise _Broken(431, "the headers are too large")

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = asyncio.get_running_loop().call_later(READ_TIMEOUT_S, self._transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close_if_idle(self) -> None:
        """The server stops: whoever is not being answered goes now."""
        if self._task is None:
            self._transport.close()

    def abort(self) -> None:
        """Nobody is answered any more."""
        if not self._transport.is_closing():
            self._transport.abort()


class HttpServer:
    """A listener with one handler."""

    def __init__(
        self,
        address: Address,
        handler: Handler,
        *,
        body_bytes_max: int,
        tls: ssl.SSLContext | None = None,
        refuse: Refuse = _as_text,
    ) -> None:
        self.address = address
        """Where it listens; with a real port after the start."""
        self.handler = handler
        self.refuse = refuse
        self.body_bytes_max = body_bytes_max
        self.arriving_bytes = 0
        """Bytes of bodies of which the end has not arrived."""
        self.arriving_bytes_max = ARRIVING_BODIES_MAX * body_bytes_max
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """Connections with a request under way, also those whose client is gone."""
        self.is_stopping = False
        self._tls = tls

    async def start(self) -> None:
        """Listen. Raises `Unavailable` where the address is taken."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self), self.address.host, self.address.port, ssl=self._tls, backlog=512
            )
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {self.address}: {error.strerror}", hint="is it in use?"
            ) from error
        self.address = Address(self.address.host, self._server.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Take nothing more. Answers under way are still given, for so long."""
        self.is_stopping = True
        self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self.connections):
            connection.abort()
