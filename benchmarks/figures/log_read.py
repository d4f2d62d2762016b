"""Reading a log into Arrow, against copying the same bytes in memory.

The log holds 256 MiB of 1 KiB records, as 4 MiB appends in a directory whose files are in the page cache. A
step scans all of it into record batches: control record, index, range requests, both checksums, all seven
columns. The raw sides copy the same number of bytes from one buffer to another, and read the same files with
pread. Nothing is kept between two steps. "Per core" is per second of processor time of the whole process, so
that threads which read ahead count in full.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_least
from benchmarks.harness.timing import async_variant, variant
from forebay.coordination import open_coordinator
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, LogReader, LogWriter, ReaderConfig
from forebay.storage import open_store

__all__ = ["log_read"]

MIB = 1024 * 1024
RECORD_BYTES = 1024
APPEND_BYTES = 4 * MIB
APPENDS = 64
TOTAL = APPENDS * APPEND_BYTES


@suite.benchmark(
    "log-read",
    "Records of a log become Arrow at a good part of the speed of memory.",
    Figure("GB/s per core", of="scan, per core", measure=Measure.PLAIN, target=at_least(1.0)),
    Figure("against memcpy", of="scan into Arrow", against="memcpy"),
    Figure("against pread", of="scan into Arrow", against="pread"),
)
def log_read(bench: Bench) -> Iterator[Variants]:
    """The same bytes through us, through pread, and through memory alone."""
    directory = bench.directory / "log"
    with asyncio.Runner() as runner:
        reader, close = runner.run(_filled(directory))

        async def scan() -> float:
            rows = 0
            async for batch in reader.scan("orders", 0):
                rows += batch.num_rows
            assert rows == TOTAL // RECORD_BYTES
            return TOTAL / MIB

        def scan_by_processor_time(seconds: float) -> Sample:
            began, units = time.process_time(), 0.0
            deadline = time.perf_counter() + seconds
            while time.perf_counter() < deadline:
                units += runner.run(scan())
            return Sample(units * MIB / 1e9 / (time.process_time() - began))

        source, target = bytearray(os.urandom(APPEND_BYTES)), memoryview(bytearray(APPEND_BYTES))
        files = sorted(path for path in directory.rglob("wal-shared/*") if path.is_file())

        def memcpy() -> float:
            for _ in range(APPENDS):
                target[:] = source
            return TOTAL / MIB

        def pread() -> float:
            for path in files:
                file = os.open(path, os.O_RDONLY)
                os.pread(file, APPEND_BYTES * 2, 0)
                os.close(file)
            return TOTAL / MIB

        yield {
            "scan into Arrow": async_variant(runner, scan, "MiB/s"),
            "scan, per core": Variant(scan_by_processor_time, "GB/s"),
            "memcpy": variant(memcpy, "MiB/s"),
            "pread": variant(pread, "MiB/s"),
        }
        runner.run(close())


async def _filled(directory: Path) -> tuple[LogReader, Callable[[], Coroutine[Any, Any, None]]]:
    """A log of random records, and a reader that keeps nothing."""
    store, coordinator = open_store(directory), open_coordinator(directory)
    clock, randomness = SystemClock(), random.Random(1)
    writer = LogWriter(store, coordinator, clock=clock, ids=IdSource(), randomness=randomness)
    for _ in range(APPENDS):
        data = os.urandom(APPEND_BYTES)
        records = [data[at : at + RECORD_BYTES] for at in range(0, APPEND_BYTES, RECORD_BYTES)]
        [result] = await writer.append_shared([AppendGroup.of("orders", 0, records)])
        result.unwrap()
    config = ReaderConfig(cache_bytes_max=0)
    reader = LogReader(store, coordinator, clock=clock, randomness=randomness, config=config)

    async def close() -> None:
        await coordinator.close()
        await store.close()

    return reader, close
