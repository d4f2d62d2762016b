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
from typing import NamedTuple

from forebay.storage._api import RESERVED_DIRECTORY
from forebay.storage._local._directories import Directories

__all__ = ["STRIPES", "Held", "Stripes"]

STRIPES = 64
"""Lock files. More would let more keys be written at once; the disk does not."""


class Held(NamedTuple):
    """A stripe that is ours."""

    temps: str
    """How the path of every half-written file of the stripe begins."""
    waited: bool
    """Whether somebody else had it when we came."""


class Stripes:
    """The locks and half-written files of one root."""

    def __init__(self, root: Path, directories: Directories) -> None:
        self._directories = directories
        self._locks = root / RESERVED_DIRECTORY / "locks"
        self._temps = root / RESERVED_DIRECTORY / "temps"
        # Text, because joining paths would cost more than the system calls they are for.
        self._lock_names = [f"{self._locks}/{stripe:02d}" for stripe in range(STRIPES)]
        self._temp_names = [f"{self._temps}/{stripe:02d}-" for stripe in range(STRIPES)]

    @contextmanager
    def locked(self, key: str) -> Iterator[Held]:
        """Hold the stripe of `key`."""
        stripe = zlib.crc32(key.encode()) % STRIPES
        with self._held(stripe, fcntl.LOCK_EX) as waited:
            yield Held(self._temp_names[stripe], waited)

    def make_temps(self) -> None:
        """Make the place of half-written files: a tool that copies a store may leave out what is empty."""
        self._temps.mkdir(exist_ok=True)

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
    def _held(self, stripe: int, flags: int) -> Iterator[bool]:
        descriptor = self._open(stripe)
        try:
            waited = _lock(descriptor, flags)
            try:
                yield waited
            finally:
                # Closing alone would leave the lock with a child that was forked meanwhile. An error here
                # must not make a write that was done look as if it was not.
                with suppress(OSError):
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
        return os.open(self._lock_names[stripe], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _make(self) -> None:
        """Make our directories and all locks, so that a delete on a full disk needs no new file."""
        with self._directories.opened(""):
            # Locks last: where there are locks, there is a place for half-written files.
            self._temps.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(parents=True, exist_ok=True)
        for stripe in range(STRIPES):
            os.close(self._open_existing(stripe))


def _lock(descriptor: int, flags: int) -> bool:
    """Take the lock; whether that meant waiting."""
    try:
        fcntl.flock(descriptor, flags | fcntl.LOCK_NB)
    except BlockingIOError:
        if flags & fcntl.LOCK_NB:
            raise
        fcntl.flock(descriptor, flags)
        return True
    return False
