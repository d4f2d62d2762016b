"""All writes of this process to one shard, on exactly one stream.

One stream because it is the fastest way, and because 0.14.0 and 0.14.1 stop taking writes when two streams
race. Whatever is queued while a request is being sent goes into the next request, so a crowd of single puts
costs a few requests. Several requests are under way at a time, and answers come in the order of the
requests.

What is certain is kept apart from what is not. A unit that was never handed to gRPC was not sent: it waits
for the next stream, until its deadline. Once handed over, only an answer settles it; when the stream ends
first its outcome is unknown, because a server may apply what it read after an error has ended the stream.
There are two exceptions, in which the server tells that it applied nothing: it turned the stream away
before reading, or it refused the only request under way because the shard is wedged.

A new stream sends one request and waits for its answer before it sends more. So a server in trouble gets to
tell its reason (a write into a stream that has ended hides it), and little is in doubt when it does.

The stream is half-closed only after the last answer: a server that sees the end of the requests stops
answering.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._assignments import Assignments
from forebay.coordination._oxia._batch import Batch, Unit
from forebay.coordination._oxia._channels import Channels, finish
from forebay.coordination._oxia._config import OxiaConfig
from forebay.coordination._oxia._deadline import Backoff, Deadline
from forebay.coordination._oxia._errors import Trouble, TroubleKind, diagnose
from forebay.errors import Closed, ForebayError, OutcomeUnknown, Unavailable
from forebay.kit.clock import Clock

__all__ = ["WriteStream"]

QUEUE_OPERATIONS_MAX = 20_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Bounds of what waits to be sent to one shard. Beyond them callers wait for room, until their deadline."""
IN_FLIGHT_BYTES_MAX = 64 * 1024 * 1024
"""Bytes sent and not yet answered on one stream, unless a single request is larger."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, pb.WriteResponse]"


class WriteStream:
    """The writer of one shard."""

    def __init__(
        self,
        shard: int,
        config: OxiaConfig,
        assignments: Assignments,
        channels: Channels,
        clock: Clock,
        backoff: Backoff,
    ) -> None:
        self.shard = shard
        self._config = config
        self._assignments = assignments
        self._channels = channels
        self._clock = clock
        self._backoff = backoff
        self._queue: deque[Unit] = deque()
        self._queued_operations = 0
        self._queued_bytes = 0
        self._in_flight: deque[Batch] = deque()
        self._in_flight_bytes = 0
        self._answers = 0
        self._paused = False
        self._closing = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._room = asyncio.Event()
        self._turn = asyncio.Lock()
        self._quiet = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # -- for callers

    async def submit(self, unit: Unit) -> None:
        """Send it, and return when every operation of it has its reply."""
        try:
            async with asyncio.timeout_at(unit.deadline.at):
                await self._enqueue(unit)
                await unit.done
        except TimeoutError:
            self._give_up(unit)
        except asyncio.CancelledError:
            self._withdraw(unit)
            unit.done.cancel()
            raise

    @asynccontextmanager
    async def quiet(self, deadline: Deadline) -> AsyncIterator[None]:
        """A moment without writes under way, for creating and closing sessions."""
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._quiet.acquire()
        except TimeoutError:
            raise Trouble(TroubleKind.TIMEOUT, "another session was being opened or closed") from None
        self._paused = True
        try:
            try:
                async with asyncio.timeout_at(deadline.at):
                    await self._drained.wait()
            except TimeoutError:
                raise Trouble(TroubleKind.TIMEOUT, "earlier writes were not answered in time") from None
            yield
        finally:
            self._paused = False
            self._quiet.release()
            self._wake.set()

    async def close(self, deadline: Deadline) -> None:
        """Finish what was accepted, as far as the deadline allows, and end the stream."""
        self._closing = True
        self._wake.set()
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=max(0.0, deadline.left_s()))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._break(Trouble(TroubleKind.TRANSIENT, "the coordinator was closed"))
        self._fail_queued(Closed("the coordinator was closed before this was sent", hint="open a new one"))

    # -- queue

    async def _enqueue(self, unit: Unit) -> None:
        if self._full(unit) or self._turn.locked():
            # One waiter at a time looks for room, so that a large unit is not passed by small ones for ever.
            async with self._turn:
                while self._full(unit):
                    self._room.clear()
                    await self._room.wait()
        if self._closing:
            unit.fail(Closed("the coordinator is closed", hint="open a new one"))
            return
        self._queue.append(unit)
        self._queued_operations += unit.operations
        self._queued_bytes += len(unit.data)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"oxia writes to shard {self.shard}")

    def _full(self, unit: Unit) -> bool:
        return bool(self._queue) and (
            self._queued_operations + unit.operations > QUEUE_OPERATIONS_MAX
            or self._queued_bytes + len(unit.data) > QUEUE_BYTES_MAX
        )

    def _leave_queue(self, unit: Unit) -> None:
        self._queued_operations -= unit.operations
        self._queued_bytes -= len(unit.data)
        self._room.set()

    def _withdraw(self, unit: Unit) -> None:
        if not unit.sent and unit in self._queue:
            self._queue.remove(unit)
            self._leave_queue(unit)

    def _give_up(self, unit: Unit) -> None:
        """The deadline is over. What was not sent is taken back and certainly not done."""
        self._withdraw(unit)
        trouble = Trouble(TroubleKind.TIMEOUT, "no answer in time")
        if unit.sent:
            unit.fail(OutcomeUnknown(unit.describe(), reason=trouble.text))
        else:
            unit.fail(Unavailable(f"{unit.describe()}: not sent in time", hint=trouble.hint))

    def _take(self) -> Batch | None:
        """The next request: all that is queued and may travel together."""
        batch = Batch()
        while self._queue and batch.takes(self._queue[0]):
            unit = self._queue.popleft()
            self._leave_queue(unit)
            if unit.has_session:
                unit.encode(self.shard)
            if unit.operations == 0:
                unit.fail(Unavailable("nothing to send"))
                continue
            unit.sent = True
            batch.add(unit)
        return batch if batch.units else None

    def _fail_queued(self, error: ForebayError) -> None:
        while self._queue:
            unit = self._queue.popleft()
            self._leave_queue(unit)
            unit.fail(error)

    # -- stream

    async def _run(self) -> None:
        while not (self._closing and not self._queue):
            if not self._queue or self._paused:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                trouble = await self._serve(await self._open())
            except Trouble as refused:
                trouble = refused
            except Unavailable as gone:
                trouble = Trouble(TroubleKind.TRANSIENT, gone.message)
            if trouble is not None:
                self._break(trouble)
                if not trouble.transient:
                    self._fail_queued(
                        trouble.error(f"writing to shard {self.shard} of {self._config.address}")
                    )
                await self._clock.sleep(self._backoff.next_s())

    async def _open(self) -> _Call:
        """A stream with a connection under it, on which nothing was sent yet."""
        service = self._channels.at(self._assignments.leader(self.shard))
        call: _Call = service.write_stream(
            metadata=(("namespace", self._config.namespace), ("shard-id", str(self.shard)))
        )
        try:
            await call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            raise diagnose(error) from None
        except BaseException:
            await finish(call)
            raise
        return call

    async def _serve(self, call: _Call) -> Trouble | None:
        """Send and receive until the stream breaks (the reason) or all is done before a close (None)."""
        self._answers = 0
        reader = asyncio.create_task(self._receive(call), name=f"oxia answers of shard {self.shard}")
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while not reader.done():
                if self._closing and not self._queue and not self._in_flight:
                    await call.done_writing()
                    await reader
                    return None
                batch = self._take() if self._may_send() else None
                if batch is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                self._in_flight.append(batch)
                self._in_flight_bytes += batch.bytes
                self._drained.clear()
                try:
                    await call.write(batch.encode(self.shard))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    break
            return await reader
        finally:
            reader.cancel()
            await finish(call)
            await asyncio.gather(reader, return_exceptions=True)

    def _may_send(self) -> bool:
        limit = self._config.requests_in_flight if self._answers else 1
        return (
            bool(self._queue)
            and not self._paused
            and len(self._in_flight) < limit
            and (not self._in_flight or self._in_flight_bytes < IN_FLIGHT_BYTES_MAX)
        )

    async def _receive(self, call: _Call) -> Trouble:
        """Hand out answers until the stream ends; the reason of the end."""
        try:
            async for response in call:
                if not self._in_flight or not self._in_flight[0].answer(response):
                    return Trouble(TroubleKind.OTHER, "the server's answer does not fit the request")
                self._in_flight_bytes -= self._in_flight.popleft().bytes
                self._answers += 1
                self._backoff.reset()
                self._settle()
        except grpc.aio.AioRpcError as error:
            return diagnose(error)
        return Trouble(TroubleKind.TRANSIENT, "the server ended the stream")

    def _settle(self) -> None:
        self._wake.set()
        if not self._in_flight:
            self._drained.set()

    def _break(self, trouble: Trouble) -> None:
        """The stream is gone: say what is known of everything that was under way on it."""
        batches, self._in_flight, self._in_flight_bytes = list(self._in_flight), deque(), 0
        for batch in reversed(batches):
            for unit in reversed(batch.units):
                if unit.done.done():
                    continue
                if trouble.unread and self._answers == 0:
                    self._requeue(unit)
                elif trouble.kind is TroubleKind.WEDGED and len(batches) == 1:
                    unit.fail(trouble.error(unit.describe()))
                else:
                    unit.fail(
                        OutcomeUnknown(unit.describe(), reason=trouble.text, hint=_unknown_hint(trouble))
                    )
        self._settle()

    def _requeue(self, unit: Unit) -> None:
        unit.sent = False
        self._queue.appendleft(unit)
        self._queued_operations += unit.operations
        self._queued_bytes += len(unit.data)


def _unknown_hint(trouble: Trouble) -> str:
    return trouble.hint if trouble.kind is TroubleKind.WEDGED else ""
