"""What a long history costs: a log with ten million index entries, used beside one with a thousand.

Both logs lie in the embedded coordinator, in databases of their own. Their entries are written as rows, by
sqlite itself, because ten million commits would take hours; they are what as many appends of one record would
have left, and every one names the same slice of one object. Then the log is used as it is: a fresh writer
appends, a fresh reader reads the end, and another somewhere in the middle.

Requests are counted, which no other load disturbs. A lookup counts as two, since the embedded coordinator
answers its two questions one after the other. Times are for orientation: the tree is deeper, and its pages
are not all in memory.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_most
from benchmarks.harness.timing import async_variant
from forebay.coordination import Coordinator, open_coordinator
from forebay.formats import bytes_batch
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, LogReader, LogWriter, ReaderConfig
from forebay.log._keys import OFFSET_DIGITS, PartitionKeys, shared_wal_key
from forebay.log._records import Control, IndexEntry, Pending, encode_record
from forebay.log._uris import uri_of
from forebay.storage import MemoryStore

__all__ = ["History", "log_history"]

LARGE: Final = 10_000_000
SMALL: Final = 1_000
KEYS: Final = PartitionKeys("orders", 0)
RECORD: Final = b"x" * 100
WORKS: Final = ("append", "tail read", "cold read")
_LABELS: Final = {LARGE: "10 million", SMALL: "1,000"}


class History:
    """A log with so many entries in its index, and what using it asks of the two seams."""

    def __init__(self, directory: Path, entries: int) -> None:
        self.entries = entries
        self.requests = 0
        self._path = directory / f"{entries}.db"
        self._store = MemoryStore()
        self._draw = random.Random(entries)

    async def open(self) -> None:
        """Write the history, then open it."""
        body = bytes_batch.encode([RECORD])
        key = shared_wal_key("history")
        await self._store.put(key, body)
        entry = IndexEntry(
            type="WAL",
            msg_count=1,
            data_key=uri_of(self._store, key),
            encoding=bytes_batch.ENCODING,
            created_at_ms=1_700_000_000_000,
            byte_offset=0,
            byte_length=len(body),
            append_id="01HF7YAT00TSV4RRFFQ69G5FAV",
            writer="history",
        )
        last = self.entries + 1
        pending = Pending(start_offset=last, end_offset=last, entry_type="WAL", **_shared(entry))
        control = Control(log_state="OPEN", sequence_counter=last + 1, pending=pending)
        coordinator = open_coordinator(f"sqlite://{self._path.resolve()}")
        await coordinator.put(KEYS.control, encode_record(control), partition_key=KEYS.partition_key)
        await coordinator.close()
        await asyncio.to_thread(_fill, self._path, self.entries, encode_record(entry))
        self._coordinator = open_coordinator(f"sqlite://{self._path.resolve()}")
        self._count_requests(self._coordinator, ("get", "ceiling", "range_scan", "write", "list"))
        self._count_requests(self._store, ("put", "get", "get_ranges", "head", "list"))
        self._writer = self._fresh_writer()

    def _count_requests(self, part: Coordinator | MemoryStore, names: tuple[str, ...]) -> None:
        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.requests += 1
                return method(*arguments, **options)

            return call

        for name in names:
            setattr(part, name, counted(getattr(part, name)))

    def _fresh_writer(self) -> LogWriter:
        return LogWriter(
            self._store, self._coordinator, clock=SystemClock(), ids=IdSource(), randomness=self._draw
        )

    async def append(self) -> int:
        """One record, by a writer that knows the partition."""
        [result] = await self._writer.append_shared([AppendGroup.of("orders", 0, [RECORD])])
        result.unwrap()
        return 1

    async def tail_read(self) -> int:
        """The last record, by a reader that knows nothing."""
        reader = self._reader()
        counter = (await reader.offsets("orders", 0)).next
        return await self._read(reader, counter - 1)

    async def cold_read(self) -> int:
        """A record anywhere, by a reader that knows nothing."""
        return await self._read(self._reader(), self._draw.randint(1, self.entries))

    def _reader(self) -> LogReader:
        config = ReaderConfig(cache_bytes_max=0)
        return LogReader(
            self._store, self._coordinator, clock=SystemClock(), randomness=self._draw, config=config
        )

    async def _read(self, reader: LogReader, offset: int) -> int:
        found = await reader.read("orders", 0, offset, max_records=1)
        assert found.records() == [RECORD]
        return 1

    def work(self, name: str) -> Callable[[], Awaitable[int]]:
        """One of `WORKS`."""
        return {"append": self.append, "tail read": self.tail_read, "cold read": self.cold_read}[name]

    async def cost(self, name: str) -> int:
        """Requests of one piece of work in steady state."""
        await self.work(name)()
        self.requests = 0
        await self.work(name)()
        return self.requests

    async def close(self) -> None:
        """Let go of the database."""
        await self._coordinator.close()


def _shared(entry: IndexEntry) -> dict[str, Any]:
    """What an index entry and a pending append have in common."""
    names = {*Pending.__struct_fields__} & {*IndexEntry.__struct_fields__}
    return {name: value for name, value in msgspec.structs.asdict(entry).items() if name in names}


def _fill(path: Path, entries: int, value: bytes) -> None:
    """One row per entry, as the coordinator writes them."""
    directory = f"{KEYS.root}/index"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma synchronous = off")
        connection.execute("pragma wal_autocheckpoint = 100000")
        connection.execute(
            "insert into kv select ?, printf(?, number), ?, number + 1, null from ("
            "with recursive counting(number) as"
            " (select 1 union all select number + 1 from counting where number < ?)"
            " select number from counting)",
            (directory, f"%0{OFFSET_DIGITS}d", value, entries),
        )
        connection.execute("update counter set version = ?", (entries + 2,))
        connection.execute("pragma wal_checkpoint(truncate)")


@suite.benchmark(
    "log-history",
    "Ten million index entries cost the same requests as a thousand (embedded coordinator).",
    *[
        Figure(
            f"requests of {'an' if name[0] == 'a' else 'a'} {name}",
            of=f"requests, {name}, {_LABELS[LARGE]}",
            against=f"requests, {name}, {_LABELS[SMALL]}",
            target=at_most(1),
        )
        for name in WORKS
    ],
    *[
        Figure(
            f"processor time of {'an' if name[0] == 'a' else 'a'} {name}",
            of=f"{name}, {_LABELS[LARGE]}",
            against=f"{name}, {_LABELS[SMALL]}",
            measure=Measure.CPU,
        )
        for name in WORKS
    ],
)
def log_history(bench: Bench) -> Iterator[Variants]:
    """Two databases on the disk to be measured; the large one is a few gigabytes."""
    variants: dict[str, Variant] = {}
    with asyncio.Runner() as runner:
        logs = [History(bench.directory, entries) for entries in (SMALL, LARGE)]
        for log in logs:
            bench.say(f"writing {log.entries:,} index entries")
            runner.run(log.open())
            for name in WORKS:
                label = f"{name}, {_LABELS[log.entries]}"
                variants[label] = async_variant(runner, log.work(name), "/s")
                variants[f"requests, {label}"] = _counted(runner, log, name)
        yield variants
        for log in logs:
            runner.run(log.close())


def _counted(runner: asyncio.Runner, log: History, name: str) -> Variant:
    return Variant(lambda _: Sample(runner.run(log.cost(name))), "requests")
