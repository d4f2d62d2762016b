"""Appending 1 KiB records to 16 partitions on a local disk, against writing and syncing the same bytes raw.

Both sides make 32 MiB durable per step, 4 MiB at a time. The raw side writes each 4 MiB to a file and syncs
it. Our side begins with lists of Python bytes and ends when every caller has its offsets: batching, encoding,
checksums, objects in a directory, commits in the embedded coordinator. Only acknowledged records count.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Sample, Variant, Variants, at_least
from benchmarks.harness.timing import timed, timed_async
from forebay.coordination import Coordinator, open_coordinator
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, BatchingProducer, LogWriter, ProducerConfig
from forebay.storage import ObjectStore, open_store

__all__ = ["log_append"]

PARTITIONS = 16
RECORD_BYTES = 1024
FLUSH_BYTES = 4 * 1024 * 1024
FLUSHES = 8
MIB = 1024 * 1024


class _Raw:
    """Write 4 MiB, sync, again: what the bytes themselves cost."""

    def __init__(self, directory: Path, data: bytes) -> None:
        directory.mkdir()
        self._directory = directory
        self._data = data
        self._number = 0

    def step(self) -> float:
        for _ in range(FLUSHES):
            self._number += 1
            file = os.open(self._directory / f"{self._number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                rest = memoryview(self._data)
                while rest:
                    rest = rest[os.write(file, rest) :]
                os.fsync(file)
            finally:
                os.close(file)
        return FLUSHES * FLUSH_BYTES / MIB

    def run(self, seconds: float) -> Sample:
        sample = timed(self.step, seconds)
        _empty(self._directory)
        return sample


class _Ours:
    """A producer over a directory and the embedded coordinator in it."""

    def __init__(self, directory: Path, data: bytes, runner: asyncio.Runner) -> None:
        self._directory = directory
        self._runner = runner
        count = FLUSH_BYTES // PARTITIONS // RECORD_BYTES
        cut = [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
        self._records = [cut[number * count : (number + 1) * count] for number in range(PARTITIONS)]
        self._store: ObjectStore = open_store(directory)
        self._coordinator: Coordinator = runner.run(_opened(directory))
        writer = LogWriter(
            self._store,
            self._coordinator,
            clock=SystemClock(),
            ids=IdSource(),
            randomness=random.Random(1),
        )
        config = ProducerConfig(batch_max_bytes=FLUSH_BYTES)
        self._producer = BatchingProducer(writer, clock=SystemClock(), config=config)

    async def _step(self) -> float:
        for _ in range(FLUSHES):
            groups = [
                AppendGroup.of("bench", partition, records) for partition, records in enumerate(self._records)
            ]
            await self._producer.append(groups)
            # Callers arrive one after the other: let the flush begin before the next ones are encoded.
            await asyncio.sleep(0)
        await self._producer.flush()
        return FLUSHES * FLUSH_BYTES / MIB

    def run(self, seconds: float) -> Sample:
        sample = self._runner.run(timed_async(self._step, seconds))
        _empty(self._directory / "llog" / "wal-shared")
        return sample

    def close(self) -> None:
        self._runner.run(self._closed())

    async def _closed(self) -> None:
        await self._producer.close()
        await self._store.close()
        await self._coordinator.close()


def _empty(directory: Path) -> None:
    """Gigabytes of benchmark data must not fill the disk. Not measured."""
    for path in directory.iterdir():
        path.unlink()


async def _opened(directory: Path) -> Coordinator:
    return open_coordinator(directory)


@suite.benchmark(
    "log-append",
    "Appending to 16 partitions keeps at least half of the disk's own rate.",
    Figure("1 KiB records, 16 partitions", of="append", against="raw write and sync", target=at_least(0.5)),
)
def log_append(bench: Bench) -> Iterator[Variants]:
    """Records of random bytes, one directory for each side."""
    data = random.Random(1).randbytes(FLUSH_BYTES)
    with asyncio.Runner() as runner:
        raw = _Raw(bench.directory / "raw", data)
        ours = _Ours(bench.directory / "log", data, runner)
        yield {
            "raw write and sync": Variant(raw.run, "MiB/s", stretch=2.0),
            "append": Variant(ours.run, "MiB/s", stretch=2.0),
        }
        ours.close()
        shutil.rmtree(bench.directory / "log", ignore_errors=True)
