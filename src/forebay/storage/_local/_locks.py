"""Lock stripes, and the half-written files that belong to them.

Every change of a key runs under an exclusive flock of its stripe. The kernel frees the lock of a killed
process, and nothing else does, so whoever holds a stripe knows that every half-written file with that
stripe in its name has lost its writer: sweeping needs no guess about age.

A lock file is opened for every operation, because a flock belongs to the open file description: threads
that share one would not shut each other out, and a forked child would keep it. It is never unlinked: two
writers could then hold two inodes of the same name.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forebay.storage._api import RESERVED_DIRECTORY
from forebay.storage._local._directories import Directories

__all__ = ["STRIPES", "Stripes"]

STRIPES = 64
"""Lock files. More would let more keys be written at once; the disk does not."""


class Stripes:
    """The locks and half-written files of one root."""

    def __init__(self, root: Path, directories: Directories) -> None:
        self._directories = directories
        self._locks = root / RESERVED_DIRECTORY / "locks"
        self._temps = root / RESERVED_DIRECTORY / "temps"

    @contextmanager
    def locked(self, key: str) -> Iterator[int]:
        """Hold the stripe of `key`; gives its number."""
        stripe = zlib.crc32(key.encode()) % STRIPES
        with self._held(stripe, fcntl.LOCK_EX):
            yield stripe

    def temp_path(self, stripe: int, version: str) -> Path:
        """Where the holder of `stripe` writes the file that will become `version`."""
        # Tools that copy a store may leave out a directory that is empty.
        self._temps.mkdir(exist_ok=True)
        return self._temps / f"{stripe:02d}-{version}"

    def sweep(self, *, wait: bool) -> int:
        """Remove what killed writers left; how many files it was.

        Without `wait`, stripes that somebody holds right now are passed over.
        """
        flags = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        removed = 0
        for stripe in sorted({name[:2] for name in self._leftovers()}):
            if stripe.isascii() and stripe.isdigit():
                with suppress(BlockingIOError), self._held(int(stripe), flags):
                    removed += self._sweep_held(stripe)
        return removed

    def _sweep_held(self, stripe: str) -> int:
        names = [name for name in self._leftovers() if name.startswith(f"{stripe}-")]
        for name in names:
            (self._temps / name).unlink(missing_ok=True)
        return len(names)

    def _leftovers(self) -> list[str]:
        try:
            return [path.name for path in self._temps.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def _held(self, stripe: int, flags: int) -> Iterator[None]:
        descriptor = self._open(stripe)
        try:
            fcntl.flock(descriptor, flags)
            try:
                yield
            finally:
                # Closing alone would leave the lock with a child that was forked meanwhile.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _open(self, stripe: int) -> int:
        try:
            return self._open_existing(stripe)
        except FileNotFoundError:
            self._make()
            return self._open_existing(stripe)

    def _open_existing(self, stripe: int) -> int:
        return os.open(self._locks / f"{stripe:02d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _make(self) -> None:
        """Make our directories and all locks, so that a delete on a full disk needs no new file."""
        with self._directories.opened(""):
            # Locks last: where there are locks, there is a place for half-written files.
            self._temps.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(parents=True, exist_ok=True)
        for stripe in range(STRIPES):
            os.close(self._open_existing(stripe))
