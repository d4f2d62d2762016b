"""A `kill -9` harness: start a Python child, kill it at a marker, an exact point or at random, start again.

    def writer(report: Report, path: str) -> None:          # importable, in any module; may be async
        for number in itertools.count():
            report.attempt(number)
            append_durably(path, number)
            report.ack(number)
            report.mark("wrote")

    with Child(writer, arguments={"path": path}) as child:
        child.wait_for("wrote", count=10)
        child.kill()
    survivors = read(path)
    assert set(child.acknowledged) <= set(survivors) <= set(child.attempted)

Simulated crashes are quicker and repeatable; this one is true: the kernel drops the locks, the page cache
stays, half-written files remain. Children start as new interpreters, never by fork, so no lock or thread of
the test lives on in them. `_servers/kill_child.py` tells how a child reports, and how it dies at an exact
place.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forebay.errors import ForebayError
from forebay.testing._servers import guard, kill_child
from forebay.testing._servers.kill_child import Crash, Report, read_reports

__all__ = [
    "Child",
    "ChildFailed",
    "Crash",
    "KillRun",
    "Report",
    "after_call",
    "at",
    "before_call",
    "kill_repeatedly",
]

TIMEOUT_S = 120.0
"""Default patience with a child. Long, for busy machines: it only matters when something is wrong."""
OUTPUT_TAIL_BYTES = 4_000
READER_JOIN_S = 5.0
_BOOTSTRAP = "from forebay.testing._servers.kill_child import main; main()"


class ChildFailed(ForebayError):
    """The child ended by itself when it should not have, or did not get there in time."""

    def __init__(self, message: str, *, output: str) -> None:
        super().__init__(f"{message}\n{output}" if output else message)
        self.output = output
        """The end of what it wrote to stderr."""


def at(name: str, hit: int = 1) -> Crash:
    """Die at the `hit`-th pass of `report.crash_point(name)`."""
    return Crash("at", name, hit)


def before_call(function: str, hit: int = 1) -> Crash:
    """Die just before the `hit`-th call of `"module:attribute"`."""
    return Crash("before", function, hit)


def after_call(function: str, hit: int = 1) -> Crash:
    """Die just after the `hit`-th call of `"module:attribute"` returned (or was awaited)."""
    return Crash("after", function, hit)


class Child:
    """One Python function in a process of its own, over as many lives as the test wants.

    The target is a function or its name `"module:function"`; it is called with a `Report` and the arguments,
    which must fit into JSON. Reports add up over all lives.
    """

    def __init__(
        self,
        target: str | Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        crash: Crash | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.target = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        self._directory = Path(tempfile.mkdtemp(prefix="forebay-kill-"))
        self._reports = self._directory / "reports"
        self._errors = self._directory / "stderr"
        self._arguments = dict(arguments or {})
        self._crash = crash
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._news = threading.Condition()
        self._marks: list[str] = []
        self._final: dict[str, list[Any]] | None = None

    # -- what it said

    @property
    def acknowledged(self) -> list[Any]:
        """Values it reported as done, over all lives, in order."""
        return self._values("acknowledged")

    @property
    def attempted(self) -> list[Any]:
        """Values it said it would try."""
        return self._values("attempted")

    @property
    def marks(self) -> list[str]:
        """Markers of the present life, in order."""
        with self._news:
            return list(self._marks)

    def wait_for(self, mark: str, *, count: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Return when the present life has passed the marker `count` times."""

        def settled() -> bool:
            return self._marks.count(mark) >= count or self._reader is None or not self._reader.is_alive()

        deadline = time.monotonic() + timeout_s
        with self._news:
            while not settled() and time.monotonic() < deadline:
                self._news.wait(deadline - time.monotonic())
            reached = self._marks.count(mark)
        if reached < count:
            raise self._failure(f"{self.target} reached {mark!r} {reached} of {count} times")

    # -- life and death

    @property
    def pid(self) -> int | None:
        """The process id, or None while nothing runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, *, crash: Crash | None = None) -> None:
        """Begin a life; with `crash`, one that ends there."""
        if self.pid is not None:
            raise ChildFailed(f"{self.target} is running already", output="")
        self._reap()
        self._marks = []
        spec = {"target": self.target, "arguments": self._arguments, "reports": str(self._reports)}
        environment = {
            **os.environ,
            # As with spawned workers: what the test could import, the child can.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **self._environment,
            kill_child.SPEC: json.dumps(spec),
            kill_child.CRASH: str(crash or ""),
        }
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        guard.watch(self._process.pid, [self._directory])
        self._reader = threading.Thread(target=self._listen, args=(self._process, self._marks), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """SIGKILL by its own id, and wait until it is gone."""
        if self.pid is not None:
            self._signal(signal.SIGKILL)
        self._reap()

    def restart(self, *, crash: Crash | None = None) -> None:
        """`kill`, then `start`."""
        self.kill()
        self.start(crash=crash)

    def pause(self) -> None:
        """SIGSTOP: the process that was thought dead, and comes back later."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def wait(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """Wait until it ends by itself; the status, negative for a signal (-9 after a crash point)."""
        assert self._process is not None, "never started"
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failure(f"{self.target} still runs after {timeout_s:g} s") from None
        self._finish_reading()
        return status

    def wait_for_crash(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until it has died at its crash point; any other end is an error."""
        status = self.wait(timeout_s=timeout_s)
        if status != -signal.SIGKILL:
            raise self._failure(f"{self.target} ended with status {status}, not at its crash point")

    def close(self) -> None:
        """Kill it and remove its files. What it reported stays readable."""
        self.kill()
        self._final = {kind: self._values(kind) for kind in ("acknowledged", "attempted")}
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start(crash=self._crash)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _values(self, kind: str) -> list[Any]:
        return self._final[kind] if self._final is not None else read_reports(self._reports, kind)

    def _listen(self, process: subprocess.Popen[str], marks: list[str]) -> None:
        assert process.stdout is not None
        # A pipe that the reaper closed under our hands has nothing more to say.
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                if line.startswith(kill_child.MARK):
                    with self._news:
                        marks.append(line[len(kill_child.MARK) :].rstrip("\n"))
                        self._news.notify_all()
        with self._news:
            if self._reader is threading.current_thread():
                self._reader = None
            self._news.notify_all()

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None:
            raise self._failure(f"{self.target} is not running")
        assert self._process is not None
        self._process.send_signal(number)

    def _finish_reading(self) -> None:
        reader = self._reader
        if reader is not None:
            reader.join(READER_JOIN_S)  # Bounded: a grandchild may hold the pipe open.

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            guard.forget(self._process.pid)
            self._finish_reading()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _failure(self, message: str) -> ChildFailed:
        output = self._errors.read_bytes()[-OUTPUT_TAIL_BYTES:] if self._errors.exists() else b""
        return ChildFailed(message, output=output.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class KillRun:
    """What became of a child that was killed over and over."""

    lives: int
    """How often it was started."""
    kills: int
    """How often it was killed; the other lives ended by themselves, with status 0."""
    acknowledged: list[Any]
    """What it promised, over all lives, in order."""
    attempted: list[Any]
    """What it may have done."""


def kill_repeatedly(
    target: str | Callable[..., Any],
    *,
    randomness: random.Random,
    lives: int,
    arguments: Mapping[str, Any] | None = None,
    ready: str | None = "ready",
    delay_ms_max: int = 100,
    total_timeout_s: float = TIMEOUT_S,
    between: Callable[[Child], None] | None = None,
) -> KillRun:
    """Start the child `lives` times and kill it each time at a random moment after its marker `ready`.

    `between` looks at what is left after each life. Raises `ChildFailed` where a life ended with an error or
    all of them together took longer than `total_timeout_s`.
    """
    deadline = time.monotonic() + total_timeout_s
    kills = 0
    child = Child(target, arguments=arguments)
    with contextlib.closing(child):
        for _ in range(lives):
            child.start()
            if ready is not None:
                child.wait_for(ready, timeout_s=max(0.0, deadline - time.monotonic()))
            kills += _kill_within(child, randomness.uniform(0, delay_ms_max) / 1000)
            if between is not None:
                between(child)
            if time.monotonic() > deadline:
                raise ChildFailed(f"{child.target}: {lives} lives took over {total_timeout_s:g} s", output="")
    return KillRun(lives, kills, child.acknowledged, child.attempted)


def _kill_within(child: Child, seconds: float) -> bool:
    """Kill after so long; False if it ended by itself before."""
    try:
        status = child.wait(timeout_s=seconds)
    except ChildFailed:
        child.kill()
        return True
    child.kill()
    if status != 0:
        raise child._failure(f"{child.target} ended with status {status}")
    return False
