"""Entries in, batches out: the writing side of the claiming queue.

    ingest -> Batcher -> upload {prefix}/{ULID}.json -> append its location to `pending` -> watcher answered

The Batcher's promises are kept here unchanged: uploads overlap, appends happen in the order in which batches
were closed, many batches per append. A watcher says "durable" only after its location is in the manifest.

An upload that waited longer than `upload_age_max_ms` for its append is uploaded again under a new name: the
orphan collector, which knows a name only by its age, may have deleted the first one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from forebay.errors import (
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
    UsageError,
)
from forebay.formats import ingest_batch
from forebay.ingest._config import IngestorConfig
from forebay.ingest._enqueue import Enqueuer
from forebay.ingest._errors import CommitUnknown, PrefixTaken
from forebay.ingest._manifest_file import Manifests
from forebay.ingest._metrics import IngestorMetrics
from forebay.ingest._paths import batch_location, owner_marker
from forebay.kit.batcher import Batcher, BatcherConfig, Outcome, Ticket
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import retry
from forebay.kit.turns import Turns
from forebay.storage import ObjectStore

__all__ = ["Ingestor", "WriteWatcher"]

CALLS_PENDING_MAX = 1_000_000
"""Calls of `ingest` that are not durable yet; beyond it further ones wait."""

_log = logging.getLogger(__name__)


class WriteWatcher:
    """Tells whether the entries of one `ingest` call are durable."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket[None]) -> None:
        self._ticket = ticket

    def result(self) -> bool | None:
        """None: not decided yet. True: stored and in the queue. Raises what went wrong."""
        if not self._ticket.done():
            return None
        self._ticket.result()
        return True

    async def await_durable(self) -> None:
        """Return once the entries are stored and in the queue; raise what went wrong."""
        # Shielded: whoever stops waiting does not take the answer away from the others.
        await asyncio.shield(self._ticket)


@dataclass(frozen=True, slots=True)
class _Uploaded:
    location: str
    began: float
    """On the monotonic clock."""
    data: bytes
    calls: int
    entries: int
    entry_bytes: int


class Ingestor:
    """Takes entries in and makes them durable. Use it as an async context manager, from one event loop."""

    def __init__(
        self,
        store: ObjectStore,
        config: IngestorConfig | None = None,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        """The store is the caller's and stays open. The rest is the machine's own unless given."""
        self._config = config = config or IngestorConfig()
        self._store = store
        self._clock = clock = clock or SystemClock()
        self._ids = ids or IdSource(clock)
        self._random = randomness = randomness or random.Random()
        registry = metrics or MetricsRegistry()
        self._metrics = IngestorMetrics(registry)
        self._manifests = Manifests.of(
            store,
            config.manifest_path,
            "ingestor",
            clock=clock,
            randomness=randomness,
            policy=config.commit,
            registry=registry,
        )
        self._queue = Enqueuer(store, self._manifests, manifest_bytes_max=config.manifest_bytes_max)
        self._batcher: Batcher[Sequence[bytes], _Uploaded, None] = Batcher(
            self._upload, self._commit, config=_batching(config), clock=clock
        )
        self._turns = Turns(clock)
        self._marked: asyncio.Task[None] | None = None

    async def ingest(self, entries: Sequence[bytes]) -> WriteWatcher:
        """Accept entries, in order, waiting while too many bytes are not durable yet. They stay together."""
        if isinstance(entries, (bytes, bytearray, memoryview, str)):
            raise UsageError("entries is a single value", hint="give a list of bytes, also for one entry")
        if not isinstance(
            entries, Sequence
        ):  # One that can be walked only once would be empty the next time.
            raise UsageError(f"entries is {type(entries).__name__}", hint="give a list of bytes")
        if not entries:
            raise UsageError("there are no entries to ingest", hint="give at least one; b'' counts as one")
        # Checked before they are accepted: one bad entry must not spoil the batch of others.
        for entry in entries:
            if not isinstance(entry, (bytes, bytearray, memoryview)):
                raise UsageError(f"an entry is {type(entry).__name__}", hint="entries are bytes")
        kept = tuple(map(bytes, entries))  # The caller may go on to change what it has.
        size = sum(map(len, kept))
        counted = min(size, self._config.max_unflushed_bytes)
        if self._turns.overdue():  # Before they are accepted: whoever is cancelled here left nothing behind.
            await self._clock.sleep(0)
        return WriteWatcher(await self._batcher.add(kept, counted))

    @property
    def unflushed_bytes(self) -> int:
        """Bytes accepted and not durable yet."""
        return self._batcher.pending_bytes

    async def flush(self) -> None:
        """Make everything accepted so far durable; raise the first failure since the last flush."""
        await self._batcher.flush()

    async def close(self) -> None:
        """Flush, refuse further entries, and raise what a flush would raise."""
        try:
            await self._batcher.close()
        finally:
            if self._marked is not None and not self._marked.done():
                self._marked.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- one batch

    async def _upload(self, calls: Sequence[Sequence[bytes]]) -> _Uploaded:
        await self._own_prefix()
        entries = [entry for call in calls for entry in call]
        data = ingest_batch.encode(entries)
        began = self._clock.monotonic()
        location = await self._put_batch(data)
        self._metrics.upload_seconds.observe(self._clock.monotonic() - began)
        return _Uploaded(location, began, data, len(calls), len(entries), sum(map(len, entries)))

    async def _put_batch(self, data: bytes) -> str:
        """Store a batch under a name of its own. The name is new, so whoever has taken it is us."""
        location = batch_location(self._config.data_path_prefix, self._ids.ulid())
        tried = False

        async def put() -> None:
            nonlocal tried
            again, tried = tried, True
            try:
                await self._store.put(location, data, ABSENT)
            except PreconditionFailed:
                if not again:
                    raise

        await retry(
            put,
            policy=self._config.commit,
            clock=self._clock,
            randomness=self._random,
            retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown),
        )
        return location

    async def _commit(self, uploads: Sequence[_Uploaded]) -> Sequence[Outcome[None]]:
        began = self._clock.monotonic()
        current = [await self._renewed(upload) for upload in uploads]
        try:
            await self._queue.append([upload.location for upload in current])
        except CommitUnknown:
            self._metrics.commit_unknown.inc()
            raise
        self._metrics.enqueue_seconds.observe(self._clock.monotonic() - began)
        self._count(current)
        return [[None] * upload.calls for upload in current]

    async def _renewed(self, upload: _Uploaded) -> _Uploaded:
        began = self._clock.monotonic()
        if (began - upload.began) * 1000 <= self._config.upload_age_max_ms:
            return upload
        self._metrics.reuploads.inc()
        _log.warning("batch %s waited too long for its turn; it is uploaded anew", upload.location)
        location = await self._put_batch(upload.data)
        return _Uploaded(location, began, upload.data, upload.calls, upload.entries, upload.entry_bytes)

    def _count(self, uploads: Sequence[_Uploaded]) -> None:
        self._metrics.batches.inc(len(uploads))
        self._metrics.entries.inc(sum(upload.entries for upload in uploads))
        self._metrics.bytes.inc(sum(upload.entry_bytes for upload in uploads))
        self._metrics.bytes_written.inc(sum(len(upload.data) for upload in uploads))
        producers = self._manifests.producers
        self._metrics.queue_length.set(len(producers.value.pending))
        self._metrics.manifest_bytes.set(producers.size_bytes)

    # -- whose prefix it is

    async def _own_prefix(self) -> None:
        """Mark the prefix as this queue's before the first upload: orphans are collected on that word."""
        if self._marked is None or (self._marked.done() and self._marked.exception() is not None):
            self._marked = asyncio.get_running_loop().create_task(self._mark())
        await asyncio.shield(self._marked)

    async def _mark(self) -> None:
        await retry(
            self._mark_once,
            policy=self._config.commit,
            clock=self._clock,
            randomness=self._random,
            retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown | NotFound),
        )

    async def _mark_once(self) -> None:
        prefix, manifest = self._config.data_path_prefix, self._config.manifest_path
        key = owner_marker(prefix)
        try:
            await self._store.put(key, msgspec.json.encode({"manifest": manifest}), ABSENT)
        except PreconditionFailed:
            owner = read_owner((await self._store.get(key)).data)
            if owner != manifest:
                raise PrefixTaken(prefix, owner or "?", manifest) from None


def read_owner(data: bytes) -> str | None:
    """The manifest that an owner marker names; None where the marker cannot be understood."""
    try:
        return msgspec.json.decode(data, type=dict[str, str]).get("manifest")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _batching(config: IngestorConfig) -> BatcherConfig:
    return BatcherConfig(
        batch_bytes=config.flush_size_bytes,
        batch_items=CALLS_PENDING_MAX,
        age_ms=config.flush_interval_ms,
        pending_items_max=CALLS_PENDING_MAX,
        pending_bytes_max=config.max_unflushed_bytes,
        uploads_max=config.uploads_max,
    )
