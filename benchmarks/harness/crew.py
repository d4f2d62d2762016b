"""Many processes at one job, started at the same moment.

A crew is spawned once per benchmark and waits between its turns: starting sixteen interpreters takes longer
than a whole turn. Any first few of the crew can work while the rest sleep on their pipes, so that 1, 4 and 16
processes are measured in turns by the same crew. A barrier gives them a common start; each counts for itself,
and the least lucky one is compared with the mean.
"""

from __future__ import annotations

import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.harness.figure import Sample
from benchmarks.harness.suite import Variant

__all__ = ["Crew", "CrewFailed", "Job"]

START_TIMEOUT_S = 120.0
"""Sixteen interpreters on two busy cores start within seconds; two minutes mean that one of them hangs."""
GRACE_S = 60.0
"""How much longer than its turn a member may take."""


class CrewFailed(Exception):
    """A member died or did not answer."""


class Job(ABC):
    """What a member does. It is pickled to the member, entered there once, and run in every turn."""

    number: int = 0
    """Which member this is, from 0: told before it is entered."""

    @abstractmethod
    def __enter__(self) -> object:
        """Open what is needed, in the member's process."""

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Close it."""

    def ready(self) -> None:
        """Before a turn, unmeasured; the turn begins when all are ready."""

    @abstractmethod
    def run(self, seconds: float) -> int:
        """Work for that long; how many units were done."""

    def rest(self) -> None:
        """After a turn, unmeasured; it is over when all have rested."""


class Crew:
    """A context manager around `max(sizes)` processes. `sizes` are the numbers that will work at once."""

    def __init__(self, job: Job, sizes: Sequence[int]) -> None:
        self._job = job
        self._sizes = sorted(set(sizes))
        self._members: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        barriers = {size: context.Barrier(size) for size in self._sizes}
        try:
            for number in range(self._sizes[-1]):
                ours, theirs = context.Pipe()
                member = context.Process(
                    target=_work, args=(self._job, number, theirs, barriers), daemon=True
                )
                member.start()
                theirs.close()
                self._members.append(member)
                self._pipes.append(ours)
            for pipe in self._pipes:
                _receive(pipe, START_TIMEOUT_S)
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(kill=kind is not None)

    def run(self, size: int, seconds: float) -> Sample:
        """Let the first `size` members work at the same time."""
        for pipe in self._pipes[:size]:
            pipe.send((size, seconds))
        reports = [_receive(pipe, seconds + GRACE_S) for pipe in self._pipes[:size]]
        shares = tuple(report.units / report.seconds for report in reports)
        units = sum(report.units for report in reports)
        cpu_s = sum(report.cpu_s for report in reports)
        return Sample(sum(shares), shares, cpu_s / units * 1e6 if units else None)

    def variant(self, size: int, unit: str) -> Variant:
        """`run` as a variant, with longer turns the more there are to share them."""
        return Variant(lambda seconds: self.run(size, seconds), unit, stretch=max(1.0, size / 2))

    def _end(self, *, kill: bool) -> None:
        for pipe in self._pipes:
            pipe.close()  # a member that waits for its turn reads the end of its pipe, and ends
        for member in self._members:
            if not kill:
                member.join(GRACE_S)
            if member.is_alive():
                member.kill()
            member.join()


class _Report(NamedTuple):
    """What a member did in one turn."""

    units: float
    seconds: float
    cpu_s: float


_READY = _Report(0.0, 0.0, 0.0)


def _receive(pipe: Connection, timeout_s: float) -> _Report:
    try:
        if pipe.poll(timeout_s):
            answer = pipe.recv()
            if isinstance(answer, _Report):
                return answer
            raise CrewFailed(f"a process of the crew failed: {answer}")
    except (EOFError, ConnectionError):
        raise CrewFailed("a process of the crew died; its last words are on the error output") from None
    raise CrewFailed(f"a process of the crew did not answer within {timeout_s:g} s")


def _work(job: Job, number: int, pipe: Connection, barriers: dict[int, Barrier]) -> None:
    """The life of one member."""
    job.number = number
    with ExitStack() as stack:
        try:
            stack.enter_context(job)
            pipe.send(_READY)
            while True:
                size, seconds = pipe.recv()
                job.ready()
                barriers[size].wait(GRACE_S)
                begin, spent = time.perf_counter(), time.process_time()
                units = job.run(seconds)
                report = _Report(units, time.perf_counter() - begin, time.process_time() - spent)
                barriers[size].wait(GRACE_S)
                job.rest()
                pipe.send(report)
        except (EOFError, KeyboardInterrupt):
            return
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
