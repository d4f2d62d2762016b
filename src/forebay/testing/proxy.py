"""A TCP proxy that misbehaves on demand, for tests with real servers.

    with FaultProxy("127.0.0.1", oxia.port) as proxy:              # in a thread of its own
        coordinator = open_coordinator(f"oxia://{proxy.address}/default")
        proxy.shape(latency_ms=20, jitter_ms=5)                    # a slow link, both ways
        proxy.next_response(lose_reply())                          # the request arrives, its answer does not
        proxy.blackhole()                                          # connections live, nothing moves
        proxy.refuse()                                             # nobody listens any more
        proxy.heal()                                               # as if nothing had been

With `async with` the proxy lives in the running loop instead. It knows nothing of protocols, only bytes and
connections, and so it works for HTTP, gRPC and everything else. Two kinds of misbehaviour:

* the *weather*, which lasts until changed: latency, jitter, bandwidth, blackhole, refused connections;
* *faults*, each met once: by the next connection, by the next request that any connection carries, or by
  connections drawn at random from a seed.

The controls may be called from any thread, but with `async with` only from the loop's own.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from forebay.errors import Closed
from forebay.testing._servers.ports import free_ports
from forebay.testing._servers.relay import Action, ConnectionFault, Direction, Link, Relay, Streams, reset

__all__ = [
    "ConnectionFault",
    "Direction",
    "FaultProxy",
    "ProxyStats",
    "corrupt",
    "half_close",
    "hang",
    "lose_reply",
    "reset_after",
]

T = TypeVar("T")
UP, DOWN = Direction.UP, Direction.DOWN
BACKLOG = 128


def reset_after(count: int = 0, direction: Direction = DOWN) -> ConnectionFault:
    """Reset both sides as soon as `count` bytes have gone that way. 0: at once."""
    return ConnectionFault(Action.RESET, direction, count)


def half_close(after_bytes: int = 0, direction: Direction = DOWN) -> ConnectionFault:
    """End one direction after so many bytes; the other goes on."""
    return ConnectionFault(Action.HALF_CLOSE, direction, after_bytes)


def corrupt(at_byte: int = 0, direction: Direction = DOWN) -> ConnectionFault:
    """Change the byte with this number, counted from 0."""
    return ConnectionFault(Action.CORRUPT, direction, at_byte)


def hang(after_bytes: int = 0, direction: Direction = DOWN) -> ConnectionFault:
    """Forward so many bytes and then no more, until `heal`."""
    return ConnectionFault(Action.HANG, direction, after_bytes)


def lose_reply(after_bytes: int = 0, *, quiet_ms: int = 200) -> ConnectionFault:
    """Let the request through, swallow the answer after so many bytes of it, then reset the connection.

    The reset comes when the server has been silent for `quiet_ms`, so that a server that sends housekeeping
    first (as HTTP/2 does) still has the time to act on the request.
    """
    return ConnectionFault(Action.LOSE, DOWN, after_bytes, quiet_ms)


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """What went through so far."""

    connections: int = 0
    """Accepted, including those that were reset at once."""
    open: int = 0
    """Open now."""
    bytes_up: int = 0
    """Forwarded to the server."""
    bytes_down: int = 0
    """Forwarded to clients."""
    faults_met: int = 0
    """Faults that acted."""


class FaultProxy:
    """Listens on a free loopback port and forwards to one server. A context manager, sync or async."""

    def __init__(
        self, upstream_host: str, upstream_port: int, *, randomness: random.Random | None = None
    ) -> None:
        self.upstream = (upstream_host, upstream_port)
        self.port = free_ports(1)[0]
        self.address = f"127.0.0.1:{self.port}"
        self.links = {direction: Link() for direction in Direction}
        self.randomness = randomness or random.Random(0)
        self.changed = asyncio.Event()
        self._stats = ProxyStats()
        self._for_connections: collections.deque[tuple[ConnectionFault, ...]] = collections.deque()
        self._for_responses: collections.deque[ConnectionFault] = collections.deque()
        self._rate = 0.0
        self._random_faults: Sequence[ConnectionFault] = ()
        self._listener: socket.socket | None = None
        self._fresh: set[socket.socket] = set()
        self._relays: set[Relay] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- the weather

    def shape(
        self,
        direction: Direction | None = None,
        *,
        latency_ms: int = 0,
        jitter_ms: int = 0,
        bytes_per_s: int | None = None,
    ) -> None:
        """Set latency and bandwidth, in one direction or (None) in both."""
        self._set_links(direction, latency_ms=latency_ms, jitter_ms=jitter_ms, bytes_per_s=bytes_per_s)

    def blackhole(self, direction: Direction | None = None, *, on: bool = True) -> None:
        """Accept connections and bytes, forward none. `on=False` lets everything go that was held back."""
        self._set_links(direction, blackhole=on)

    def refuse(self) -> None:
        """Stop listening: new connections are refused by the kernel. Open ones stay."""
        self._in_loop(self._close_listener)

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._in_loop(self._listen)

    def cut(self) -> int:
        """Reset every open connection now; return how many there were."""
        return self._in_loop(self._cut_now)

    def heal(self) -> None:
        """Fair weather, no faults, everything that hangs goes on. Connections that were cut stay cut."""
        self._in_loop(self._heal_now)

    # -- faults, each met once

    def next_connection(self, *faults: ConnectionFault) -> None:
        """The next connection that nothing else is planned for meets these faults."""
        self._in_loop(lambda: self._for_connections.append(faults))

    def next_response(self, fault: ConnectionFault) -> None:
        """The connection that next carries bytes to the server meets the fault; bytes count from there."""
        self._in_loop(lambda: self._for_responses.append(fault))

    def fail_randomly(self, rate: float, faults: Sequence[ConnectionFault]) -> None:
        """From now on each new connection meets, with this probability, one of these faults."""

        def plan() -> None:
            self._rate, self._random_faults = rate, list(faults)

        self._in_loop(plan)

    @property
    def stats(self) -> ProxyStats:
        """Counters so far."""
        return dataclasses.replace(self._stats, open=len(self._relays))

    # -- life

    def __enter__(self) -> Self:
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, args=(started,), daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._thread is not None and self._loop is not None
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()
        self._loop = None

    def _run_thread(self, started: concurrent.futures.Future[None]) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            try:
                self._listen()
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._loop.run_forever()

    async def _close(self) -> None:
        self._close_listener()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._fresh:
            connection.close()
        await asyncio.sleep(0)  # Transports close their sockets in the turn after.

    def _in_loop(self, action: Callable[[], T]) -> T:
        """Run a control where the connections live: at once if we are there, else as a visitor who waits."""
        loop = self._loop
        if loop is None:
            raise Closed("the proxy is not running", hint="use it inside its `with` block")
        if self._thread is None or threading.current_thread() is self._thread:
            result = action()
            self._wake()
            return result

        async def visit() -> T:
            result = action()
            self._wake()
            return result

        return asyncio.run_coroutine_threadsafe(visit(), loop).result()

    def _wake(self) -> None:
        # Waiters look at the state again; a fresh event makes the next change news as well.
        self.changed.set()
        self.changed = asyncio.Event()

    # -- what relays ask for

    def forwarded(self, direction: Direction, count: int) -> None:
        """Count bytes (called by the connections)."""
        name = "bytes_up" if direction is UP else "bytes_down"
        self._count(**{name: count})

    def met(self, fault: ConnectionFault) -> None:
        """Count a fault that acted (called by the connections)."""
        self._count(faults_met=1)

    def take_response_fault(self) -> ConnectionFault | None:
        """The next fault that waits for a request (called by the connections)."""
        return self._for_responses.popleft() if self._for_responses else None

    def _count(self, **more: int) -> None:
        changes = {name: getattr(self._stats, name) + count for name, count in more.items()}
        self._stats = dataclasses.replace(self._stats, **changes)

    # -- inside the loop

    def _set_links(self, direction: Direction | None, **changes: int | None) -> None:
        def change() -> None:
            for each in [direction] if direction else Direction:
                self.links[each] = dataclasses.replace(self.links[each], **changes)  # type: ignore[arg-type]

        self._in_loop(change)

    def _heal_now(self) -> None:
        self.links.update({direction: Link() for direction in Direction})
        self._for_connections.clear()
        self._for_responses.clear()
        self._rate = 0.0
        for relay in self._relays:
            relay.unhang()
        self._listen()

    def _cut_now(self) -> int:
        for relay in self._relays:
            relay.cut()
        return len(self._relays)

    def _listen(self) -> None:
        if self._listener is not None:
            return
        assert self._loop is not None
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept_one, self._listener)

    def _close_listener(self) -> None:
        if self._listener is not None and self._loop is not None:
            # The loop must let go of the descriptor before it is closed: its number may be used again.
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept_one(self, listener: socket.socket) -> None:
        assert self._loop is not None
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # The client left before we looked.
        connection.setblocking(False)
        self._count(connections=1)
        # A task that is cancelled before its first step never runs: until then the socket is ours to close.
        self._fresh.add(connection)
        task = self._loop.create_task(self._carry(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, connection: socket.socket) -> None:
        client: Streams = await asyncio.open_connection(sock=connection)
        self._fresh.discard(connection)
        faults = self._plan()
        if any(fault.at_once and fault.after_bytes == 0 and fault.action is Action.RESET for fault in faults):
            self._count(faults_met=1)
            reset(client[1])
            return
        try:
            server = await asyncio.open_connection(*self.upstream)
        except BaseException as error:
            reset(client[1])
            if isinstance(error, OSError):
                return  # The server is down, and so the client learns it.
            raise
        relay = Relay(self, client, server)
        for fault in faults:
            relay.arm(fault)
        self._relays.add(relay)
        try:
            await relay.run()
        finally:
            self._relays.discard(relay)

    def _plan(self) -> tuple[ConnectionFault, ...]:
        if self._for_connections:
            return self._for_connections.popleft()
        if self._random_faults and self.randomness.random() < self._rate:
            return (self.randomness.choice(self._random_faults),)
        return ()
