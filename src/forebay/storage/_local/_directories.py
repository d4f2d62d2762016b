"""Directories that survive a power cut, and that go away again when they are empty.

A file is lost with its directory if the parent never wrote that name down, so a new directory needs an
fsync of its parent. It is not enough that whoever made the directory does this: another writer may find it
in the moment between and acknowledge a file in it. So a directory carries a mark, set only after its parent
was synced, and a writer that finds a directory without the mark syncs the parent itself. The mark is an
attribute of the inode; a directory that was removed and made anew does not have it.

Because empty directories are removed, a directory may vanish between its making and its use. Callers get it
as an open descriptor, rename into that, and ask again if the rename says that it is gone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forebay.errors import Unavailable

__all__ = ["RACES_MAX", "Directories"]

RACES_MAX = 100
"""How often a step is tried again because another process removed a directory under it."""
_MARK = "user.forebay.durable"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Directories:
    """The directories of one root. Paths are relative to it; the root itself is the empty path."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._base = f"{root}/"

    @contextmanager
    def opened(self, relative: str) -> Iterator[int]:
        """A descriptor of the directory, made if need be, whose name is known to be durable.

        Raises NotADirectoryError where a file is in the way.
        """
        descriptor = self._open_durable(relative)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def prune(self, relative: str) -> None:
        """Remove the directory and its parents as far as they are empty. The root stays."""
        with suppress(OSError):
            while relative:
                (self._root / relative).rmdir()
                relative = relative.rpartition("/")[0]

    def remove_empty_tree(self, relative: str) -> None:
        """Remove a directory that holds nothing but empty directories. Raises OSError where it holds more."""
        for path, _, _ in os.walk(self._root / relative, topdown=False):
            Path(path).rmdir()

    def _open_durable(self, relative: str) -> int:
        if not relative:
            return self._open_root()
        for _ in range(RACES_MAX):
            with suppress(FileNotFoundError):
                descriptor = self._open_or_make(relative)
                try:
                    self._ensure_mark(descriptor, relative)
                except BaseException:
                    os.close(descriptor)
                    raise
                return descriptor
        raise Unavailable(f"{relative!r} keeps vanishing", hint="another process removes it; try again")

    def _open_or_make(self, relative: str) -> int:
        try:
            return os.open(self._base + relative, _OPEN)
        except FileNotFoundError:
            parent, _, name = relative.rpartition("/")
            with self.opened(parent) as parent_descriptor, suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent_descriptor)
            return os.open(self._base + relative, _OPEN)

    def _ensure_mark(self, descriptor: int, relative: str) -> None:
        if _is_marked(descriptor):
            return
        with self.opened(relative.rpartition("/")[0]) as parent_descriptor:
            os.fsync(parent_descriptor)
        _mark(descriptor)

    def _open_root(self) -> int:
        if not self._root.is_dir():
            _make_root(self._root)
        descriptor = os.open(self._root, _OPEN)
        if not _is_marked(descriptor):
            # A root that somebody else made may lie in a directory we cannot read: then it is theirs to sync.
            with suppress(PermissionError):
                _sync(self._root.parent)
            _mark(descriptor)
        return descriptor


def _make_root(path: Path) -> None:
    if path.is_dir():
        return
    _make_root(path.parent)
    path.mkdir(exist_ok=True)
    with suppress(PermissionError):
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, _OPEN)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_marked(descriptor: int) -> bool:
    try:
        os.getxattr(descriptor, _MARK)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return False
        raise
    return True


def _mark(descriptor: int) -> None:
    # Without the right to set it the parent is synced on every write: slower, and just as safe.
    with suppress(PermissionError):
        os.setxattr(descriptor, _MARK, b"1")
