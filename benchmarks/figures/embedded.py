"""The embedded coordinator: compare-and-set on one key by many processes, and many operations in one write.

The raw side appends one page to a file and syncs its data: the least that any commit can cost. Every process
reads the key and writes it back on condition that nobody else did; only successes count. A process that goes
on at once may do up to four writes in one turn of its own; the least lucky shares tell what that does to the
others. With a key each nobody is refused, and only the file is shared.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.figures._disk import RawAppend
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variants, at_least, at_most
from benchmarks.harness.crew import Crew, Job
from benchmarks.harness.timing import async_variant, variant
from forebay.coordination import Coordinator, Put, open_coordinator
from forebay.errors import PreconditionFailed

__all__ = ["EmbeddedJob", "embedded_cas", "embedded_write"]

KEY = "counters/one"
SIZES = (1, 4, 16)
VALUE = bytes(100)
KEYS = [f"bench/{index:03d}" for index in range(100)]


def _url(directory: Path) -> str:
    return f"sqlite://{directory.resolve()}/coordinator.db"


@dataclass
class EmbeddedJob(Job):
    """Adds one to a shared counter, again and again."""

    url: str
    own: bool = False
    """Every process has a counter of its own, so that none is refused and only the file is shared."""
    runner: asyncio.Runner | None = field(default=None, init=False)
    coordinator: Coordinator | None = field(default=None, init=False)
    key: str = field(default=KEY, init=False)

    def __enter__(self) -> Self:
        self.runner = asyncio.Runner()
        self.coordinator = self.runner.run(_opened(self.url))
        if self.own:
            self.key = f"counters/{os.getpid()}"
            self.runner.run(self.coordinator.put(self.key, b"0"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.runner is not None and self.coordinator is not None
        self.runner.run(self.coordinator.close())
        self.runner.close()

    def run(self, seconds: float) -> int:
        """Successes within that time."""
        assert self.runner is not None and self.coordinator is not None
        return self.runner.run(_count(self.coordinator, self.key, seconds))


async def _opened(url: str) -> Coordinator:
    coordinator = open_coordinator(url)
    await coordinator.get(KEY)
    return coordinator


async def _count(coordinator: Coordinator, key: str, seconds: float) -> int:
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        found = await coordinator.get(key)
        assert found is not None
        try:
            await coordinator.put(key, b"%d" % (int(found.value) + 1), when=found.version)
        except PreconditionFailed:
            continue
        done += 1
    return done


async def _begin(url: str) -> None:
    async with open_coordinator(url) as coordinator:
        await coordinator.put(KEY, b"0")


@suite.benchmark(
    "embedded-cas",
    "Processes that fight for one key of the embedded coordinator commit nearly as fast as the disk syncs.",
    Figure("1 process", of="1 process", against="raw append", target=at_least(0.5)),
    Figure("4 processes", of="4 processes", against="raw append", target=at_least(0.5)),
    Figure("16 processes", of="16 processes", against="raw append", target=at_least(0.5)),
    Figure("4 processes, a key each", of="4 processes, a key each", against="raw append"),
    Figure("16 processes, a key each", of="16 processes, a key each", against="raw append"),
    Figure("least lucky of 4", of="4 processes", measure=Measure.LEAST_SHARE),
    Figure("least lucky of 16", of="16 processes", measure=Measure.LEAST_SHARE),
)
def embedded_cas(bench: Bench) -> Iterator[Variants]:
    """One crew for all sizes, one database, and the raw append beside it."""
    url = _url(bench.directory)
    asyncio.run(_begin(url))
    bench.say("starting 32 processes")
    with (
        Crew(EmbeddedJob(url), SIZES) as crew,
        Crew(EmbeddedJob(url, own=True), (4, 16)) as owners,
        RawAppend(bench.directory / "raw") as raw,
    ):
        yield {
            "raw append": variant(raw.step, "syncs/s"),
            "1 process": crew.variant(1, "cas/s"),
            "4 processes": crew.variant(4, "cas/s"),
            "16 processes": crew.variant(16, "cas/s"),
            "4 processes, a key each": owners.variant(4, "cas/s"),
            "16 processes, a key each": owners.variant(16, "cas/s"),
        }


@suite.benchmark(
    "embedded-write",
    "A write of many operations is one commit.",
    Figure(
        "time of 100 puts", of="write of 100", against="write of 1", measure=Measure.TIME, target=at_most(3)
    ),
    Figure("64 puts in flight, against one by one", of="64 in flight", against="write of 1"),
    Figure("write of 1, against raw", of="write of 1", against="raw append"),
)
def embedded_write(bench: Bench) -> Iterator[Variants]:
    """Calls per second, so that the inverse is the time of a call."""
    with asyncio.Runner() as runner, RawAppend(bench.directory / "raw") as raw:
        coordinator = runner.run(_opened(_url(bench.directory)))

        async def write(count: int) -> int:
            for result in await coordinator.write([Put(key, VALUE) for key in KEYS[:count]]):
                result.unwrap()
            return 1

        async def in_flight() -> int:
            await asyncio.gather(*[coordinator.put(key, VALUE) for key in KEYS[:64]])
            return 64

        yield {
            "raw append": variant(raw.step, "syncs/s"),
            "write of 1": async_variant(runner, lambda: write(1), "calls/s"),
            "write of 100": async_variant(runner, lambda: write(100), "calls/s"),
            "64 in flight": async_variant(runner, in_flight, "calls/s"),
        }
        runner.run(coordinator.close())
