"""The raw operations that durable parts are held against, as plain as the system calls allow."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["RawAppend", "RawReplace"]


class RawReplace:
    """Create, write, fsync, rename, sync the directory: what any atomic and durable replacement costs."""

    def __init__(self, directory: Path, name: str, data: bytes, *, durable: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._temporary, self._final = directory / f".{name}.new", directory / name
        self._data = data
        self._durable = durable

    def step(self) -> int:
        """One replacement."""
        file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(file, self._data)
            if self._durable:
                os.fsync(file)
        finally:
            os.close(file)
        self._temporary.rename(self._final)
        if self._durable:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        return 1

    def settle(self) -> None:
        """Write back what an unsynced variant left: the next one's sync would pay for it."""
        file = os.open(self._final, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


class RawAppend:
    """Append one page and fdatasync: what any commit to a log costs."""

    PAGE = bytes(4096)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def step(self) -> int:
        """One append."""
        _write_all(self._file, self.PAGE)
        os.fdatasync(self._file)
        return 1


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
