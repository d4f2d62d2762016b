"""Requests and answers as plain objects: what a handler sees of HTTP.

A handler takes a `Request` and a function to reply with. It knows no sockets, so it runs in tests and in the
simulated world as it is. What it has to wait for is in the coroutine it returns, which the server runs as a
task; a handler that is told by somebody else when to reply returns none and costs no task. `Request.gone`
tells a handler that waits or streams that nobody listens any more; handlers that do something need not look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, unquote

from forebay.errors import UsageError

__all__ = ["Gone", "Handler", "Reply", "Request", "Response", "head_bytes"]

QUERY_FIELDS_MAX: Final = 100
"""Fields of one query string."""


class Gone:
    """Becomes true when a client hangs up or the broker stops."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Tell everybody who waits."""
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def future(self) -> asyncio.Future[None]:
        """A future that is done once it is true. Give it to `forget` if it is not needed any more."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_set:
            waiter.set_result(None)
        else:
            self._waiters.append(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Nobody waits on this future any more."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)


@dataclass(slots=False, eq=False)
class Request:
    """One request, whole."""

    method: str
    target: str
    """Path and query as they were sent."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case; of repeated ones all values, joined by a comma."""
    body: bytes | memoryview = b""
    client: str = ""
    """Address of the peer."""
    has_length: bool = True
    """Whether the length of the body was told, or that it comes in chunks."""
    gone: Gone = field(default_factory=Gone)
    request_id: str = ""

    @property
    def path(self) -> str:
        """The path, as it was sent: decode its parts after splitting it."""
        return self.target.partition("?")[0]

    @cached_property
    def query(self) -> dict[str, str]:
        """Fields of the query string; of repeated ones the last."""
        text = self.target.partition("?")[2]
        if not text:
            return {}
        try:
            pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX)
        except ValueError as error:
            raise UsageError(f"the query cannot be read: {error}", hint="encode it as a form is") from None
        return dict(pairs)

    def part(self, text: str) -> str:
        """One part of a path, decoded."""
        try:
            return unquote(text, errors="strict")
        except UnicodeDecodeError:
            raise UsageError("the path is no UTF-8", hint="encode it as URLs are") from None

    @property
    def content_type(self) -> str:
        """Content type without parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(slots=True, eq=False)
class Response:
    """One answer: a body, or a stream of pieces."""

    status: int
    body: bytes | bytearray = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    stream: AsyncGenerator[bytes, None] | None = None
    """Pieces to send as they come, in place of `body`."""
    close: bool = False
    """Whether the connection ends with this answer."""


Reply: TypeAlias = Callable[[Response], None]
"""Takes the answer to one request. Called once, at once or later; the connection may be gone by then."""
Handler: TypeAlias = Callable[[Request, Reply], Coroutine[Any, Any, None] | None]
"""Never raises. Everything up to the first await happens in the order of the requests of a connection."""

_STATUS: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


@lru_cache(maxsize=256)
def _opening(status: int, content_type: str) -> bytes:
    """The status line and the content type: of a few kinds, with every answer."""
    line = _STATUS[status]
    return line + f"Content-Type: {content_type}\r\n".encode("latin-1") if content_type else line


def head_bytes(response: Response, *, close: bool, chunked: bool) -> bytes:
    """The status line and the headers of an answer."""
    head = _opening(response.status, response.content_type)
    if chunked:
        head += b"Transfer-Encoding: chunked\r\n"
    elif response.status != HTTPStatus.NO_CONTENT and response.stream is None:
        head += b"Content-Length: %d\r\n" % len(response.body)
    for name, value in response.headers:
        head += f"{name}: {value}\r\n".encode("latin-1")
    return head + (b"Connection: close\r\n\r\n" if close else b"\r\n")
