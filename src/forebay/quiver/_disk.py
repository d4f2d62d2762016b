"""The seam between Quiver and a file system.

Quiver is the one engine that lives on local files, so it has a seam of its own in the place where others have
an object store. Operations are plain functions, because a write path is a short row of them; what may block
is put together into one function and handed to `Disk.run`, which has a thread for each *lane* (`wal`, `ack`,
`segments`, `reads`, and `files` for WAL files that come and go), so that a slow segment never delays an
acknowledgement. Work of one lane runs in order. Short work may be done by the caller himself (`run_here`),
where nothing of its lane is under way.
A simulated disk runs the same functions in place, at a moment of its own choosing, and may lose what was not
synced, tear it, fill up, or stop at any operation.

Names are relative to the root and use `/`. Every operation may raise `OSError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

__all__ = ["Disk", "DiskFile", "Lane", "Piece", "write_file"]

T = TypeVar("T")
Lane: TypeAlias = Literal["wal", "ack", "segments", "reads", "files"]
Piece: TypeAlias = bytes | memoryview


class DiskFile(Protocol):
    """A file open for writing. Positions are explicit, so that a failed write can be written over."""

    def write(self, offset: int, pieces: Sequence[Piece]) -> None:
        """Write all of it, or raise; after an error any part may have been written."""
        ...

    def write_aside(self, offset: int, pieces: Iterable[Piece]) -> None:
        """As `write`, for much data that nobody waits for: the disk gets it bit by bit, so that a sync of
        another file does not queue behind all of it. Pieces may be made as they are asked for; what that
        raises is raised. Durable with `sync`, as everything."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file."""
        ...

    def sync(self) -> None:
        """Return once data and size are durable (fdatasync)."""
        ...

    def close(self) -> None:
        """Close without syncing."""
        ...


class Disk(Protocol):
    """A directory."""

    def open(self, name: str, *, create: bool = False) -> DiskFile:
        """Open for writing. `create` makes a new file and refuses an old one."""
        ...

    def read(self, name: str) -> memoryview:
        """The whole file, mapped and not copied. Stays valid when the file is removed."""
        ...

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """A copy of some bytes; fewer at the end of the file."""
        ...

    def list(self, directory: str) -> list[tuple[str, int]]:
        """Names and sizes of the files in a directory, sorted. A missing directory is an error."""
        ...

    def make_directory(self, directory: str) -> None:
        """Make a directory that may be there already."""
        ...

    def sync_directory(self, directory: str) -> None:
        """Return once names made, renamed and removed in it are durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Move a file over another name."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file. No error if it is gone."""
        ...

    def protect(self, name: str) -> None:
        """Mark a finished file read-only where the file system can; otherwise nothing."""
        ...

    def lock(self) -> None:
        """Keep every other process off the directory. Raises `BlockingIOError` where one has it."""
        ...

    def unlock(self) -> None:
        """Let others in."""
        ...

    def submit(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """As `run`, but `done` is called in the loop with the result or the error, and no task waits."""
        ...

    def run_here(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """As `submit`, but in the caller's own thread, and `done` is called before this returns.

        As `submit` where something of the lane is under way: its order holds. What is no `Exception` (an
        interrupt of the main thread) is told to `done` and then raised as well.
        """
        ...

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        """Do blocking work in a lane, behind what was given to it before."""
        ...

    async def close(self) -> None:
        """End the lanes. Work under way is finished."""
        ...


def write_file(disk: Disk, name: str, pieces: Iterable[Piece], *, is_aside: bool = False) -> None:
    """Make a new file with these bytes, durable but for its name, which takes a sync of the directory.

    Nothing of it stays where that fails: a part would pass for all there was, and a full disk would get
    fuller with each attempt. `is_aside` writes as `DiskFile.write_aside` does.
    """
    file = disk.open(name, create=True)
    try:
        try:
            if is_aside:
                file.write_aside(0, pieces)
            else:
                file.write(0, list(pieces))
            file.sync()
        finally:
            file.close()
    except BaseException:
        disk.remove(name)
        raise
