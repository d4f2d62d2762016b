"""The real disk: a directory of the machine, and a thread for each lane."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from forebay.kit.disk_writes import write_out
from forebay.quiver._disk import DiskFile, Lane, Piece

__all__ = ["LocalDisk", "make_directories", "sync_directory"]

T = TypeVar("T")
_Job: TypeAlias = tuple[Callable[[], Any], Callable[[Any, Any], None], asyncio.AbstractEventLoop]
_PIECES_PER_CALL: Final = 512
"""Pieces of one writev, below the system's own bound of 1,024."""
_LOCK_NAME: Final = "lock"
_ASIDE_BYTES: Final = 512 * 1024
"""Bytes that the disk gets at once of what nobody waits for: a sync waits behind one such piece at most."""


class LocalDisk:
    """See `forebay.quiver._disk`. The directory is made if it is missing; its parent must be there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path)
        self._lanes: dict[Lane, _Thread] = {}
        self._lock: int | None = None
        self._directories: dict[str, int] = {}
        """Descriptors of directories, kept: where a process has none to spare, a sync that could not even be
        tried would count as one that failed, and stop the store."""
        self._can_protect = True

    def open(self, name: str, *, create: bool = False) -> DiskFile:
        """A descriptor of its own."""
        flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return _LocalFile(os.open(self._root / name, flags, 0o640))

    def read(self, name: str) -> memoryview:
        """A private map; the descriptor is not kept."""
        with (self._root / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """One pread."""
        descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def list(self, directory: str) -> list[tuple[str, int]]:
        """Files only."""
        found = []
        with os.scandir(self._root / directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
        return sorted(found)

    def make_directory(self, directory: str) -> None:
        """mkdir, and a sync of the directory above."""
        path = self._root / directory
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o750)
            sync_directory(path.parent)
        if directory not in self._directories:
            self._directories[directory] = _open_directory(path)

    def sync_directory(self, directory: str) -> None:
        """fsync of the directory."""
        descriptor = self._directories.get(directory)
        if descriptor is None:
            sync_directory(self._root / directory)
        else:
            os.fsync(descriptor)

    def rename(self, old: str, new: str) -> None:
        """rename(2)."""
        (self._root / old).rename(self._root / new)

    def remove(self, name: str) -> None:
        """unlink(2)."""
        (self._root / name).unlink(missing_ok=True)

    def protect(self, name: str) -> None:
        """chmod 0440. A file system that knows no modes is asked once."""
        if not self._can_protect:
            return
        try:
            (self._root / name).chmod(0o440)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
                raise
            self._can_protect = False

    def lock(self) -> None:
        """flock on a file of the directory: the kernel lets go of it when the process dies."""
        descriptor = os.open(self._root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before may have removed the directory with the file that is locked now.
            if not os.path.samestat(os.fstat(descriptor), (self._root / _LOCK_NAME).stat()):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, error.strerror, str(self._root)) from None
        self._lock = descriptor

    def unlock(self) -> None:
        """Close the lock file. It stays: removing it would let two processes lock two files."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def submit(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """To the thread of the lane, made at the first call."""
        thread = self._lanes.get(lane)
        if thread is None:
            thread = self._lanes[lane] = _Thread(lane)
        thread.under_way += 1
        thread.jobs.put((work, done, asyncio.get_running_loop()))

    def run_here(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Between the jobs of the lane, which is as if its thread had done it."""
        thread = self._lanes.get(lane)
        if thread is not None and thread.under_way:
            self.submit(lane, work, done)
            return
        result, problem = _outcome(work)
        done(result, problem)
        if problem is not None and not isinstance(problem, Exception):
            raise problem

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        """In the thread of the lane."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.submit(lane, work, partial(_answer, future))
        # Whoever stops waiting cancels the future alone; the work goes on to its end.
        return await future

    async def close(self) -> None:
        """Wait for every lane."""
        lanes, self._lanes = self._lanes, {}
        for thread in lanes.values():
            thread.jobs.put(None)
        for thread in lanes.values():
            while thread.is_alive():
                await asyncio.sleep(0)
                thread.join(0.001)
        await asyncio.sleep(0)  # the outcomes of the last jobs are told
        directories, self._directories = self._directories, {}
        for descriptor in directories.values():
            os.close(descriptor)


class _Thread(threading.Thread):
    """Runs jobs in order and answers through the loop. Lighter than an executor: half the hops."""

    def __init__(self, lane: str) -> None:
        super().__init__(name=f"quiver-{lane}", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.under_way = 0
        """Jobs whose outcome was not told yet. Belongs to the event loop."""
        self.start()

    def run(self) -> None:
        """Until None comes."""
        while (job := self.jobs.get()) is not None:
            work, done, loop = job
            result, problem = _outcome(work)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._tell, done, result, problem)
            del work, done, result, problem, job

    def _tell(self, done: Callable[[Any, Any], None], result: Any, problem: BaseException | None) -> None:
        self.under_way -= 1
        done(result, problem)


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _answer(future: asyncio.Future[Any], result: Any, problem: BaseException | None) -> None:
    if future.done():
        return
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(problem)


class _LocalFile:
    """A descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, offset: int, pieces: Sequence[Piece]) -> None:
        """pwritev until all is written: a short write is no error, but says nothing of the rest."""
        if len(pieces) <= _PIECES_PER_CALL:
            written = os.pwritev(self._descriptor, pieces, offset)
            if written == sum(map(len, pieces)):
                return
        # Writing the first pieces again does no harm, and a short write is rare.
        ahead = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while ahead:
            written = os.pwritev(self._descriptor, ahead[:_PIECES_PER_CALL], offset)
            offset += written
            done = 0
            while done < len(ahead) and written >= len(ahead[done]):
                written -= len(ahead[done])
                done += 1
            ahead = ahead[done:]
            if ahead and written:
                ahead[0] = ahead[0][written:]

    def write_aside(self, offset: int, pieces: Iterable[Piece]) -> None:
        """Pieces of some 512 KiB, each handed to the disk before the next is written. Left to itself, the
        kernel would hand all of it over at the sync, and every sync of the WAL would wait behind it."""
        waiting: list[Piece] = []
        size = 0
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                part, view = view[: _ASIDE_BYTES - size], view[_ASIDE_BYTES - size :]
                waiting.append(part)
                size += len(part)
                if size == _ASIDE_BYTES:
                    self.write(offset, waiting)
                    write_out(self._descriptor, offset, size)
                    offset, waiting, size = offset + size, [], 0
        if waiting:
            self.write(offset, waiting)

    def truncate(self, size: int) -> None:
        """ftruncate."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """fdatasync."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """close."""
        os.close(self._descriptor)


def make_directories(path: Path) -> None:
    """A directory and those above it that are missing, each of them durable."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(mode=0o750, exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """fsync of a directory: names in it are durable then."""
    descriptor = _open_directory(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
