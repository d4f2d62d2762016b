"""The commit of a flush against the sequence of the specification, on the same coordinator, in the same run.

The baseline is ours: a re-implementation of the specified sequence, which publishes neither source nor
figures. For each partition of a flush, one after the other, it reads the control record, sets the pending
append by compare-and-set, puts the index entry, and clears the pending append by compare-and-set: four
dependent round trips. Both sides encode the same records and put them into a store in memory; that is not
measured, only the commit is.

On Oxia the baseline runs twice: with one plain call per operation, which is all that the client of the
specification can do, and with our own client, whose puts share one stream of writes. The second says what the
sequence alone gains, the first what somebody gains who comes from there.

Flushes come strictly one after the other, but for the last variant: there a producer flushes every group by
itself, over eight partitions, and commits what is uploaded together; encoding is part of it. The specified
writer has no such mode; it serialises all flushes. On the embedded coordinator a read costs next to nothing,
so three synced writes stand against one there, not four round trips.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

import msgspec

from benchmarks.figures._suite import suite
from benchmarks.figures._unary_oxia import UnaryOxia
from benchmarks.harness import Bench, CannotMeasure, Figure, Sample, Variant, Variants, at_least
from benchmarks.harness.timing import async_variant
from forebay.coordination import ABSENT, ANY, Coordinator, Record, When, open_coordinator
from forebay.formats import bytes_batch, shared_blob
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, BatchingProducer, LogWriter, ProducerConfig
from forebay.log._keys import PartitionKeys, shared_wal_key
from forebay.log._records import Control, Cursor, Pending, decode_record, encode_record
from forebay.log._upload import Uploaded
from forebay.storage import MemoryStore
from forebay.testing.servers import OxiaServer, ServerUnavailable

__all__ = ["SpecifiedSequence", "log_commit_embedded", "log_commit_oxia"]

T = TypeVar("T")

SIZES = (1, 100)
RECORD = bytes(100)
PREPARED = 4
PIPELINED_PARTITIONS = 8
PIPELINED_ROUNDS = 4

_FIGURES = [
    Figure(
        f"{size} partition{'s' if size > 1 else ''} per flush",
        of=f"one round trip, {size}",
        against=f"specified sequence, {size}",
        target=at_least(4 if size == 1 else 50),
    )
    for size in SIZES
] + [
    Figure(
        "1 partition per flush, pipelined",
        of="one round trip, pipelined",
        against="specified sequence, 1",
        target=at_least(4),
    )
]


_PLAIN_FIGURES = [
    Figure(
        f"{size} partition{'s' if size > 1 else ''} per flush, against plain calls",
        of=f"one round trip, {size}",
        against=f"plain calls, {size}",
        target=at_least(4 if size == 1 else 50),
    )
    for size in SIZES
]


class _Keys(Protocol):
    """What the specified sequence needs of a coordinator."""

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None: ...

    async def put(
        self, key: str, value: bytes, when: When = ANY, *, partition_key: str | None = None
    ) -> int: ...


def _groups(topic: str, partitions: int) -> list[AppendGroup]:
    return [AppendGroup.of(topic, partition, [RECORD]) for partition in range(partitions)]


class SpecifiedSequence:
    """Read, set pending, put index, clear pending: four round trips per partition."""

    def __init__(self, coordinator: _Keys, topic: str, partitions: int) -> None:
        self._coordinator = coordinator
        self._store = MemoryStore()
        self._ids = IdSource()
        self._clock = SystemClock()
        self._every = [PartitionKeys(topic, partition) for partition in range(partitions)]
        self._begun = False

    async def _begin(self) -> None:
        control = encode_record(Control(log_state="OPEN", sequence_counter=1, pending=None))
        for keys in self._every:
            home = keys.partition_key
            await self._coordinator.put(keys.control, control, ABSENT, partition_key=home)
            await self._coordinator.put(
                keys.cursor, encode_record(Cursor(offset=1)), ABSENT, partition_key=home
            )
        self._begun = True

    async def prepare(self) -> tuple[str, list[shared_blob.Slice]]:
        """Encode and upload one flush over all partitions."""
        if not self._begun:
            await self._begin()
        parts = [
            shared_blob.Part(keys.topic, keys.partition, 1, bytes_batch.encode([RECORD]))
            for keys in self._every
        ]
        blob, slices = shared_blob.encode(parts, created_at_ms=self._clock.now_ms())
        key = shared_wal_key(self._ids.ulid())
        await self._store.put(key, blob)
        return key, slices

    async def commit(self, prepared: tuple[str, list[shared_blob.Slice]]) -> int:
        """Commit it; how many partitions that were."""
        key, slices = prepared
        for keys, where in zip(self._every, slices, strict=True):
            await self._commit(keys, key, where)
        return len(self._every)

    async def _commit(self, keys: PartitionKeys, key: str, where: shared_blob.Slice) -> None:
        coordinator, home = self._coordinator, keys.partition_key
        record = await coordinator.get(keys.control, partition_key=home)
        assert record is not None
        control = decode_record(Control, record.key, record.value)
        pending = Pending(
            append_id=self._ids.ulid(),
            start_offset=control.sequence_counter,
            end_offset=control.sequence_counter,
            msg_count=1,
            entry_type="WAL",
            data_key=f"memory:///{key}",
            encoding=where.encoding,
            created_at_ms=self._clock.now_ms(),
            byte_offset=where.body_offset,
            byte_length=where.body_length,
            crc32c=where.crc32c,
        )
        control = msgspec.structs.replace(control, sequence_counter=pending.end_offset + 1, pending=pending)
        version = await coordinator.put(
            keys.control, encode_record(control), record.version, partition_key=home
        )
        entry = encode_record(pending.index_entry())
        await coordinator.put(keys.index(pending.end_offset), entry, ABSENT, partition_key=home)
        cleared = encode_record(msgspec.structs.replace(control, pending=None))
        await coordinator.put(keys.control, cleared, version, partition_key=home)


def _writer(coordinator: Coordinator) -> LogWriter:
    return LogWriter(
        MemoryStore(),
        coordinator,
        clock=SystemClock(),
        ids=IdSource(),
        randomness=random.Random(1),
    )


class _OneRoundTrip:
    """Our writer, cut between upload and commit."""

    def __init__(self, coordinator: Coordinator, topic: str, partitions: int) -> None:
        self._writer = _writer(coordinator)
        self._topic, self._partitions = topic, partitions

    async def prepare(self) -> Uploaded:
        return await self._writer.upload(_groups(self._topic, self._partitions))

    async def commit(self, uploaded: Uploaded) -> int:
        [results] = await self._writer.commit([uploaded])
        for result in results:
            result.unwrap()
        return len(results)


class _Side(Protocol[T]):
    """Prepares flushes and commits them."""

    async def prepare(self) -> T: ...

    async def commit(self, prepared: T, /) -> int: ...


def _measured(runner: asyncio.Runner, side: _Side[T]) -> Variant:
    """Commits per second of commit: preparing is left out of the time."""

    async def run(seconds: float) -> Sample:
        spent, units = 0.0, 0
        while spent < seconds:
            ready = [await side.prepare() for _ in range(PREPARED)]
            begin = time.perf_counter()
            for prepared in ready:
                units += await side.commit(prepared)
            spent += time.perf_counter() - begin
        return Sample(units / spent)

    return Variant(lambda seconds: runner.run(run(seconds)), "commits/s")


def _pipelined(writer: LogWriter) -> Callable[[], Awaitable[float]]:
    producer: list[BatchingProducer] = []

    async def flushes() -> int:
        if not producer:
            producer.append(
                BatchingProducer(writer, clock=SystemClock(), config=ProducerConfig(batch_max_groups=1))
            )
        for _ in range(PIPELINED_ROUNDS):
            producer[0].append_nowait(_groups("ours-pipelined", PIPELINED_PARTITIONS))
        await producer[0].flush()
        return PIPELINED_ROUNDS * PIPELINED_PARTITIONS

    return flushes


def _variants(runner: asyncio.Runner, coordinator: Coordinator) -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for size in SIZES:
        baseline = SpecifiedSequence(coordinator, f"specified-{size}", size)
        variants[f"specified sequence, {size}"] = _measured(runner, baseline)
        ours = _OneRoundTrip(coordinator, f"ours-{size}", size)
        variants[f"one round trip, {size}"] = _measured(runner, ours)
    pipelined = _pipelined(_writer(coordinator))
    variants["one round trip, pipelined"] = async_variant(runner, pipelined, "commits/s")
    return variants


async def _opened(url: str) -> Coordinator:
    return open_coordinator(url)


async def _plain(address: str) -> UnaryOxia:
    return UnaryOxia(address)


@suite.benchmark(
    "log-commit-embedded",
    "A flush commits in one round trip whatever its partitions (embedded coordinator).",
    *_FIGURES,
)
def log_commit_embedded(bench: Bench) -> Iterator[Variants]:
    """One database on the disk to be measured."""
    with asyncio.Runner() as runner:
        coordinator = runner.run(_opened(f"sqlite://{bench.directory.resolve()}/coordinator.db"))
        yield _variants(runner, coordinator)
        runner.run(coordinator.close())


@suite.benchmark(
    "log-commit-oxia",
    "A flush commits in one round trip whatever its partitions (Oxia, one shard).",
    *_FIGURES,
    *_PLAIN_FIGURES,
)
def log_commit_oxia(bench: Bench) -> Iterator[Variants]:
    """One server with one shard on this machine, fsync on."""
    bench.say("starting Oxia")
    try:
        server = OxiaServer(directory=bench.directory)
    except ServerUnavailable as error:
        raise CannotMeasure(error.message) from error
    with server, asyncio.Runner() as runner:
        coordinator = runner.run(_opened(server.url()))
        plain = runner.run(_plain(server.address))
        variants = _variants(runner, coordinator)
        for size in SIZES:
            sequence = SpecifiedSequence(plain, f"plain-{size}", size)
            variants[f"plain calls, {size}"] = _measured(runner, sequence)
        yield variants
        runner.run(plain.close())
        runner.run(coordinator.close())
