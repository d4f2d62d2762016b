"""Open stores and coordinators of this process, by address: made once, inside the process that uses them.

A task must neither carry a client (connections do not travel) nor open one for itself (a hundred tasks of one
worker would open a hundred). So they live here, in a module that every worker can import, each process with
its own: after a fork the child finds that the process id is another and begins anew. All of them share one
event loop on a thread of its own; decoding and compressing happen on the thread of the task.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pyarrow as pa

from forebay._connect import Parts, open_parts
from forebay._loop_thread import LoopThread
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import LogReader, LogWriter, ReaderConfig
from forebay.storage import ObjectStore, open_store

__all__ = ["Clients", "clients", "close_clients"]

T = TypeVar("T")

PULL_BYTES: Final = 8 * 1024 * 1024
"""Bytes of record batches handed from the loop to a task at a time."""


@dataclass
class Clients:
    """Everything that is open in this process."""

    pid: int = field(default_factory=os.getpid)
    loop: LoopThread = field(default_factory=lambda: LoopThread("forebay-export"))
    clock: SystemClock = field(default_factory=SystemClock)
    ids: IdSource = field(default_factory=IdSource)
    randomness: random.Random = field(default_factory=random.SystemRandom)
    _stores: dict[str, ObjectStore] = field(default_factory=dict)
    _parts: dict[tuple[str, str | None], Parts] = field(default_factory=dict)
    _readers: dict[tuple[str, str | None], LogReader] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the loop."""
        return self.loop.run(work)

    def store(self, url: str) -> ObjectStore:
        """The store at an address."""

        async def make() -> ObjectStore:
            return open_store(url, clock=self.clock, ids=self.ids)

        with self._lock:
            if url not in self._stores:
                self._stores[url] = self.run(make())
            return self._stores[url]

    def parts(self, store: str, coordinator: str | None) -> Parts:
        """A deployment."""

        async def make() -> Parts:
            return open_parts(store, coordinator)

        with self._lock:
            key = (store, coordinator)
            if key not in self._parts:
                self._parts[key] = self.run(make())
            return self._parts[key]

    def reader(self, store: str, coordinator: str | None) -> LogReader:
        """A reader of a deployment's log. It keeps no batches: a task reads every object once."""
        parts = self.parts(store, coordinator)
        with self._lock:
            key = (store, coordinator)
            if key not in self._readers:
                self._readers[key] = LogReader(
                    parts.store,
                    parts.coordinator,
                    clock=parts.clock,
                    randomness=parts.randomness,
                    config=ReaderConfig(cache_bytes_max=0, maps_objects=_is_started_again()),
                )
            return self._readers[key]

    def writer(self, store: str, coordinator: str | None) -> LogWriter:
        """A writer to a deployment's log."""
        parts = self.parts(store, coordinator)
        return LogWriter(
            parts.store,
            parts.coordinator,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            name=parts.name,
        )

    def close(self) -> None:
        """Close everything and end the loop."""
        if not self.loop.running:
            return
        for parts in self._parts.values():
            self.run(parts.close())
        for store in self._stores.values():
            self.run(store.close())
        self.loop.stop()

    def pull(self, batches: AsyncIterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """What an asynchronous scan yields, several batches at a time."""
        while some := self.run(_some(batches)):
            yield some


def _is_started_again() -> bool:
    """Whether this is a worker of Spark, which may end: what is mapped ends it where a disk fails."""
    pyspark = sys.modules.get("pyspark")
    return pyspark is not None and pyspark.TaskContext.get() is not None


async def _some(batches: AsyncIterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    size = 0
    async for batch in batches:
        found.append(batch)
        size += batch.nbytes
        if size >= PULL_BYTES:
            break
    return found


_current: Clients | None = None
_making = threading.Lock()


def clients() -> Clients:
    """Those of this process."""
    global _current  # noqa: PLW0603 - one per process is the point
    with _making:
        if _current is None or _current.pid != os.getpid() or not _current.loop.running:
            _current = Clients()
        return _current


def close_clients() -> None:
    """Let go of everything that exports and jobs opened in this process. The next one opens it again."""
    global _current
    with _making:
        current, _current = _current, None
    if current is not None and current.pid == os.getpid():
        current.close()
