"""A manifest in the bucket: read conditionally, remembered, replaced by compare-and-set.

`update` is the one loop for every change. It hands the current content to a `change` function and writes what
comes back on condition that nobody was faster; the content after an own write is remembered, so that the next
update needs no read. Two things are told apart on every failure:

* The write certainly did not happen: read again if somebody else was first, and try again.
* Nobody can tell. Then the content is read again and `change` is told that an earlier write of this update
  may have happened, so that it looks for its own traces. As long as the version read is the one the lost
  write was conditional on, that write may land late; it and the next attempt exclude each other, because both
  are conditional on the same version.

Giving up says `CommitFailed` only if no write of this update can have happened or can happen still.

These manifests hold no counter, and on S3 a version is a hash of the content, so a version may come back: an
empty manifest is the same empty manifest every time. What follows from that stands with each change that
minds. A manifest that was seen and is gone is `ManifestLost`; it is never made anew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from forebay.errors import ForebayError, NotFound, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.formats.ingest_manifest import (
    ConsumerManifest,
    ProducerManifest,
    consumer_name,
    decode_consumer,
    decode_producer,
    encode,
)
from forebay.ingest._errors import CommitFailed, CommitUnknown, ManifestLost
from forebay.ingest._metrics import ManifestMetrics
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy, retry
from forebay.storage import ObjectStore, StoredObject
from forebay.storage._api import When

__all__ = ["Change", "ManifestFile", "Manifests"]

M = TypeVar("M", bound=msgspec.Struct)

Change = Callable[[M, bool], Awaitable[M | None]]
"""Gets the content and whether an earlier write of this update may have happened; None: nothing to write."""


class ManifestFile(Generic[M]):
    """One manifest as one process knows it. Updates of one `ManifestFile` take turns."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        empty: M,
        decode: Callable[[bytes], M],
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy,
        metrics: ManifestMetrics,
    ) -> None:
        self.key = key
        self.value = empty
        """The content as of the last read or own write."""
        self.size_bytes = 0
        """Bytes of that content in the bucket."""
        self._decode = decode
        self._store = store
        self._clock = clock
        self._random = randomness
        self._policy = policy
        self._metrics = metrics
        self._version: When = ABSENT
        self._current = False
        self._turn = asyncio.Lock()

    @property
    def exists(self) -> bool:
        """Whether it has been seen in the bucket."""
        return self._version is not ABSENT

    async def load(self) -> M:
        """Read it, if it changed since it was last seen. A manifest that never was there is empty."""
        return await retry(self._load, policy=self._policy, clock=self._clock, randomness=self._random)

    async def _load(self) -> M:
        while True:
            asked = self._version
            found = await self._look(asked)
            if self._version == asked:
                break
            # Another task read or wrote it meanwhile. What was found may be older than that: ask again.
        if found is not None:
            value = self._decode(found.data)
            self.value, self._version, self.size_bytes = value, found.version, len(found.data)
        self._current = True
        return self.value

    async def _look(self, version: When) -> StoredObject | None:
        """What lies there, or None where that is `version`, or nothing at all where none is known."""
        try:
            if isinstance(version, str):
                return await self._store.get_if_changed(self.key, version)
            return await self._store.get(self.key)
        except NotFound:
            if version is ABSENT:
                return None
            raise ManifestLost(self.key) from None

    async def update(self, change: Change[M], *, refresh: bool = False) -> M:
        """Apply `change` by compare-and-set and return the content it led to."""
        async with self._turn:
            if refresh:
                self._current = False
            return await self._update(change)

    async def _update(self, change: Change[M]) -> M:
        deadline = self._clock.monotonic() + self._policy.deadline_ms / 1000
        doubt: When | None = None
        maybe = False
        attempt = 0
        while True:
            attempt += 1
            try:
                if not self._current:
                    await self._load()
                if self._version != doubt:
                    doubt = None
                wanted = await change(self.value, maybe)
                if wanted is None:
                    return self.value
                maybe = doubt is not None
                await self._write(wanted)
                return wanted
            except PreconditionFailed as error:
                problem: ForebayError = error
                self._metrics.conflicts.inc()
            except OutcomeUnknown as error:
                if isinstance(error, CommitUnknown):
                    raise
                problem, doubt, maybe = error, self._version, True
            except Unavailable as error:
                problem = error
            self._current = False
            wait = self._policy.wait_s(attempt, self._random)
            if attempt >= self._policy.attempts_max or self._clock.monotonic() + wait >= deadline:
                kind = CommitUnknown if maybe or doubt is not None else CommitFailed
                raise kind(self.key, f"after {attempt} attempts, {problem.message}") from problem
            await self._clock.sleep(wait)

    async def _write(self, value: M) -> None:
        data = encode(value)
        self._metrics.writes.inc()
        self._version = await self._store.put(self.key, data, self._version)
        self.value, self.size_bytes = value, len(data)


@dataclass(frozen=True, slots=True)
class Manifests:
    """Both manifests of one queue, as one role of one process knows them."""

    producers: ManifestFile[ProducerManifest]
    """The list of what waits."""
    consumers: ManifestFile[ConsumerManifest]
    """The claims and what is done."""

    @classmethod
    def of(
        cls,
        store: ObjectStore,
        manifest_path: str,
        role: str,
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy,
        registry: MetricsRegistry,
    ) -> Manifests:
        """The manifests of the queue at `manifest_path`. Nothing is read yet."""
        consumer_path = consumer_name(manifest_path)
        producers = ManifestFile(
            store,
            manifest_path,
            ProducerManifest([]),
            lambda data: decode_producer(data, name=manifest_path),
            clock=clock,
            randomness=randomness,
            policy=policy,
            metrics=ManifestMetrics.of(registry, "producer", role),
        )
        consumers = ManifestFile(
            store,
            consumer_path,
            ConsumerManifest({}, []),
            lambda data: decode_consumer(data, name=consumer_path),
            clock=clock,
            randomness=randomness,
            policy=policy,
            metrics=ManifestMetrics.of(registry, "consumer", role),
        )
        return cls(producers, consumers)
