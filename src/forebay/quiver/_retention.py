"""What goes, when, and why.

**Precedence.** 1. Segments that every subscriber has resolved, at any position, go at once (but for
`headroom_bytes`). 2. Time retention goes over claims and under both policies: `dropped(expired)`. 3. The size
cap: first what is processed, then, only under `drop_oldest`, the oldest segment that nobody works on:
`dropped(size)`; and where no segment is left to drop, the oldest data that is in none yet. Under
`backpressure` ingest is refused instead.

**Order of a deletion.** Outcomes durable for everybody, unlink, sync of the directory, uncharge. A crash in
between leaves a file that the next opening deletes again. One stuck segment stops nothing: every other is
judged on its own.

**Time.** What a segment says of its age holds as long as the wall clock does. So expiry pauses after a step
of the clock, and after an opening long after the last thing that the store wrote: nobody watched the clock in
between, and a machine that starts may have a wrong one for a while. What came in since the opening is never
older than the monotonic clock says: a clock that was far behind then, and is set right, takes nothing. A
clock that stays wrong for longer than the pause is believed.

**The cap is about files.** It counts WAL, segments, `ack.log`, checkpoints, quarantine and dead letters, and
what the data in memory will need when it becomes a segment. Several instances may share one (`_budget`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from forebay.errors import ForebayError, StorageFull
from forebay.formats.quiver_ack import Dropped, Finalized, Outcome, Record, WalDropped
from forebay.kit.clock import Clock
from forebay.quiver._acks import Acks
from forebay.quiver._backlog import Backlog
from forebay.quiver._budget import Budget
from forebay.quiver._config import QuiverConfig
from forebay.quiver._delivery import Deliveries
from forebay.quiver._disk import Disk
from forebay.quiver._errors import QuiverFull
from forebay.quiver._finalizer import Finalizer
from forebay.quiver._group_log import GroupLog
from forebay.quiver._metrics import QuiverMetrics
from forebay.quiver._runs import RunSet
from forebay.quiver._segment_file import Batch, SegmentInfo, runs_of, segment_name

__all__ = ["RESERVE_BYTES", "Parts", "Retention"]

CLOCK_JUMP_MS: Final = 60_000
"""A forward step of the wall clock that pauses expiry, and a time without the store that does."""
CLOCK_PAUSE_S: Final = 600.0
"""Seconds for which it does: time for a wrong clock to be set right."""
DROPPED_AT_ONCE_MAX: Final = 100
"""Segments that are told to be dropped, and deleted, together: syncs are shared, and no step takes long."""
RESERVE_BYTES: Final = 64 * 1024
"""Bytes kept free for file headers, footers and checkpoints."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a store that retention looks at."""

    disk: Disk
    config: QuiverConfig
    clock: Clock
    metrics: QuiverMetrics
    wal: GroupLog
    acks: Acks
    finalizer: Finalizer
    deliveries: Deliveries
    segments: dict[int, SegmentInfo]
    budget: Budget
    backlog: Backlog


class Retention:
    """See the module. `newest_ms` is the latest time that the files speak of, 0 where they speak of none."""

    def __init__(self, parts: Parts, newest_ms: int) -> None:
        self._parts = parts
        self._budget = parts.budget
        self._config = parts.config
        self.lock = asyncio.Lock()
        """Held by whoever deletes segments, or must see none deleted."""
        self._last_ms = parts.clock.now_ms()
        self._last_s = parts.clock.monotonic()
        is_long_ago = 0 < newest_ms < self._last_ms - CLOCK_JUMP_MS
        self._paused_until = self._last_s + CLOCK_PAUSE_S if is_long_ago else 0.0
        self._first_entry = parts.acks.state.next_entry
        self._opened_s: dict[int, float] = {}
        """When segments with entries of this opening were opened, at the earliest, on the monotonic clock."""
        self._processed: set[int] = set()
        self.granted = 0
        """Bytes of batches that may be queued without being asked for: see `_admission`."""
        self._oldest_ms = min((each.ingested_ms[1] for each in parts.segments.values()), default=1 << 62)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        parts = self._parts
        return parts.backlog.file_bytes + parts.wal.bytes + parts.acks.bytes + parts.deliveries.aside_bytes

    def projected_bytes(self, more: int) -> int:
        """Bytes on disk once everything in memory, and `more` bytes of a new batch, are in files."""
        parts = self._parts
        reserve = self._config.ack_rotation_bytes + RESERVE_BYTES
        more += parts.wal.pending_bytes + self.granted
        return self.used_bytes + parts.finalizer.bytes + 2 * more + reserve

    def _bytes_at_least(self, more: int) -> int:
        """What `projected_bytes` comes to if everything goes that may."""
        parts = self._parts
        leased = [parts.segments[each] for each in parts.deliveries.leased() if each in parts.segments]
        # One that is no file yet will be as large as what is in it.
        kept = sum(each.file_bytes or each.raw_bytes for each in leased)
        kept += parts.acks.bytes + parts.deliveries.aside_bytes
        return kept + 2 * (parts.wal.pending_bytes + more) + self._config.ack_rotation_bytes + RESERVE_BYTES

    def registered(self, info: SegmentInfo) -> None:
        """A segment is there."""
        self._oldest_ms = min(self._oldest_ms, info.ingested_ms[1])
        if self._config.retain_ms is not None and info.entries[-1][1] >= self._first_entry:
            opened_s = self._parts.clock.monotonic() - self._config.segment_open_ms / 1000
            self._opened_s[info.segment] = opened_s

    def judge(self, record: Record) -> None:
        """Look whether a record made segments deletable."""
        parts = self._parts
        if isinstance(record, Outcome):
            if record.outcome == "nack":
                return
            if record.outcome == "dropped":
                parts.metrics.dropped.labels(record.subscriber).inc(record.last - record.first + 1)
            numbers = range(record.first, record.last + 1)
            self._processed.update(
                each for each in numbers if each in parts.segments and parts.acks.state.is_resolved(each)
            )
        elif not isinstance(record, Dropped):
            self.judge_all()

    def judge_all(self) -> None:
        """Look at every segment: at opening, and when a subscriber comes or goes."""
        state = self._parts.acks.state
        self._processed = {each for each in self._parts.segments if state.is_resolved(each)}

    # Passes.

    async def run(self, *, expire: bool = True) -> None:
        """Sweep, expire, and hold the cap. Expiry looks at every segment, so it is left to the timer."""
        async with self.lock:
            await self._trim()
            others_need = self._budget.is_short
            if others_need or isinstance(self._parts.finalizer.problem, StorageFull):
                await self._parts.wal.drop_spares()
            await self._sweep(0 if others_need else self._config.headroom_bytes)
            if expire:
                await self._expire()
            if self.is_over(0):
                await self._relieve(0)
            self._budget.publish(self.projected_bytes(0))

    async def admit(self, more: int) -> None:
        """Make room for a batch, or raise `QuiverFull`."""
        if not self.is_over(more):
            return
        async with self.lock:
            # Nothing is dropped for a batch that would not fit even then.
            if self.is_over(more) and not self._budget.is_over(self._bytes_at_least(more)):
                await self._relieve(more)
        if self.is_over(more):
            self._budget.publish(self.projected_bytes(0))
            self._budget.refused()
            self._parts.metrics.throttled.inc()
            raise QuiverFull(used=self.projected_bytes(0), cap=self._budget.cap_bytes, needed=2 * more)

    async def trim(self) -> None:
        """Delete WAL files that hold nothing but what is in segments."""
        async with self.lock:
            await self._trim()

    def is_over(self, more: int) -> bool:
        """Whether `more` bytes of a new batch would pass the cap."""
        return self._budget.is_over(self.projected_bytes(more))

    async def _trim(self) -> None:
        parts = self._parts
        covered = parts.acks.state.covered
        done = [
            file
            for _, file in sorted(parts.wal.files.items())
            if file.last_sequence < 0 or not covered.gaps(file.first_sequence, file.last_sequence)
        ]
        await parts.wal.remove(done)

    async def _sweep(self, headroom: int) -> bool:
        """False where some could not be deleted."""
        parts = self._parts
        ordered = sorted(each for each in self._processed if each in parts.segments)
        kept = sum(parts.segments[each].file_bytes for each in ordered)
        gone = []
        for segment in ordered:
            if kept > headroom or segment in parts.finalizer.held:
                gone.append(segment)
                kept -= parts.segments[segment].file_bytes
        return await self._delete(gone, "processed")

    async def _expire(self) -> None:
        now_ms = self._look_at_clock()
        if not self.is_expired(now_ms, self._oldest_ms):
            return
        segments = self._parts.segments
        old = [each for each, info in segments.items() if self.is_expired(now_ms, info.ingested_ms[1], each)]
        for begin in range(0, len(old), DROPPED_AT_ONCE_MAX):
            await self._drop(old[begin : begin + DROPPED_AT_ONCE_MAX], "expired")
        # Counted last: what could not be dropped is looked at again.
        self._oldest_ms = min((each.ingested_ms[1] for each in segments.values()), default=1 << 62)

    def is_expired(self, now_ms: int, ingested_ms: int, segment: int = 0) -> bool:
        """Whether time retention takes what came in then, as a part of this segment if it is in one."""
        retain, now_s = self._config.retain_ms, self._parts.clock.monotonic()
        if retain is None or now_ms - ingested_ms <= retain or now_s < self._paused_until:
            return False
        opened_s = self._opened_s.get(segment)
        return opened_s is None or (now_s - opened_s) * 1000 > retain

    def _look_at_clock(self) -> int:
        clock = self._parts.clock
        now_ms, now_s = clock.now_ms(), clock.monotonic()
        jump = (now_ms - self._last_ms) - (now_s - self._last_s) * 1000
        self._last_ms, self._last_s = now_ms, now_s
        if jump > CLOCK_JUMP_MS:
            self._paused_until = now_s + CLOCK_PAUSE_S
            self._parts.metrics.clock_jumps.inc()
        return now_ms

    async def _relieve(self, more: int) -> None:
        await self._trim()
        await self._parts.wal.drop_spares()
        can_delete = await self._sweep(0)
        await self._expire()
        if not self.is_over(more):
            return
        finalizer = self._parts.finalizer
        # Early finalize: what is open becomes deliverable, and its part of the WAL can go.
        finalizer.freeze_all()
        # Where files cannot be deleted, what is dropped would be lost for nothing.
        if self._config.size_cap_policy != "drop_oldest" or not can_delete:
            return
        self._parts.metrics.emergencies.inc()
        self._budget.refused()
        while self.is_over(more):
            victim = self._victim()
            if victim is not None:
                if not await self._drop([victim], "size"):
                    return
                # One that was no file yet leaves its place in the WAL.
                await self._trim()
            elif finalizer.is_writing or (finalizer.is_busy and finalizer.problem is None):
                await finalizer.changed()
                await self._trim()
            elif not await self._drop_open():
                return

    def _victim(self) -> int | None:
        leased = self._parts.deliveries.is_leased
        # Segments get rising numbers, so the first one is the oldest.
        return next((each for each in self._parts.segments if not leased(each)), None)

    async def _drop_open(self) -> bool:
        """Let the oldest data go that is in no segment: none can be written, or readers hold them all."""
        finalizer = self._parts.finalizer
        oldest = finalizer.take_oldest()
        if oldest is None:
            return False
        try:
            await self.drop_entries({oldest.kind[0]: oldest.batches}, "size")
        except BaseException:
            finalizer.put_back(oldest)
            raise
        finalizer.dropped(oldest)
        await self._trim()
        return True

    async def drop_entries(
        self, by_signal: Mapping[str, Sequence[Batch]], reason: Literal["size", "expired"]
    ) -> None:
        """Tell everybody, durably, that WAL entries will be in no segment.

        Subscribers hear of it by a number that no segment has. Their outcomes come first: a crash in between
        leaves entries that are replayed, and a number that nobody waits for.
        """
        parts = self._parts
        number = parts.finalizer.take_number()
        parts.acks.state.saw_segment(number)
        batches = [each for some in by_signal.values() for each in some]
        rows = sum(each.batch.num_rows for each in batches)
        size = sum(each.size for each in batches)
        records: list[Record] = [
            Outcome(name, number, number, "dropped", reason) for name in parts.acks.state.subscribers
        ]
        for first, last in runs_of(sorted(each.sequence for each in batches)):
            records.append(WalDropped(first, last, reason, rows, size))
            rows = size = 0
        try:
            await parts.acks.commit(records)
        except BaseException:
            # Nobody heard of the number; the next opening will find it absent, and so do we.
            parts.acks.state.note_absent(number)
            raise
        for signal, some in by_signal.items():
            parts.metrics.lost_bytes.labels(reason).inc(sum(each.size for each in some))
            parts.metrics.lost_rows.labels(signal, reason).inc(sum(each.batch.num_rows for each in some))

    async def _drop(self, segments: list[int], reason: Literal["size", "expired"]) -> bool:
        """Let segments go that somebody still needs: told to everybody first, durably. False where a file
        cannot be deleted."""
        parts = self._parts
        state = parts.acks.state
        records: list[Record] = []
        for who in state.subscribers.values():
            needed = RunSet((each, each) for each in segments if not who.is_resolved(each))
            records += [Outcome(who.name, first, last, "dropped", reason) for first, last in needed.runs()]
        # Told once, also where its file could not be deleted then.
        told = [each for each in segments if not state.is_resolved(each)]
        if not state.subscribers:
            told = [each for each in told if each in state.live]
        infos = [parts.segments[each] for each in told]
        records += [Dropped(each.segment, reason, each.rows, each.raw_bytes) for each in infos]
        if records:
            await parts.acks.commit(records)
        for info in infos:
            parts.metrics.segment_dropped.inc()
            parts.metrics.lost_segments.labels(reason).inc()
            parts.metrics.lost_bytes.labels(reason).inc(info.raw_bytes)
            parts.metrics.lost_rows.labels(info.signal, reason).inc(info.rows)
        return await self._delete(segments, reason)

    async def _delete(self, segments: list[int], reason: str) -> bool:
        """False where some are still there; they are tried again."""
        files = [each for each in segments if self._is_file(each)]
        # At once: nothing that goes wrong with a file may leave one behind that is nowhere any more.
        self._forget([each for each in segments if each not in files], reason)
        if not files:
            return True
        await self._parts.acks.record_finalized()
        gone = await self._remove(files)
        self._forget(gone, reason)
        return len(gone) == len(files)

    def _forget(self, gone: list[int], reason: str) -> None:
        parts = self._parts
        for segment in gone:
            info = parts.segments.pop(segment, None)
            if info is not None:
                parts.backlog.removed(info)
                parts.metrics.reclaimed.inc(info.file_bytes)
            self._processed.discard(segment)
            self._opened_s.pop(segment, None)
            parts.acks.state.live.remove(segment)
            parts.deliveries.reader.forget(segment)
        if gone:
            parts.metrics.evictions.labels(reason).inc(len(gone))

    def _is_file(self, segment: int) -> bool:
        """Whether there is, or may be, a file to remove. One that is only in memory is let go of here: the
        outcomes that are durable keep its WAL entries from being replayed, so its record can wait."""
        parts = self._parts
        if segment not in parts.finalizer.held:
            return True
        parts.acks.finalized(Finalized(segment, parts.segments[segment].entries))
        is_file = parts.finalizer.let_go(segment)
        parts.metrics.spared.inc(not is_file)
        return is_file

    async def _remove(self, segments: list[int]) -> list[int]:
        """Remove files. Returns those that are gone."""
        parts = self._parts

        def work() -> list[int]:
            gone = []
            for segment in segments:
                try:
                    parts.disk.remove(segment_name(segment))
                except OSError:
                    continue
                gone.append(segment)
            parts.disk.sync_directory("segments")
            return gone

        try:
            gone = await parts.disk.run("segments", work)
        except OSError as error:
            parts.metrics.delete_failures.inc(len(segments))
            raise ForebayError(f"deleting segments: {error}", hint="see to the disk") from error
        parts.metrics.delete_failures.inc(len(segments) - len(gone))
        return gone
