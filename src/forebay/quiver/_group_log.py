"""An append-only log over numbered files, with group commit. The WAL and `ack.log` are both one of these.

**Invariant.** A caller hears of success only after a finished `sync` that covers its frame. While one sync
runs, the next group collects, so groups follow the load without a timer; `flush_interval_ms` can only make a
group wait longer. All state belongs to the event loop; the lane writes and syncs. `_log_files` has the files.

**Here.** While everybody waits for one sync, a thread of its own for it helps nobody, and the way there and
back costs as much as half a sync. So a group is written and synced in the event loop's own thread where all
of this holds, and by the lane otherwise: each of its callers waits for his frame; they are as many as there
were at the last sync, waiting or about to, so that nobody is missing who could use the time to come; nothing
of the lane is under way, so that frames keep their order; the active file has room; the group has at most
`HERE_BYTES_MAX` bytes; syncs took at most `QUICK_SYNC_S` of late, on a moving average, so that a slow one
sends everybody to the lane until quick ones have made up for it.

Whoever was alone the last time is written at once, within `append`, but only one in each turn of the loop:
who comes second in a turn is a crowd and collects a group, for one sync here must never become a row of syncs
that others should have shared. The outcome takes the same way as one of the lane's, only that it is known
when `append` returns; `next_turn` then lets the loop go on once, for a producer whose frames are never waited
for would keep it to himself.

Rejected: to split a large crowd, so that one half is synced while the other comes. With 64 producers it was
quicker on a busy disk and slower where syncs are fast: not enough for what it adds here.

**Failures.** A write that fails (a full disk) is cut back to the last good end and the cut is synced: those
callers get `NotDone`, later ones may succeed; and so do the callers of a group that cannot be encoded. A sync
that fails, of data or of a directory, latches: the kernel may have thrown the pages away, and a second sync
would report success for data that is gone. Callers in that group get `OutcomeUnknown`, everybody after them
`QuiverFailed`, until the store is reopened.

**Crash points.** File made but name not synced: no frame in it was acknowledged. Frames written, not synced:
recovery keeps what is whole. A file with frames is never continued: each opening begins a new one, so a torn
tail stays where it is until its file goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from forebay.errors import Closed, ForebayError, NotDone, OutcomeUnknown
from forebay.formats.quiver_frame import FRAME_OVERHEAD_BYTES, check_body, encode_frame
from forebay.kit.clock import Clock
from forebay.quiver._disk import Disk, DiskFile, Piece
from forebay.quiver._errors import QuiverFailed, from_os_error
from forebay.quiver._log_files import LogFile, LogFiles, LogSettings, SyncFailed

__all__ = ["GroupLog", "Item"]

GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes at which a group of a Quiver log is closed, so that one write stays short."""
HERE_BYTES_MAX: Final = 1024 * 1024
"""Largest group that is written in the event loop's thread. For larger ones the way to a lane is nothing."""
QUICK_SYNC_S: Final = 0.001
"""Seconds, on average, up to which a write and its sync may keep the event loop."""
_PACE_WEIGHT: Final = 1 / 8
"""What the last sync counts in that average. One of 100 ms is made up for by some twenty of 0.1 ms."""


class Item(msgspec.Struct):
    """One frame on its way."""

    sequence: int
    type: int
    time_ns: int
    body: Sequence[Piece]
    size: int
    """Bytes of the whole frame."""
    payload: Any
    done: asyncio.Future[Any]
    answer: Any = None
    """What `done` gives."""


class GroupLog:
    """See the module. `on_durable` hears of each group in order, before its callers do."""

    def __init__(
        self,
        disk: Disk,
        settings: LogSettings,
        clock: Clock,
        *,
        on_durable: Callable[[list[Item]], None],
        on_sync: Callable[[int, float], None] = lambda group, seconds: None,
        may_fill: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self._disk = disk
        self._lane = settings.lane
        self._suffix = settings.suffix
        self._files = LogFiles(disk, settings, may_fill=may_fill, on_failed_sync=self._latch)
        self._interval_s = settings.flush_interval_ms / 1000
        self._clock = clock
        self._on_durable = on_durable
        self._on_sync = on_sync
        self._pending: list[Item] = []
        self._is_open = False
        self._is_working = False
        self._crowd = 0
        self._is_eager = settings.is_eager and not settings.flush_interval_ms
        self._is_waited_for = True
        """Whether everybody whose frame is in `_pending` does nothing else until it is durable."""
        self._is_turn_taken = False
        """Whether a frame was written here in this turn of the loop, at once."""
        self._pace_s = 2 * QUICK_SYNC_S
        """A moving average of what syncs took. A disk that is not known yet counts as a slow one."""
        self._began = 0.0
        self._synced_at = clock.monotonic() - self._interval_s
        self._pacing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._urgent = asyncio.Event()
        self.next_sequence = 1
        self._unsettled = 1
        """Every frame below it is settled."""
        self.pending_bytes = 0
        """Encoded bytes that no sync covers yet."""
        self.oldest_pending_at: float | None = None
        self.failure: QuiverFailed | None = None

    @property
    def files(self) -> dict[int, LogFile]:
        """Every file of the log that holds frames, or is about to, by its number."""
        return self._files.files

    @property
    def bytes(self) -> int:
        """Bytes of all files, spares included."""
        return self._files.bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of the files that wait to be used."""
        return self._files.spare_bytes

    def projected_bytes(self, more: int) -> int:
        """Bytes of all files once everything that waits, and `more` bytes besides, are written."""
        more += self.pending_bytes
        files = self._files
        free = 0 if files.active is None else files.active.bytes - files.active.size
        return files.bytes + (0 if more <= free else max(0, more - files.spare_bytes))

    def start(
        self,
        files: list[LogFile],
        next_generation: int,
        next_sequence: int,
        spares: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Go on behind what recovery found."""
        self._files.start(files, next_generation, spares)
        self.next_sequence = self._unsettled = next_sequence
        self._loop = asyncio.get_running_loop()
        self._is_open = True

    def append(
        self,
        type_: int,
        time_ns: int,
        body: Sequence[Piece],
        size: int,
        payload: Any = None,
        answer: Any = None,
        *,
        is_waited_for: bool = False,
    ) -> Item:
        """Queue a frame whose body has `size` bytes. `item.done` ends once it is durable, or fails.

        `is_waited_for` says that the caller does nothing else until then, so that the frame may be written
        here: `item.done` may be over when this returns.
        """
        if self.failure is not None:
            raise self.failure
        if not self._is_open:
            raise Closed("the store is closed", hint="open it again")
        check_body(size)
        size += FRAME_OVERHEAD_BYTES
        done = self._loop.create_future()
        item = Item(self.next_sequence, type_, time_ns, body, size, payload, done, answer)
        self.next_sequence += 1
        self._pending.append(item)
        self._is_waited_for = self._is_waited_for and is_waited_for
        self.pending_bytes += size
        if self.oldest_pending_at is None:
            self.oldest_pending_at = self._clock.monotonic()
        if self.pending_bytes >= GROUP_BYTES_MAX:
            self._urgent.set()
        if not self._is_working:
            self._is_working = True
            self._idle.clear()
            if self._crowd == 1 and self._is_eager and not self._is_turn_taken:
                # Whoever came last was alone: there is nobody to wait for, and a turn of the loop costs him
                # a tenth of his sync.
                self._hand_over()
                self._is_turn_taken = done.done()
            else:
                self._go_on()
        return item

    async def next_turn(self) -> None:
        """For whoever finds `item.done` over when `append` returns: wait here before going on."""
        try:
            # Whoever is ready comes now, in the same turn: see the module.
            await asyncio.sleep(0)
        finally:
            self._is_turn_taken = False

    async def has_room(self, bytes_max: int) -> None:
        """Wait until fewer than `bytes_max` bytes wait, or the log has failed."""
        while self.pending_bytes >= bytes_max and self.failure is None and self._is_open:
            self._room.clear()
            await self._room.wait()

    async def drained(self) -> None:
        """Wait until nothing is queued or under way."""
        self._urgent.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Sync what is queued, then end."""
        if not self._is_open:
            return
        await self.drained()
        self._is_open = False
        self._room.set()
        await self._files.close()

    def abandon(self) -> None:
        """End at once: nothing further is written, whatever waits or is under way."""
        self._is_open = False
        self._latch(Closed("the store was given up", hint="open it again"))
        self._files.abandon()

    def let_go(self) -> None:
        """Close what is open, once no lane is at work any more."""
        self._files.let_go()

    # The flusher, in the loop.

    def _go_on(self) -> None:
        """Write what waits: behind every task that is ready, so that what they append joins the group."""
        if self._interval_s:
            self._pacing = asyncio.ensure_future(self._pause())
        else:
            self._loop.call_soon(self._hand_over)

    async def _pause(self) -> None:
        seconds = self._synced_at + self._interval_s - self._clock.monotonic()
        if seconds > 0 and not self._urgent.is_set():
            sleep = asyncio.ensure_future(self._clock.sleep(seconds))
            urgent = asyncio.ensure_future(self._urgent.wait())
            try:
                await asyncio.wait({sleep, urgent}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in (sleep, urgent):
                    each.cancel()
        self._hand_over()

    def _hand_over(self) -> None:
        is_waited_for = self._is_waited_for
        group, size = self._take_group()
        if not group:  # the log has failed in the meantime
            self._rest()
            return
        self._began = self._clock.monotonic()
        if self._files.has_room(size):
            is_everybody = is_waited_for and len(group) >= self._crowd
            is_quick = size <= HERE_BYTES_MAX and self._pace_s <= QUICK_SYNC_S
            self._write(group, size, is_here=self._is_eager and is_everybody and is_quick)
        else:
            self._files.begin(group[0].sequence, partial(self._begun, group, size))

    def _take_group(self) -> tuple[list[Item], int]:
        """Frames to be written together, and their bytes."""
        size = sum(item.size for item in self._pending)
        if size < GROUP_BYTES_MAX:
            group, self._pending = self._pending, []
        else:
            size, count = 0, 0
            for item in self._pending:
                size += item.size
                count += 1
                if size >= GROUP_BYTES_MAX:
                    break
            group, self._pending = self._pending[:count], self._pending[count:]
        if not self._pending:
            self._urgent.clear()
            self._is_waited_for = True
        return group, size

    def _begun(self, group: list[Item], size: int, problem: BaseException | None) -> None:
        if problem is None and self.failure is None:
            self._write(group, size)
        else:
            self._settle(group, size, self.failure or problem)

    def _write(self, group: list[Item], size: int, *, is_here: bool = False) -> None:
        file, active = self._files.handle, self._files.active
        assert file is not None
        assert active is not None
        try:
            pieces = _encoded(group, size, active.generation)
        except NotDone as problem:
            self._settle(group, size, problem)
            return
        run = self._disk.run_here if is_here else self._disk.submit
        run(
            self._lane,
            partial(_write_and_sync, file, active.size, pieces),
            partial(self._written, group, size),
        )

    def _written(self, group: list[Item], size: int, result: object, problem: BaseException | None) -> None:
        self._files.wrote(0 if problem else size, group[-1].sequence)
        self._settle(group, size, problem)

    def _settle(self, group: list[Item], size: int, problem: BaseException | None) -> None:
        seconds = self._measure(group, size)
        self._unsettled = group[-1].sequence + 1
        self.oldest_pending_at = self._synced_at if self._pending else None
        self._room.set()
        if problem is None:
            self._on_durable(group)
            for item in group:
                done = item.done
                if not done.done():
                    done.set_result(item.answer)
        elif isinstance(problem, OSError):
            _fail(group, from_os_error(f"writing the {self._suffix} file", problem))
        elif isinstance(problem, NotDone):
            _fail(group, problem)
        else:
            _fail(group, OutcomeUnknown(f"a write to the {self._suffix} file", reason=str(problem)))
            self._latch(problem)
        self._on_sync(len(group), seconds)
        if self._pending:
            self._go_on()
        else:
            self._rest()

    def _measure(self, group: list[Item], size: int) -> float:
        """What a group that is over says of the crowd and of the disk. Returns the seconds that it took."""
        self._synced_at = self._clock.monotonic()
        seconds = self._synced_at - self._began
        self._crowd = len(group) + len(self._pending)
        self.pending_bytes -= size
        if size <= HERE_BYTES_MAX:
            # Larger ones take longer on any disk, and are not written here anyway.
            self._pace_s += (seconds - self._pace_s) * _PACE_WEIGHT
        return seconds

    def _rest(self) -> None:
        self._is_working = False
        self._idle.set()

    def _latch(self, problem: BaseException | None) -> None:
        """A sync failed. What waits is certainly not written; a group that is under way has its own sync."""
        self.failure = QuiverFailed(str(problem))
        waiting, self._pending = self._pending, []
        self.pending_bytes -= sum(item.size for item in waiting)
        _fail(waiting, self.failure)
        self._room.set()

    # Files that come and go.

    async def remove(self, files: list[LogFile]) -> None:
        """Let go of files whose frames nobody needs, unless one is about to get further frames."""
        await self._files.remove(files, is_working=self._is_working, first_sequence=self._unsettled)

    async def prepare(self) -> None:
        """Have spares, when there is nothing to use again; and the first file."""
        await self._files.prepare(lambda: self._unsettled)

    async def drop_spares(self, keep: int = 0) -> None:
        """Give the space of spares back, but for some."""
        await self._files.drop_spares(keep)


def _encoded(group: list[Item], size: int, generation: int) -> list[Piece]:
    """The frames of a group. Raises `NotDone`: whatever is wrong with one, nothing is written yet."""
    pieces: list[Piece] = []
    try:
        for item in group:
            body, length = item.body, item.size - FRAME_OVERHEAD_BYTES
            before, behind = encode_frame(item.type, generation, item.sequence, item.time_ns, length, body)
            pieces.append(before)
            pieces += body
            pieces.append(behind)
    except Exception as error:
        raise NotDone(f"a frame cannot be encoded: {error!r}", hint="try it again") from error
    # Where the next group is written, and how long a body is, was counted by whoever appended.
    found = sum(map(len, pieces))
    if found != size:
        raise NotDone(f"{size:,} bytes of frames were counted, and {found:,} encoded", hint="try it again")
    return pieces


def _write_and_sync(file: DiskFile, offset: int, pieces: list[Piece]) -> None:
    try:
        file.write(offset, pieces)
    except OSError as error:
        # Take a torn frame back, for certain: what is told to have failed must not come back later.
        try:
            file.truncate(offset)
            file.sync()
        except OSError as second:
            raise SyncFailed(f"cutting a torn write back: {second}") from second
        raise error from None
    try:
        file.sync()
    except OSError as error:
        raise SyncFailed(f"sync: {error}") from error


def _fail(items: list[Item], problem: ForebayError) -> None:
    for item in items:
        if not item.done.done():
            item.done.set_exception(problem)
            # Whoever gave up waiting is not told twice by the event loop.
            item.done.exception()
