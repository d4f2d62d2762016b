"""What the tests of the writing side share: writers, a plain reader that trusts nothing, counted requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from crc32c import crc32c

from forebay.coordination import Coordinator, MemoryCoordinator
from forebay.formats import bytes_batch, shared_blob
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy
from forebay.log import AppendGroup, AppendResult, Fencing, LogWriter, WriterConfig
from forebay.log._keys import PartitionKeys
from forebay.log._records import Control, Cursor, IndexEntry, decode_record
from forebay.log._uris import key_of
from forebay.storage import MemoryStore, ObjectStore
from forebay.testing import Actor, World

AT_ONCE = RetryPolicy(attempts_max=20, base_ms=0, cap_ms=0)
"""Retries without waiting."""


def writer_of(
    store: ObjectStore | None = None,
    coordinator: Coordinator | None = None,
    *,
    config: WriterConfig | None = None,
    clock: Clock | None = None,
    metrics: MetricsRegistry | None = None,
    name: str = "",
) -> LogWriter:
    """A writer on the machine's clock, in memory unless told otherwise."""
    clock = clock or SystemClock()
    return LogWriter(
        store or MemoryStore(),
        coordinator or MemoryCoordinator(),
        clock=clock,
        ids=IdSource(clock),
        randomness=random.Random(1),
        config=config or WriterConfig(commit=AT_ONCE, upload=AT_ONCE),
        metrics=metrics,
        name=name,
    )


def writer_in(
    me: Actor, config: WriterConfig | None = None, metrics: MetricsRegistry | None = None
) -> LogWriter:
    """The writer of an actor."""
    return LogWriter(
        me.store,
        me.coordinator,
        clock=me.clock,
        ids=me.ids,
        randomness=me.random,
        config=config,
        metrics=metrics,
        name=me.name,
    )


def fencing_in(me: Actor) -> Fencing:
    """The fencing door of an actor."""
    return Fencing(me.coordinator, writer_in(me).catalog, clock=me.clock, randomness=me.random)


def group(
    topic: str,
    partition: int,
    *records: bytes,
    producer: str | None = None,
    sequence: int | None = None,
    epoch: int | None = None,
) -> AppendGroup:
    """A group of plain records."""
    plain = AppendGroup.of(topic, partition, list(records))
    return replace(plain, producer_id=producer, sequence=sequence, epoch=epoch)


def span(result: AppendResult) -> tuple[int | None, int | None]:
    """First and last offset."""
    return result.start_offset, result.end_offset


async def control_of(coordinator: Coordinator, keys: PartitionKeys) -> tuple[Control, int]:
    """The control record and its version."""
    record = await coordinator.get(keys.control, partition_key=keys.partition_key)
    assert record is not None
    return decode_record(Control, record.key, record.value), record.version


async def index_of(coordinator: Coordinator, keys: PartitionKeys) -> dict[int, IndexEntry]:
    """Every index entry by its end offset."""
    found = {}
    async for record in coordinator.scan_all(*keys.index_range(), partition_key=keys.partition_key):
        found[keys.end_offset(record.key)] = decode_record(IndexEntry, record.key, record.value)
    return found


async def read_log(
    store: ObjectStore, coordinator: Coordinator, topic: str = "t", partition: int = 0
) -> list[bytes]:
    """The whole partition, straight from the keys and objects. Fails on any gap, overlap or bad slice.

    Independent of the reader under test elsewhere: it takes all index entries and the pending append, and
    wants them to cover every offset from the first to the counter exactly once.
    """
    keys = PartitionKeys(topic, partition)
    record = await coordinator.get(keys.control, partition_key=keys.partition_key)
    if record is None:
        return []
    control = decode_record(Control, record.key, record.value)
    cursor = await coordinator.get(keys.cursor, partition_key=keys.partition_key)
    assert cursor is not None
    assert decode_record(Cursor, cursor.key, cursor.value).offset <= control.sequence_counter
    entries = await index_of(coordinator, keys)
    if control.pending is not None:
        entry = control.pending.index_entry()
        assert entries.get(control.pending.end_offset, entry) == entry
        entries[control.pending.end_offset] = entry
    records: list[bytes] = []
    expected, time_ms = control.start_offset, 0
    for end, entry in sorted(entries.items()):
        if end < control.start_offset:
            continue  # Put late, by somebody who slept through a trim or a deletion: nobody looks there.
        assert entry.start_offset(end) == expected, f"{keys}: {entry} ends at {end}, expected {expected}"
        assert entry.created_at_ms >= time_ms, "entry times went back"
        records += await _slice(store, entry, keys)
        expected, time_ms = end + 1, entry.created_at_ms
    assert expected == control.sequence_counter
    return records


async def _slice(store: ObjectStore, entry: IndexEntry, keys: PartitionKeys) -> list[bytes]:
    assert entry.byte_offset is not None and entry.byte_length is not None
    whole = await store.get(key_of(store, entry.data_key))
    rows = [
        row
        for row in shared_blob.decode(whole.data).partitions
        if (row.topic, row.partition, row.body_offset) == (keys.topic, keys.partition, entry.byte_offset)
    ]
    assert len(rows) == 1
    body = whole.data[entry.byte_offset : entry.byte_offset + entry.byte_length]
    assert rows[0].msg_count == entry.msg_count
    assert rows[0].crc32c == entry.crc32c == crc32c(body)
    records = bytes_batch.decode(body).records()
    assert len(records) == entry.msg_count
    return records


class Counted:
    """Passes every call on and counts it by name."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments, **named)

        return call


def counted_store(store: ObjectStore) -> tuple[ObjectStore, Counter[str]]:
    """The store, and a live count of its requests."""
    counted = Counted(store)
    return cast(ObjectStore, counted), counted.calls


def counted_coordinator(coordinator: Coordinator) -> tuple[Coordinator, Counter[str]]:
    """The coordinator, and a live count of its requests."""
    counted = Counted(coordinator)
    return cast(Coordinator, counted), counted.calls


def in_world(main: Callable[[World], Awaitable[Any]], seed: int = 1, **options: Any) -> Any:
    """Run `main` in a world of its own."""

    async def run(world: World) -> Any:
        return await main(world)

    return World(seed, **options).run(run)


def as_one(actor: Callable[[Actor], Awaitable[Any]], seed: int = 1, **options: Any) -> Any:
    """Run one actor in a world of its own; its result."""

    async def main(world: World) -> Any:
        async def run(me: Actor) -> Any:
            return await actor(me)

        return await world.spawn("w", run).join()

    return in_world(main, seed, **options)


def values(results: Sequence[AppendResult]) -> list[tuple[int | None, int | None]]:
    """First and last offsets of many results."""
    return [span(result) for result in results]


def metric(registry: MetricsRegistry, name: str, *labels: str) -> float:
    """The value of one counter or gauge."""
    [family] = [family for family in registry.families() if family.name == name]
    [series] = [series for found, series in family.series() if found == labels]
    value = series.value
    assert isinstance(value, int | float)
    return value
