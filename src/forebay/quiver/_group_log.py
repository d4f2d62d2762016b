"""An append-only log over numbered files, with group commit. The WAL and `ack.log` are both one of these.

**Invariant.** A caller hears of success only after a finished `sync` that covers its frame. While one sync
runs, the next group collects, so groups follow the load without a timer; `flush_interval_ms` can only make a
group wait longer. All state belongs to the event loop; the lane writes, syncs, and makes files.

**Reuse.** A file whose frames nobody needs is kept as a *spare*, under another name, and written over later,
from its beginning; at the first start one is filled with zeros. A sync of bytes that change no size needs no
commit of the file system's journal: it takes half the time, and does not wait for the segment that is being
written beside it. A spare is renamed away, durably, before it is written; its new header is durable before it
gets its new name; frames of its earlier life have another generation.

**Failures.** A write that fails (a full disk) is cut back to the last good end and the cut is synced: those
callers get `NotDone`, later ones may succeed. A sync that fails, of data or of a directory, latches: the
kernel may have thrown the pages away, and a second sync would report success for data that is gone. Callers
in that group get `OutcomeUnknown`, everybody after them `QuiverFailed`, until the store is reopened.

**Crash points.** File made but name not synced: no frame in it was acknowledged. Frames written, not synced:
recovery keeps what is whole. A file with frames is never continued: each opening begins a new one, so a torn
tail stays where it is until its file goes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from forebay.errors import Closed, ForebayError, OutcomeUnknown
from forebay.formats.quiver_frame import (
    FRAME_OVERHEAD_BYTES,
    FileHeader,
    check_body,
    encode_file_header,
    encode_frame,
)
from forebay.kit.clock import Clock
from forebay.quiver._disk import Disk, DiskFile, Lane, Piece
from forebay.quiver._errors import QuiverFailed, from_os_error

__all__ = ["SPARE", "GroupLog", "Item", "LogFile", "LogSettings", "file_name", "generation_of"]

T = TypeVar("T")
GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes at which a group of a Quiver log is closed, so that one write stays short."""
SPARE: Final = "spare"
"""Suffix of a file that waits to be used again."""
_ZEROS: Final = bytes(1 << 20)


@dataclass(slots=True)
class Item:
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


@dataclass(slots=True)
class LogFile:
    """A file of the log."""

    generation: int
    size: int = 0
    """Where its frames end. After recovery: all of it."""
    first_sequence: int = 0
    """No frame in it is below."""
    last_sequence: int = -1
    """Highest sequence in it, -1 where it has none."""
    allocated: int = 0
    """Bytes it had when it was begun."""

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return max(self.size, self.allocated)


class _SyncFailed(Exception):
    """Nobody knows what the disk holds."""


def file_name(generation: int, suffix: str) -> str:
    """The name of a file, sorted as its number."""
    return f"{generation:016d}.{suffix}"


def generation_of(name: str, suffix: str) -> int | None:
    """The number in a name, or None where it is not one of the log's."""
    stem, dot, end = name.partition(".")
    return int(stem) if dot and end == suffix and len(stem) == 16 and stem.isdecimal() else None


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What tells one log from the other."""

    lane: Lane
    directory: str
    suffix: str
    magic: bytes
    file_bytes: int
    """Bytes that a file should not pass."""
    flush_interval_ms: int = 0
    spares_max: int = 0
    """Files kept for reuse."""
    spare_bytes: int = 0
    """Bytes of one that is made for it. Where it is at hand, frames need no new space on the disk."""
    is_always_prepared: bool = False
    """Make one at every start that finds none, not at the first alone."""


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
    ) -> None:
        self._disk = disk
        self._settings = settings
        self._directory = settings.directory
        self._suffix = settings.suffix
        self._interval_s = settings.flush_interval_ms / 1000
        self._clock = clock
        self._on_durable = on_durable
        self._on_sync = on_sync
        self._pending: list[Item] = []
        self._is_open = False
        self._is_working = False
        self._began = 0.0
        self._synced_at = clock.monotonic() - self._interval_s
        self._pacing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._urgent = asyncio.Event()
        self._file: DiskFile | None = None
        self._active: LogFile | None = None
        self._next_generation = 1
        self._spares: dict[str, int] = {}
        self.files: dict[int, LogFile] = {}
        """Every file of the log that is on disk, by its number."""
        self.bytes = 0
        """Bytes of all files, spares included."""
        self.spare_bytes = 0
        """Bytes of the files that wait to be used again."""
        self.next_sequence = 1
        self.pending_bytes = 0
        """Encoded bytes that no sync covers yet."""
        self.oldest_pending_at: float | None = None
        self.failure: QuiverFailed | None = None

    def _count(self) -> None:
        """Asked for with every append, so it is counted only when a file changes."""
        self.spare_bytes = sum(self._spares.values())
        self.bytes = sum(file.bytes for file in self.files.values()) + self.spare_bytes

    def projected_bytes(self, more: int) -> int:
        """Bytes of all files once everything that waits, and `more` bytes besides, are written."""
        more += self.pending_bytes
        free = 0 if self._active is None else self._active.bytes - self._active.size
        return self.bytes + (0 if more <= free else max(0, more - self.spare_bytes))

    def start(
        self,
        files: list[LogFile],
        next_generation: int,
        next_sequence: int,
        spares: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Go on behind what recovery found."""
        self.files = {file.generation: file for file in files}
        self._next_generation = next_generation
        self.next_sequence = next_sequence
        self._spares = dict(spares)
        self._is_open = True
        self._count()

    def append(self, type_: int, time_ns: int, body: Sequence[Piece], size: int, payload: Any = None) -> Item:
        """Queue a frame whose body has `size` bytes. `item.done` ends once it is durable, or fails."""
        if self.failure is not None:
            raise self.failure
        if not self._is_open:
            raise Closed("the store is closed", hint="open it again")
        check_body(size)
        size += FRAME_OVERHEAD_BYTES
        done = asyncio.get_running_loop().create_future()
        item = Item(self.next_sequence, type_, time_ns, body, size, payload, done)
        self.next_sequence += 1
        self._pending.append(item)
        self.pending_bytes += size
        if self.oldest_pending_at is None:
            self.oldest_pending_at = self._clock.monotonic()
        if self.pending_bytes >= GROUP_BYTES_MAX:
            self._urgent.set()
        if not self._is_working:
            self._is_working = True
            self._idle.clear()
            self._go_on()
        return item

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
        file, self._file, self._active = self._file, None, None
        if file is not None:
            await self._disk.run(self._settings.lane, file.close)

    # The flusher, in the loop.

    def _go_on(self) -> None:
        """Write what waits: behind every task that is ready, so that what they append joins the group."""
        if self._interval_s:
            self._pacing = asyncio.ensure_future(self._pause())
        else:
            asyncio.get_running_loop().call_soon(self._hand_over)

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
        group = self._take_group()
        self._began = self._clock.monotonic()
        active = self._active
        # A file that still grows is left for a spare as soon as there is one.
        grows = active is not None and not active.allocated and bool(self._spares)
        if (
            active is not None
            and not grows
            and (
                active.last_sequence < 0
                or active.size + sum(item.size for item in group) <= self._settings.file_bytes
            )
        ):
            self._write(group)
            return
        header = FileHeader(self._settings.magic, self._next_generation, group[0].sequence)
        self._next_generation += 1
        spare = next(iter(self._spares.items()), None)
        if spare is not None:
            # Used up even if the attempt fails: nobody knows its name then.
            del self._spares[spare[0]]
            self._count()
        old, self._file, self._active = self._file, None, None
        self._disk.submit(
            self._settings.lane,
            partial(self._begin_file, header, spare, old),
            partial(self._begun, group),
        )

    def _take_group(self) -> list[Item]:
        if self.pending_bytes < GROUP_BYTES_MAX:
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
        return group

    def _begun(
        self, group: list[Item], result: tuple[DiskFile, LogFile] | None, problem: BaseException | None
    ) -> None:
        if result is None:
            self._settle(group, problem)
            return
        self._file, self._active = result
        self.files[self._active.generation] = self._active
        self._count()
        self._write(group)

    def _write(self, group: list[Item]) -> None:
        file, active = self._file, self._active
        assert file is not None
        assert active is not None
        pieces: list[Piece] = []
        generation = active.generation
        for item in group:
            before, behind = encode_frame(item.type, generation, item.sequence, item.time_ns, *item.body)
            pieces.append(before)
            pieces += item.body
            pieces.append(behind)
        self._disk.submit(
            self._settings.lane,
            partial(_write_and_sync, file, active.size, pieces),
            partial(self._written, group),
        )

    def _written(self, group: list[Item], result: object, problem: BaseException | None) -> None:
        active = self._active
        if problem is None and active is not None:
            active.size += sum(item.size for item in group)
            active.last_sequence = group[-1].sequence
        elif active is not None:
            active.allocated = active.size
        self._count()
        self._settle(group, problem)

    def _settle(self, group: list[Item], problem: BaseException | None) -> None:
        now = self._clock.monotonic()
        self._synced_at = now
        self.pending_bytes -= sum(item.size for item in group)
        self.oldest_pending_at = now if self._pending else None
        self._room.set()
        if problem is None:
            self._on_durable(group)
            for item in group:
                if not item.done.done():
                    item.done.set_result(item.answer)
        elif isinstance(problem, OSError):
            _fail(group, from_os_error(f"writing the {self._suffix} file", problem))
        else:
            self.failure = QuiverFailed(str(problem))
            _fail(group, OutcomeUnknown(f"a write to the {self._suffix} file", reason=str(problem)))
            _fail(self._pending, self.failure)
            self._pending, self.pending_bytes = [], 0
        self._on_sync(len(group), now - self._began)
        if self._pending:
            self._go_on()
        else:
            self._is_working = False
            self._idle.set()

    # Files that come and go.

    async def remove(self, files: list[LogFile]) -> None:
        """Let go of files whose frames nobody needs, unless one is about to get further frames."""
        wanted = []
        for file in files:
            if file is self._active:
                if self._is_working:
                    continue
                handle, self._file, self._active = self._file, None, None
                if handle is not None:
                    await self._disk.run(self._settings.lane, handle.close)
            wanted.append(file)
        if not wanted:
            return
        keep: dict[str, int] = {}
        for file in wanted:
            if len(self._spares) + len(keep) >= self._settings.spares_max:
                break
            # A short file would have to grow, and one with a large frame in it is too much to keep.
            if self._settings.spare_bytes // 2 <= file.bytes <= 2 * self._settings.file_bytes:
                keep[file_name(file.generation, SPARE)] = file.bytes
        kept = await self._in_files(lambda: self._remove(wanted, keep))
        for file in wanted:
            self.files.pop(file.generation, None)
        self._spares.update({name: keep[name] for name in kept})
        self._count()

    async def prepare(self) -> None:
        """Have a spare, when there is nothing to use again."""
        settings = self._settings
        if settings.spares_max == 0 or self._spares or (self.files and not settings.is_always_prepared):
            return
        # A name that was never given: another spare may be in the lane, on its way to becoming a log file.
        name = file_name(self._next_generation, SPARE)
        self._next_generation += 1
        size = settings.spare_bytes

        def work() -> None:
            place = f"{self._directory}/{name}"
            file = self._disk.open(place, create=True)
            try:
                for offset in range(0, size, len(_ZEROS)):
                    file.write(offset, [_ZEROS[: size - offset]])
                file.sync()
            except OSError:
                self._disk.remove(place)
                raise
            finally:
                file.close()
            self._disk.sync_directory(self._directory)

        await self._in_files(work)
        self._spares[name] = size
        self._count()

    async def drop_spares(self, keep: int = 0) -> None:
        """Give the space of spares back, but for some."""
        names = list(self._spares)[keep:]
        if not names:
            return
        for name in names:
            del self._spares[name]
        self._count()

        def work() -> None:
            for name in names:
                self._disk.remove(f"{self._directory}/{name}")
            self._disk.sync_directory(self._directory)

        await self._in_files(work)

    async def _in_files(self, work: Callable[[], T]) -> T:
        try:
            return await self._disk.run("files", work)
        except OSError as error:
            raise from_os_error(f"giving {self._suffix} files back", error) from error

    # In a lane.

    def _begin_file(
        self, header: FileHeader, spare: tuple[str, int] | None, old: DiskFile | None
    ) -> tuple[DiskFile, LogFile]:
        if old is not None:
            old.close()
        name = f"{self._directory}/{file_name(header.generation, self._suffix)}"
        place = name if spare is None else f"{self._directory}/{spare[0]}"
        file = self._disk.open(place, create=spare is None)
        data = encode_file_header(
            FileHeader(header.magic, header.generation, header.first_sequence, is_reused=spare is not None)
        )
        try:
            file.write(0, [data])
        except OSError:
            file.close()
            self._disk.remove(place)
            raise
        # Header and name are durable before any frame is: a file without a good header holds no frame, and
        # one with frames and a bad header is damaged for certain.
        try:
            file.sync()
            if spare is not None:
                self._disk.rename(place, name)
            self._disk.sync_directory(self._directory)
        except OSError as error:
            file.close()
            raise _SyncFailed(f"beginning a file: {error}") from error
        allocated = 0 if spare is None else spare[1]
        return file, LogFile(header.generation, len(data), header.first_sequence, allocated=allocated)

    def _remove(self, files: list[LogFile], keep: dict[str, int]) -> list[str]:
        kept = []
        for file in files:
            place = f"{self._directory}/{file_name(file.generation, self._suffix)}"
            spare = file_name(file.generation, SPARE)
            if spare in keep:
                try:
                    self._disk.rename(place, f"{self._directory}/{spare}")
                    kept.append(spare)
                    continue
                except OSError as error:
                    # Renamed by an attempt that failed later: its space is better given back.
                    if error.errno == errno.ENOENT:
                        self._disk.remove(f"{self._directory}/{spare}")
            self._disk.remove(place)
        self._disk.sync_directory(self._directory)
        return kept


def _write_and_sync(file: DiskFile, offset: int, pieces: list[Piece]) -> None:
    try:
        file.write(offset, pieces)
    except OSError as error:
        # Take a torn frame back, for certain: what is told to have failed must not come back later.
        try:
            file.truncate(offset)
            file.sync()
        except OSError as second:
            raise _SyncFailed(f"cutting a torn write back: {second}") from second
        raise error from None
    try:
        file.sync()
    except OSError as error:
        raise _SyncFailed(f"sync: {error}") from error


def _fail(items: list[Item], problem: ForebayError) -> None:
    for item in items:
        if not item.done.done():
            item.done.set_exception(problem)
            # Whoever gave up waiting is not told twice by the event loop.
            item.done.exception()
