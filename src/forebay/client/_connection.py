"""One HTTP/1.1 connection: a request, its answer, and again.

The parser is httptools', which is compiled; the rest is an asyncio protocol, because streams would copy every
body once more and wake a task per chunk. Requests are not pipelined: a broker answers a produce request when
it is durable, and whatever stood behind it on the same connection would wait as well.

What a failure means depends on how far the request got, so each says so: `Unsent` before its first byte was
handed to the transport (nothing can have happened), `Broken` afterwards (anything can).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import httptools

from forebay.client._address import Address

__all__ = ["Broken", "Connection", "Response", "Unsent"]

HEADER_BYTES_MAX: Final = 64 * 1024
"""Bytes of the headers of one answer."""


class Unsent(Exception):
    """Nothing of the request was sent."""


class Broken(Exception):
    """The connection ended, or spoke nonsense, before the answer was complete."""


@dataclass(slots=True)
class Response:
    """An answer, complete."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""


class Connection(asyncio.Protocol):
    """For one request at a time."""

    def __init__(self, response_bytes_max: int) -> None:
        self._bytes_max = response_bytes_max
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[Response] | None = None
        self._response = Response(0)
        self._chunks: list[bytes] = []
        self._size = self._header_size = 0
        self._keep_alive = True
        self._awaits_end = False
        """The answer has no length: it ends with the connection."""
        self._paused = False
        """The transport still holds bytes of the request."""
        self._on_sent: Callable[[], None] | None = None
        self.idle_since = 0.0
        """When it became free, on the monotonic clock of whoever pools it."""

    @classmethod
    async def open(cls, address: Address, response_bytes_max: int) -> Connection:
        """Connect. Raises OSError, `ssl.SSLError` among them."""
        loop = asyncio.get_running_loop()
        tls: ssl.SSLContext | None = address.tls
        _, connection = await loop.create_connection(
            lambda: cls(response_bytes_max), address.host, address.port, ssl=tls
        )
        return connection

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._keep_alive

    async def request(
        self,
        head: bytes,
        body: Sequence[bytes | memoryview],
        on_sent: Callable[[], None] | None = None,
    ) -> Response:
        """Send and wait for the whole answer. Cancelling closes the connection."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._waiter is not None:
            raise Unsent("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._chunks, self._size, self._header_size = Response(0), [], 0, 0
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self._on_sent = on_sent
            transport.writelines([head, *body])
            if not self._paused:
                self._sent()
            return await self._waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._waiter = None

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End it. Only between requests."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: it stands."""
        # uvloop's and TLS transports are transports without being of the class.
        self._transport = cast(asyncio.Transport, transport)
        # With a limit of nothing, the transport says when its buffer is empty: the request has left then.
        self._transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        """asyncio's: the kernel did not take all of it."""
        self._paused = True

    def resume_writing(self) -> None:
        """asyncio's: now it has."""
        self._paused = False
        self._sent()

    def _sent(self) -> None:
        callback, self._on_sent = self._on_sent, None
        if callback is not None:
            callback()

    def data_received(self, data: bytes) -> None:
        """asyncio's: bytes of the answer."""
        if self._parser is None or self._waiter is None:
            # Nobody asked. A broker that says goodbye to an idle connection does so.
            self._keep_alive = False
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, _TooLarge) as error:
            cause = error.__context__ if isinstance(error.__context__, _TooLarge) else error
            self._fail(Broken(f"not a usable answer: {cause}"))

    def eof_received(self) -> None:
        """asyncio's: the broker will not send more. The transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's: it is over."""
        if self._awaits_end and error is None:
            self._finish()
        self._fail(Broken(str(error) if error else "the broker closed the connection"))

    def _fail(self, error: Exception) -> None:
        self._keep_alive = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.abort()

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools': one header."""
        self._header_size += len(name) + len(value)
        if self._header_size > HEADER_BYTES_MAX:
            raise _TooLarge(f"headers of more than {HEADER_BYTES_MAX} bytes")
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """httptools': the body begins."""
        headers = self._response.headers
        bodiless = self._parser is not None and self._parser.get_status_code() in (204, 304)
        self._awaits_end = not bodiless and not headers.keys() & {"content-length", "transfer-encoding"}

    def on_body(self, body: bytes) -> None:
        """httptools': a part of the body."""
        self._size += len(body)
        if self._size > self._bytes_max:
            raise _TooLarge(f"a body of more than {self._bytes_max} bytes")
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """httptools': that was all."""
        self._finish()

    def _finish(self) -> None:
        assert self._parser is not None
        response = self._response
        response.status = self._parser.get_status_code()
        if 100 <= response.status < 200:
            self._response, self._chunks = Response(0), []
            return
        response.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._keep_alive = self._keep_alive and self._parser.should_keep_alive() and not self._awaits_end
        self._chunks = []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)


class _TooLarge(Exception):
    """Met inside a callback of the parser."""
