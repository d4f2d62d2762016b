"""OTAP over gRPC: a stream of batches comes in, a status for each of them goes out.

**Invariant.** A batch gets the status OK after the node behind has all of it safely, as an OTLP request does.
Batches are decoded in their order, because each builds on the dictionaries of those before; they become safe
side by side, so that their statuses may come in another order. Who sends more than `requests_max` batches
without waiting is not read from until some are safe, nor who takes no statuses until he takes some.

    what                                        status of the batch       and the stream
    content that makes no sense                 INVALID_ARGUMENT          goes on
    too much under way, store full              RESOURCE_EXHAUSTED        goes on
    everything else that may pass               UNAVAILABLE               goes on
    Arrow that cannot be read, or is too large  INVALID_ARGUMENT          ends: its dictionaries are in doubt
    too many dictionaries, in all streams       RESOURCE_EXHAUSTED        ends: a new one begins without
    too many streams                                                      ends with RESOURCE_EXHAUSTED
    the receiver stops                                                    ends with UNAVAILABLE
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from forebay.dataflow._grpc_server import CODES, listen, refuse
from forebay.dataflow._intake import STOP_GRACE_S, Intake, Refusal
from forebay.dataflow._otap import METHODS, Batch, BatchStatus, PayloadStreams, decode
from forebay.dataflow._settings import OtapReceiverSettings
from forebay.dataflow._signals import SIGNALS, Signal, check_count
from forebay.errors import Backpressure, FormatError

__all__ = ["OtapReceiver"]

STREAMS_MAX: Final = 1_024
"""Streams at once; further ones are refused."""
ALL_DICTIONARIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of the dictionaries of all streams."""
DECODERS: Final = 2
"""Batches that are decoded at once."""
_OPTIONS: Final = (
    # A sender that vanished without a word would keep its dictionaries here.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Requests: TypeAlias = tuple[list[bytes], int]


class OtapReceiver:
    """One listener."""

    def __init__(self, settings: OtapReceiverSettings, intake: Intake) -> None:
        self._settings = settings
        self._intake = intake
        self._stopping = asyncio.Event()
        self._serving = 0
        self._dictionary_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(DECODERS, "forebay-otap")
        self.address = settings.address
        """Where it listens; with a real port after the start."""

    async def start(self) -> None:
        """Listen. Raises `Unavailable` where the address is taken."""
        settings = self._settings
        options = [("grpc.max_receive_message_length", settings.request_bytes_max), *_OPTIONS]
        handlers = []
        for name, (service, method) in METHODS.items():
            behaviour: Any = grpc.stream_stream_rpc_method_handler(self._handler(SIGNALS[name]))
            handlers.append(grpc.method_handlers_generic_handler(service, {method: behaviour}))
        self._server, self.address = await listen(handlers, self.address, settings.tls, options)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take nothing more; let what is under way end."""
        self._stopping.set()
        await self._server.stop(grace_s or None)
        self._threads.shutdown(wait=False)

    def _handler(self, signal: Signal) -> Callable[[object, _Context], Awaitable[None]]:
        async def serve(_: object, context: _Context) -> None:
            if self._serving >= STREAMS_MAX:
                full = Backpressure(f"{self._serving:,} streams are open")
                await refuse(context, self._intake.refusal(full))
            stream = _Stream(self, signal, context)
            self._serving += 1
            try:
                async for status in stream.statuses():
                    await context.write(status)
            finally:
                self._serving -= 1
                await stream.close()
            if stream.ending is not None:
                code, message = stream.ending
                await context.abort(code, message.encode("ascii", "replace").decode())

        return serve

    def reserve(self, size: int) -> None:
        """Count the bytes of dictionaries. Raises `Backpressure`."""
        with self._lock:
            if size > 0 and self._dictionary_bytes + size > ALL_DICTIONARIES_BYTES_MAX:
                raise Backpressure(
                    "the dictionaries of all streams are too large", hint="begin a new stream, it has none"
                )
            self._dictionary_bytes += size

    async def decode(self, signal: Signal, streams: PayloadStreams, batch: Batch) -> _Requests:
        """The requests of a batch, made in a thread: it takes a while, and others should not wait."""
        loop = asyncio.get_running_loop()
        most = self._settings.request_bytes_max

        def work() -> _Requests | Exception:
            tables = streams.read(batch)
            try:
                messages = decode(signal.name, tables, most)
                requests = [each.SerializeToString() for each in messages]
                sizes = map(len, requests)
                return requests, sum(map(partial(check_count, signal), messages, sizes))
            except Exception as error:
                # The tables were read: the stream is sound, whatever is in them.
                return error

        running = loop.run_in_executor(self._threads, work)
        try:
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            # It counts dictionaries, and whoever gives them back has to know all of them.
            await asyncio.wait({running})
            raise
        if isinstance(outcome, Exception):
            raise _Content(outcome)
        return outcome

    @property
    def settings(self) -> OtapReceiverSettings:
        """Its settings."""
        return self._settings

    @property
    def intake(self) -> Intake:
        """What takes the batches."""
        return self._intake

    @property
    def stopping(self) -> asyncio.Event:
        """Set when it should end."""
        return self._stopping


class _Content(Exception):
    """A batch that could be read and makes no sense."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Stream:
    """One gRPC stream: a task that reads, one per batch that becomes safe, and a queue of statuses."""

    def __init__(self, receiver: OtapReceiver, signal: Signal, context: _Context) -> None:
        self.ending: tuple[grpc.StatusCode, str] | None = None
        """How the stream ends, where not because its sender ended it."""
        self._receiver = receiver
        self._signal = signal
        self._context = context
        settings = receiver.settings
        self._streams = PayloadStreams(signal.name, settings.request_bytes_max, receiver.reserve)
        self._gate = asyncio.Semaphore(settings.requests_max)
        """Taken with each batch, given back with its status."""
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def statuses(self) -> AsyncIterator[bytes]:
        """The statuses, until the stream ends and nothing is under way."""
        reader = asyncio.create_task(self._read_all())
        self._tasks.add(reader)
        while (status := await self._queue.get()) is not None:
            yield status
            # It is on its way: what waits to be taken has the same bound as what waits to be safe.
            self._gate.release()

    async def close(self) -> None:
        """End; give back what the dictionaries took."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._receiver.reserve(-self._streams.dictionary_bytes)

    async def _read_all(self) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            while (data := await self._next()) is not None:
                await self._gate.acquire()
                found = await self._decode(data)
                if found is None:
                    if self.ending is not None:
                        break
                    continue
                task = asyncio.create_task(self._take(*found))
                for group in (under_way, self._tasks):
                    group.add(task)
                    task.add_done_callback(group.discard)
            if under_way:
                await asyncio.wait(under_way)
        finally:
            self._queue.put_nowait(None)

    async def _next(self) -> bytes | None:
        """The bytes of the next batch; none where the stream or the receiver ends."""
        read = asyncio.ensure_future(self._context.read())
        stop = asyncio.create_task(self._receiver.stopping.wait())
        try:
            await asyncio.wait({read, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                self.ending = (grpc.StatusCode.UNAVAILABLE, "the receiver stops")
                return None
            data: Any = read.result()
            return None if data is grpc.aio.EOF else bytes(data)
        finally:
            for task in (read, stop):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await stop

    async def _decode(self, data: bytes) -> tuple[int, _Requests] | None:
        """Number and requests of a batch; none where it was refused."""
        number = 0
        try:
            batch = Batch.FromString(data)
            number = batch.batch_id
            return number, await self._receiver.decode(self._signal, self._streams, batch)
        except _Content as content:
            self._refuse(number, self._receiver.intake.refusal(content.error))
        except DecodeError as error:
            wrong = FormatError(f"not a batch: {str(error)[:100]}", hint="send BatchArrowRecords")
            refusal = self._receiver.intake.refusal(wrong)
            self.ending = (CODES[refusal.reason], refusal.message)
        except Exception as error:
            refusal = self._receiver.intake.refusal(error)
            self._refuse(number, refusal)
            self.ending = (CODES[refusal.reason], refusal.message)
        return None

    async def _take(self, number: int, requests: _Requests) -> None:
        try:
            await self._receiver.intake.receive_parts(self._signal, *requests)
        except Refusal as refusal:
            self._refuse(number, refusal)
        else:
            self._queue.put_nowait(BatchStatus(batch_id=number).SerializeToString())

    def _refuse(self, number: int, refusal: Refusal) -> None:
        code = int(CODES[refusal.reason].value[0])
        status = BatchStatus(batch_id=number, status_code=code, status_message=refusal.message)
        self._queue.put_nowait(status.SerializeToString())
