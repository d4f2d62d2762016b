"""Connections to one broker, kept and handed out, and requests over them.

Last in, first out: a burst leaves connections behind, and those that are not needed any more grow old at the
bottom. One that was idle for too long is not used again, because the broker may be closing it at this moment,
and what was sent into a closing connection has an unknown outcome.

The outcome of a request is one of three. It was answered; it was certainly not sent (`Unavailable`, and such
a request is tried again on another connection at once where the failed one had been kept); or the answer was
lost (`OutcomeUnknown`). A timeout is the last kind.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from forebay.client._address import Address
from forebay.client._config import ClientConfig
from forebay.client._connection import Broken, Connection, Response, Unsent
from forebay.errors import Closed, OutcomeUnknown, Unavailable
from forebay.kit.clock import Clock

__all__ = ["Pool"]

USER_AGENT: Final = "forebay-client"


class Pool:
    """Sends requests. Belongs to one event loop."""

    def __init__(self, address: Address, *, clock: Clock, config: ClientConfig, token: str | None) -> None:
        self.address = address
        self._clock = clock
        self._config = config
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(config.connections_max)
        self._busy: set[Connection] = set()
        self._closed = False
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        self._common = f"Host: {address.authority}\r\nUser-Agent: {USER_AGENT}\r\n{authorization}"
        self.requests = 0
        """Requests sent so far."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Sequence[bytes | memoryview] = (),
        content_type: str = "",
        accept: str = "application/json",
        timeout_s: float | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> Response:
        """Send one request. `on_sent` is called when all of it has left this process.

        Raises `Unavailable` where nothing was sent, else `OutcomeUnknown`.
        """
        if self._closed:
            raise Closed("the client is closed", hint="connect again")
        head = self._head(method, path, sum(map(len, body)), content_type, accept)
        async with self._slots:
            wait_s = timeout_s or self._config.request_timeout_s
            return await self._send(f"{method} {path}", head, body, wait_s, on_sent)

    def _head(self, method: str, path: str, length: int, content_type: str, accept: str) -> bytes:
        lines = [f"{method} {self.address.path}{path} HTTP/1.1\r\n", self._common, f"Accept: {accept}\r\n"]
        if length or method != "GET":
            lines.append(f"Content-Length: {length}\r\n")
        if content_type:
            lines.append(f"Content-Type: {content_type}\r\n")
        return "".join([*lines, "\r\n"]).encode("latin-1")

    async def _send(
        self,
        what: str,
        head: bytes,
        body: Sequence[bytes | memoryview],
        timeout_s: float,
        on_sent: Callable[[], None] | None,
    ) -> Response:
        while True:
            connection, kept = await self._connection()
            self._busy.add(connection)
            try:
                self.requests += 1
                async with asyncio.timeout(timeout_s):
                    response = await connection.request(head, body, on_sent)
            except Unsent:
                if kept:
                    continue
                raise self._unavailable("the connection was closed at once") from None
            except Broken as error:
                raise OutcomeUnknown(what, reason=str(error)) from None
            except TimeoutError:
                raise OutcomeUnknown(what, reason=f"no answer within {timeout_s:g} s") from None
            finally:
                self._busy.discard(connection)
            self._keep(connection)
            return response

    def _keep(self, connection: Connection) -> None:
        if connection.usable and not self._closed:
            connection.idle_since = self._clock.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> tuple[Connection, bool]:
        """A connection, and whether it had been used before."""
        oldest = self._clock.monotonic() - self._config.idle_timeout_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection, True
            connection.close()
        timeout_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await Connection.open(self.address, self._config.response_bytes_max), False
        except TimeoutError:
            raise self._unavailable(f"no connection within {timeout_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            hint = "give the certificate that signed the broker's: ca=FILE, or --ca FILE"
            raise self._unavailable(f"not trusted: {error.verify_message}", hint) from error
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error

    def _unavailable(
        self, reason: str, hint: str = "is the broker running? forebay serve starts one"
    ) -> Unavailable:
        return Unavailable(f"{self.address}: {reason}", hint=hint)

    async def close(self) -> None:
        """End every connection; requests under way get `OutcomeUnknown`."""
        self._closed = True
        for connection in [*self._idle, *self._busy]:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # Transports close their sockets in the turn after.
