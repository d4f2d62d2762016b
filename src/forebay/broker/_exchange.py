"""What a connection has to do with: the server that it belongs to, and a request with its answer."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from forebay.broker._http import Reply, Request, Response
from forebay.broker._limits import HttpLimits

if TYPE_CHECKING:
    from forebay.broker._connection import Connection

__all__ = ["Exchange", "Host"]


class Host(Protocol):
    """What a connection needs of its server."""

    limits: HttpLimits
    stopping: bool
    answer_bytes: int
    """Bytes of answers that their clients have not taken; connections keep it."""
    inbox: memoryview
    """Where bytes of any connection arrive. They are parsed, and what is kept is copied, before the next ones
    are asked for."""

    def opened(self, connection: Connection) -> bool:
        """Note a new connection; whether there is room for it."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether so many connections are open that a further one is not even told so."""
        ...

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        ...

    def has_room(self, size: int) -> bool:
        """Whether there is room for a body of so many bytes now."""
        ...

    def take_body(self, size: int) -> bool:
        """Reserve bytes for a body; whether there is room."""
        ...

    def give_body(self, size: int) -> None:
        """Give them back."""
        ...

    def refused(self, status: int, kind: str, message: str, hint: str) -> Response:
        """The answer to a request that was not handed on."""
        ...

    def hand_on(self, request: Request, reply: Reply) -> None:
        """A request is whole: its handler is called a moment later, after those that came before it."""
        ...

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that outlives this call."""
        ...


class Exchange:
    """A request and its answer."""

    __slots__ = ("body_bytes", "chunks", "connection", "head_only", "keep_alive", "response", "streaming")

    def __init__(
        self, connection: Connection, *, keep_alive: bool, head_only: bool, body_bytes: int, chunks: bool
    ) -> None:
        self.connection = connection
        self.keep_alive = keep_alive
        self.head_only = head_only
        self.body_bytes = body_bytes
        self.chunks = chunks
        """Whether the client understands a stream in chunks: HTTP/1.0 has none."""
        self.response: Response | None = None
        self.streaming = False

    def reply(self, response: Response) -> None:
        """The answer is there."""
        self.response = response
        self.connection.send_ready()
        self.connection.count_answers()
