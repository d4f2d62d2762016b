"""The producer: many small calls in, few immutable objects and fewer manifest writes out.

    produce -> [batch] -> one object -> [turn] -> commit of all that is ready -> watchers

Records are encoded when their batch is uploaded, all in one go: encoding every call by itself would copy each
record twice. What can be wrong with a call is found before it is accepted, so that one call cannot spoil the
batch of others. Batches upload in parallel and are committed in the order they were closed, many per
compare-and-set, together with those of other producers of this process on the same queue.

What a crash leaves, by where it strikes: before the upload nothing; between upload and commit an object that
no manifest names, which garbage collection takes; after the commit a durable batch. Whoever produced learns
of durability only after the commit, so nothing that was promised is ever lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import pyarrow as pa
from crc32c import crc32c

from forebay.buffer._commit_broker_client import BrokeredCommitter
from forebay.buffer._commit_broker_socket import BrokerSocket
from forebay.buffer._committer import Committed, Committer, Upload
from forebay.buffer._config import BufferConfig
from forebay.buffer._errors import UploadFailed
from forebay.buffer._metrics import BufferMetrics
from forebay.buffer._names import batch_location
from forebay.buffer._producer_metrics import ProducerMetrics
from forebay.buffer._shared_committer import SharedCommitter
from forebay.errors import ForebayError, LimitExceeded, OutcomeUnknown, Unavailable, UsageError
from forebay.formats import buffer_batch, buffer_manifest, record_block
from forebay.formats.buffer_batch import Compression
from forebay.formats.buffer_manifest import Metadata, NewEntry
from forebay.formats.entry_tail import EntryTail, encode_tail
from forebay.kit.batcher import Batcher, BatcherConfig, Outcome, Ticket
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import retry
from forebay.kit.turns import Turns
from forebay.storage import ObjectStore, open_store

__all__ = ["DurabilityWatcher", "Durable", "Producer", "WriteHandle"]

_log = logging.getLogger(__name__)

ITEM_BYTES = 16
"""Bytes of a metadata item beside its payload."""
ENTRY_SHARE = 4
"""A batch of many calls ends where its entry would take this part of the largest manifest."""


class Durable(NamedTuple):
    """Where the records of one call are."""

    sequence: int
    """Of their batch in the queue."""
    location: str
    """Of their batch in the store."""
    start_index: int
    """Of the first of them in the batch."""
    record_count: int


class DurabilityWatcher:
    """Tells whether the records of one call are durable."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket[Durable]) -> None:
        self._ticket = ticket

    def result(self) -> Durable | None:
        """None while it is open; then where the records are, or the error raised."""
        return self._ticket.result() if self._ticket.done() else None

    async def await_durable(self) -> Durable:
        """Wait until the records are durable. Raises `NotDone` errors, `CommitUnknown` or `ManifestLost`.

        Cancelling the wait does not touch the records.
        """
        return await asyncio.shield(self._ticket)


@dataclass(frozen=True, slots=True)
class WriteHandle:
    """What `produce` returns."""

    watcher: DurabilityWatcher
    ingestion_time_ms: int
    """Wall-clock time that was recorded for these records."""


@dataclass(slots=True, eq=False)
class _Input:
    entries: list[bytes]
    """The records; empty where they are a block already."""
    block: bytes
    size_bytes: int
    """Of the block, made or to be made."""
    count: int
    metadata: bytes
    time_ms: int
    number: int = -1
    ticket: Ticket[Durable] | None = None

    @property
    def side_bytes(self) -> int:
        """What it adds to the manifest."""
        return ITEM_BYTES + len(self.metadata)


@dataclass(slots=True, eq=False)
class _Uploaded:
    upload: Upload
    inputs: Sequence[_Input]
    raw_bytes: int
    stored_bytes: int
    began: float
    ready_at: float
    places: list[Durable] | None = None
    """Where its calls are, once it is committed."""


class Producer:
    """Appends batches of records to a queue. Use from one event loop, as a context manager."""

    def __init__(
        self,
        config: BufferConfig,
        clock: Clock | None = None,
        *,
        store: ObjectStore | None = None,
        ids: IdSource | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
        committer: Committer | None = None,
    ) -> None:
        """The store is opened from `config.url` unless handed in; only an own one is closed at the end."""
        self._config = config
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._ids = ids or IdSource(self._clock, self._random)
        self._owns_store = store is None
        self._store = store if store is not None else open_store(config.url, clock=self._clock)
        self.instance = self._ids.ulid()
        """Name of this producer in metrics and extensions."""
        self._producer_id = bytes.fromhex(self._ids.token())
        self.metrics = BufferMetrics(metrics, "producer", self.instance)
        self._more_metrics = ProducerMetrics(self.metrics)
        self._committer = committer or self._own_committer()
        self._entry_bytes = _entry_bytes(config)
        self._ordinal = 0
        self._inputs = 0
        self._turns = Turns(self._clock)
        self._closed = False
        self._batcher: Batcher[_Input, _Uploaded, Durable] = Batcher(
            self._upload,
            self._commit,
            config=BatcherConfig(
                batch_bytes=config.flush_size_bytes,
                batch_side_bytes=config.manifest_append_bytes_max // ENTRY_SHARE,
                batch_items=config.max_buffered_inputs,
                age_ms=config.flush_interval_ms,
                pending_items_max=config.max_buffered_inputs,
                pending_bytes_max=config.max_buffered_bytes,
                uploads_max=config.uploads_max,
                commit_batches_max=config.commit_batches_max,
            ),
            clock=self._clock,
        )
        self._more_metrics.watch(self._batcher)

    def _own_committer(self) -> Committer:
        config, store = self._config, self._store
        if not config.broker_socket:
            return SharedCommitter(
                store,
                config,
                is_store_own=self._owns_store,
                clock=self._clock,
                randomness=self._random,
                metrics=self.metrics,
            )
        link = BrokerSocket(
            Path(config.broker_socket), manifest_path=config.manifest_path, store=store.url, clock=self._clock
        )
        return BrokeredCommitter(
            link, store, config, clock=self._clock, randomness=self._random, metrics=self.metrics
        )

    # -- taking records in

    async def produce(self, entries: Sequence[bytes] | pa.BinaryArray, metadata: bytes = b"") -> WriteHandle:
        """Accept records; wait for room if too much is not durable yet. The handle tells when they are."""
        item = self._input(entries, metadata)
        if self._turns.overdue():  # Before it is accepted: whoever is cancelled here has left nothing behind.
            await self._clock.sleep(0)
        began, waits = self._clock.monotonic(), self._batcher.stats.waits
        ticket = await self._batcher.add(item, item.size_bytes + item.side_bytes, item.side_bytes)
        if self._batcher.stats.waits != waits:
            self._more_metrics.append_block.observe(self._clock.monotonic() - began)
        return self._accepted(item, ticket)

    def produce_nowait(self, entries: Sequence[bytes] | pa.BinaryArray, metadata: bytes = b"") -> WriteHandle:
        """Accept records, or raise `Backpressure` if there is no room now."""
        item = self._input(entries, metadata)
        ticket = self._batcher.add_nowait(item, item.size_bytes + item.side_bytes, item.side_bytes)
        return self._accepted(item, ticket)

    def _accepted(self, item: _Input, ticket: Ticket[Durable]) -> WriteHandle:
        # Nothing else runs between acceptance and this line, so the numbers are in the order of acceptance.
        item.number, item.ticket = self._inputs, ticket
        self._inputs += 1
        return WriteHandle(DurabilityWatcher(ticket), item.time_ms)

    def _input(self, entries: Sequence[bytes] | pa.BinaryArray, metadata: bytes) -> _Input:
        _check_call(entries, metadata)
        item_bytes, limit = ITEM_BYTES + len(metadata), self._config.manifest_append_bytes_max
        if item_bytes + self._entry_bytes > limit:  # It would never fit, and would take its batch with it.
            raise LimitExceeded(
                "manifest_append_bytes_max", limit=limit, actual=item_bytes + self._entry_bytes
            )
        now_ms = self._clock.now_ms()
        if isinstance(entries, (pa.Array, pa.ChunkedArray)):
            block = record_block.encode(entries)
            return _Input([], block, len(block), len(entries), bytes(metadata), now_ms)
        records = _records(entries)
        size = record_block.encoded_size(records)
        return _Input(records, b"", size, len(records), bytes(metadata), now_ms)

    # -- uploading

    async def _upload(self, items: Sequence[_Input]) -> _Uploaded:
        began = self._clock.monotonic()
        records = sum(item.count for item in items)
        raw_bytes = sum(item.size_bytes for item in items)
        data = self._encode(items, records)
        metadata = _metadata(items, merge=self._config.merge_metadata)
        for item in items:
            item.entries, item.block = [], b""  # Part of the batch now; both would double what waits.
        upload = await self._put(data, metadata, self._tail(data, records), began)
        ready_at = self._clock.monotonic()
        self.metrics.upload_duration.observe(ready_at - began)
        self._more_metrics.upload_duration.observe(ready_at - upload.uploaded_at)
        uploaded = _Uploaded(upload, items, raw_bytes, len(data), began, ready_at)
        upload.number, upload.following = items[0].number, items[-1].number + 1
        upload.on_commit = partial(self._landed, uploaded)
        if not self._batcher.aborted:  # Else its calls were told that it is not done: no commit may carry it.
            self._committer.ready(upload)
        return uploaded

    def _encode(self, items: Sequence[_Input], records: int) -> bytes:
        metrics = self._more_metrics
        began = self._clock.monotonic()
        metrics.encode_busy.inc()
        try:
            data = _encode(items, records, self._config.batch_compression)
        finally:
            metrics.encode_busy.dec()
        metrics.encode_duration.observe(self._clock.monotonic() - began)
        if len(data) > self._config.batch_bytes_max:  # Compression may add to what does not compress.
            raise LimitExceeded("batch_bytes_max", limit=self._config.batch_bytes_max, actual=len(data))
        return data

    def _tail(self, data: bytes, records: int) -> bytes:
        if not self._config.entry_extension:
            return b""
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return encode_tail(EntryTail(len(data), crc32c(data), self._producer_id, ordinal, records))

    async def _put(
        self, data: bytes, metadata: tuple[Metadata, ...], tail: bytes, waiting_since: float
    ) -> Upload:
        location = batch_location(self._config.data_path_prefix, self._ids.ulid())
        uploaded_at = self._clock.monotonic()

        async def put() -> str:
            return await self._store.put(location, data)

        # The name is new and the bytes are the same every time, so a put of unknown outcome may be repeated.
        try:
            await retry(
                put,
                policy=self._config.upload_retry,
                clock=self._clock,
                randomness=self._random,
                retryable=lambda error: isinstance(error, (Unavailable, OutcomeUnknown)),
            )
        except (Unavailable, OutcomeUnknown) as error:
            raise UploadFailed(location, str(error)) from error

        async def renew() -> Upload:
            return await self._put(data, metadata, tail, waiting_since)

        return Upload(NewEntry(location, metadata, tail), uploaded_at, waiting_since, renew)

    # -- committing

    async def _commit(self, group: Sequence[_Uploaded]) -> Sequence[Outcome[Durable]]:
        metrics, began = self._more_metrics, self._clock.monotonic()
        metrics.append_batches.observe(len(group))
        for uploaded in group:
            metrics.head_of_line_block.observe(began - uploaded.ready_at)
        answers = await self._committer.commit([uploaded.upload for uploaded in group])
        metrics.append_duration.observe(self._clock.monotonic() - began)
        outcomes: list[Outcome[Durable]] = []
        for uploaded, answer in zip(group, answers, strict=True):
            metrics.ended(answer)
            if isinstance(answer, Committed):
                self._landed(uploaded, answer)
                assert uploaded.places is not None
                outcomes.append(uploaded.places)
            else:
                outcomes.append(answer)
        return outcomes

    def _landed(self, uploaded: _Uploaded, committed: Committed) -> None:
        """Answer the calls of a batch. The batcher does the same later and then finds it done."""
        if uploaded.places is not None:
            return
        uploaded.places, start = [], 0
        for item in uploaded.inputs:
            place = Durable(committed.sequence, committed.location, start, item.count)
            uploaded.places.append(place)
            start += item.count
            if item.ticket is not None and not item.ticket.done():
                item.ticket.set_result(place)
        metrics = self.metrics
        metrics.batches_flushed.inc()
        metrics.entries_flushed.inc(start)
        metrics.bytes_flushed.inc(uploaded.raw_bytes)
        metrics.bytes_written.inc(uploaded.stored_bytes)
        metrics.flush_duration.observe(self._clock.monotonic() - uploaded.began)

    # -- ending

    @property
    def pending_inputs(self) -> int:
        """Calls that are not answered yet."""
        return self._batcher.pending_items

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self._batcher.pending_bytes

    def conflict_rate(self) -> float:
        """Percent of this producer's manifest writes that somebody else was faster.

        A write that carries batches of several producers counts as the write of the first of them.
        """
        return self.metrics.writes.conflict_rate()

    async def flush(self) -> None:
        """Wait until everything produced before is durable. Raises the first failure since the last flush."""
        await self._batcher.flush()

    async def close(self) -> None:
        """Flush and end. Raises what `flush` would raise. Closing twice is fine."""
        self._closed = True
        try:
            await self._batcher.close()
        except asyncio.CancelledError:
            self._abandon("its close was cancelled")
            raise
        finally:
            await self._committer.close()
            if self._owns_store:
                await self._store.close()

    def _abandon(self, why: str) -> None:
        """Answer every watcher whose records were not handed to a commit, and say how many that are."""
        lost = self._batcher.pending_items
        if lost:
            _log.warning("producer %s: %d calls were not durable when %s", self.instance, lost, why)
        self._batcher._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        # What was accepted is kept even if the block failed; its own error is the one to be seen.
        try:
            await self.close()
        except ForebayError as problem:
            _log.warning("producer %s: not everything became durable: %s", self.instance, problem)
            error.add_note(f"and closing the producer failed: {problem}")

    def __del__(self) -> None:
        batcher = getattr(self, "_batcher", None)
        if batcher is not None and not self._closed and batcher.pending_items:
            _log.warning(
                "producer %s: dropped without close, %d calls are lost", self.instance, batcher.pending_items
            )


def _entry_bytes(config: BufferConfig) -> int:
    """Bytes of a manifest with one entry, without what is known of its calls."""
    location = batch_location(config.data_path_prefix, "0" * 26)
    tail = encode_tail(EntryTail(0, 0, bytes(16), 0, 0)) if config.entry_extension else b""
    return buffer_manifest.FOOTER_BYTES + buffer_manifest.encoded_entry_bytes(NewEntry(location, (), tail))


def _check_call(entries: object, metadata: object) -> None:
    if isinstance(entries, (bytes, bytearray, memoryview, str)):
        raise UsageError("entries is a single value", hint="give a list of bytes, also for one record")
    if not isinstance(entries, (Sequence, pa.Array, pa.ChunkedArray)):
        raise UsageError(f"entries is {type(entries).__name__}", hint="give a list of bytes")
    if not len(entries):
        raise UsageError("no entries", hint="give at least one record; an empty one is b''")
    if not isinstance(metadata, (bytes, bytearray, memoryview)):
        raise UsageError(f"metadata is {type(metadata).__name__}", hint="metadata is bytes; b'' is none")


def _records(entries: Sequence[bytes]) -> list[bytes]:
    """The caller's records as a list of our own. The caller may go on to change the one it has."""
    if set(map(type, entries)) == {bytes}:
        return list(entries)
    for entry in entries:
        if not isinstance(entry, (bytes, bytearray, memoryview)):
            raise UsageError(f"a record is {type(entry).__name__}", hint="records are bytes")
    return [bytes(entry) for entry in entries]


def _encode(items: Sequence[_Input], records: int, compression: Compression) -> bytes:
    if not any(item.block for item in items):
        return buffer_batch.encode(list(chain.from_iterable(item.entries for item in items)), compression)
    blocks = [item.block or record_block.encode(item.entries) for item in items]
    return buffer_batch.encode_blocks(blocks, records, compression)


def _metadata(items: Sequence[_Input], *, merge: bool) -> tuple[Metadata, ...]:
    found: list[Metadata] = []
    start = 0
    for item in items:
        last = found[-1] if found else None
        if not (
            merge
            and last is not None
            and (last.payload, last.ingestion_time_ms) == (item.metadata, item.time_ms)
        ):
            found.append(Metadata(start, item.time_ms, item.metadata))
        start += item.count
    return tuple(found)
