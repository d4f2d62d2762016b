"""The files of an append-only log: which there are, which one is written, and which comes next.

**Reuse.** A file whose frames nobody needs is kept as a *spare*, under another name, and written over later,
from its beginning; at the first opening spares are filled with zeros. A sync of bytes that change no size
needs no commit of the file system's journal: it takes half the time, and does not wait for the segment that
is being written beside it. A spare is renamed away, durably, before it is written; its new header is durable
before it gets its new name; frames of its earlier life have another generation.

**Ahead.** Beginning a file takes three syncs, which no caller should wait for. Where the settings say so, a
spare gets its header and its name as soon as its predecessor is begun, and is *ready*. One that is being made
ready is waited for: files get rising generations in the order of their frames, which recovery relies on. A
ready file is not in `files` before it is used, so that nobody trims it, and no checkpoint names it.

All state belongs to the event loop.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from forebay.errors import Closed
from forebay.formats.quiver_frame import FileHeader, encode_file_header
from forebay.quiver._disk import Disk, DiskFile, Lane, write_file
from forebay.quiver._errors import from_os_error
from forebay.quiver._to_the_end import on_its_own

__all__ = ["SPARE", "LogFile", "LogFiles", "LogSettings", "SyncFailed", "file_name", "generation_of"]

T = TypeVar("T")
SPARE: Final = "spare"
"""Suffix of a file that waits to be used again."""
_ZEROS: Final = bytes(1 << 20)


class SyncFailed(Exception):
    """Nobody knows what the disk holds."""


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
    """Make spares at every start that finds none, not at the first alone, and again when they are used up."""
    is_eager: bool = False
    """Write a frame at once where the one before it was alone, instead of at the end of the loop's turn. Not
    for a log that gets several frames in a row from one caller."""
    is_ahead: bool = False
    """Have the next file ready before it is needed, where there is a spare."""


def file_name(generation: int, suffix: str) -> str:
    """The name of a file, sorted as its number."""
    return f"{generation:016d}.{suffix}"


def generation_of(name: str, suffix: str) -> int | None:
    """The number in a name, or None where it is not one of the log's."""
    stem, dot, end = name.partition(".")
    return int(stem) if dot and end == suffix and len(stem) == 16 and stem.isdecimal() else None


class LogFiles:
    """See the module. `may_fill` says whether so many bytes of zeros may be written; `on_failed_sync` hears
    of a sync that failed where nobody waits for it."""

    def __init__(
        self,
        disk: Disk,
        settings: LogSettings,
        *,
        may_fill: Callable[[int], bool],
        on_failed_sync: Callable[[SyncFailed], None],
    ) -> None:
        self._disk = disk
        self._settings = settings
        self._directory = settings.directory
        self._may_fill = may_fill
        self._on_failed_sync = on_failed_sync
        self._spares: dict[str, int] = {}
        self._next_generation = 1
        self._ready: tuple[DiskFile, LogFile] | None = None
        self._is_readying = False
        self._is_filling = False
        self._taken_bytes = 0
        """Bytes of a spare that is on its way to becoming a log file."""
        self._is_open = False
        self._waiting: tuple[int, Callable[[BaseException | None], None]] | None = None
        self.files: dict[int, LogFile] = {}
        """Every file of the log that is on disk, by its number, but for spares and the one that is ready."""
        self.active: LogFile | None = None
        """The file that gets frames."""
        self.handle: DiskFile | None = None
        self.bytes = 0
        """Bytes of all files, spares included."""
        self.spare_bytes = 0
        """Bytes of the files that wait to be used again, the one that is ready included."""

    def start(self, files: list[LogFile], next_generation: int, spares: Sequence[tuple[str, int]]) -> None:
        """Go on behind what recovery found."""
        self.files = {file.generation: file for file in files}
        self._next_generation = next_generation
        self._spares = dict(spares)
        self._is_open = True
        self.count()

    def count(self) -> None:
        """Sizes are asked for with every append, so they are counted only when a file changes."""
        ready = 0 if self._ready is None else self._ready[1].bytes
        self.spare_bytes = sum(self._spares.values()) + ready + self._taken_bytes
        self.bytes = sum(file.bytes for file in self.files.values()) + self.spare_bytes

    def wrote(self, more: int, last_sequence: int) -> None:
        """Frames were added to the active file; none where `more` is 0, because the write was cut back."""
        active = self.active
        if active is None:
            return
        if more:
            active.size += more
            active.last_sequence = last_sequence
        else:
            active.allocated = active.size
        if active.allocated <= active.size:  # otherwise they took no space that it did not have
            self.count()

    # The next file.

    def has_room(self, more: int) -> bool:
        """Whether the active file takes so many bytes of frames."""
        active = self.active
        if active is None:
            return False
        if not active.allocated and (self._spares or self._ready is not None):
            # A file that still grows is left for a spare as soon as there is one.
            return False
        return active.last_sequence < 0 or active.size + more <= self._settings.file_bytes

    def begin(self, first_sequence: int, done: Callable[[BaseException | None], None]) -> None:
        """Make the next file the active one, and call `done`: at once where it is ready."""
        if not self._is_open:
            done(Closed("the store was given up", hint="open it again"))
            return
        if self._is_readying:
            self._waiting = (first_sequence, done)
            return
        old, self.handle, self.active = self.handle, None, None
        if self._ready is not None:
            if old is not None:
                self._disk.submit("files", old.close, lambda result, problem: None)
            ready, self._ready = self._ready, None
            # It was made ready for an earlier sequence; what is in memory may be exact.
            ready[1].first_sequence = first_sequence
            self._use(ready)
            done(None)
            self.look_ahead(first_sequence)
            return
        header, spare = self._next(first_sequence)

        def begun(result: tuple[DiskFile, LogFile] | None, problem: BaseException | None) -> None:
            self._settled(spare)
            if result is not None:
                self._use(result)
            done(problem)
            if result is not None:
                self.look_ahead(first_sequence)

        self._disk.submit(self._settings.lane, partial(self._begin_file, header, spare, old), begun)

    def _settled(self, spare: tuple[str, int] | None) -> None:
        self._taken_bytes -= 0 if spare is None else spare[1]
        self.count()

    def _use(self, opened: tuple[DiskFile, LogFile]) -> None:
        self.handle, self.active = opened
        self.files[self.active.generation] = self.active
        self.count()

    def _next(self, first_sequence: int) -> tuple[FileHeader, tuple[str, int] | None]:
        header = FileHeader(self._settings.magic, self._next_generation, first_sequence)
        self._next_generation += 1
        spare = next(iter(self._spares.items()), None)
        if spare is not None:
            # Used up even if the attempt fails: nobody knows its name then.
            self._taken_bytes += self._spares.pop(spare[0])
        return header, spare

    def look_ahead(self, first_sequence: int) -> None:
        """Get the next file ready. Its header names `first_sequence`: no frame that is still to be written is
        below, those that wait already included."""
        if not self._is_open:
            return
        if self._settings.is_always_prepared and not self._spares and not self._is_filling:
            self._refill()
        if self._settings.is_ahead and self._spares and self._ready is None and not self._is_readying:
            self._is_readying = True
            header, spare = self._next(first_sequence)
            self._disk.submit(
                "files", partial(self._begin_file, header, spare, None), partial(self._made_ready, spare)
            )

    def _refill(self) -> None:
        """Have a spare again at once: the next opening may find a full disk, and nothing can be given back
        there without a file to write into."""
        self._is_filling = True
        size = self._settings.spare_bytes
        name = self._new_name()

        def filled(result: object, problem: BaseException | None) -> None:
            self._is_filling = False
            if problem is None:  # otherwise the next file tries again, or the next opening
                self._spares[name] = size
                self.count()

        self._disk.submit("files", partial(self._fill, name, size), filled)

    def _new_name(self) -> str:
        # One that was never given: another spare may be in the lane, becoming a log file.
        self._next_generation += 1
        return file_name(self._next_generation - 1, SPARE)

    def _made_ready(
        self,
        spare: tuple[str, int] | None,
        result: tuple[DiskFile, LogFile] | None,
        problem: BaseException | None,
    ) -> None:
        self._is_readying = False
        self._ready = result
        self._settled(spare)
        waiting, self._waiting = self._waiting, None
        if isinstance(problem, SyncFailed):
            self._on_failed_sync(problem)
            if waiting is not None:
                waiting[1](problem)
        elif waiting is not None:
            self.begin(*waiting)

    # Files that come and go.

    def abandon(self) -> None:
        """Begin no further file."""
        self._is_open = False

    def let_go(self) -> None:
        """Close what is open, once no lane is at work any more."""
        handles = [self.handle, None if self._ready is None else self._ready[0]]
        self.handle = self.active = self._ready = None
        for handle in handles:
            if handle is not None:
                handle.close()

    async def close(self) -> None:
        """Close what is open. A ready file stays: the next opening finds no frame in it."""
        self._is_open = False
        # Behind what is being made ready there.
        await self._disk.run("files", lambda: None)
        handles = [self.handle, None if self._ready is None else self._ready[0]]
        self.handle = self.active = self._ready = None
        for handle in handles:
            if handle is not None:
                await self._disk.run(self._settings.lane, handle.close)

    async def remove(self, files: list[LogFile], *, is_working: bool, first_sequence: int) -> None:
        """Let go of files whose frames nobody needs, unless one is about to get further frames."""
        wanted = []
        for file in files:
            if file is self.active:
                if is_working:
                    continue
                handle, self.handle, self.active = self.handle, None, None
                if handle is not None:
                    await self._disk.run(self._settings.lane, handle.close)
            wanted.append(file)
        if not wanted:
            return
        keep: dict[str, int] = {}
        room = self._settings.spares_max - len(self._spares)
        room -= self._is_readying or self._ready is not None
        for file in wanted:
            if len(keep) >= room:
                break
            # A short file would have to grow, and one with a large frame in it is too much to keep.
            if self._settings.spare_bytes // 2 <= file.bytes <= 2 * self._settings.file_bytes:
                keep[file_name(file.generation, SPARE)] = file.bytes
        kept = await self._in_files(lambda: self._remove(wanted, keep))
        for file in wanted:
            self.files.pop(file.generation, None)
        self._spares.update({name: keep[name] for name in kept})
        self.count()
        self.look_ahead(first_sequence)

    async def prepare(self, first_sequence: Callable[[], int]) -> None:
        """Have spares, when there is nothing to use again; and the first file."""
        settings = self._settings
        if self._spares or self._is_filling or (self.files and not settings.is_always_prepared):
            self.look_ahead(first_sequence())
            return
        self._is_filling = True
        try:
            for _ in range(settings.spares_max):
                if not self._may_fill(settings.spare_bytes):
                    break
                name = self._new_name()
                await self._in_files(partial(self._fill, name, settings.spare_bytes))
                self._spares[name] = settings.spare_bytes
                self.count()
                self.look_ahead(first_sequence())
        finally:
            self._is_filling = False

    async def drop_spares(self, keep: int = 0) -> None:
        """Give the space of spares back, but for some."""
        if self._is_readying:
            await self._disk.run("files", lambda: None)
        spares = dict(list(self._spares.items())[keep:])
        for name in spares:
            del self._spares[name]
        names = list(spares)
        ready = None
        if not keep and self._ready is not None:
            ready, self._ready = self._ready, None
            names.append(file_name(ready[1].generation, self._settings.suffix))
        if not names:
            return
        self.count()

        left = list(names)

        def work() -> None:
            if ready is not None:
                ready[0].close()
            for name in names:
                self._disk.remove(f"{self._directory}/{name}")
                left.remove(name)
            self._disk.sync_directory(self._directory)

        async def drop() -> None:
            try:
                await self._in_files(work)
            finally:
                # What is still there counts, and is tried again: a spare as one, the ready file as one to
                # trim.
                self._spares.update({name: size for name, size in spares.items() if name in left})
                if ready is not None and names[-1] in left:
                    self.files[ready[1].generation] = ready[1]
                self.count()

        await on_its_own(drop())

    async def _in_files(self, work: Callable[[], T]) -> T:
        try:
            return await self._disk.run("files", work)
        except OSError as error:
            raise from_os_error(f"giving {self._settings.suffix} files back", error) from error

    # In a lane.

    def _fill(self, name: str, size: int) -> None:
        place = f"{self._directory}/{name}"
        zeros = (_ZEROS[: size - offset] for offset in range(0, size, len(_ZEROS)))
        write_file(self._disk, place, zeros, is_aside=True)
        try:
            self._disk.sync_directory(self._directory)
        except OSError:
            self._disk.remove(place)
            raise

    def _begin_file(
        self, header: FileHeader, spare: tuple[str, int] | None, old: DiskFile | None
    ) -> tuple[DiskFile, LogFile]:
        if old is not None:
            old.close()
        name = f"{self._directory}/{file_name(header.generation, self._settings.suffix)}"
        place = name if spare is None else f"{self._directory}/{spare[0]}"
        try:
            file = self._disk.open(place, create=spare is None)
        except OSError:
            if spare is not None:  # nobody counts it any more
                self._disk.remove(place)
            raise
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
            raise SyncFailed(f"beginning a file: {error}") from error
        allocated = 0 if spare is None else spare[1]
        return file, LogFile(header.generation, len(data), header.first_sequence, allocated=allocated)

    def _remove(self, files: list[LogFile], keep: dict[str, int]) -> list[str]:
        kept = []
        for file in files:
            place = f"{self._directory}/{file_name(file.generation, self._settings.suffix)}"
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
