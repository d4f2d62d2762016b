"""Compare-and-set on one key of a local directory, by many processes.

Every process reads the counter, adds one and puts it back on condition that nobody else did; only successes
count. The raw side is one process that replaces a file in the same directory, without reading, comparing or
locking: nothing durable can be faster, and nothing that takes turns can gain from more processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.figures._disk import RawReplace
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variants, at_least
from benchmarks.harness.crew import Crew, Job
from benchmarks.harness.timing import variant
from forebay.errors import PreconditionFailed
from forebay.storage import ObjectStore, open_store

__all__ = ["CountingJob", "local_cas"]

KEY = "counters/one"
SIZES = (1, 4, 16)
VALUE_DIGITS = 100
"""Bytes of the value: a manifest's pointer, not a batch."""


@dataclass
class CountingJob(Job):
    """Adds one to a shared counter, again and again."""

    root: Path
    runner: asyncio.Runner | None = field(default=None, init=False)
    store: ObjectStore | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.runner = asyncio.Runner()
        self.store = self.runner.run(_open(self.root))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.runner is not None and self.store is not None
        self.runner.run(self.store.close())
        self.runner.close()

    def run(self, seconds: float) -> int:
        """Successes within that time."""
        assert self.runner is not None and self.store is not None
        return self.runner.run(_count(self.store, seconds))


async def _open(root: Path) -> ObjectStore:
    return open_store(root)


async def _count(store: ObjectStore, seconds: float) -> int:
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        found = await store.get(KEY)
        try:
            await store.put(KEY, _counter(int(found.data) + 1), when=found.version)
        except PreconditionFailed:
            continue
        done += 1
    return done


def _counter(value: int) -> bytes:
    return b"%0*d" % (VALUE_DIGITS, value)


async def _begin(root: Path) -> None:
    async with open_store(root) as store:
        await store.put(KEY, _counter(0))


@suite.benchmark(
    "local-cas",
    "Processes that fight for one key of a local directory lose little to the fight, and none starves.",
    Figure("1 process", of="1 process", against="raw replace"),
    Figure("4 processes", of="4 processes", against="raw replace"),
    Figure("16 processes", of="16 processes", against="raw replace", target=at_least(0.25)),
    Figure("least lucky of 4", of="4 processes", measure=Measure.LEAST_SHARE),
    Figure("least lucky of 16", of="16 processes", measure=Measure.LEAST_SHARE, target=at_least(0.25)),
)
def local_cas(bench: Bench) -> Iterator[Variants]:
    """One crew for all sizes, and the raw replacement in the directory of the key."""
    asyncio.run(_begin(bench.directory))
    raw = RawReplace(bench.directory / "counters", "raw", _counter(0))
    bench.say("starting 16 processes")
    with Crew(CountingJob(bench.directory), SIZES) as crew:
        yield {
            "raw replace": variant(raw.step, "files/s"),
            "1 process": crew.variant(1, "cas/s"),
            "4 processes": crew.variant(4, "cas/s"),
            "16 processes": crew.variant(16, "cas/s"),
        }
