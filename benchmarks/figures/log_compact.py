"""Compaction of 10,000 small appends into objects of 64 MiB, against copying the same bytes raw.

Both sides read 10,000 slices of 20 KiB out of 10,000 files and make durable files of 64 MiB of them. The raw
side opens, preads and closes each file, writes what it read, syncs and renames. Our side does the same by
way of the store, checks every slice twice (its own checksum and its entry's) and its lengths, joins the
columns, checks the result, reads the new object back, and replaces 10,000 index entries in the embedded
coordinator. `store copy` is in between: the same reads and writes through the store, and nothing else.

Memory is measured in a process of its own: the highest resident size after compaction over that before it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.figures._suite import suite
from benchmarks.harness import (
    Bench,
    CannotMeasure,
    Figure,
    Measure,
    Sample,
    Variant,
    Variants,
    at_least,
    at_most,
)
from forebay.coordination import Coordinator, Put, open_coordinator
from forebay.formats import bytes_batch, shared_blob
from forebay.kit import IdSource, SystemClock
from forebay.log import Compactor, CompactorConfig
from forebay.log._keys import PartitionKeys, shared_wal_key
from forebay.log._records import Control, Cursor, IndexEntry, encode_record
from forebay.log._uris import uri_of
from forebay.storage import ObjectStore, open_store

__all__ = ["log_compact"]

BATCHES = 10_000
RECORDS_PER_BATCH = 20
RECORD_BYTES = 1_000
PUTS_AT_ONCE = 32
WRITE_OPERATIONS = 5_000
MIB = 1024 * 1024
CONFIG = CompactorConfig(min_age_ms=0, wait_for_full_ms=0)
KEYS = PartitionKeys("t", 0)


class _Log:
    """10,000 appends in a directory, and their index, which can be put back as it was."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.slices: list[tuple[Path, int, int]] = []
        """File, first byte, length."""
        self._puts: list[Put] = []

    async def fill(self, store: ObjectStore) -> None:
        ids = IdSource()
        turns = asyncio.Semaphore(PUTS_AT_ONCE)
        body = bytes_batch.encode([os.urandom(RECORD_BYTES) for _ in range(RECORDS_PER_BATCH)])
        part = shared_blob.Part(KEYS.topic, KEYS.partition, RECORDS_PER_BATCH, body)
        blob, [cut] = shared_blob.encode([part], created_at_ms=1)

        async def append(number: int) -> None:
            key = shared_wal_key(ids.token())
            async with turns:
                await store.put(key, blob)
            self.slices.append((self._directory / key, cut.body_offset, cut.body_length))
            entry = IndexEntry(
                type="WAL",
                msg_count=RECORDS_PER_BATCH,
                data_key=uri_of(store, key),
                encoding=bytes_batch.ENCODING,
                created_at_ms=1,
                byte_offset=cut.body_offset,
                byte_length=cut.body_length,
                crc32c=cut.crc32c,
            )
            self._put(KEYS.index((number + 1) * RECORDS_PER_BATCH), encode_record(entry))

        await asyncio.gather(*(append(number) for number in range(BATCHES)))
        counter = BATCHES * RECORDS_PER_BATCH + 1
        control = Control(log_state="OPEN", sequence_counter=counter, pending=None)
        self._put(KEYS.control, encode_record(control))
        self._put(KEYS.cursor, encode_record(Cursor(offset=1)))

    def _put(self, key: str, value: bytes) -> None:
        self._puts.append(Put(key, value, partition_key=KEYS.partition_key))

    async def restore(self, coordinator: Coordinator) -> None:
        """The index as if nothing was ever compacted."""
        for first in range(0, len(self._puts), WRITE_OPERATIONS):
            for result in await coordinator.write(self._puts[first : first + WRITE_OPERATIONS]):
                result.unwrap()

    @property
    def mib(self) -> float:
        """Size of all slices."""
        return sum(length for _, _, length in self.slices) / MIB

    def copy_raw(self, directory: Path) -> None:
        """Slice by slice into durable files of the target size."""
        slices = iter(self.slices)
        for number, count in enumerate(self.runs):
            temporary = directory / f"{number}.new"
            out = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                for path, start, length in islice(slices, count):
                    file = os.open(path, os.O_RDONLY)
                    rest = memoryview(os.pread(file, length, start))
                    os.close(file)
                    while rest:
                        rest = rest[os.write(out, rest) :]
                os.fsync(out)
            finally:
                os.close(out)
            temporary.rename(directory / f"{number}")
            parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(parent)
            os.close(parent)

    async def copy_through(self, store: ObjectStore) -> None:
        """The same through the store."""
        slices = iter(self.slices)
        for number, count in enumerate(self.runs):
            pieces = [
                await store.get_range(str(path.relative_to(self._directory)), start, length)
                for path, start, length in islice(slices, count)
            ]
            await store.put(f"copies/{number}", b"".join(pieces))

    @property
    def runs(self) -> list[int]:
        """How many slices go into each object of the target size."""
        most = CONFIG.target_bytes // self.slices[0][2]
        return [min(most, BATCHES - first) for first in range(0, BATCHES, most)]


async def _compact(store: ObjectStore, coordinator: Coordinator) -> list[str]:
    """Fold everything; the URIs of the new objects."""
    clock = SystemClock()
    compactor = Compactor(
        store, coordinator, clock=clock, ids=IdSource(clock), randomness=random.Random(), config=CONFIG
    )
    results = await compactor.compact_all(KEYS.topic, KEYS.partition)
    records = sum(result.records for result in results)
    assert records == BATCHES * RECORDS_PER_BATCH, records
    return [result.data_key for result in results if result.data_key]


def _peak_mib(directory: str) -> float:
    """In a process of its own: MiB that compaction adds to the resident size."""

    async def work() -> float:
        async with open_store(Path(directory)) as store, open_coordinator(Path(directory)) as coordinator:
            await coordinator.get(KEYS.control, partition_key=KEYS.partition_key)
            before = _highest_kib()
            await _compact(store, coordinator)
            return (_highest_kib() - before) / 1024

    return asyncio.run(work())


def _highest_kib() -> int:
    """Highest resident size of this process. What `getrusage` tells is inherited from whoever started it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1])


@suite.benchmark(
    "log-compact",
    "Compacting 10,000 small appends costs little more than copying their bytes, in bounded memory.",
    Figure("against raw copy", of="compact", against="raw copy", target=at_least(0.4)),
    Figure("against copy through the store", of="compact", against="store copy"),
    Figure("MiB over base", of="memory", target=at_most(256), measure=Measure.PLAIN),
)
def log_compact(bench: Bench) -> Iterator[Variants]:
    """One partition, its files in the page cache on all sides."""
    if not Path("/proc/self/status").exists():
        raise CannotMeasure("the highest resident size is read from /proc")
    directory = bench.directory / "log"
    log = _Log(directory)
    raw_directory = bench.directory / "raw"
    raw_directory.mkdir()
    with asyncio.Runner() as runner:
        store = open_store(directory)
        coordinator = runner.run(_opened(directory))
        bench.say(f"writing {BATCHES:,} appends")
        runner.run(log.fill(store))

        def raw(_: float) -> Sample:
            begin = time.perf_counter()
            log.copy_raw(raw_directory)
            return Sample(log.mib / (time.perf_counter() - begin))

        def through(_: float) -> Sample:
            begin = time.perf_counter()
            runner.run(log.copy_through(store))
            return Sample(log.mib / (time.perf_counter() - begin))

        def compact(_: float) -> Sample:
            runner.run(log.restore(coordinator))
            begin = time.perf_counter()
            uris = runner.run(_compact(store, coordinator))
            elapsed = time.perf_counter() - begin
            for uri in uris:
                Path(uri.removeprefix("file://")).unlink()
            return Sample(log.mib / elapsed)

        def memory(_: float) -> Sample:
            runner.run(log.restore(coordinator))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return Sample(pool.apply(_peak_mib, (str(directory),)))

        yield {
            "raw copy": Variant(raw, "MiB/s"),
            "store copy": Variant(through, "MiB/s"),
            "compact": Variant(compact, "MiB/s"),
            "memory": Variant(memory, "MiB"),
        }
        runner.run(coordinator.close())
        runner.run(store.close())


async def _opened(directory: Path) -> Coordinator:
    return open_coordinator(directory)
