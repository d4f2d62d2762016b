"""One connection through the fault proxy: two directions, each a reader, a queue and a writer.

The queue between reading and writing is what makes latency honest: a chunk is stamped with the moment it may
leave, so a slow link still carries many chunks at once, as a real one does. Waiting inline would turn every
millisecond of latency into a limit on bandwidth. Writers wait until the kernel has taken every byte, so that
"after n bytes" means n, and not what a buffer made of it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import random
import socket
import struct
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["Action", "ConnectionFault", "Direction", "Link", "Relay", "Streams", "Weather"]

CHUNK_BYTES = 64 * 1024
QUEUE_CHUNKS_MAX = 64
"""Chunks under way in one direction: the bandwidth-delay product of the emulated link."""
PIECES_PER_SECOND = 20
"""How smoothly a bandwidth cap lets bytes through."""

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Direction(enum.Enum):
    """Which way bytes go."""

    UP = "to the server"
    DOWN = "to the client"


class Action(enum.Enum):
    """What a fault does when its byte is reached."""

    RESET = "reset both sides"
    HALF_CLOSE = "end this direction, keep the other"
    CORRUPT = "change one byte"
    HANG = "stop forwarding in this direction until the proxy heals"
    LOSE = "swallow what comes, then reset"


@dataclass(frozen=True, slots=True)
class Link:
    """The lasting state of one direction."""

    latency_ms: int = 0
    """Milliseconds every chunk is late."""
    jitter_ms: int = 0
    """Up to so many more, at random. Order is kept."""
    bytes_per_s: int | None = None
    """Bandwidth of each connection; None: as fast as it goes."""
    blackhole: bool = False
    """Nothing leaves until this is lifted; then everything does."""


@dataclass(frozen=True, slots=True)
class ConnectionFault:
    """A fault of one connection, due once so many bytes have gone in one direction."""

    action: Action
    direction: Direction
    after_bytes: int = 0
    quiet_ms: int = 200
    """For LOSE: the reset follows when nothing came to swallow for so long."""

    @property
    def at_once(self) -> bool:
        """Whether it acts after its last byte, not at the one that follows."""
        return self.action in (Action.RESET, Action.HALF_CLOSE)


class Weather(Protocol):
    """What a relay knows of its proxy."""

    links: dict[Direction, Link]
    randomness: random.Random
    changed: asyncio.Event

    def forwarded(self, direction: Direction, count: int) -> None:
        """Count bytes."""

    def met(self, fault: ConnectionFault) -> None:
        """Count a fault that acted."""

    def take_response_fault(self) -> ConnectionFault | None:
        """The fault that waits for the next request and its response, if any; it is given out once."""


class _Cut(Exception):
    """The connection is to be reset."""


@dataclass(slots=True)
class _Armed:
    fault: ConnectionFault
    left: int


class Relay:
    """Carries one client connection to the server and back."""

    def __init__(self, weather: Weather, client: Streams, server: Streams) -> None:
        self._weather = weather
        self._readers = {Direction.UP: client[0], Direction.DOWN: server[0]}
        self._writers = {Direction.UP: server[1], Direction.DOWN: client[1]}
        self._queues: dict[Direction, asyncio.Queue[tuple[float, bytes]]] = {}
        self._armed: dict[Direction, collections.deque[_Armed]] = {}
        for direction in Direction:
            self._queues[direction] = asyncio.Queue(QUEUE_CHUNKS_MAX)
            self._armed[direction] = collections.deque()
            self._writers[direction].transport.set_write_buffer_limits(high=0)
        self._hung: set[Direction] = set()
        self._muted: set[Direction] = set()

    def arm(self, fault: ConnectionFault) -> None:
        """Let the fault happen. Bytes are counted from now on; several of one direction act in turn."""
        self._armed[fault.direction].append(_Armed(fault, fault.after_bytes))

    def unhang(self) -> None:
        """Go on where a fault made it hang."""
        self._hung.clear()

    async def run(self) -> None:
        """Carry bytes until both sides are done or the connection is cut."""
        cut = False
        try:
            async with asyncio.TaskGroup() as tasks:
                for direction in Direction:
                    tasks.create_task(self._intake(direction))
                    tasks.create_task(self._outflow(direction))
        except* (OSError, _Cut):
            cut = True
        finally:
            # Also on the way out of a cancellation: no connection outlives its relay.
            for writer in self._writers.values():
                if cut or not writer.is_closing():
                    reset(writer) if cut else writer.close()

    def cut(self) -> None:
        """Reset both sides now."""
        for writer in self._writers.values():
            reset(writer)

    async def _intake(self, direction: Direction) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while chunk := await self._readers[direction].read(CHUNK_BYTES):
            if direction is Direction.UP and (fault := self._weather.take_response_fault()):
                self.arm(fault)
            link = self._weather.links[direction]
            late_ms = link.latency_ms + self._weather.randomness.uniform(0, link.jitter_ms)
            due = max(due, loop.time() + late_ms / 1000)
            await self._queues[direction].put((due, chunk))
        await self._queues[direction].put((due, b""))

    async def _outflow(self, direction: Direction) -> None:
        loop = asyncio.get_running_loop()
        await self._act_if_due(direction)
        while True:
            due, chunk = await self._queues[direction].get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._until_clear(direction)
            if not chunk:
                self._end(direction)
                return
            await self._forward(direction, chunk)

    async def _until_clear(self, direction: Direction) -> None:
        while self._weather.links[direction].blackhole or direction in self._hung:
            await self._weather.changed.wait()

    async def _forward(self, direction: Direction, chunk: bytes) -> None:
        armed = self._armed[direction]
        while chunk:
            count = min(armed[0].left, len(chunk)) if armed else len(chunk)
            head, chunk = chunk[:count], chunk[count:]
            if armed:
                armed[0].left -= count
            await self._send(direction, head)
            if chunk and armed:
                chunk = await self._act(direction, armed.popleft().fault, chunk)
            await self._act_if_due(direction)

    async def _act_if_due(self, direction: Direction) -> None:
        armed = self._armed[direction]
        while armed and armed[0].left == 0 and armed[0].fault.at_once:
            await self._act(direction, armed.popleft().fault, b"")

    async def _act(self, direction: Direction, fault: ConnectionFault, rest: bytes) -> bytes:
        """Do it; return what is left to forward."""
        self._weather.met(fault)
        match fault.action:
            case Action.RESET:
                raise _Cut
            case Action.HALF_CLOSE:
                self._end(direction)
                self._muted.add(direction)
            case Action.CORRUPT:
                return bytes([rest[0] ^ self._weather.randomness.randint(1, 255)]) + rest[1:]
            case Action.HANG:
                self._hung.add(direction)
                await self._until_clear(direction)
            case Action.LOSE:
                await self._swallow(direction, fault.quiet_ms / 1000)
                raise _Cut
        return rest

    async def _swallow(self, direction: Direction, quiet_s: float) -> None:
        more = b"the first chunk is swallowed already"
        with contextlib.suppress(TimeoutError):
            while more:
                async with asyncio.timeout(quiet_s):
                    _, more = await self._queues[direction].get()

    async def _send(self, direction: Direction, data: bytes) -> None:
        if not data or direction in self._muted:
            return
        speed = self._weather.links[direction].bytes_per_s
        step = len(data) if speed is None else max(1, speed // PIECES_PER_SECOND)
        writer = self._writers[direction]
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            writer.write(piece)
            await writer.drain()
            self._weather.forwarded(direction, len(piece))
            if speed is not None:
                await asyncio.sleep(len(piece) / speed)

    def _end(self, direction: Direction) -> None:
        writer = self._writers[direction]
        if direction not in self._muted and writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST, as the kernel of a machine does where the program is gone."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
