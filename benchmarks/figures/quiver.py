"""Quiver: durable ingest against the disk itself, and against the published Rust crate.

The raw side writes the bytes of the same WAL entry to a growing file and syncs its data: what a producer that
waits for durability gets from the disk without further thought. Ours writes the segment files as well.
"Acknowledged" means here: a finished `fdatasync` covers the batch. So it does for the crate with a sync in
every ingest; at 25 ms the crate answers before the sync, so ours keeps many batches in flight there, none of
them counted before its sync.

Python has one interpreter lock per process, so 64 producers are measured twice: in one process, and as a
store is used where that lock is the bound, with an instance for each of two cores on one directory.

Turns are short and have a new directory each, and in a new directory ours fills four WAL files with zeros
beside the first ingests. They are there before the clock starts, as at every later opening of a store in use;
neither the crate nor the raw side makes anything of the kind. No memory is free (`_memory`): ours and the
crate write twice what the raw side writes, and would pay the machine for new pages twice as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import pyarrow as pa

from benchmarks.figures._memory import made_ready, memory_in_use
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Sample, Variant, Variants, at_least
from benchmarks.harness.crew import Crew, Job
from benchmarks.peers.quiver_crate import quiver_binary
from forebay.formats import quiver_wal
from forebay.quiver import Quiver, QuiverConfig, QuiverCore, Receipt

__all__ = ["Ours", "bench_batch", "quiver_crate", "quiver_ingest"]

ROWS = (100, 1_000, 8_192)
IN_FLIGHT = 4_096
"""Batches of one producer that wait for a sync at 25 ms; the store itself bounds their bytes."""
CROWD, CROWD_ROWS = 64, 100
CAP_BYTES = 1 << 40
SPARE_LOOKS = 10_000
"""Looks for the spares, a millisecond apart. What is not there by then will not be: the turn goes on."""


Work: TypeAlias = Callable[[Quiver, pa.RecordBatch, float], Awaitable[int]]
"""A producer: ingests until then, and tells how many batches were durable."""


def bench_batch(rows: int) -> pa.RecordBatch:
    """The batch of the crate's own benchmarks."""
    return pa.record_batch(
        {
            "timestamp": pa.array(range(1_700_000_000_000, 1_700_000_000_000 + rows), pa.int64()),
            "value": pa.array(range(0, rows * 100, 100), pa.int64()),
            "message": pa.array([f"Log message number {row} with some content" for row in range(rows)]),
        }
    )


class Ours:
    """A store of its own for every turn; opening, closing and removal are not timed."""

    def __init__(self, directory: Path, rows: int, *, producers: int = 1, flush_ms: int = 0) -> None:
        self._directory = directory
        self._batch = bench_batch(rows)
        self._producers = producers
        self._config = QuiverConfig(size_cap_bytes=CAP_BYTES, flush_interval_ms=flush_ms)

    def run(self, seconds: float) -> Sample:
        """A turn."""
        try:
            return asyncio.run(self._run(seconds))
        finally:
            shutil.rmtree(self._directory)

    async def _run(self, seconds: float) -> Sample:
        work = _wait_for_each if self._config.flush_interval_ms == 0 else _keep_in_flight
        async with Quiver(self._directory, self._config) as quiver:
            await _until_spare(quiver, self._config)
            spent, begin = time.process_time(), time.perf_counter()
            done = await _share(work, quiver, self._batch, self._producers, seconds)
            passed = time.perf_counter() - begin
            return Sample(done / passed, (), (time.process_time() - spent) / done * 1e6)

    def variant(self) -> Variant:
        """`run` as a variant."""
        return Variant(self.run, "batches/s")


@dataclass
class CoreJob(Job):
    """One core of several on one directory, each a process with its part of the producers."""

    root: Path
    cores: int
    producers: int
    config: QuiverConfig = field(default_factory=lambda: QuiverConfig(size_cap_bytes=CAP_BYTES))
    runner: asyncio.Runner | None = field(default=None, init=False)
    core: QuiverCore | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.runner = asyncio.Runner()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.runner is not None
        self.runner.close()

    def ready(self) -> None:
        """A shard of its own for every turn."""
        assert self.runner is not None
        self.core = QuiverCore(self.root, self.number, self.cores, self.config)
        self.runner.run(self._open(self.core))

    async def _open(self, core: QuiverCore) -> None:
        await core.open()
        await _until_spare(core.own, self.config)

    def run(self, seconds: float) -> int:
        """Batches that are durable within that time."""
        assert self.runner is not None and self.core is not None
        batch = bench_batch(CROWD_ROWS)
        work = _share(_wait_for_each, self.core.own, batch, self.producers // self.cores, seconds)
        return self.runner.run(work)

    def rest(self) -> None:
        """The shard goes."""
        assert self.runner is not None and self.core is not None
        self.runner.run(self.core.close())
        shutil.rmtree(self.root / f"core_{self.number}")


async def _until_spare(quiver: Quiver, config: QuiverConfig) -> None:
    for _ in range(SPARE_LOOKS):
        if quiver.stats().wal_bytes >= config.wal_spares_max * config.wal_file_bytes:
            return
        await asyncio.sleep(0.001)


async def _share(work: Work, quiver: Quiver, batch: pa.RecordBatch, producers: int, seconds: float) -> int:
    """Batches of all producers together."""
    end = time.perf_counter() + seconds
    return sum(await asyncio.gather(*(work(quiver, batch, end) for _ in range(producers))))


async def _wait_for_each(quiver: Quiver, batch: pa.RecordBatch, end: float) -> int:
    done = 0
    while time.perf_counter() < end:
        await quiver.ingest(batch)
        done += 1
    return done


async def _keep_in_flight(quiver: Quiver, batch: pa.RecordBatch, end: float) -> int:
    done = 0
    flying: list[asyncio.Future[Receipt]] = []
    while time.perf_counter() < end:
        flying.append(await quiver.submit(batch))
        if len(flying) >= IN_FLIGHT:
            # They become durable in order, so the last of the first half speaks for all of it.
            await flying[IN_FLIGHT // 2]
            del flying[: IN_FLIGHT // 2]
            done += IN_FLIGHT // 2
    return done + len(await asyncio.gather(*flying))


class Crate:
    """The Rust program, one process for all turns."""

    def __init__(self, binary: Path, directory: Path) -> None:
        directory.mkdir()
        self._process = subprocess.Popen(
            [str(binary), str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def variant(self, rows: int, *, producers: int = 1, flush_ms: int = 0) -> Variant:
        """A turn with these settings."""

        def run(seconds: float) -> Sample:
            assert self._process.stdin is not None and self._process.stdout is not None
            order = {"seconds": seconds, "rows": rows, "producers": producers, "flush_ms": flush_ms}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return Sample(float(json.loads(self._process.stdout.readline())["rate"]))

        return Variant(run, "batches/s")

    def close(self) -> None:
        """It ends with its input."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _raw(path: Path, rows: int) -> Variant:
    body = quiver_wal.encode(bench_batch(rows), "logs")

    def run(seconds: float) -> Sample:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            done, begin = 0, time.perf_counter()
            while time.perf_counter() < begin + seconds:
                os.write(file, body)
                os.fdatasync(file)
                done += 1
            return Sample(done / (time.perf_counter() - begin))
        finally:
            os.close(file)
            path.unlink()

    return Variant(run, "batches/s")


@suite.benchmark(
    "quiver-ingest",
    "Durable ingest runs at the speed of the disk, and many producers share its syncs.",
    *(
        Figure(
            f"{rows:,} rows, against write and sync",
            of=f"{rows:,} rows",
            against=f"raw {rows:,}",
            target=at_least(0.8),
        )
        for rows in ROWS
    ),
    Figure("64 producers, against one", of="64 producers, 100 rows", against="100 rows", target=at_least(10)),
    Figure(
        "64 producers on two cores, against one",
        of="64 producers, two cores",
        against="100 rows",
        target=at_least(10),
    ),
)
def quiver_ingest(bench: Bench) -> Iterator[Variants]:
    """Every sample on a directory of its own."""
    variants: dict[str, Variant] = {}
    cores = CoreJob(bench.directory / "cores", 2, CROWD)
    for rows in ROWS:
        variants[f"raw {rows:,}"] = _raw(bench.directory / "raw", rows)
        variants[f"{rows:,} rows"] = Ours(bench.directory / "store", rows).variant()
    variants["64 producers, 100 rows"] = Ours(
        bench.directory / "store", CROWD_ROWS, producers=CROWD
    ).variant()
    with memory_in_use(bench) as memory, Crew(cores, (2,)) as crew:
        variants["64 producers, two cores"] = crew.variant(2, "batches/s")
        yield made_ready(variants, memory.refill)


@suite.benchmark(
    "quiver-crate",
    "Against the published Rust crate: as fast with one producer, ten times as fast with 64 that wait.",
    *(
        Figure(
            f"{rows:,} rows, {mode}",
            of=f"ours {rows:,}, {mode}",
            against=f"crate {rows:,}, {mode}",
            target=at_least(0.5 if rows == 100 else 1),
        )
        for mode in ("sync each", "25 ms")
        for rows in ROWS
    ),
    Figure(
        "64 producers, 100 rows, sync each",
        of="ours 64 producers",
        against="crate 64 producers",
    ),
    Figure(
        "64 producers, against one of the crate",
        of="ours 64 producers",
        against="crate 100, sync each",
        target=at_least(10),
    ),
)
def quiver_crate(bench: Bench) -> Iterator[Variants]:
    """Both sides with 32 MiB segments, no subscriber, a directory for each turn."""
    crate = Crate(quiver_binary(bench.say), bench.directory / "crate")
    variants: dict[str, Variant] = {}
    with closing(crate), memory_in_use(bench) as memory:
        for mode, flush_ms in (("sync each", 0), ("25 ms", 25)):
            for rows in ROWS:
                variants[f"crate {rows:,}, {mode}"] = crate.variant(rows, flush_ms=flush_ms)
                ours = Ours(bench.directory / "store", rows, flush_ms=flush_ms)
                variants[f"ours {rows:,}, {mode}"] = ours.variant()
        variants["crate 64 producers"] = crate.variant(100, producers=64)
        variants["ours 64 producers"] = Ours(bench.directory / "store", CROWD_ROWS, producers=CROWD).variant()
        yield made_ready(variants, memory.refill)
