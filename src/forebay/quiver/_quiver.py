"""Quiver: an Arrow buffer on local disk, between producers and any number of subscribers.

**Write path.** Encode once; append to the WAL with everybody else who waits; one sync; the batch joins the
open segment of its signal type and schema; the caller hears that it is durable. Size, age, pressure or
shutdown turn open segments into immutable Arrow files, off the path of the callers. Subscribers get whole
segments and say ack, nack or reject; a segment goes when the last of them is done with it.

**What an acknowledgement means**: a finished `fdatasync` covers the batch. Nothing is delivered before its
segment is durable too, as a file, or as a record of the WAL entries in it (`_finalizer`, held segments).

Layout of the directory: `wal/` and `ack/` (numbered logs, checkpoints), `segments/` (Arrow files), `dead/`
(rejected segments), `quarantine/` (damaged bytes), `lock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from forebay.errors import Backpressure, Closed, ForebayError, UsageError
from forebay.formats import quiver_ack, quiver_wal
from forebay.formats.quiver_ack import Finalized, Record, Register, Sealed, Unregister
from forebay.formats.quiver_frame import FRAME_OVERHEAD_BYTES, WAL_MAGIC, check_body
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver._acks import Acks
from forebay.quiver._admission import Admission
from forebay.quiver._backlog import Backlog
from forebay.quiver._budget import Budget, OwnBudget
from forebay.quiver._config import QuiverConfig
from forebay.quiver._delivery import Deliveries, Delivery
from forebay.quiver._disk import Disk
from forebay.quiver._errors import DirectoryInUse, from_os_error
from forebay.quiver._finalizer import Finalizer, Held, Hooks, Kind
from forebay.quiver._gauges import Gauges
from forebay.quiver._group_log import GroupLog, Item
from forebay.quiver._local_disk import LocalDisk
from forebay.quiver._log_files import LogSettings
from forebay.quiver._metrics import GroupSeries, QuiverMetrics
from forebay.quiver._newcomers import Newcomers
from forebay.quiver._orphans import Orphans
from forebay.quiver._reading import SegmentView
from forebay.quiver._recovery import DIRECTORIES, ENTRY_TYPE, Recovered, recover
from forebay.quiver._report import RecoveryReport
from forebay.quiver._retention import Parts, Retention
from forebay.quiver._segment_file import Batch, SegmentInfo
from forebay.quiver._selection import Selection
from forebay.quiver._stats import QuiverStats, collect
from forebay.quiver._submission import Forms, Receipt, context_of
from forebay.quiver._to_the_end import to_the_end

__all__ = ["Quiver"]

_log = logging.getLogger(__name__)
YIELD_BYTES: Final = 512 * 1024
"""Encoded bytes that one producer may queue before others get a turn."""
SLACK_BYTES: Final = 64 * 1024
"""Bytes, and as many again as a batch has, that it may keep in memory besides its own."""


class Quiver:
    """An instance on a directory. Open it with `async with`, or with `open` and `close`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Disk,
        config: QuiverConfig | None = None,
        *,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
        budget: Budget | None = None,
        core: int = 0,
        is_adopted: bool = False,
    ) -> None:
        self._core = core
        self._is_adopted = is_adopted
        self._disk: Disk = LocalDisk(path) if isinstance(path, str | os.PathLike) else path
        self._config = config or QuiverConfig()
        self._budget = budget or OwnBudget(self._config.size_cap_bytes)
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._metrics = QuiverMetrics(metrics or MetricsRegistry())
        self._group_series = GroupSeries(self._metrics)
        self._forms = Forms()
        self._tasks: list[asyncio.Task[None]] = []
        self._logs: list[GroupLog] = []
        self._is_open = False
        self._kept_loop_bytes = 0
        self._trim_wanted = asyncio.Event()
        self.report = RecoveryReport()
        """What the last `open` found."""

    # Opening and closing.

    async def open(self) -> Self:
        """Lock the directory, recover what is in it, and begin. Raises `DirectoryInUse`."""
        if self._is_open:
            raise UsageError("the store is open already", hint="open it once")
        try:
            self._disk.make_directory("")
            self._disk.lock()
        except BlockingIOError as error:
            await self._disk.close()
            raise DirectoryInUse(error.filename or "the directory") from error
        except OSError as error:
            await self._disk.close()
            raise from_os_error("opening the directory", error) from error
        try:
            found = await self._disk.run("segments", self._read)
            await self._begin(found)
        except BaseException as error:
            self._is_open = False
            # What the logs have under way would go on in new threads, when the directory is somebody else's.
            for log in self._logs:
                log.abandon()
            await self._let_go()
            if isinstance(error, OSError):
                raise from_os_error("reading the directory", error) from error
            raise
        return self

    def _read(self) -> Recovered:
        for directory in DIRECTORIES:
            self._disk.make_directory(directory)
        return recover(self._disk)

    async def _begin(self, found: Recovered) -> None:
        config, clock, state = self._config, self._clock, found.state
        self.report = found.report
        self._segments = dict(sorted(found.segments.items()))
        self._backlog = Backlog(self._segments, state)
        self._gauges = Gauges(self._metrics, self._disk, clock, self._core, is_alone=not self._is_adopted)
        self._acks = Acks(self._disk, config, clock, state, self._applied)
        self._wal = GroupLog(
            self._disk,
            LogSettings(
                lane="wal",
                directory="wal",
                suffix="wal",
                magic=WAL_MAGIC,
                file_bytes=config.wal_file_bytes,
                flush_interval_ms=config.flush_interval_ms,
                spares_max=config.wal_spares_max,
                spare_bytes=config.wal_file_bytes,
                is_eager=True,
                is_ahead=True,
            ),
            clock,
            on_durable=self._durable,
            on_sync=self._synced,
            may_fill=lambda size: not self._retention.is_over(size),
        )
        self._finalizer = Finalizer(
            self._disk,
            config,
            clock,
            next_segment=state.next_segment,
            first_entry=state.next_entry,
            hooks=Hooks(
                register=self._register,
                skipped=state.note_absent,
                on_write=self._written,
                keeps_up=self._keeps_up,
                seal=lambda record: self._acks.commit([record]),
            ),
        )
        self._deliveries = Deliveries(
            self._disk,
            config,
            clock,
            self._random,
            self._acks,
            self._segments,
            self._metrics,
            on_nack=self._finalizer.hurry,
        )
        self._deliveries.aside_bytes = found.aside_bytes
        self._retention = Retention(
            Parts(
                self._disk,
                config,
                clock,
                self._metrics,
                self._wal,
                self._acks,
                self._finalizer,
                self._deliveries,
                self._segments,
                self._budget,
                self._backlog,
            ),
            found.newest_ms,
        )
        self._newcomers = Newcomers(
            self._acks, self._finalizer, self._segments, skips_nothing=self.report.redelivery_possible
        )
        self._admission = Admission(config, self._wal, self._finalizer, self._retention, self._check_open)
        self._acks.start(
            found.ack_files,
            found.next_ack_generation,
            found.next_ack_sequence,
            found.checkpoints,
            found.next_checkpoint,
            found.ack_spares,
        )
        self._wal.start(found.wal_files, found.next_wal_generation, state.next_entry, found.wal_spares)
        self._logs = [self._wal, self._acks.log]
        self._orphans = Orphans(
            config,
            clock,
            names=lambda: [each for each in state.subscribers if self._deliveries.is_orphaned(each)],
            stats=self.stats,
            unregister=self.unregister,
        )
        self._is_open = True
        await self._settle_recovery(found)
        self._finalizer.start()
        self._tasks = [
            asyncio.create_task(self._maintain_forever()),
            asyncio.create_task(self._trim_forever()),
            asyncio.create_task(self._prepare()),
        ]

    async def _settle_recovery(self, found: Recovered) -> None:
        """Bring `ack.log` up to date with what was found, then put the WAL's entries back."""
        for record in found.unrecorded:
            self._acks.finalized(record)
        # On a full disk these wait for the next opening; nothing depends on them.
        with contextlib.suppress(ForebayError):
            await self._acks.commit(found.losses())
            await self._deliveries.bound_aside()
        self._retention.judge_all()
        await self._replay(found)
        report = found.report
        self._metrics.replayed.inc(report.entries_replayed)
        for kind in ("damaged_ranges", "segments_quarantined", "checkpoints_damaged", "unknown_frames"):
            self._metrics.damaged.labels(kind).inc(getattr(report, kind))
        if not report.is_clean:
            _log.warning("quiver.recovery.damaged: %s", report)

    async def _replay(self, found: Recovered) -> None:
        """Put WAL entries back into open segments, but for those that time retention would take at once, and
        those of segments that had a number already."""
        now_ms = self._clock.now_ms()
        expired: dict[str, list[Batch]] = {}
        kept = []
        sealed: dict[int, tuple[Kind, list[Batch]]] = {}
        for each in found.replay:
            entry = each.entry
            kind = (entry.signal, entry.fingerprint)
            batch = Batch(each.sequence, each.time_ms, entry.batch, dict(entry.context), entry.size)
            if each.segment is not None:
                sealed.setdefault(each.segment, (kind, []))[1].append(batch)
                continue
            if self._retention.is_expired(now_ms, each.time_ms):
                expired.setdefault(entry.signal, []).append(batch)
            kept.append((kind, batch))
        for number, (kind, batches) in sorted(sealed.items()):
            self._hold(self._finalizer.restore(number, kind, batches))
        # Oldest first again.
        for number in sorted(self._segments) if sealed else ():
            self._segments[number] = self._segments.pop(number)
        dropped: set[int] = set()
        # Where it cannot be recorded they are kept, and expire later.
        with contextlib.suppress(ForebayError):
            if expired:
                await self._retention.drop_entries(expired, "expired")
            dropped = {each.sequence for batches in expired.values() for each in batches}
        for kind, batch in kept:
            if batch.sequence not in dropped:
                self._finalizer.add(kind, [batch])
        found.report.entries_expired = len(dropped)
        found.report.entries_replayed -= len(dropped)

    async def close(self) -> None:
        """Finalize what is open, write a checkpoint, let the directory go. What fails is in the WAL."""
        await self._close()

    async def _close(self, *, keeps_lock: bool = False) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            with contextlib.suppress(ForebayError):
                await self._wal.drained()
                self._finalizer.freeze_all()
                await self._finalizer.settled()
                await self._retention.run()
                await self._acks.record_finalized()
                await self._acks.checkpoint()
        finally:
            # Left in the middle, it would keep the directory from everybody for as long as the process lives.
            await to_the_end(lambda: self._end(keeps_lock=keeps_lock))

    async def _end(self, *, keeps_lock: bool) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._finalizer.stop()
        await self._wal.close()
        await self._acks.log.close()
        self._deliveries.close()
        await self._let_go(keeps_lock=keeps_lock)

    async def _let_go(self, *, keeps_lock: bool = False) -> None:
        # A thread may still be at work for a task that was cancelled: nobody else gets the directory before.
        await self._disk.close()
        for log in self._logs:
            log.let_go()
        if not keeps_lock:
            self._disk.unlock()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Producers.

    async def ingest(
        self, batch: pa.RecordBatch, *, signal: str = "logs", context: Mapping[str, str] | None = None
    ) -> Receipt:
        """Return once the batch is durable.

        Raises `QuiverFull` at the size cap, `StorageFull` on a full disk, `QuiverFailed` after a failed sync:
        all certainly not done. `OutcomeUnknown` only where the sync of this very batch failed.
        """
        try:
            item = await self._queue(batch, signal, context, is_waited_for=True)
            if item.done.done():
                await self._wal.next_turn()
            receipt: Receipt = await item.done
            return receipt
        except ForebayError as error:
            failure = "backpressure" if isinstance(error, Backpressure) else "error"
            self._metrics.failures.labels(failure).inc()
            raise

    async def submit(
        self, batch: pa.RecordBatch, *, signal: str = "logs", context: Mapping[str, str] | None = None
    ) -> asyncio.Future[Receipt]:
        """Queue a batch, for one producer with many in flight: the future is done once it is durable.

        Batches become durable in the order of the calls. Waits while `pending_bytes_max` is exceeded or the
        WAL is full, and raises what `ingest` raises before the batch is queued; the future has the rest.
        """
        item = await self._queue(batch, signal, context)
        self._kept_loop_bytes += item.size
        if self._kept_loop_bytes >= YIELD_BYTES:
            # A producer that never waits would keep the loop, and with it the syncs, from going on.
            self._kept_loop_bytes = 0
            await asyncio.sleep(0)
        return item.done

    async def _queue(
        self,
        batch: pa.RecordBatch,
        signal: str,
        given: Mapping[str, str] | None,
        *,
        is_waited_for: bool = False,
    ) -> Item:
        self._check_open()
        wal, config = self._wal, self._config
        form = self._forms.of(batch)
        if wal.pending_bytes >= config.pending_bytes_max:
            await wal.has_room(config.pending_bytes_max)
        context = context_of(given)
        pieces, length, size = quiver_wal.encode_pieces(batch, signal, context, config.wal_codec, form)
        check_body(length)
        need = max(length, size) + FRAME_OVERHEAD_BYTES
        if need > self._retention.granted:
            await self._admission.admit(need, length + FRAME_OVERHEAD_BYTES)
        self._retention.granted -= need
        if batch.get_total_buffer_size() > 2 * size + SLACK_BYTES:
            # A slice would hold on to a parent many times its size.
            batch = quiver_wal.decode(b"".join(pieces)).batch
        now_ms = self._clock.now_ms()
        # The log gives this number to the next frame, and nothing is awaited until then.
        number = wal.next_sequence
        return wal.append(
            ENTRY_TYPE,
            now_ms * 1_000_000,
            pieces,
            length,
            ((signal, form.fingerprint), Batch(number, now_ms, batch, context, size)),
            Receipt(number, now_ms),
            is_waited_for=is_waited_for,
        )

    async def flush(self) -> None:
        """Finalize everything ingested so far; return once it is in segments. Raises what prevents it."""
        self._check_open()
        await self._wal.drained()
        self._finalizer.freeze_all()
        await self._finalizer.settled()

    def _durable(self, group: list[Item]) -> None:
        kinds: dict[Kind, list[Batch]] = {}
        for item in group:
            kind, batch = item.payload
            kinds.setdefault(kind, []).append(batch)
        rows: dict[str, int] = {}
        for kind, batches in kinds.items():
            self._finalizer.add(kind, batches)
            rows[kind[0]] = rows.get(kind[0], 0) + sum([each.batch.num_rows for each in batches])
        self._group_series.durable(len(group), rows)

    def _synced(self, group: int, seconds: float) -> None:
        self._retention.granted = 0
        self._group_series.synced(group, seconds)

    # Segments.

    def _keeps_up(self) -> bool:
        """Whether every subscriber is there, and has nothing before it but what is in memory anyway."""
        held = len(self._finalizer.held)
        names = self._acks.state.subscribers
        return bool(names) and all(
            self._deliveries.is_active(each) and self._backlog.of(each).segments <= held for each in names
        )

    def _hold(self, held: Held) -> None:
        """A segment is there, in memory."""
        self._segments[held.info.segment] = held.info
        self._deliveries.reader.held[held.info.segment] = held.view
        self._backlog.added(held.info)
        self._retention.registered(held.info)
        self._deliveries.notify()

    def _register(self, info: SegmentInfo) -> None:
        """A segment is there, as a file; it may have been held before."""
        held = self._segments.get(info.segment)
        if held is not None:
            self._backlog.removed(held)
            self._deliveries.reader.forget(info.segment)
        self._segments[info.segment] = info
        self._acks.finalized(Finalized(info.segment, info.entries))
        self._backlog.added(info)
        if held is None:
            self._retention.registered(info)
            self._deliveries.notify()
        self._trim_wanted.set()

    def _written(self, seconds: float, ok: bool) -> None:
        self._metrics.finalize_seconds.observe(seconds)
        if not ok:
            self._metrics.finalize_failures.inc()
            self._trim_wanted.set()
            _log.warning("quiver.segment.finalize_failed: %s", self._finalizer.problem)

    def _applied(self, record: Record) -> None:
        if isinstance(record, Sealed):
            if (held := self._finalizer.held.get(record.segment)) is not None:
                self._hold(held)
            return
        if isinstance(record, Unregister):
            self._deliveries.forget(record.subscriber)
        elif isinstance(record, Register):
            self._newcomers.applied(record)
        self._backlog.applied(record)
        self._retention.judge(record)
        self._trim_wanted.set()

    # Subscribers.

    async def register(self, name: str, start: str | int = "earliest") -> None:
        """Add a subscriber, durably. One that is there keeps its position.

        `earliest` begins with the oldest segment there is, `latest` with the next one to be finalized, a
        number with that segment.
        """
        self._check_open()
        quiver_ack.check_subscriber(name)
        async with self._retention.lock:
            await self._newcomers.add(name, start)

    async def unregister(self, name: str) -> bool:
        """Remove a subscriber, durably: it pins nothing any more. False where there is none."""
        self._check_open()
        if name not in self._acks.state.subscribers:
            return False
        await self._acks.commit([Unregister(name)])
        return True

    def activate(self, name: str) -> None:
        """Let a subscriber read again after `deactivate`. The first `next` does the same by itself."""
        self._check_open()
        self._deliveries.activate(name)

    def deactivate(self, name: str) -> None:
        """Pause a subscriber: `next` waits until `activate`, and what it has not resolved stays pinned.

        Lasts until the store is closed. Segments in its hands may still be settled.
        """
        self._check_open()
        self._deliveries.deactivate(name)

    def has_subscriber(self, name: str) -> bool:
        """Whether such a subscriber is registered."""
        self._check_open()
        return name in self._acks.state.subscribers

    async def next(self, name: str, timeout_s: float | None = None) -> Delivery | None:
        """The next segment for a subscriber, or None after `timeout_s`. None waits for ever."""
        self._check_open()
        return await self._deliveries.next(name, timeout_s)

    async def read(self, selection: Selection | None = None) -> AsyncIterator[SegmentView]:
        """Finished segments that can hold what is asked for, oldest first, without claiming them.

        Rows in them that are not asked for are left to `Selection.rows`. One that is deleted in the meantime
        is left out, and one that is damaged beyond reading: it is named in the log and counted.
        """
        self._check_open()
        wanted = selection or Selection()
        for number in [each for each, info in self._segments.items() if wanted.wants(info)]:
            self._check_open()
            if number in self._segments and (view := await self._deliveries.look(number)) is not None:
                yield view
                view.release_pages()

    # Maintenance.

    async def maintain(self) -> None:
        """One pass of cleanup, retention and checkpoints. It also happens by itself."""
        self._check_open()
        await self._acks.record_finalized()
        await self._retention.run()
        await self._orphans.look()
        if self._acks.is_due():
            await self._acks.checkpoint()

    def stats(self) -> QuiverStats:
        """What is in the store now."""
        self._check_open()
        return collect(
            self._segments,
            self._backlog,
            self._acks,
            self._wal,
            self._finalizer,
            self._deliveries,
            self._retention.used_bytes,
            self._clock.now_ms(),
        )

    async def _maintain_forever(self) -> None:
        while True:
            await self._clock.sleep(self._config.maintenance_interval_ms / 1000)
            await self._guarded(self.maintain())
            await self._guarded(self._gauges.measure())
            self._gauge()

    async def _prepare(self) -> None:
        await self._guarded(self._acks.log.prepare())
        await self._guarded(self._wal.prepare())

    async def _trim_forever(self) -> None:
        """Give space back soon after a finalize or an acknowledgement, without waiting for the timer."""
        while True:
            await self._trim_wanted.wait()
            self._trim_wanted.clear()
            await self._guarded(self._retention.run(expire=False))

    async def _guarded(self, work: object) -> None:
        try:
            await work  # type: ignore[misc]
        except Closed:
            return
        except Exception as error:
            # Whatever it is: a task that ended here would leave the store without maintenance for good.
            is_told = isinstance(error, ForebayError | OSError)
            _log.warning("quiver.maintenance.failed: %s", error, exc_info=None if is_told else error)

    def _gauge(self) -> None:
        if self._is_open:
            self._gauges.show(self.stats(), self._wal, self._acks, self._backlog, self._budget.cap_bytes)

    def _check_open(self) -> None:
        if not self._is_open:
            raise Closed("the store is not open", hint="use it inside async with, or call open first")
