"""The child's side of the kill harness: reports that survive SIGKILL, markers, and points to die at.

What a dead process promised must be known exactly, so a report is one `write` to a file opened for appending:
once the call returned, the bytes are the kernel's, and no kill can take them back. (A power cut could; that
is another test.) A kill in the middle of the call can leave half a line. The next life of the child ends that
line before it adds its own, and the reader skips it: the value was not reported yet.

Three ways to die at an exact place, none of which makes an engine import the test kit:

* `at("name")`: the code under test takes a plain callable, such as `step: Callable[[str], None]`, and calls
  `step("name")`. The child hands in `report.crash_point`; everybody else hands in nothing.
* `before_call("os:replace")` and `after_call("os:replace")`: the child replaces that attribute by one that
  kills the process just before, or just after, the real call. This needs no cooperation at all, and finds the
  windows between two system calls.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["MARK", "Crash", "Report", "read_reports"]

MARK = "forebay-mark "
SPEC = "FOREBAY_KILL_CHILD"
"""Environment variable with the child's orders, in JSON."""
CRASH = "FOREBAY_CRASH_AT"
"""Environment variable that arms one point: `at|before|after NAME HIT`."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Where the child kills itself."""

    when: str
    """`at` a named point, `before` or `after` a call."""
    where: str
    """The point's name, or `module:attribute` of the function."""
    hit: int = 1
    """At which pass: 1 is the first."""

    def __str__(self) -> str:
        return f"{self.when} {self.where} {self.hit}"

    @classmethod
    def parse(cls, text: str) -> Crash:
        """The reverse of `str`."""
        when, where, hit = text.split(" ")
        return cls(when, where, int(hit))


class Report:
    """The child's way to speak to its harness. Handed to the target as its first argument."""

    def __init__(self, path: Path, crash: Crash | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._crash = crash
        self._passes: collections.Counter[str] = collections.Counter()
        if path.stat().st_size:
            os.write(self._file, b"\n")

    def attempt(self, value: object) -> None:
        """Say, before trying, what is about to be done. The value must fit into JSON."""
        self._write("attempted", value)

    def ack(self, value: object) -> None:
        """Say that this is done and promised."""
        self._write("acknowledged", value)

    def mark(self, name: str) -> None:
        """Tell the harness, which may be waiting for it, that this point was reached."""
        sys.stdout.write(f"{MARK}{name}\n")
        sys.stdout.flush()

    def crash_point(self, name: str) -> None:
        """Die here, if the harness armed this name. Does nothing otherwise."""
        if self._crash is not None and self._crash.when == "at" and self._crash.where == name:
            self._passes[name] += 1
            if self._passes[name] == self._crash.hit:
                die()

    def _write(self, kind: str, value: object) -> None:
        os.write(self._file, json.dumps([kind, value]).encode() + b"\n")


def read_reports(path: Path, kind: str) -> list[Any]:
    """All values of one kind, in the order they were reported."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            reported, value = json.loads(line)
        except ValueError:
            continue  # Cut short by a kill: not reported.
        if reported == kind:
            found.append(value)
    return found


def die() -> NoReturn:
    """SIGKILL to ourselves. The signal may take a moment; nothing after it may run."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


def resolve(name: str) -> tuple[Any, str]:
    """Owner and attribute of `module:attribute.attribute`."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, attribute


def arm_call(crash: Crash) -> None:
    """Replace a function by one that dies around its n-th call."""
    owner, attribute = resolve(crash.where)
    bound = isinstance(inspect.getattr_static(owner, attribute), (staticmethod, classmethod))
    function: Callable[..., Any] = getattr(owner, attribute)
    passes = 0

    def due() -> bool:
        nonlocal passes
        passes += 1
        return passes == crash.hit

    @functools.wraps(function)
    def deadly(*arguments: Any, **named: Any) -> Any:
        mine = due()
        if mine and crash.when == "before":
            die()
        result = function(*arguments, **named)
        if mine and not inspect.isawaitable(result):
            die()
        return _die_after(result) if mine else result

    setattr(owner, attribute, staticmethod(deadly) if bound else deadly)


async def _die_after(result: Any) -> NoReturn:
    await result
    die()


def main() -> None:
    """Run the target that the environment names."""
    spec = json.loads(os.environ[SPEC])
    armed = os.environ.get(CRASH)
    crash = Crash.parse(armed) if armed else None
    owner, attribute = resolve(spec["target"])
    target = getattr(owner, attribute)
    if crash is not None and crash.when != "at":
        arm_call(crash)
    result = target(Report(Path(spec["reports"]), crash), **spec["arguments"])
    if inspect.iscoroutine(result):
        asyncio.run(result)
