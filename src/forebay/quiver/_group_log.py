"""An append-only log over numbered files, with group commit. The WAL and `ack.log` are both one of these.

**Invariant.** A caller hears of success only after a finished `sync` that covers its frame. While one sync
runs, the next group collects, so groups follow the load without a timer; `flush_interval_ms` can only make a
group wait longer.

**Failures.** A write that fails (a full disk) is cut back to the last good end and the cut is synced: those
callers get `NotDone`, later ones may succeed. A sync that fails, of data or of a directory, latches: the
kernel may have thrown the pages away, and a second sync would report success for data that is gone. Callers
in that group get `OutcomeUnknown`, everybody after them `QuiverFailed`, until the store is reopened.

**Crash points.** File made but name not synced: no frame in it was acknowledged. Frames written, not synced:
recovery keeps what is whole. An old file is never written again: each opening begins a new one, so a torn
tail stays where it is until its file goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from forebay.errors import Closed, ForebayError, OutcomeUnknown
from forebay.formats.quiver_frame import (
    FRAME_OVERHEAD_BYTES,
    FileHeader,
    encode_file_header,
    encode_frame,
)
from forebay.kit.clock import Clock
from forebay.quiver._disk import Disk, DiskFile, Lane, Piece
from forebay.quiver._errors import QuiverFailed, from_os_error

__all__ = ["GroupLog", "Item", "LogFile", "LogSettings", "file_name", "generation_of"]

GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes at which a group of a Quiver log is closed, so that one write stays short."""


@dataclass(slots=True)
class Item:
    """One frame on its way."""

    sequence: int
    type: int
    time_ns: int
    body: Piece
    payload: Any
    done: asyncio.Future[None]


@dataclass(slots=True)
class LogFile:
    """A file of the log."""

    generation: int
    size: int = 0
    first_sequence: int = 0
    """No frame in it is below."""
    last_sequence: int = -1
    """Highest sequence in it, -1 where it has none."""


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
    """Bytes at which the next file is begun."""
    flush_interval_ms: int = 0


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
        self._lane = settings.lane
        self._directory = settings.directory
        self._suffix = settings.suffix
        self._magic = settings.magic
        self._file_bytes = settings.file_bytes
        self._interval_s = settings.flush_interval_ms / 1000
        self._clock = clock
        self._on_durable = on_durable
        self._on_sync = on_sync
        self._pending: list[Item] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._urgent = asyncio.Event()
        self._file: DiskFile | None = None
        self._active: LogFile | None = None
        self._next_generation = 1
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.files: dict[int, LogFile] = {}
        """Every file of the log that is on disk, by its number."""
        self.next_sequence = 1
        self.pending_bytes = 0
        """Encoded bytes that no sync covers yet."""
        self.oldest_pending_at: float | None = None
        self.failure: QuiverFailed | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in list(self.files.values()))

    def start(self, files: list[LogFile], next_generation: int, next_sequence: int) -> None:
        """Go on behind what recovery found."""
        self.files = {file.generation: file for file in files}
        self._next_generation = next_generation
        self.next_sequence = next_sequence
        self._task = asyncio.create_task(self._flush_forever())

    def append(self, type_: int, time_ns: int, body: Piece, payload: Any = None) -> Item:
        """Queue a frame. `item.done` ends once it is durable, or fails."""
        if self.failure is not None:
            raise self.failure
        if self._closing or self._task is None:
            raise Closed("the store is closed", hint="open it again")
        item = Item(
            self.next_sequence, type_, time_ns, body, payload, asyncio.get_running_loop().create_future()
        )
        self.next_sequence += 1
        self._pending.append(item)
        self.pending_bytes += len(body) + FRAME_OVERHEAD_BYTES
        if self.oldest_pending_at is None:
            self.oldest_pending_at = self._clock.monotonic()
        if self.pending_bytes >= GROUP_BYTES_MAX:
            self._urgent.set()
        self._idle.clear()
        self._wake.set()
        return item

    async def has_room(self, bytes_max: int) -> None:
        """Wait until fewer than `bytes_max` bytes wait, or the log has failed."""
        while self.pending_bytes >= bytes_max and self.failure is None and not self._closing:
            self._room.clear()
            await self._room.wait()

    async def drained(self) -> None:
        """Wait until nothing is queued or under way."""
        self._urgent.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Sync what is queued, then end."""
        if self._task is None:
            return
        await self.drained()
        self._closing = True
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        await self._disk.run(self._lane, self._close_file)
        self._room.set()

    async def remove(self, files: list[LogFile]) -> None:
        """Delete files whose frames nobody needs, unless one got further frames in the meantime."""
        wanted = [(file.generation, file.last_sequence) for file in files]
        if wanted:
            gone = await self._disk.run(self._lane, lambda: self._remove(wanted))
            for generation in gone:
                self.files.pop(generation, None)

    # The flusher.

    async def _flush_forever(self) -> None:
        last = self._clock.monotonic() - self._interval_s
        while True:
            await self._wake.wait()
            if self._interval_s:
                await self._pause(last + self._interval_s - self._clock.monotonic())
            group = self._take_group()
            began = self._clock.monotonic()
            problem: Exception | None = None
            try:
                await self._disk.run(self._lane, lambda group=group: self._write(group))  # type: ignore[misc]
            except (_SyncFailed, OSError) as error:
                problem = error
            last = self._clock.monotonic()
            self._settle(group, problem)
            self._on_sync(len(group), last - began)

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0 or self._urgent.is_set():
            return
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        urgent = asyncio.ensure_future(self._urgent.wait())
        try:
            await asyncio.wait({sleep, urgent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (sleep, urgent):
                each.cancel()

    def _take_group(self) -> list[Item]:
        size, count = 0, 0
        for item in self._pending:
            size += len(item.body)
            count += 1
            if size >= GROUP_BYTES_MAX:
                break
        group, self._pending = self._pending[:count], self._pending[count:]
        if not self._pending:
            self._wake.clear()
            self._urgent.clear()
        return group

    def _settle(self, group: list[Item], problem: Exception | None) -> None:
        self.pending_bytes -= sum(len(item.body) + FRAME_OVERHEAD_BYTES for item in group)
        self.oldest_pending_at = self._clock.monotonic() if self._pending else None
        self._room.set()
        if problem is None:
            self._on_durable(group)
            for item in group:
                if not item.done.done():
                    item.done.set_result(None)
        elif isinstance(problem, OSError):
            _fail(group, from_os_error(f"writing the {self._suffix} file", problem))
        else:
            self.failure = QuiverFailed(str(problem))
            _fail(group, OutcomeUnknown(f"a write to the {self._suffix} file", reason=str(problem)))
            _fail(self._pending, self.failure)
            self._pending, self.pending_bytes = [], 0
            self._wake.clear()
        if not self._pending:
            self._idle.set()

    # In the lane.

    def _write(self, group: list[Item]) -> None:
        if self._active is not None and self._active.size >= self._file_bytes:
            self._close_file()
        if self._file is None:
            self._begin_file(group[0].sequence)
        file, active = self._file, self._active
        assert file is not None
        assert active is not None
        pieces: list[Piece] = []
        for item in group:
            before, behind = encode_frame(
                item.type, active.generation, item.sequence, item.time_ns, item.body
            )
            pieces += (before, item.body, behind)
        try:
            file.write(active.size, pieces)
        except OSError as error:
            self._cut(file, active.size)
            raise error from None
        try:
            file.sync()
        except OSError as error:
            raise _SyncFailed(f"sync: {error}") from error
        active.size += sum(map(len, pieces))
        active.last_sequence = group[-1].sequence

    def _begin_file(self, first_sequence: int) -> None:
        generation = self._next_generation
        self._next_generation += 1
        name = f"{self._directory}/{file_name(generation, self._suffix)}"
        file = self._disk.open(name, create=True)
        header = encode_file_header(FileHeader(self._magic, generation, first_sequence))
        try:
            file.write(0, [header])
        except OSError:
            file.close()
            self._disk.remove(name)
            raise
        # Header and name are durable before any frame is: a file without a good header holds no frame, and
        # one with frames and a bad header is damaged for certain.
        try:
            file.sync()
            self._disk.sync_directory(self._directory)
        except OSError as error:
            file.close()
            raise _SyncFailed(f"beginning a file: {error}") from error
        self._file = file
        self._active = self.files[generation] = LogFile(generation, len(header), first_sequence)

    def _remove(self, wanted: list[tuple[int, int]]) -> list[int]:
        gone = []
        for generation, last in wanted:
            if self._active is not None and self._active.generation == generation:
                if self._active.last_sequence != last:
                    continue
                self._close_file()
            self._disk.remove(f"{self._directory}/{file_name(generation, self._suffix)}")
            gone.append(generation)
        self._disk.sync_directory(self._directory)
        return gone

    def _cut(self, file: DiskFile, size: int) -> None:
        """Take a torn frame back, for certain: what is told to have failed must not come back later."""
        try:
            file.truncate(size)
            file.sync()
        except OSError as error:
            raise _SyncFailed(f"cutting a torn write back: {error}") from error

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._active = None


def _fail(items: list[Item], problem: ForebayError) -> None:
    for item in items:
        if not item.done.done():
            item.done.set_exception(problem)
            # Whoever gave up waiting is not told twice by the event loop.
            item.done.exception()
