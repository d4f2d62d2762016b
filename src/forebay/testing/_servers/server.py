"""What the real servers have in common: one process, one directory, a context manager around both."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.testing._servers.process import ServerProcess

__all__ = ["Server"]


class Server(ABC):
    """A server with a directory. Who derives from it sets the three fields, and says how it starts."""

    directory: Path
    _own_directory: bool
    """Whether the directory goes when the server does."""
    _process: ServerProcess

    @property
    def pid(self) -> int | None:
        """The process id, or None while it does not run."""
        return self._process.pid

    @property
    def output(self) -> Path:
        """The file with everything the server printed."""
        return self._process.output

    @abstractmethod
    def start(self) -> None:
        """Start, on the same address and data as before, and wait until it serves."""

    def kill(self) -> None:
        """SIGKILL: the crash."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP: a server that hangs. `kill` and the end of the context work all the same."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def close(self) -> None:
        """Kill the server and remove its directory if it was our own."""
        self.kill()
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
