"""A fake Oxia server, for wire behaviour that a real one does not show on demand, and a clock to step.

It serves the old service name only, keeps keys in a dictionary, and notes what a real server would suffer
from: several write streams at once on one shard, requests without a shard, a session created beside a
write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import grpc.aio

from forebay.coordination._oxia import oxia_pb2 as pb

SERVICE = "io.streamnative.oxia.proto.OxiaClient"
Context = grpc.aio.ServicerContext[Any, Any]
WriteHandler = Callable[
    ["FakeOxia", AsyncIterator[pb.WriteRequest], Context], AsyncIterator[pb.WriteResponse]
]


class SteppedClock:
    """Time that passes only when a test says so. Short pauses between attempts are over at once."""

    SHORT_S = 0.1

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= self.SHORT_S:
            await asyncio.sleep(0)
            return
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, sleeper))
        await sleeper

    async def advance(self, seconds: float) -> None:
        """Pass time, once somebody waits for it."""
        while not self._sleepers:  # noqa: ASYNC110 - tasks of the client tell nobody when they begin to wait
            await asyncio.sleep(0.001)
        self.now += seconds
        due = [sleeper for at, sleeper in self._sleepers if at <= self.now]
        self._sleepers = [(at, sleeper) for at, sleeper in self._sleepers if at > self.now]
        for sleeper in due:
            if not sleeper.done():
                sleeper.set_result(None)


async def store_writes(
    fake: FakeOxia, requests: AsyncIterator[pb.WriteRequest], _: Context
) -> AsyncIterator[pb.WriteResponse]:
    """The well-behaved write stream."""
    async for request in requests:
        yield fake.apply(request)


async def fail(context: Context, text: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
    await context.abort(code, text)


class FakeOxia:
    """One server. Change its attributes to make it misbehave."""

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards
        self.leader: str | None = None
        """Whom the assignments name; None for the address of this server."""
        self.assignments_end = asyncio.Event()
        """Set: the assignment stream ends normally after its first message."""
        self.write: WriteHandler = store_writes
        self.read_failures: list[tuple[grpc.StatusCode, str]] = []
        """Answers to the next reads, before they work."""
        self.read_hangs = False
        self.namespace_error: str | None = None
        self.keep_alive_error: tuple[grpc.StatusCode, str] | None = None
        self.notification_error: tuple[grpc.StatusCode, str] | None = None
        self.scan_message: pb.RangeScanResponse | None = None
        self.keys: dict[str, tuple[bytes, int]] = {}
        self.requests: list[pb.WriteRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.calls: dict[str, int] = defaultdict(int)
        self.open_streams: dict[int, int] = defaultdict(int)
        self.sins: list[str] = []
        self.unanswered = 0
        self.sessions_closed: list[int] = []
        self.notify: asyncio.Queue[pb.NotificationBatch | None] = asyncio.Queue()
        """Batches for the notification stream; None ends it normally."""
        self.changed = asyncio.Condition()
        self._version = -1
        self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"

    def url(self, timeout_ms: int = 20_000, **options: object) -> str:
        extra = "".join(f"&{name}={value}" for name, value in options.items())
        return f"oxia://{self.address}/default?timeout_ms={timeout_ms}{extra}"

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true of this server."""
        async with self.changed:
            await self.changed.wait_for(condition)

    def apply(self, request: pb.WriteRequest) -> pb.WriteResponse:
        """Unconditional puts and deletes are enough here."""
        response = pb.WriteResponse()
        for put in request.puts:
            self._version += 1
            self.keys[put.key] = put.value, self._version
            response.puts.add(version=pb.Version(version_id=self._version))
        for delete in request.deletes:
            found = self.keys.pop(delete.key, None)
            response.deletes.add(status=pb.OK if found else pb.KEY_NOT_FOUND)
        for _ in request.delete_ranges:
            response.delete_ranges.add()
        return response

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary_stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        calls: dict[str, tuple[Any, Any, Any]] = {
            "GetShardAssignments": (unary_stream, self._assignments, pb.AssignmentsRequest),
            "WriteStream": (grpc.stream_stream_rpc_method_handler, self._write, pb.WriteRequest),
            "Read": (unary_stream, self._read, pb.ReadRequest),
            "RangeScan": (unary_stream, self._range_scan, pb.RangeRequest),
            "GetNotifications": (unary_stream, self._notifications, pb.NotificationsRequest),
            "CreateSession": (unary, self._create_session, pb.CreateSessionRequest),
            "KeepAlive": (unary, self._keep_alive, pb.SessionRequest),
            "CloseSession": (unary, self._close_session, pb.SessionRequest),
        }
        handlers = {
            name: make(
                handler,
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (make, handler, request) in calls.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _count(self, name: str) -> None:
        async with self.changed:
            self.calls[name] += 1
            self.changed.notify_all()

    async def _assignments(
        self, request: pb.AssignmentsRequest, context: Context
    ) -> AsyncIterator[pb.Assignments]:
        await self._count("assignments")
        if self.namespace_error is not None:
            await fail(context, self.namespace_error)
        step = 2**32 // self.shards
        message = pb.Assignments()
        namespace = message.namespaces[request.namespace]
        namespace.router = pb.XXHASH3
        for shard in range(self.shards):
            last = 2**32 - 1 if shard == self.shards - 1 else (shard + 1) * step - 1
            namespace.assignments.add(
                shard=shard,
                leader=self.leader or self.address,
                hash_range=pb.HashRange(first=shard * step, last=last),
            )
        yield message
        await self.assignments_end.wait()

    async def _write(
        self, requests: AsyncIterator[pb.WriteRequest], context: Context
    ) -> AsyncIterator[pb.WriteResponse]:
        metadata = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
        self.metadata.append(metadata)
        shard = int(metadata["shard-id"])
        self.open_streams[shard] += 1
        if self.open_streams[shard] > 1:
            self.sins.append("two write streams at once on one shard")
        await self._count("write")
        try:
            async for response in self.write(self, self._noted(requests, shard), context):
                self.unanswered -= 1
                yield response
        finally:
            self.unanswered = 0
            self.open_streams[shard] -= 1

    async def _noted(
        self, requests: AsyncIterator[pb.WriteRequest], shard: int
    ) -> AsyncIterator[pb.WriteRequest]:
        async for request in requests:
            if not request.HasField("shard") or request.shard != shard:
                self.sins.append("a write that does not name its shard")
            async with self.changed:
                self.requests.append(request)
                self.unanswered += 1
                self.changed.notify_all()
            yield request

    async def _read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadResponse]:
        await self._count("read")
        if self.read_hangs:
            await asyncio.Event().wait()
        if self.read_failures:
            code, text = self.read_failures.pop(0)
            await fail(context, text, code)
        response = pb.ReadResponse()
        for get in request.gets:
            found = self.keys.get(get.key)
            if found is None:
                response.gets.add(status=pb.KEY_NOT_FOUND)
            else:
                response.gets.add(value=found[0], version=pb.Version(version_id=found[1]))
        yield response

    async def _range_scan(self, _: pb.RangeRequest, context: Context) -> AsyncIterator[pb.RangeScanResponse]:
        await self._count("range_scan")
        assert self.scan_message is not None
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                yield self.scan_message
                await self._count("scan messages")

    async def _notifications(
        self, request: pb.NotificationsRequest, context: Context
    ) -> AsyncIterator[pb.NotificationBatch]:
        await self._count("notifications")
        if self.notification_error is not None:
            await fail(context, self.notification_error[1], self.notification_error[0])
        yield pb.NotificationBatch(shard=request.shard)
        while (batch := await self.notify.get()) is not None:
            yield batch

    async def _create_session(self, _: pb.CreateSessionRequest, __: Context) -> pb.CreateSessionResponse:
        if self.unanswered:
            self.sins.append("a session created beside a write")
        await self._count("create_session")
        return pb.CreateSessionResponse(session_id=self.calls["create_session"] - 1)

    async def _keep_alive(self, _: pb.SessionRequest, context: Context) -> pb.SessionResponse:
        await self._count("keep_alive")
        if self.keep_alive_error is not None:
            await fail(context, self.keep_alive_error[1], self.keep_alive_error[0])
        return pb.SessionResponse()

    async def _close_session(self, request: pb.SessionRequest, _: Context) -> pb.SessionResponse:
        if self.unanswered:
            self.sins.append("a session closed beside a write")
        self.sessions_closed.append(request.session_id)
        await self._count("close_session")
        return pb.SessionResponse()
