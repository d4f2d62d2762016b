"""Open segments, and the task that turns them into files.

**Invariant.** A durable batch is, at every moment, in at least one of: the WAL, a durable and registered
segment. Its WAL entry is *covered* only after the segment that holds it is registered. What is frozen stays
reachable in memory until then.

**Held segments.** Where every subscriber keeps up, a segment is acknowledged a moment after it is finished,
and a file of it would be deleted as soon as it is written. So it may be handed out from memory first, and
written only if somebody has not acknowledged it when `segment_hold_ms` are over, says nack, or memory, WAL or
disk run short. Before anybody gets it, a durable record (`Sealed`) says which WAL entries are in it; these
count as covered only once its file is durable, or all subscribers are done with it, durably. What a crash
finds: no record, and the entries go into another segment, for nobody had this one; a record alone, and the
segment is made again from the WAL, the same rows under the same number, for those who did not acknowledge it;
everybody's acknowledgement as well, and nothing is to be done.

**Failures.** A segment that cannot be written goes to the end of the queue and is tried again after a pause,
under a new number; others overtake it. Nothing is forgotten: its entries stay uncovered, so the WAL keeps
them. Segments are finalized for four reasons and no other: size, age, shutdown, pressure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from forebay.errors import ForebayError
from forebay.formats.quiver_ack import Sealed
from forebay.formats.quiver_segment import SegmentMeta
from forebay.formats.quiver_wal import has_dictionary
from forebay.kit.clock import Clock
from forebay.quiver import _segment_file
from forebay.quiver._config import QuiverConfig
from forebay.quiver._disk import Disk
from forebay.quiver._errors import from_os_error
from forebay.quiver._reading import HeldView
from forebay.quiver._segment_file import SOURCES_MAX, Batch, NotEncodable, SegmentInfo, info_of

__all__ = ["TIMER_S", "Finalizer", "Frozen", "Held", "Hooks", "Kind"]

Kind: TypeAlias = tuple[str, bytes]
"""Signal type and schema hash: what batches of one segment have in common."""

TIMER_S: Final = 0.001
"""Shortest sleep of a timer. A shorter one may end before the clock has moved, and spin."""
HELD_SEGMENTS: Final = 2
"""Full segments after whose bytes no further one is held in memory while subscribers have them."""
RETRY_S: Final = 0.5
"""Seconds before a segment that could not be written is tried again."""

SPAN_MS_MAX: Final = 12 * 3_600_000
"""Milliseconds of ingestion between the first batch of a segment and any other of it. Batches that lay in the
WAL while the process was down, and those on either side of a step of the clock, get segments of their own:
what is stored by the day of a segment's first batch is found by the days of all of them."""


@dataclass(slots=True, eq=False)
class Frozen:
    """An open segment, or one that waits to be written."""

    kind: Kind
    opened_at: float
    batches: list[Batch] = field(default_factory=list)
    bytes: int = 0
    is_urgent: bool = False
    """Whether it has to be a file now."""


@dataclass(slots=True)
class Held:
    """A segment with a number and without a file."""

    kind: Kind
    view: HeldView
    info: SegmentInfo
    batches: Sequence[Batch]
    due: float
    """When it is written."""
    is_being_written: bool = False


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the store does for the finalizer."""

    register: Callable[[SegmentInfo], None]
    """Hears of each segment whose file is durable."""
    skipped: Callable[[int], None]
    """Hears of numbers that became no segment."""
    on_write: Callable[[float, bool], None]
    """Hears how long an attempt took, and whether it succeeded."""
    keeps_up: Callable[[], bool]
    """Whether every subscriber would get a segment at once."""
    seal: Callable[[Sealed], Awaitable[None]]
    """Makes the record of a held segment durable, which then is there for the subscribers."""


class Finalizer:
    """See the module."""

    def __init__(
        self,
        disk: Disk,
        config: QuiverConfig,
        clock: Clock,
        *,
        next_segment: int,
        first_entry: int,
        hooks: Hooks,
    ) -> None:
        self._disk = disk
        self._config = config
        self._clock = clock
        self._hooks = hooks
        self._first_entry = first_entry
        """The first WAL entry since the store was opened."""
        self.held: dict[int, Held] = {}
        """By number; also the one whose record is on its way."""
        self._open: dict[Kind, Frozen] = {}
        self._queue: deque[Frozen] = deque()
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._writing = False
        self._has_failed_held = False
        """Whether the last attempt was one at a held segment, and failed."""
        self._presses = 0
        """How often everything was wanted in files."""
        self.next_segment = next_segment
        self.problem: ForebayError | None = None
        """Why the last attempt failed; None once one succeeds."""
        self.bytes = 0
        """Logical bytes that are in no file yet."""

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run())

    def add(self, kind: Kind, batches: Sequence[Batch]) -> None:
        """Durable batches join the open segment of their kind."""
        segment = self._open.get(kind)
        full = self._config.segment_bytes
        for batch in batches:
            if segment is not None and abs(batch.time_ms - segment.batches[0].time_ms) > SPAN_MS_MAX:
                self._freeze(kind)
                segment = None
            if segment is None:
                segment = self._opened(kind)
            segment.batches.append(batch)
            segment.bytes += batch.size
            self.bytes += batch.size
            if segment.bytes >= full or len(segment.batches) >= SOURCES_MAX:
                self._freeze(kind)
                segment = None

    def _opened(self, kind: Kind) -> Frozen:
        if len(self._open) >= self._config.streams_max:
            self._freeze(next(iter(self._open)))
        segment = self._open[kind] = Frozen(kind, self._clock.monotonic())
        self._wake.set()
        return segment

    def freeze_all(self) -> None:
        """Shutdown, flush or pressure: let everything that is open or held be written now."""
        for kind in list(self._open):
            self._freeze(kind)
        self._presses += 1
        for segment in self._queue:
            segment.is_urgent = True
        for number in self.held:
            self.hurry(number)

    def hurry(self, number: int) -> None:
        """Do not hold this segment any longer."""
        held = self.held.get(number)
        if held is not None:
            held.due = min(held.due, self._clock.monotonic())
            self._wake.set()

    def restore(self, number: int, kind: Kind, batches: Sequence[Batch]) -> Held:
        """A segment that a crash left without its file: the same again, held until it is written."""
        held = self._make_held(number, kind, batches)
        held.due = self._clock.monotonic()
        self.held[number] = held
        self.bytes += held.info.raw_bytes
        return held

    def let_go(self, number: int) -> bool:
        """Everybody is done with it. Returns whether there is a file of it, or may be one."""
        held = self.held.pop(number, None)
        if held is None:
            return True
        self.bytes -= held.info.raw_bytes
        self._changed.set()
        return held.is_being_written

    async def settled(self) -> None:
        """Wait until everything frozen so far is written, or an attempt has failed. Raises its error."""
        while self.is_busy:
            if self.problem is not None:
                raise self.problem
            self._changed.clear()
            await self._changed.wait()

    async def changed(self) -> None:
        """Wait for the next attempt to end."""
        self._changed.clear()
        await self._changed.wait()

    def take_oldest(self) -> Frozen | None:
        """The oldest data that is in no segment, out of the queue: for `put_back`, or for `dropped`."""
        waiting = [*self._queue, *self._open.values()]
        if not waiting:
            return None
        oldest = min(waiting, key=lambda each: each.batches[0].sequence)
        if oldest in self._queue:
            self._queue.remove(oldest)
        else:
            del self._open[oldest.kind]
        return oldest

    def put_back(self, segment: Frozen) -> None:
        """It stays after all."""
        self._queue.appendleft(segment)
        self._wake.set()

    def dropped(self, segment: Frozen) -> None:
        """It will never be a segment."""
        self.bytes -= segment.bytes
        self._changed.set()

    def take_number(self) -> int:
        """A number that no segment will have. Not while one is being written."""
        assert not self._writing
        self.next_segment += 1
        return self.next_segment - 1

    @property
    def is_writing(self) -> bool:
        """Whether an attempt is under way."""
        return self._writing

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._queue) or self._writing or self._next_due() is not None

    async def stop(self) -> None:
        """End the task. What is not written is in the WAL."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def _freeze(self, kind: Kind) -> None:
        self._queue.append(self._open.pop(kind))
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._freeze_aged()
            due = self._next_due()
            # After a failure the others have their turn.
            if self._queue and (due is None or self._has_failed_held):
                await self._finalize(self._queue.popleft())
            elif due is not None:
                await self._attempt(self._write_held(due))
            else:
                await self._wait()

    def _next_due(self) -> int | None:
        now = self._clock.monotonic()
        return next((number for number, each in self.held.items() if each.due <= now), None)

    def _freeze_aged(self) -> None:
        limit = self._clock.monotonic() - self._config.segment_open_ms / 1000
        for kind, segment in list(self._open.items()):
            if segment.opened_at <= limit:
                self._freeze(kind)

    async def _wait(self) -> None:
        """Until something is frozen, the oldest open segment comes of age, or one was held long enough."""
        self._wake.clear()
        moments = [each.opened_at + self._config.segment_open_ms / 1000 for each in self._open.values()]
        moments += [each.due for each in self.held.values()]
        if not moments:
            await self._wake.wait()
            return
        due = min(moments) - self._clock.monotonic()
        sleep = asyncio.ensure_future(self._clock.sleep(max(due, TIMER_S)))
        wake = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({sleep, wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (sleep, wake):
                each.cancel()

    async def _finalize(self, segment: Frozen) -> None:
        if self._may_hold(segment):
            await self._attempt(self._hold(segment), segment, is_write=False)
        else:
            await self._attempt(self._write(segment), segment)

    async def _attempt(
        self, work: Awaitable[None], segment: Frozen | None = None, *, is_write: bool = True
    ) -> None:
        self._writing, self._has_failed_held = True, False
        began = self._clock.monotonic()
        try:
            await work
            self.problem = None
        except Exception as error:
            # Whatever it is, a task that ended here would leave every later segment unwritten as well.
            self.problem = error if isinstance(error, ForebayError) else _told(error)
            if segment is not None:
                self._queue.append(segment)
            self._has_failed_held = segment is None
        finally:
            self._writing = False
        if is_write or self.problem is not None:
            self._hooks.on_write(self._clock.monotonic() - began, self.problem is None)
        self._changed.set()
        if self.problem is not None:
            await self._clock.sleep(RETRY_S)

    def _may_hold(self, segment: Frozen) -> bool:
        config = self._config
        held_bytes = sum(each.info.raw_bytes for each in self.held.values())
        return (
            config.segment_hold_ms > 0
            # Processed segments that are kept on purpose are kept as files.
            and not config.headroom_bytes
            and not segment.is_urgent
            and self.problem is None
            and held_bytes < HELD_SEGMENTS * config.segment_bytes
            # What was replayed lies in mapped WAL files, which are written over once there is a file of it:
            # under the eyes of whoever got it from memory.
            and segment.batches[0].sequence >= self._first_entry
            # Those may have to be split over several segments.
            and not any(has_dictionary(each.type) for each in segment.batches[0].batch.schema)
            and self._hooks.keeps_up()
        )

    async def _hold(self, segment: Frozen) -> None:
        """Give the segment a number, and the subscribers what they need to know, before it is a file."""
        number, presses = self.next_segment, self._presses
        self.next_segment += 1
        try:
            held = await self._disk.run(
                "segments", lambda: self._make_held(number, segment.kind, segment.batches)
            )
            # There before its record is: the record takes effect with it.
            self.held[number] = held
            await self._hooks.seal(Sealed(number, held.info.entries))
        except Exception:
            self.held.pop(number, None)
            self._hooks.skipped(number)
            raise
        if presses != self._presses:
            self.hurry(number)

    def _make_held(self, number: int, kind: Kind, batches: Sequence[Batch]) -> Held:
        template, column = self._template(number, kind), self._config.event_time_column
        meta = _segment_file.described(batches, template, column)
        view = HeldView(
            meta,
            batches,
            lambda: _segment_file.encoded(batches, template=template, event_time_column=column),
        )
        due = self._clock.monotonic() + self._config.segment_hold_ms / 1000
        return Held(kind, view, info_of(meta, 0), batches, due)

    async def _write_held(self, number: int) -> None:
        held = self.held[number]
        held.is_being_written = True
        try:
            info = await self._write_file(self._template(number, held.kind), held.batches)
        except Exception as error:
            held.is_being_written = False
            if number in self.held:
                self.held[number] = self.held.pop(number)
            if isinstance(error, NotEncodable) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        # Whoever let go of it meanwhile removes its file, behind us in the same thread.
        if self.held.pop(number, None) is not None:
            self.bytes -= info.raw_bytes
            self._hooks.register(info)

    async def _write(self, segment: Frozen) -> None:
        """As one segment, or as several where its batches do not go together. One that cannot be written at
        all keeps nobody else waiting: it stays, and the next attempt says what is wrong with it."""
        waiting: deque[Sequence[Batch]] = deque([segment.batches])
        problem: BaseException | None = None
        is_any_written = False
        while waiting:
            part = waiting.popleft()
            try:
                await self._write_one(segment, part)
                is_any_written = True
            except NotEncodable as error:
                if len(part) == 1:
                    problem = error.__cause__
                else:
                    half = len(part) // 2
                    waiting.extendleft((part[half:], part[:half]))
        if problem is not None and not is_any_written:
            raise problem
        if segment.batches:
            self._queue.append(segment)

    async def _write_one(self, segment: Frozen, batches: Sequence[Batch]) -> None:
        template = self._template(self.next_segment, segment.kind)
        self.next_segment += 1
        try:
            info = await self._write_file(template, batches)
        except Exception:
            self._hooks.skipped(template.segment)
            raise
        if len(batches) == len(segment.batches):
            segment.batches = []
        else:
            gone = {each.sequence for each in batches}
            segment.batches = [each for each in segment.batches if each.sequence not in gone]
        segment.bytes -= info.raw_bytes
        self.bytes -= info.raw_bytes
        self._hooks.register(info)

    def _template(self, number: int, kind: Kind) -> SegmentMeta:
        signal, schema_hash = kind
        return SegmentMeta(
            segment=number,
            entries=[],
            signal=signal,
            schema_hash=schema_hash,
            rows=0,
            codec=self._config.segment_codec,
            raw_bytes=0,
            ingested_ms=(0, 0),
            sources=[],
            contexts=[],
            parts=[],
        )

    async def _write_file(self, template: SegmentMeta, batches: Sequence[Batch]) -> SegmentInfo:
        column = self._config.event_time_column
        return await self._disk.run(
            "segments",
            lambda: _segment_file.write(self._disk, batches, template=template, event_time_column=column),
        )


def _told(error: Exception) -> ForebayError:
    if isinstance(error, OSError):
        return from_os_error("writing a segment", error)
    return ForebayError(f"a segment cannot be encoded: {error!r}", hint="look at the schema of the batches")
