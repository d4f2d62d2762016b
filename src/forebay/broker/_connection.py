"""One connection: bytes in, requests out; answers in, bytes out, in the order of the requests.

httptools parses, this class keeps the books. What it promises, whatever the other side does:

* Answers go out in the order of the requests, though requests that follow each other on the wire
  (pipelining) are worked on at the same time, up to `PIPELINE_MAX`; then the socket is not read further, and
  what was read with the last of them waits unparsed: thousands of requests fit into one read.
* A request is handed on only when it is whole, and never when a limit is passed: too long a target, too many
  headers, too large a body is answered at once, and the connection ends, since what follows on it is unread.
* Every phase has a deadline: the headers, the body (with a least rate), the pause between requests, and the
  taking of an answer. The server asks `overdue` about once a second; no timer per connection.
* A client that does not take its answers is not read from, so it cannot make the broker hold more of them.
* A client that has shut down its sending side still gets its answers. Handlers that wait learn of it by
  `gone` and answer with what they have.

* A body whose length is known is received in the place where it stays: only what came together with the
  headers is copied. The place grows with what has arrived, so announcing much takes no memory. The parser
  does not see such a body, and is a new one afterwards.

A handler never runs inside the parser's callbacks, and its failure never reaches them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast

import numpy as np

try:
    import httptools
except ImportError:  # The extra `broker`: tokens and messages are of use without it; the server says so.
    httptools = None  # type: ignore[assignment]

from forebay.broker._exchange import Exchange, Host
from forebay.broker._http import Gone, Request, Response, head_bytes
from forebay.broker._limits import HEADER_BYTES_MAX, HEADERS_MAX, PIPELINE_MAX, TARGET_BYTES_MAX

__all__ = ["Connection"]

_BODYLESS = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS"})
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PARSER_INSTALLED = httptools is not None
"""Whether connections can be served here."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused request is read and thrown away."""
PLACE_FACTOR: Final = 8
"""Bytes of memory for a body, per byte of it that has arrived, until it has all it needs."""
HEAD_END: Final = b"\r\n\r\n"
HEAD_BYTES_MIN: Final = len(b"GET / HTTP/1.1")
"""Bytes of the shortest request up to `HEAD_END`."""
CHUNKED_PIECE_BYTES: Final = 4 * 1024
"""Bytes of a body in chunks that are parsed at a time: nobody but the parser knows where it ends."""
JOINED_BYTES: Final = 64 * 1024
"""Answers up to this size are sent in one piece with their head, which costs less than gathering two."""
_NAMES: Final = {
    spelling.encode(): name
    for name in (
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "host",
        "origin",
        "transfer-encoding",
        "user-agent",
        "x-request-id",
    )
    for spelling in (name, name.title())
}
"""Names as nearly all clients write them."""


class Connection(asyncio.BufferedProtocol):
    """The protocol of one connection."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._gone = Gone()
        self._exchanges: deque[Exchange] = deque()
        self._unread = False
        """There may be bytes of a refused request that nobody reads."""
        self._refusing = False
        """Nothing more is read: the last answer is on its way."""
        self._rest = b""
        """What was read behind the last request that there was room for."""
        self._reading_paused = False
        self._writable: asyncio.Future[None] | None = None
        """Set while the client takes no more bytes."""
        self._eof = False
        self._deadline: float | None = None
        """When the present phase is over; None while only handlers are at work."""
        self._write_deadline: float | None = None
        self._write_left = 0
        """Bytes that waited to be sent when `overdue` last looked."""
        self._untaken = 0
        """Bytes of answers that the client has not taken, as the server was told."""
        self._lingering = False
        """The last answer is sent; what still comes is thrown away, so that the client reads it."""
        self._begin_message()

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or say that there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else str(peer or "")
        self._deadline = self._loop.time() + self._host.limits.head_timeout_ms / 1000
        if self._host.opened(self):
            return
        if self._host.crowded:
            self._refusing = True
            self.abort()
        else:
            self._refuse(503, "TooManyConnections", "too many connections are open", "try again later")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the body, or to a place that all connections share, since none leaves
        anything there."""
        place = self._place
        return self._host.inbox if place is None else place[self._body_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what came."""
        if self._refusing:
            return
        if self._place is None:
            self._parse(cast(bytearray, self._host.inbox.obj), nbytes)
        else:
            self._count_body(nbytes)
        self._go_on()

    def _go_on(self) -> None:
        if self._length is not None and not self._refusing:
            self._receive_in_place(self._length)
        self._regulate()

    def _parse(self, data: bytes | bytearray, end: int) -> None:
        """Give the parser one request at a time, while there is room for another."""
        start, view = 0, memoryview(data)
        while start < end and not self._refusing:
            if self._is_full:
                self._keep_rest(bytes(view[start:end]))
                return
            stop = self._request_end(data, start, end)
            self._feed(view[start:stop])
            start = stop

    def _request_end(self, data: bytes | bytearray, start: int, end: int) -> int:
        """Where to stop, so that no more than one request, or hardly more, is parsed."""
        if not self._in_body:
            found = data.find(HEAD_END, start + HEAD_BYTES_MIN, end)
            return end if found < 0 else found + len(HEAD_END)
        left = CHUNKED_PIECE_BYTES if self._length is None else self._length - self._body_bytes
        return min(end, start + left)

    def _keep_rest(self, rest: bytes) -> None:
        if self._host.take_body(len(rest)):
            self._rest = rest
        else:
            self._no_room()

    def _take_rest(self) -> bytes:
        rest, self._rest = self._rest, b""
        self._host.give_body(len(rest))
        return rest

    def _parse_rest(self) -> None:
        """There is room for another request, perhaps."""
        if self._rest and not self._is_full:
            rest = self._take_rest()
            self._parse(rest, len(rest))
            self._go_on()

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing here can be upgraded to: the request is answered as it is, what follows it is unread.
            self._refusing = self._unread = True
        except httptools.HttpParserError as error:
            self._refuse(400, "BadRequest", f"this is not HTTP: {error}", "see RFC 9112")

    def eof_received(self) -> bool:
        """The client sends no more. Keep the connection for the answers that are due."""
        self._eof = True
        self._gone.set()
        if self._in_request:
            self._refusing = True
            self._drop_body()
        return bool(self._exchanges or self._rest)

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody is there any more."""
        self._gone.set()
        self._refusing = True
        self._take_rest()
        self._drop_body()
        for exchange in self._exchanges:
            self._host.give_body(exchange.body_bytes)
        self._exchanges.clear()
        self.resume_writing()
        self._host.closed(self)

    def pause_writing(self) -> None:
        """The client takes no more bytes for now."""
        if self._writable is None:
            self._writable = self._loop.create_future()
            assert self._transport is not None
            self._write_left = self._transport.get_write_buffer_size()
            self._write_deadline = self._loop.time() + self._host.limits.write_timeout_ms / 1000
        self._regulate()

    def resume_writing(self) -> None:
        """It does again."""
        waiter, self._writable = self._writable, None
        self._write_deadline = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self.count_answers()
        self._regulate()

    # -- the server's side

    @property
    def busy(self) -> bool:
        """Whether answers are due."""
        return bool(self._exchanges)

    def overdue(self, now: float) -> None:
        """End what takes too long."""
        transport = self._transport
        assert transport is not None
        if self._write_deadline is not None and self._takes_nothing(transport, now):
            transport.abort()
            return
        deadline = self._deadline
        if self._in_body and deadline is not None:
            deadline += self._body_bytes / self._host.limits.body_rate_min_bytes
        if deadline is None or now <= deadline:
            return
        if self._refusing or not self._in_request:
            transport.abort() if self._lingering else transport.close()
        else:
            what = "body" if self._in_body else "headers"
            self._refuse(408, "RequestTimeout", f"the {what} took too long", "send the request faster")

    def _takes_nothing(self, transport: asyncio.Transport, now: float) -> bool:
        """Whether the client has taken no byte for too long."""
        left = transport.get_write_buffer_size()
        if left < self._write_left:
            self._write_deadline = now + self._host.limits.write_timeout_ms / 1000
        self._write_left = left
        self.count_answers()
        return self._write_deadline is not None and now > self._write_deadline

    def stop(self) -> None:
        """Tell handlers that wait to come to an end; close where nothing is due."""
        self._gone.set()
        if not self._exchanges and not self._in_request and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- the parser's side

    def _begin_message(self) -> None:
        self._in_request = False
        self._in_body = False
        self._target = b""
        self._headers: dict[str, str] = {}
        self._header_count = 0
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._reserved = 0
        self._has_length = False
        self._length: int | None = None
        """Of a body that is not whole yet and does not come in chunks."""
        self._place: memoryview | None = None
        """Where the body is received, once a part of it has come."""

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._begin_message()
        self._in_request = True
        self._deadline = self._loop.time() + self._host.limits.head_timeout_ms / 1000

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._target += url
        if len(self._target) > TARGET_BYTES_MAX:
            self._refuse(
                414, "LimitExceeded", f"TARGET_BYTES_MAX: the limit is {TARGET_BYTES_MAX}", "use a body"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_count += 1
        self._header_bytes += len(name) + len(value)
        if self._header_count > HEADERS_MAX or self._header_bytes > HEADER_BYTES_MAX:
            which = "HEADERS_MAX" if self._header_count > HEADERS_MAX else "HEADER_BYTES_MAX"
            self._refuse(431, "LimitExceeded", f"{which}: the headers are too many or too long", "send fewer")
            return
        if self._in_body:
            return  # Behind the chunks: whoever checked the headers on the way has not seen it.
        key = _NAMES.get(name) or name.decode("latin-1").lower()
        text = value.decode("latin-1").strip()
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Look at the length before any of the body."""
        if self._refusing:
            return
        headers, limits = self._headers, self._host.limits
        length = headers.get("content-length")
        coding = headers.get("transfer-encoding")
        self._has_length = length is not None or coding is not None
        self._in_body = True
        self._deadline = self._loop.time() + limits.body_timeout_ms / 1000
        if coding is not None and (coding.lower() != "chunked" or self._parser.get_http_version() != "1.1"):
            # A proxy that knows more codings, or none with HTTP/1.0, would see another end of the request.
            self._refuse(400, "BadRequest", "this Transfer-Encoding is not taken", "chunked, with HTTP/1.1")
            return
        if length is not None:
            if not (length.isascii() and length.isdecimal()):
                self._refuse(400, "BadRequest", "Content-Length is no number", "send one, or chunks")
                return
            if int(length[:20]) > limits.body_max_bytes:
                self._too_large(int(length[:20]))
                return
            # Looked at, and taken only as it comes: a client that announces much and sends nothing holds
            # nothing, and cannot keep the others out.
            if not self._host.has_room(int(length)):
                self._no_room()
                return
            if coding is None:
                self._length = int(length)
        if headers.get("expect", "").lower() == "100-continue" and not self._refusing:
            assert self._transport is not None
            if not self._exchanges:
                self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._refusing:
            return
        self._body.append(body)
        self._count_body(len(body))

    def _count_body(self, nbytes: int) -> None:
        self._body_bytes += nbytes
        if self._body_bytes > self._host.limits.body_max_bytes:
            self._too_large(self._body_bytes)
        elif self._body_bytes > self._reserved:
            self._reserve(self._body_bytes - self._reserved)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if not self._refusing:
            self._complete(self._body[0] if len(self._body) == 1 else b"".join(self._body))

    def _complete(self, body: bytes | memoryview) -> None:
        """Hand the request on, and be ready for the next one."""
        method = self._parser.get_method()
        request = Request(
            method.decode("latin-1"),
            self._target.decode("latin-1"),
            self._headers,
            body,
            self._peer,
            self._has_length or method in _BODYLESS,
            self._gone,
        )
        exchange = Exchange(
            self,
            keep_alive=self._parser.should_keep_alive() and not self._eof,
            head_only=method == b"HEAD",
            body_bytes=self._reserved,
            chunks=self._parser.get_http_version() != "1.0",
        )
        self._exchanges.append(exchange)
        self._host.hand_on(request, exchange.reply)
        self._begin_message()
        self._deadline = None

    def _receive_in_place(self, length: int) -> None:
        """See to it that there is room for more of a body of this length, or hand on a body that is whole."""
        place, arrived = self._place, self._body_bytes
        if not arrived:
            return  # The headers only. They announce much, perhaps.
        if place is None or (arrived == len(place) and arrived < length):
            grown = np.empty(min(length, PLACE_FACTOR * arrived), np.uint8).data
            grown[:arrived] = b"".join(self._body) if place is None else place
            self._place = grown
            self._body.clear()
        if arrived == length:
            assert self._place is not None
            self._complete(self._place)
            self._parser = httptools.HttpRequestParser(self)

    # -- answers

    def send_ready(self) -> None:
        """Send the answers whose turn it is."""
        while self._exchanges and (response := self._exchanges[0].response) is not None:
            exchange = self._exchanges[0]
            if exchange.streaming:
                return
            last = self._ends(exchange, response)
            if response.stream is not None and not exchange.head_only:
                exchange.streaming = True
                self._host.run(self._send_stream(exchange, response))
                return
            self._write(response, close=last, head_only=exchange.head_only)
            self._finish(exchange, last)

    def count_answers(self) -> None:
        """Tell the server how much of the answers waits for the client, or for its turn."""
        if not (self._exchanges or self._untaken or self._writable is not None):
            return
        untaken = sum([len(each.response.body) for each in self._exchanges if each.response is not None])
        if self._writable is not None and self._transport is not None:
            untaken += self._transport.get_write_buffer_size()
        self._host.answer_bytes += untaken - self._untaken
        self._untaken = untaken

    def _ends(self, exchange: Exchange, response: Response) -> bool:
        alone = len(self._exchanges) == 1
        return (
            response.close
            or not exchange.keep_alive
            or (alone and (self._refusing or self._host.stopping or (self._eof and not self._rest)))
        )

    def _write(self, response: Response, *, close: bool, head_only: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        head = head_bytes(response, close=close, chunked=response.stream is not None)
        if head_only or not response.body:
            transport.write(head)
        elif len(response.body) <= JOINED_BYTES:
            transport.write(head + response.body)
        else:
            transport.writelines([head, response.body])

    async def _send_stream(self, exchange: Exchange, response: Response) -> None:
        transport = self._transport
        assert transport is not None and response.stream is not None
        # Without chunks the end of the stream is the end of the connection.
        transport.write(head_bytes(response, close=True, chunked=exchange.chunks))
        try:
            async for piece in response.stream:
                if transport.is_closing():
                    break
                if piece:
                    transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if exchange.chunks else piece)
                if self._writable is not None:
                    await self._writable
        finally:
            await response.stream.aclose()
            if exchange.chunks and not transport.is_closing():
                transport.write(b"0\r\n\r\n")
            self._finish(exchange, True)

    def _finish(self, exchange: Exchange, last: bool) -> None:
        if self._exchanges and self._exchanges[0] is exchange:
            self._exchanges.popleft()
            self._host.give_body(exchange.body_bytes)
        if last:
            self._end()
        elif not self._exchanges and not self._in_request:
            self._deadline = self._loop.time() + self._host.limits.idle_timeout_ms / 1000
        self._regulate()

    def _end(self) -> None:
        transport, unread = self._transport, self._unread
        self._refusing = True
        self._take_rest()
        if transport is None or transport.is_closing():
            return
        if unread and not self._eof and transport.can_write_eof():
            # Closing now would reset the connection under the feet of a client that is sending still, and
            # the answer would be lost with it.
            self._lingering = True
            self._deadline = self._loop.time() + LINGER_S
            transport.write_eof()
        else:
            transport.close()

    # -- refusing and regulating

    def _too_large(self, size: int) -> None:
        limit = self._host.limits.body_max_bytes
        self._refuse(
            413,
            "LimitExceeded",
            f"body_max_bytes: {size:,} is over the limit of {limit:,}",
            "send less at once",
        )

    def _reserve(self, size: int) -> None:
        if self._host.take_body(size):
            self._reserved += size
        else:
            self._no_room()

    def _no_room(self) -> None:
        self._refuse(
            503,
            "BackPressureRejected",
            "bodies_max_bytes: too many bytes of requests are under way",
            "wait for earlier answers",
        )

    def _drop_body(self) -> None:
        self._host.give_body(self._reserved)
        self._reserved = 0
        self._body = []
        self._length, self._place = None, None
        self._in_request = self._in_body = False

    def _refuse(self, status: int, kind: str, message: str, hint: str) -> None:
        """Answer without a handler and read no further."""
        if self._refusing:
            return
        self._refusing = self._unread = True
        self._drop_body()
        exchange = Exchange(self, keep_alive=False, head_only=False, body_bytes=0, chunks=False)
        exchange.response = self._host.refused(status, kind, message, hint)
        self._exchanges.append(exchange)
        self._deadline = None
        self._loop.call_soon(self.send_ready)

    @property
    def _is_full(self) -> bool:
        """Whether no request may begin now: too many are under way, or the client takes no answers."""
        return len(self._exchanges) >= PIPELINE_MAX or self._writable is not None

    def _regulate(self) -> None:
        """Read while there is room for more requests and the client takes its answers."""
        pause = self._is_full or bool(self._rest)
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._rest and not self._is_full:
            self._loop.call_soon(self._parse_rest)
        if pause == self._reading_paused:
            return
        if pause:
            transport.pause_reading()
        else:
            transport.resume_reading()
        self._reading_paused = pause
