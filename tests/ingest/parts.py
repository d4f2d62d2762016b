"""What the tests of the claiming queue share: a store whose versions are hashes, a clock turned by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any

from forebay.errors import NotFound
from forebay.ingest import Collector, CollectorConfig, Ingestor, IngestorConfig
from forebay.kit.conditions import ABSENT, ANY
from forebay.kit.ids import IdSource
from forebay.storage import MemoryStore, ObjectStore, StoredObject
from forebay.storage._api import Buffer, When
from forebay.storage._memory import _Entry

RETRY_WAIT_S_MAX = 5.0
PRODUCERS = "ingest/manifest.json"
CONSUMERS = "ingest/manifest.consumer.json"


class HandClock:
    """A clock that stands still until it is turned."""

    def __init__(self, now_ms: int = 1_750_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        if seconds < RETRY_WAIT_S_MAX:  # between two attempts no time passes
            await asyncio.sleep(0)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._monotonic + seconds, turn))
        await turn

    async def turn(self, seconds: float) -> None:
        """Let time pass, wake who is due, and let them run until they wait again."""
        await self._let_run()
        self._now_ms += int(seconds * 1000)
        self._monotonic += seconds
        due = [turn for at, turn in self._sleepers if at <= self._monotonic]
        self._sleepers = [(at, turn) for at, turn in self._sleepers if at > self._monotonic]
        for turn in due:
            if not turn.done():
                turn.set_result(None)
        await self._let_run()

    async def _let_run(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


class HashStore(MemoryStore):
    """Versions are hashes of the content, as on S3: a version comes back with its content."""

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        held = self._objects.entries.get(key)
        inner = held.version if held is not None and when not in (ANY, ABSENT) else when
        if when not in (ANY, ABSENT) and (held is None or when != hashed(held)):
            inner = "no such version"
        await super().put(key, data, inner)
        return hashed(self._objects.entries[key])

    async def get(self, key: str) -> StoredObject:
        found = await super().get(key)
        return StoredObject(key, found.data, hashed(self._entry(key)))


def hashed(entry: _Entry) -> str:
    return hashlib.md5(entry.data).hexdigest()


async def document(store: ObjectStore, key: str) -> Any:
    """A manifest as plain data; None where there is none."""
    try:
        return json.loads((await store.get(key)).data)
    except NotFound:
        return None


async def pending(store: ObjectStore) -> list[str]:
    found = await document(store, PRODUCERS)
    return list(found["pending"]) if found else []


async def claimed(store: ObjectStore) -> dict[str, int]:
    found = await document(store, CONSUMERS)
    return dict(found["claimed"]) if found else {}


async def done(store: ObjectStore) -> list[str]:
    found = await document(store, CONSUMERS)
    return list(found["done"]) if found else []


async def batches(store: ObjectStore, prefix: str = "ingest/") -> list[str]:
    """Keys of the batch objects."""
    return [
        info.key
        async for info in store.list(prefix)
        if "manifest" not in info.key and "owner" not in info.key
    ]


async def fill(store: ObjectStore, count: int, **settings: Any) -> list[str]:
    """Ingest `count` batches of one entry each, b"0", b"1", ...; their locations."""
    before = await pending(store)
    async with Ingestor(store, IngestorConfig(flush_interval_ms=0, **settings)) as ingestor:
        for number in range(count):
            await ingestor.ingest([b"%d" % number])
            await ingestor.flush()
    return (await pending(store))[len(before) :]


def collector(store: ObjectStore, clock: HandClock | None = None, **settings: Any) -> Collector:
    return Collector(
        store, CollectorConfig(**settings), clock=clock or HandClock(), randomness=random.Random(1)
    )


def ids() -> IdSource:
    return IdSource(HandClock(), random.Random(2))
