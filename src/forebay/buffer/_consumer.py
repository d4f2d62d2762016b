"""The consumer: one at a time, in order, from where the last one stopped.

Taking over raises the epoch in the manifest by compare-and-set. From then on every operation of an earlier
consumer fails with `Fenced`, for good: it sees the epoch when it looks, and it looks at every operation. It
can never remove entries, since its writes name a version from before the change.

Crash points, and why each is harmless:

    after the epoch was raised, before anything else     the next consumer raises it again
    after a batch was handed out                         it is handed out again: acknowledge after storing
    after an acknowledgement, before the dequeue         the entry is still there; `initialize` is told where
                                                         the sink stands and removes what lies before
    in the middle of a dequeue                           it happened or not; repeating it changes nothing

An epoch counts as ours only where the store said so. After a lost reply it is raised once more: another
consumer may have written the very same number.

Each version of the manifest is downloaded at most once: looks are conditional, and after an own write nothing
has to be read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from types import TracebackType
from typing import Self

from forebay.buffer._batches import BatchDescriptor, ConsumedBatch
from forebay.buffer._config import BufferConfig
from forebay.buffer._cursor import Cursor, Locations
from forebay.buffer._errors import BatchMissing, Fenced, ManifestLost, NotInitialized, ResumeRefused
from forebay.buffer._fetch import Fetcher, describe
from forebay.buffer._gc import GarbageCollector, collect_while_alive
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.buffer._read_ahead import ReadAhead
from forebay.errors import (
    Closed,
    ForebayError,
    FormatError,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
    UsageError,
)
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import Manifest
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import retry
from forebay.storage import ObjectStore, open_store

__all__ = ["Consumer"]

_log = logging.getLogger(__name__)


class Consumer:
    """Takes batches out of a queue. One task at a time may use it."""

    def __init__(
        self,
        config: BufferConfig,
        clock: Clock | None = None,
        *,
        store: ObjectStore | None = None,
        ids: IdSource | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        """The store is opened from `config.url` unless handed in; only an own one is closed at the end."""
        self._config = config
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._owns_store = store is None
        self._store = store if store is not None else open_store(config.url, clock=self._clock)
        self.instance = (ids or IdSource(self._clock, self._random)).ulid()
        """Name of this consumer in metrics."""
        self.metrics = BufferMetrics(metrics, "consumer", self.instance)
        self._file = ManifestFile(
            self._store, config.manifest_path, self._clock, bytes_max=config.manifest_bytes_max
        )
        fetcher = Fetcher(self._store, config, clock=self._clock, randomness=self._random)
        self._ahead = ReadAhead(fetcher, config, clock=self._clock, metrics=self.metrics)
        self._seen = Locations(config.duplicate_window)
        self._cursor: Cursor | None = None
        self._epoch = 0
        self._fenced: Fenced | None = None
        self._closed = False
        self._checked_at = float("-inf")
        self._gc_task: asyncio.Task[None] | None = None
        self.skipped: list[BatchDescriptor] = []
        """Batches that were passed over by policy, the last `duplicate_window` of them."""

    # -- taking over

    async def initialize(self, last_acked_sequence: int | None = None) -> None:
        """Take over the queue, shutting out every earlier consumer.

        `None` starts at the earliest entry; a sequence resumes after it. Raises `ResumeRefused`, with the
        queue unchanged, for a sequence that the queue has not reached, or where batches after it are gone.
        """
        self._check_usable()
        attempt = 0
        while True:
            attempt += 1
            try:
                await self._take_over(last_acked_sequence)
                break
            except (PreconditionFailed, Unavailable, OutcomeUnknown) as error:
                if isinstance(error, ManifestLost) or attempt >= self._config.commit_retry.attempts_max:
                    raise
                # Producers that were faster are no reason to be more patient.
                tries = 1 if isinstance(error, PreconditionFailed) else attempt
                await self._clock.sleep(self._config.read_retry.wait_s(tries, self._random))
        self._cursor = Cursor(last_acked_sequence)
        self._look_at(self._file.manifest)
        if self._config.gc_enabled:
            self._stop_collecting()  # One of an earlier epoch would never delete anything again.
            self._gc_task = self._start_collecting()

    async def _take_over(self, last_acked: int | None) -> None:
        manifest = await self._file.load()
        if last_acked is not None:
            self._check_resume(manifest, last_acked)
        if not self._file.exists:
            _log.warning("created a new queue at %r in %s", self._file.path, self._store.url)
        taken = buffer_manifest.bump_epoch(manifest)
        if last_acked is not None:
            taken = buffer_manifest.dequeue(taken, last_acked)
        await self._write(taken)
        self._epoch = taken.epoch
        self._checked_at = self._clock.monotonic()

    def _check_resume(self, manifest: Manifest, last_acked: int) -> None:
        first, following = manifest.first_sequence, manifest.next_sequence
        _check_sequence(last_acked)
        if last_acked < 0:
            raise UsageError(f"last_acked_sequence is {last_acked}", hint="None starts at the earliest entry")
        if last_acked >= following:
            raise ResumeRefused(
                f"the queue has only reached {following}",
                last_acked=last_acked,
                first=first,
                following=following,
                hint="check the path of the manifest and where the sequence comes from",
            )
        if first > last_acked + 1 and not self._config.allow_gap:
            raise ResumeRefused(
                f"the batches from {last_acked + 1} to {first - 1} are gone",
                last_acked=last_acked,
                first=first,
                following=following,
                hint="set allow_gap=True to go on without them",
            )

    # -- reading

    async def next_batch(self) -> ConsumedBatch | None:
        """The next batch in order, or None where there is none yet.

        Raises `Fenced`, `BatchMissing` (unless those are skipped), `CorruptBatch`, or what the store says. A
        failed read changes nothing: the next call tries the same batch again.
        """
        self._ready()
        await self._check_fence()
        while True:
            batch = self._peek()
            if batch is None:
                return None
            if batch.duplicate_of is not None and self._config.duplicates == "skip":
                self._skip(batch, "its location was seen before")
                continue
            self._ahead.want(self._upcoming())
            try:
                consumed = await self._ahead.take(batch)
            except BatchMissing as error:
                await self._check_fence(now=True)  # A newer consumer may have collected it.
                self.metrics.batches_missing.inc()
                if self._config.missing_batch == "raise":
                    raise
                self._skip(batch, str(error))
                continue
            self._hand_out(batch)
            self._note_fetched(consumed)
            return consumed

    def _hand_out(self, batch: BatchDescriptor) -> None:
        self._ready().hand_out(batch.sequence)
        if batch.duplicate_of is not None:
            self.metrics.duplicates_seen.inc()
        if batch.metadata:
            age_ms = self._clock.now_ms() - batch.metadata[-1].ingestion_time_ms
            self.metrics.consumer_lag.set(max(0.0, age_ms / 1000))

    def _note_fetched(self, batch: ConsumedBatch) -> None:
        self.metrics.batches_collected.inc()
        self.metrics.entries_collected.inc(len(batch))
        self.metrics.bytes_collected.inc(batch.entries.stored_bytes)

    async def next_descriptors(self, most: int) -> list[BatchDescriptor]:
        """Up to `most` next batches without their records, for whoever fetches them in parallel.

        They count as handed out. Those that are lost come back only through a new consumer.
        """
        self._ready()
        if most <= 0:
            return []
        await self._check_fence()
        found: list[BatchDescriptor] = []
        while len(found) < most:
            try:
                batch = self._peek()
            except FormatError:
                if found:
                    break  # What lies before a damaged entry is handed out; the next call tells of it.
                raise
            if batch is None:
                break
            if batch.duplicate_of is not None and self._config.duplicates == "skip":
                self._skip(batch, "its location was seen before")
                continue
            self._hand_out(batch)
            found.append(batch)
        self.metrics.descriptors_handed_out.inc(len(found))
        return found

    async def fetch(self, batch: BatchDescriptor) -> ConsumedBatch:
        """The records of a descriptor. Several may run at once."""
        self._ready()
        await self._check_fence()
        consumed = await self._ahead.fetch(batch)
        self._note_fetched(consumed)
        return consumed

    def _peek(self) -> BatchDescriptor | None:
        return self._describe(0)

    def _describe(self, distance: int) -> BatchDescriptor | None:
        cursor, manifest = self._ready(), self._file.manifest
        following = manifest.first_sequence if cursor.handed_out is None else cursor.handed_out + 1
        entry = manifest.entry(max(following, manifest.first_sequence) + distance)
        if entry is None:
            return None
        return describe(entry, self._seen.first(entry.location, entry.sequence))

    def _upcoming(self) -> list[BatchDescriptor]:
        """The next batch and those to fetch ahead."""
        found: list[BatchDescriptor] = []
        for distance in range(1 + self._config.read_ahead_batches):
            try:
                batch = self._describe(distance)
            except FormatError:
                if not found:
                    raise
                break  # A damaged entry further on does not hold up those before it.
            if batch is None:
                break
            found.append(batch)
        return found

    def _skip(self, batch: BatchDescriptor, reason: str) -> None:
        _log.warning("consumer %s passes over batch %d: %s", self.instance, batch.sequence, reason)
        if batch.duplicate_of is not None:
            self.metrics.duplicates_seen.inc()
        self._ready().skip(batch.sequence)
        self.skipped = [*self.skipped, batch][-max(1, self._config.duplicate_window) :]

    # -- acknowledging

    async def ack(self, sequence: int) -> None:
        """Confirm one batch. In order, from the very first one. Every so often the manifest is rewritten.

        Raises `AckOutOfOrder`, `Fenced`, or what the store says; then nothing has changed, and the same
        acknowledgement may be repeated.
        """
        await self._ack(sequence, through=False)

    async def ack_through(self, sequence: int) -> None:
        """Confirm every batch up to this one, and rewrite the manifest without them."""
        await self._ack(sequence, through=True)

    async def _ack(self, sequence: int, *, through: bool) -> None:
        cursor = self._ready()
        _check_sequence(sequence)
        await self._check_fence()
        cursor.check(sequence, through=through)
        if through or cursor.pending(sequence) >= self._config.dequeue_acks:
            await self._dequeue(sequence)
        self.metrics.acks.inc(cursor.ack(sequence))

    async def flush(self) -> None:
        """Rewrite the manifest without what was acknowledged. Writes nothing where there is nothing to do."""
        cursor = self._ready()
        if cursor.acked is None or cursor.acked == cursor.dequeued:
            await self._check_fence()
            return
        await self._dequeue(cursor.acked)

    async def _dequeue(self, through: int) -> None:
        """Remove entries up to `through`, whatever others append meanwhile."""
        policy = self._config.read_retry
        deadline = self._clock.monotonic() + policy.deadline_ms / 1000
        attempt = 0
        while True:
            attempt += 1
            try:
                if not self._file.known:
                    self._look_at(await self._file.load())
                shorter = buffer_manifest.dequeue(self._file.manifest, through)
                if shorter is not self._file.manifest:
                    await self._write(shorter)
                    self._look_at(shorter)
                break
            except (PreconditionFailed, Unavailable, OutcomeUnknown) as error:
                # A race that was lost costs only itself: producers are many, so it does not count.
                lost = isinstance(error, PreconditionFailed)
                late = self._clock.monotonic() >= deadline
                if isinstance(error, ManifestLost) or late or (attempt >= policy.attempts_max and not lost):
                    raise
                wait = policy.wait_s(1 if lost else attempt, self._random)
            await self._clock.sleep(wait)
        self._ready().dequeued = through

    # -- looking at the manifest

    async def _write(self, manifest: Manifest) -> None:
        self.metrics.writes.attempted()
        try:
            await self._file.write(manifest)
        except PreconditionFailed:
            self.metrics.writes.conflicted()
            raise

    async def _check_fence(self, *, now: bool = False) -> None:
        """Look whether somebody took over, and at what is new. A look costs one request without a body."""
        age_ms = (self._clock.monotonic() - self._checked_at) * 1000
        if not now and self._file.known and age_ms < self._config.fence_check_interval_ms:
            return
        manifest = await retry(
            self._file.load, policy=self._config.read_retry, clock=self._clock, randomness=self._random
        )
        self._look_at(manifest)

    def _look_at(self, manifest: Manifest) -> None:
        if manifest.epoch != self._epoch:
            self.metrics.fenced.inc()
            self._fenced = Fenced(own_epoch=self._epoch, epoch=manifest.epoch)
            self._stop_collecting()
            raise self._fenced
        self._checked_at = self._clock.monotonic()
        self.metrics.queue_length.set(len(manifest))
        self.metrics.manifest_bytes.set(len(manifest.data))
        acked = self.last_acked_sequence
        behind = len(manifest) if acked is None else manifest.next_sequence - 1 - acked
        self.metrics.consumer_sequence_lag.set(behind)
        oldest = manifest.entry_at(0).metadata if len(manifest) else ()
        age_ms = self._clock.now_ms() - oldest[0].ingestion_time_ms if oldest else 0
        self.metrics.oldest_entry_age.set(max(0.0, age_ms / 1000))

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed("the consumer is closed", hint="open a new one")
        if self._fenced is not None:
            raise self._fenced

    def _ready(self) -> Cursor:
        self._check_usable()
        if self._cursor is None:
            raise NotInitialized
        return self._cursor

    # -- what is known

    @property
    def epoch(self) -> int:
        """The epoch this consumer holds."""
        return self._epoch

    @property
    def last_acked_sequence(self) -> int | None:
        """The last batch acknowledged here, or handed to `initialize`."""
        return self._cursor.acked if self._cursor is not None else None

    def __len__(self) -> int:
        return len(self._file.manifest)

    def is_empty(self) -> bool:
        """Whether the manifest had no entries when it was last seen."""
        return not len(self)

    @property
    def manifest_reads(self) -> int:
        """How many versions of the manifest were downloaded."""
        return self._file.reads

    def conflict_rate(self) -> float:
        """Percent of this consumer's manifest writes that somebody else was faster."""
        return self.metrics.writes.conflict_rate()

    # -- garbage collection and the end

    def _start_collecting(self) -> asyncio.Task[None]:
        collector = GarbageCollector(
            self._config,
            self._clock,
            store=self._store,
            randomness=self._random,
            metrics=self.metrics,
            epoch=self._epoch,
        )
        loop = collect_while_alive(weakref.ref(self), collector, self._config.gc_interval_ms / 1000)
        return asyncio.create_task(loop, name="forebay buffer garbage collection")

    def _stop_collecting(self) -> None:
        if self._gc_task is not None:
            self._gc_task.cancel()

    @property
    def is_collecting(self) -> bool:
        """Whether garbage collection may go on: not after close, and not once fenced."""
        return not self._closed and self._fenced is None

    async def close(self) -> None:
        """Write what was acknowledged, stop everything. Closing twice is fine.

        Raises what that write raises; everything is stopped nevertheless. Where there is nothing to write,
        and for a consumer that has been told that it is fenced, closing asks the store nothing and succeeds.
        """
        if self._closed:
            return
        try:
            cursor = self._cursor
            if cursor is not None and self._fenced is None and cursor.acked != cursor.dequeued:
                await self.flush()
        finally:
            self._closed = True
            self._stop_collecting()
            await self._ahead.close()
            if self._gc_task is not None:
                await asyncio.wait({self._gc_task})
            if self._owns_store:
                await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close()
        except ForebayError as problem:
            error.add_note(f"and closing the consumer failed: {problem}")


def _check_sequence(sequence: object) -> None:
    if not isinstance(sequence, int) or isinstance(sequence, bool):
        raise UsageError(f"a sequence is {sequence!r}", hint="sequences are integers")
