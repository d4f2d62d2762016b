"""One server process: started, waited for, stopped by its own id, its output kept in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forebay.testing._servers import guard
from forebay.testing._servers.errors import ServerFailed

__all__ = ["ServerProcess"]

OUTPUT_TAIL_BYTES = 4_000
"""How much of the output an error shows."""
POLL_S = 0.02
STOP_TIMEOUT_S = 10.0
"""Patience after SIGTERM before SIGKILL."""


class ServerProcess:
    """A child process that can be started again with the same command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        output: Path,
        environment: Mapping[str, str] | None = None,
        leftovers: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self.command = list(command)
        self.output = output
        """What the server printed, over all its starts."""
        self._leftovers = leftovers
        self._environment = {**os.environ, **(environment or {})}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None while nothing runs."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def start(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Start and return when `ready()` says so; otherwise end it and raise `ServerFailed`."""
        if self.pid is not None:
            return
        self._reap()
        with self.output.open("ab") as sink:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=self.output.parent,
                env=self._environment,
                # Ctrl-C belongs to the test run, which then ends its servers in order.
                start_new_session=True,
            )
        guard.watch(self._child.pid, self._leftovers)
        try:
            self._wait_until(ready, timeout_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Does nothing where nothing runs."""
        self._end(signal.SIGKILL, timeout_s=None)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that takes too long."""
        try:
            self._end(signal.SIGTERM, timeout_s=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def output_tail(self) -> str:
        """The end of what the server printed."""
        with contextlib.suppress(FileNotFoundError):
            return self.output.read_bytes()[-OUTPUT_TAIL_BYTES:].decode(errors="replace")
        return ""

    def _wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        assert self._child is not None
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._child.poll() is not None:
                raise ServerFailed(
                    f"{self.name} ended with status {self._child.returncode} while starting",
                    output=self.output_tail(),
                )
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} not ready after {timeout_s:g} s", output=self.output_tail())
            time.sleep(POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None:
            raise ServerFailed(f"{self.name} is not running", output="", hint="call start() first")
        assert self._child is not None
        self._child.send_signal(number)

    def _end(self, number: signal.Signals, timeout_s: float | None) -> None:
        if self.pid is not None:
            assert self._child is not None
            self._child.send_signal(number)
            # A stopped process notices a signal only when it goes on; SIGKILL needs no such help.
            if number != signal.SIGKILL:
                self._child.send_signal(signal.SIGCONT)
            self._child.wait(timeout_s)
        self._reap()

    def _reap(self) -> None:
        if self._child is not None:
            self._child.wait()
            guard.forget(self._child.pid)
            self._child = None
