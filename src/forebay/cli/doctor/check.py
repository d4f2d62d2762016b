"""One finding of the doctor, and the way a group of probes is asked without ever waiting for it in vain.

Every group runs in a thread of its own. A disk or a server that does not answer keeps its thread; the doctor
says so and goes on, and the thread, being a daemon, does not keep the process alive.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Check", "Probe", "Status", "examine"]

PROBE_SECONDS_MAX = 8.0
"""Seconds after which a group of probes counts as not answering. Far above what any of them needs."""


class Status(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"
    """Not there, and not needed until somebody wants the part it belongs to."""
    FAILED = "failed"
    """Broken, and needed."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's findings."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    """The remedy; empty where all is well."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A group of checks that are made together."""

    name: str
    """Stands for the checks of the group if it does not answer."""
    look: Callable[[], Sequence[Check]]


@dataclass(slots=True)
class _Running:
    probe: Probe
    thread: threading.Thread
    findings: list[Check] = field(default_factory=list)


def examine(probes: Sequence[Probe], seconds_max: float | None = None) -> list[Check]:
    """Ask all probes at once and return their checks in order, within `seconds_max` (`PROBE_SECONDS_MAX`)."""
    seconds_max = PROBE_SECONDS_MAX if seconds_max is None else seconds_max
    running = [_start(probe) for probe in probes]
    deadline = time.monotonic() + seconds_max
    checks: list[Check] = []
    for each in running:
        each.thread.join(max(0.0, deadline - time.monotonic()))
        checks += _silent(each.probe, seconds_max) if each.thread.is_alive() else each.findings
    return checks


def _start(probe: Probe) -> _Running:
    running = _Running(probe, threading.Thread(target=lambda: _look(running), name=probe.name, daemon=True))
    running.thread.start()
    return running


def _look(running: _Running) -> None:
    try:
        running.findings.extend(running.probe.look())
    except Exception as error:
        detail = f"could not be examined: {type(error).__name__}: {error}"
        running.findings.append(Check(running.probe.name, Status.WARN, detail))


def _silent(probe: Probe, seconds: float) -> list[Check]:
    return [
        Check(probe.name, Status.WARN, f"gave no answer in {seconds:g} s", "see whether it hangs by itself")
    ]
