"""A small log on memory tenants with a clock that the test moves: what the tests of compaction share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from forebay.coordination import ABSENT, ANY, MemoryCoordinator
from forebay.errors import ForebayError
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy
from forebay.log import (
    AppendGroup,
    CompactionResult,
    Compactor,
    CompactorConfig,
    LogReader,
    LogWriter,
    ReaderConfig,
    Vacuum,
    VacuumConfig,
    VacuumReport,
    VerifyReport,
    verify,
)
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta, located, read_meta
from forebay.log._records import IndexEntry, encode_record
from forebay.log._resolve import Located
from forebay.storage import MemoryStore

START_MS = 1_760_000_000_000
AT_ONCE = RetryPolicy(attempts_max=5, base_ms=0, cap_ms=0)
EAGER = CompactorConfig(min_age_ms=0, wait_for_full_ms=0, entries_min=1)
"""Folds whatever there is."""
HASTY = VacuumConfig(grace_ms=1_000, mark_gap_ms=1_000)


class ManualClock:
    """Stands still until somebody sleeps."""

    def __init__(self) -> None:
        self.elapsed = 0.0

    def now_ms(self) -> int:
        return START_MS + int(self.elapsed * 1000)

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        self.elapsed += max(0.0, seconds)


class Bed:
    """One deployment, and hands for everybody in it."""

    def __init__(self, topic: str = "t", partition: int = 0) -> None:
        self.clock = ManualClock()
        self.random = random.Random(7)
        self.ids = IdSource(self.clock, self.random)
        self.store = MemoryStore(self.clock, self.ids)
        self.keys_of_coordinator = MemoryCoordinator()
        self.coordinator = self.keys_of_coordinator
        self.keys = PartitionKeys(topic, partition)
        self.sent: list[bytes] = []
        self.writer = self.new_writer()

    def new_writer(self, name: str = "writer") -> LogWriter:
        return LogWriter(
            self.store,
            self.coordinator,
            clock=self.clock,
            ids=self.ids,
            randomness=self.random,
            name=name,
        )

    def reader(self) -> LogReader:
        config = ReaderConfig(cache_bytes_max=0, retry=AT_ONCE, attempts_max=3)
        return LogReader(
            self.store, self.coordinator, clock=self.clock, randomness=self.random, config=config
        )

    def compactor(self, config: CompactorConfig = EAGER) -> Compactor:
        return Compactor(
            self.store,
            self.coordinator,
            clock=self.clock,
            ids=self.ids,
            randomness=self.random,
            config=config,
            policy=AT_ONCE,
        )

    def vacuum(self, config: VacuumConfig = HASTY) -> Vacuum:
        return Vacuum(
            self.store,
            self.coordinator,
            clock=self.clock,
            randomness=self.random,
            ids=self.ids,
            config=config,
        )

    async def append(self, *sizes: int, partitions: Sequence[int] | None = None) -> None:
        """One append per size, of so many records, to our partition (or to several at once)."""
        for size in sizes:
            values = [b"record %05d" % (len(self.sent) + number) for number in range(size)]
            where = [self.keys.partition] if partitions is None else partitions
            groups = [AppendGroup.of(self.keys.topic, number, values) for number in where]
            for result in await self.writer.append_shared(groups):
                assert result.error is None, result.error
            self.sent += values

    async def compact(self, config: CompactorConfig = EAGER) -> CompactionResult:
        return await self.compactor(config).compact_once(self.keys.topic, self.keys.partition)

    async def run_vacuum(self, config: VacuumConfig = HASTY, *, times: int = 2) -> VacuumReport:
        """As many runs as it takes to delete, with the grace between them."""
        for _ in range(times):
            await self.clock.sleep(2 + config.grace_ms / 1000 + config.mark_gap_ms / 1000)
            report = await self.vacuum(config).run_once()
        return report

    async def verify(self) -> VerifyReport:
        return await verify(self.store, self.coordinator, clock=self.clock, randomness=self.random)

    async def problems(self) -> list[str]:
        return [problem for each in (await self.verify()).partitions for problem in each.problems]

    async def meta(self) -> PartitionMeta:
        return await read_meta(self.coordinator, self.keys)

    async def index(self) -> list[Located]:
        start, end = self.keys.index_range()
        records = await self.coordinator.range_scan(start, end, partition_key=self.keys.partition_key)
        return [located(self.keys, record) for record in records]

    async def spans(self) -> list[tuple[str, int, int]]:
        """Type, first and last offset of every index entry."""
        return [(each.entry.type, each.start_offset, each.end_offset) for each in await self.index()]

    async def put_late(self, entry: Located, *, if_absent: bool = True) -> bool:
        """What a writer does that slept since its commit; whether it landed."""
        try:
            await self.coordinator.put(
                self.keys.index(entry.end_offset),
                encode_record(entry.entry),
                ABSENT if if_absent else ANY,
                partition_key=self.keys.partition_key,
            )
        except ForebayError:
            return False
        return True

    async def put_index(self, end: int, entry: IndexEntry) -> None:
        await self.coordinator.put(
            self.keys.index(end), encode_record(entry), partition_key=self.keys.partition_key
        )

    async def unreadable(self) -> list[int]:
        """Offsets that a reader cannot read, or reads wrongly, each asked for by itself."""
        reader, meta = self.reader(), await self.meta()
        wrong = []
        for offset in range(meta.earliest, meta.next):
            try:
                found = await reader.read(self.keys.topic, self.keys.partition, offset, max_records=1)
            except ForebayError:
                wrong.append(offset)
            else:
                if found.records() != [self.sent[offset - 1]]:
                    wrong.append(offset)
        return wrong

    async def read_all(self) -> list[bytes]:
        """Every record, by a scan."""
        scan = self.reader().scan_batches(self.keys.topic, self.keys.partition)
        return [value async for batch in scan for value in batch.batch.records()]
