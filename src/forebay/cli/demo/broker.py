"""The processes of the demo: a broker and a pipeline, started, listened to, and killed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forebay.errors import Unavailable

__all__ = ["Broker", "Pipeline"]

PATIENCE_S = 300.0
"""Seconds a process has for its next sign of life. Long, for busy machines."""
ERROR_CHARS = 2_000


class _Process:
    """A child whose stdout is read line by line, and whose group ends with the demo."""

    def __init__(self, words: list[str], log: Path) -> None:
        self._log = log
        self._errors = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_line(self) -> str | None:
        """The next line; None at the end. Raises `Unavailable` where none comes."""
        try:
            return self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise self._gone("a process of the demo hangs") from None

    def _gone(self, what: str) -> Unavailable:
        said = self._log.read_text(errors="replace")[-ERROR_CHARS:].strip()
        return Unavailable(f"{what}: {said}" if said else what, hint=f"its own words are in {self._log}")

    def tell(self, text: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL to the process and everything in its group: driver and JVM."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def end(self) -> int:
        """SIGTERM, and wait."""
        if self._process.poll() is None:
            self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Its exit status, when it has ended by itself."""
        status = self._process.wait(timeout=PATIENCE_S)
        self._close()
        return status

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


class Broker(_Process):
    """`forebay serve` on a free port."""

    def __init__(self, data: Path, log: Path) -> None:
        super().__init__(["-m", "forebay.cli", "serve", "--data", str(data), "--port", "0"], log)
        try:
            line = self.next_line()
        except BaseException:  # Nobody has it yet who could end it.
            self.kill()
            raise
        if line is None:
            raise self._gone("the broker did not start")
        self.url = line.split()[-1]
        """Where it listens."""


class Pipeline(_Process):
    """The process that exports."""

    def __init__(self, directory: Path, mode: str, log: Path) -> None:
        super().__init__(["-m", "forebay.cli.demo.pipeline", str(directory), mode], log)

    def next_fact(self) -> dict[str, Any] | None:
        """What it tells next; None when it has ended."""
        line = self.next_line()
        if line is None:
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def failed(self) -> Unavailable:
        """Why it ended too early."""
        return self._gone("the pipeline ended by itself")
