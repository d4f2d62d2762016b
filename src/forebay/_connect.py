"""From one or two URLs to the parts of a deployment, and from words and times to offsets.

A directory needs no second URL: the embedded coordinator lives in it. A bucket has no place for one that
several machines could share, so it is refused without.
"""

from __future__ import annotations

import operator
import os
import random
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, SupportsIndex, TypeAlias
from urllib.parse import unquote, urlsplit

from forebay._forks import check_not_forked
from forebay.coordination import Coordinator, MemoryCoordinator, is_there, open_coordinator
from forebay.errors import UsageError
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.log import LogReader
from forebay.storage import ObjectStore, open_store

__all__ = ["Location", "Parts", "Position", "check_there", "open_parts", "resolve_position", "time_ms"]

Location: TypeAlias = str | os.PathLike[str]
"""A directory, or the URL of a store."""
Position: TypeAlias = int | datetime | Literal["earliest", "latest"]
"""An offset, a time (with its zone), or one of the two ends."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a deployment is made of."""

    store: ObjectStore
    coordinator: Coordinator
    clock: Clock
    ids: IdSource
    randomness: random.Random
    metrics: MetricsRegistry
    name: str = ""
    """Who writes, as `forebay log explain` shows it beside a record."""

    async def close(self) -> None:
        """Close both ends, the second also where the first fails."""
        try:
            await self.coordinator.close()
        finally:
            await self.store.close()


def check_there(location: Location, coordinator: Location | None) -> None:
    """Raise `UsageError` where opening would make a deployment: for whoever only reads, or works on what is
    there. Of a server nobody is asked."""
    where = location if coordinator is None else coordinator
    text = os.fspath(where)
    if coordinator is None and text.lower().startswith("file://"):
        where = Path(unquote(urlsplit(text).path))
    if not is_there(where):
        raise UsageError(
            f"{text.partition('?')[0]!r} holds no deployment, and none is made here",
            hint="check the path; the first `forebay topics create`, or a producer, makes one",
        )


def open_parts(location: Location, coordinator: Location | None) -> Parts:
    """Open the store and the coordinator. Call it inside the running loop; nothing is contacted yet."""
    check_not_forked(location, coordinator)
    clock = SystemClock()
    ids = IdSource(clock)
    keys = _open_coordinator(location) if coordinator is None else open_coordinator(coordinator)
    store = open_store(location, clock=clock, ids=ids)
    name = f"{socket.gethostname()}:{os.getpid()}"
    return Parts(store, keys, clock, ids, random.SystemRandom(), MetricsRegistry(), name)


def _open_coordinator(location: Location) -> Coordinator:
    """The coordinator that goes with a store of one machine."""
    text = os.fspath(location)
    if isinstance(location, os.PathLike) or "://" not in text:
        return open_coordinator(Path(text))
    scheme = text.partition("://")[0].lower()
    if scheme == "memory":
        return open_coordinator(text) if text != "memory://" else MemoryCoordinator()
    if scheme == "file":
        return open_coordinator(Path(unquote(urlsplit(text).path)))
    raise UsageError(
        f"{text.partition('?')[0]!r} needs a coordinator",
        hint='name one: connect(url, coordinator="oxia://host:port/namespace")',
    )


async def resolve_position(reader: LogReader, topic: str, partition: int, position: Position) -> int:
    """The offset that a position means now."""
    if isinstance(position, datetime):
        return await reader.offset_for_time(topic, partition, time_ms(position))
    if isinstance(position, SupportsIndex) and not isinstance(position, bool):
        return operator.index(position)
    offsets = await reader.offsets(topic, partition)
    if position == "earliest":
        return offsets.earliest
    if position == "latest":
        return offsets.next
    raise UsageError(
        f"{position!r} is no position in a log", hint="an offset, a datetime, 'earliest' or 'latest'"
    )


def time_ms(time: datetime) -> int:
    """Milliseconds since the Unix epoch. A time without a zone is refused: whose would it be?"""
    if time.tzinfo is None:
        raise UsageError(f"{time} has no time zone", hint="for example datetime.now(timezone.utc)")
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return (time - epoch) // (datetime.resolution * 1000)
