"""Open deployments of this process: opened by whoever needs one first, then kept.

Spark plans in some processes and reads in others, which it forks and uses again; nothing that is open may be
pickled or inherited. So a task carries names only, and each process keeps its clients in a module global. The
process id is part of the name: a forked child finds nothing of its parent's.

Engines are imported when they are first used: a worker that reads topics never loads the others, nor what
writes into a log.

The event loop runs on the calling thread and only while somebody waits for it. A worker has one thread that
matters, and handing every batch from one thread to another would cost more than decoding it; requests that
are under way go on in the store's own threads while the loop rests.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay._connect import Parts, open_parts
from forebay.errors import UsageError
from forebay.formats.bytes_batch import Codec
from forebay.kit.clock import SystemClock
from forebay.log import LogReader, Positions, ReaderConfig
from forebay.storage import ObjectStore, open_store

if TYPE_CHECKING:
    from forebay import aio
    from forebay.buffer import BufferConfig
    from forebay.buffer import Reader as BufferReader
    from forebay.stream import StreamReader

__all__ = ["Client", "Deployment", "client"]

T = TypeVar("T")

READER: Final = ReaderConfig(cache_bytes_max=0, prefetch_bytes_max=64 * 1024 * 1024, maps_objects=True)
"""A task reads every byte once: nothing to keep, much to fetch ahead, and no copy where none is needed. Spark
starts a worker again that has ended."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where things lie: what a task carries instead of a connection."""

    path: str
    """A directory (absolute) or the URL of a store."""
    coordinator: str | None = None
    """None: the one that goes with a directory."""


class Client:
    """One deployment, open in this process."""

    def __init__(self, deployment: Deployment, codec: Codec = "none") -> None:
        self._deployment = deployment
        self._codec: Codec = codec
        self._loop = asyncio.new_event_loop()
        self._bay: aio.Bay | None = None
        self._parts: Parts | None = None
        self._reader: LogReader | None = None
        self._store: ObjectStore | None = None
        self._positions: Positions | None = None
        self._streams: dict[str, StreamReader] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine."""
        return self._loop.run_until_complete(work)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator, which is closed with this one."""

        async def step() -> tuple[bool, T | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, item = self.run(step())
                if not more:
                    return
                assert item is not None
                yield item
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                self.run(close())

    @property
    def bay(self) -> aio.Bay:
        """The log of this deployment, for those who write."""
        if self._bay is None:
            from forebay import aio
            from forebay.log import WriterConfig

            bay = aio.connect(
                self._deployment.path,
                self._deployment.coordinator,
                reader_config=READER,
                writer_config=WriterConfig(codec=self._codec),
            )
            self.run(bay.open())
            self._bay = bay
        return self._bay

    @property
    def reader(self) -> LogReader:
        """A reader of the log."""
        if self._reader is None:
            parts = self._open
            self._reader = LogReader(
                parts.store,
                parts.coordinator,
                clock=parts.clock,
                randomness=parts.randomness,
                config=READER,
                metrics=parts.metrics,
            )
        return self._reader

    @property
    def _open(self) -> Parts:
        if self._bay is not None:
            return self._bay.parts
        if self._parts is None:
            self._parts = self.run(_parts(self._deployment))
        return self._parts

    @property
    def store(self) -> ObjectStore:
        """The store alone, for engines that need no coordinator."""
        if self._bay is not None or self._parts is not None:
            return self._open.store
        if self._store is None:
            self._store = self.run(_opened(self._deployment.path))
        return self._store

    @property
    def positions(self) -> Positions:
        """Ends and sizes of partitions."""
        if self._positions is None:
            parts = self._open
            self._positions = Positions(parts.coordinator, clock=parts.clock, randomness=parts.randomness)
        return self._positions

    def stream(self, name: str) -> StreamReader:
        """A reader of a stream's remote tier."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = self.run(_stream_reader(name, self.store))
        return found

    def buffer(self, config: BufferConfig) -> BufferReader:
        """A reader of a queue in this store."""
        from forebay.buffer import Reader as BufferReader

        return BufferReader(config, store=self.store)


async def _parts(deployment: Deployment) -> Parts:
    return open_parts(deployment.path, deployment.coordinator)


async def _opened(path: str) -> ObjectStore:
    return open_store(path)


async def _stream_reader(name: str, store: ObjectStore) -> StreamReader:
    from forebay.stream import StreamReader

    return StreamReader(name, store, clock=SystemClock(), randomness=random.SystemRandom())


_clients: dict[tuple[int, Deployment, Codec], Client] = {}


def client(deployment: Deployment, codec: Codec = "none", *, reading: bool = False) -> Client:
    """The client of this process; `codec` is for what it writes. Where there is only `reading` to be done, a
    directory that is not there is not made: raises `UsageError`."""
    key = (os.getpid(), deployment, codec)
    found = _clients.get(key)
    if found is None:
        if reading and "://" not in deployment.path and not Path(deployment.path).is_dir():
            raise UsageError(
                f"there is no directory {deployment.path!r} here",
                hint="the option path; driver and executors need the same directory, or a store in common",
            )
        found = _clients[key] = Client(deployment, codec)
    return found
