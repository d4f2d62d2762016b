"""The commit broker on a Unix socket: frames of MessagePack, each behind its length.

    u32 LE length | hello    [version, manifest path, store, monotonic clock]      client, then broker
    u32 LE length | request  [number, deadline, entries]                           client
    u32 LE length | reply    [number, kind, sequence, reason, limit, actual]       broker, in any order

The hello keeps a producer from handing its batches to a broker of another queue, and from talking to one
whose monotonic clock is not its own: deadlines would then mean nothing. Both sides refuse frames over
`FRAME_BYTES_MAX` before reading them, and hang up on whoever does not say hello in time.

The socket is for its owner alone. Its permissions are set before anybody can connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from forebay.buffer._commit_broker import CommitBroker, CommitReply, CommitRequest
from forebay.buffer._commit_broker_client import BrokerGone
from forebay.errors import Closed, OutcomeUnknown, UsageError
from forebay.kit.clock import Clock, SystemClock

__all__ = ["BrokerServer", "BrokerSocket"]

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest frame either side accepts."""
CONNECTIONS_MAX: Final = 1_000
"""Producers a broker serves at once."""
VERSION: Final = 1
CLOCK_DIFFERENCE_S_MAX: Final = 5.0
"""How far the two monotonic clocks may seem apart; more means that they are not the same clock."""
GREETING_S_MAX: Final = 5.0
"""Seconds within which the other side says hello."""
RECONNECT_S: Final = 1.0
"""Seconds before a broker that was not there is looked for again."""

_LENGTH: Final = struct.Struct("<I")
_log = logging.getLogger(__name__)

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks, about which queue, on which clock."""

    version: int
    manifest_path: str
    store: str
    monotonic: float


_encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(Hello)
_request = msgspec.msgpack.Decoder(CommitRequest)
_reply = msgspec.msgpack.Decoder(CommitReply)


async def _read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The next frame. Raises `EOFError` at the end, `ValueError` for anything that is not one."""
    head = await reader.readexactly(_LENGTH.size)
    [size] = _LENGTH.unpack(head)
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size:,} bytes")
    try:
        return decoder.decode(await reader.readexactly(size))
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a frame of this protocol: {error}") from error


async def _greeting(reader: asyncio.StreamReader) -> Hello:
    """The first frame. Raises `TimeoutError`, an `OSError`, where it does not come in time."""
    async with asyncio.timeout(GREETING_S_MAX):
        return await _read(reader, _hello)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise BrokerGone(f"{len(body):,} bytes do not fit into one frame", hint="flush more often")
    return _LENGTH.pack(len(body)) + body


class BrokerServer:
    """Lets producers of this machine reach a `CommitBroker`. Use it as an async context manager."""

    def __init__(
        self, broker: CommitBroker, path: Path, *, manifest_path: str, store: str, clock: Clock | None = None
    ) -> None:
        """`path` is the socket's; `manifest_path` and `store` name the queue."""
        self._broker = broker
        self._path = path
        self._manifest_path = manifest_path
        self._store = store
        self._clock = clock or SystemClock()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Listen. Raises `UsageError` where another broker listens on the path, or where it is no socket."""
        if self._path.exists():
            if not self._path.is_socket():
                raise UsageError(f"{self._path} is not a socket", hint="name a file that does not exist yet")
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(str(self._path))
                await _hang_up(writer)
                raise UsageError(f"{self._path} is in use", hint="one broker per socket; stop the other one")
            self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)  # Before it listens, nobody can connect.
            self._server = await asyncio.start_unix_server(self._accepted, sock=listener)
        except BaseException:
            listener.close()
            raise

    async def stop(self) -> None:
        """Stop listening, answer what is under way, and hang up."""
        if self._server is not None:
            self._server.close()
            await self._broker.close()
            connections = dict(self._connections)
            for task in connections:
                task.cancel()
            if connections:
                await asyncio.wait(connections)
            for writer in connections.values():
                await _hang_up(writer)  # A task that never began has not done it.
            self._server = None
            self._path.unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering: set[asyncio.Task[None]] = set()
        try:
            theirs = await _greeting(reader)
            ours = Hello(VERSION, self._manifest_path, self._store, self._clock.monotonic())
            writer.write(_frame(ours))
            if not _same_queue(ours, theirs):
                return
            while True:
                request = await _read(reader, _request)
                task = asyncio.get_running_loop().create_task(self._answer(request, writer))
                answering.add(task)
                task.add_done_callback(answering.discard)
        except (EOFError, OSError):
            pass
        except (ValueError, UsageError) as error:
            _log.warning("a connection is closed: %s", error)
        finally:
            # What was accepted is finished before the producer is let go: a closed connection then means that
            # nobody works on its requests.
            if answering:
                await asyncio.wait(answering)
            writer.close()

    async def _answer(self, request: CommitRequest, writer: asyncio.StreamWriter) -> None:
        reply = await self._broker.commit(request)
        with contextlib.suppress(OSError):
            writer.write(_frame(reply))
            await writer.drain()


def _same_queue(ours: Hello, theirs: Hello) -> bool:
    return (
        ours.version == theirs.version
        and ours.manifest_path == theirs.manifest_path
        and ours.store == theirs.store
        and abs(ours.monotonic - theirs.monotonic) <= CLOCK_DIFFERENCE_S_MAX
    )


class BrokerSocket:
    """A `BrokerLink` over a Unix socket. Connects when it is first needed, and again after a loss."""

    def __init__(self, path: Path, *, manifest_path: str, store: str, clock: Clock | None = None) -> None:
        """`manifest_path` and `store` name the queue, as the broker was told."""
        self._path = path
        self._manifest_path = manifest_path
        self._store = store
        self._clock = clock or SystemClock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Future[CommitReply]] = {}
        self._not_before = float("-inf")
        self._closed = False

    async def request(self, request: CommitRequest) -> CommitReply:
        """Send a request and wait for its reply."""
        if self._closed:
            raise Closed("the link is closed")
        frame = _frame(request)
        writer = await self._connected()
        reply: asyncio.Future[CommitReply] = asyncio.get_running_loop().create_future()
        self._open[request.number] = reply
        try:
            writer.write(frame)
            await writer.drain()
            return await reply
        except OSError as error:
            raise OutcomeUnknown("a commit by the broker", reason=str(error)) from error
        finally:
            self._open.pop(request.number, None)

    async def close(self) -> None:
        """Hang up."""
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is not None:
            await _hang_up(self._writer)

    async def _connected(self) -> asyncio.StreamWriter:
        if self._writer is not None and self._reading is not None and not self._reading.done():
            return self._writer
        if self._clock.monotonic() < self._not_before:
            raise BrokerGone("there is no broker", hint="it is looked for again after a second")
        self._not_before = self._clock.monotonic() + RECONNECT_S
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path))
            ours = Hello(VERSION, self._manifest_path, self._store, self._clock.monotonic())
            writer.write(_frame(ours))
            theirs = await _greeting(reader)
        except (OSError, EOFError, ValueError) as error:
            if writer is not None:
                await _hang_up(writer)
            raise BrokerGone(f"there is no broker: {error}", hint="start one, or do without") from error
        if not _same_queue(ours, theirs):
            await _hang_up(writer)
            raise BrokerGone(
                f"the broker at {self._path} serves {theirs.manifest_path!r} on {theirs.store!r}",
                hint="give every queue a socket of its own",
            )
        self._writer = writer
        self._reading = asyncio.get_running_loop().create_task(self._read_replies(reader, writer))
        return writer

    async def _read_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reason = "the broker hung up"
        try:
            while True:
                reply = await _read(reader, _reply)
                waiting = self._open.get(reply.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (EOFError, OSError):
            pass
        except ValueError as error:
            reason = str(error)
        writer.close()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(OutcomeUnknown("a commit by the broker", reason=reason))
