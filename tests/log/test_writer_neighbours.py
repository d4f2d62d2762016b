"""What a writer does for others: it feeds the tail cache, and it minds topics that vanish under its hands."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from benchmarks.figures import suite
from benchmarks.harness import Bench
from tests.log.writing import AT_ONCE, control_of, group, read_log, span, writer_of

from forebay.coordination import ABSENT, MemoryCoordinator, Operation, Put, Record, WriteResult
from forebay.errors import OutcomeUnknown
from forebay.formats import bytes_batch, shared_blob
from forebay.formats.bytes_batch import BytesBatch, Codec
from forebay.formats.encoded_batch import EncodedBatch
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import (
    AppendGroup,
    AppendResult,
    LogWriter,
    Topic,
    TopicDeleted,
    UnknownTopic,
    WriterConfig,
)
from forebay.log._keys import PartitionKeys
from forebay.log._tail_cache import MemoryTailCache
from forebay.log._uris import key_of
from forebay.storage import MemoryStore


class _Heard(MemoryTailCache):
    """A tail cache that also keeps a list of what it was told."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.heard: list[tuple[str, int, int, list[bytes], int]] = []

    def committed(
        self, topic: str, partition: int, start_offset: int, batch: BytesBatch | EncodedBatch, time_ms: int
    ) -> None:
        self.heard.append((topic, partition, start_offset, _columns(batch).records(), time_ms))
        super().committed(topic, partition, start_offset, batch, time_ms)


def _columns(batch: BytesBatch | EncodedBatch) -> BytesBatch:
    return batch if isinstance(batch, BytesBatch) else batch.columns()


def _feeding(store: MemoryStore, coordinator: MemoryCoordinator, cache: MemoryTailCache) -> LogWriter:
    return LogWriter(
        store,
        coordinator,
        clock=SystemClock(),
        ids=IdSource(),
        randomness=random.Random(1),
        config=WriterConfig(commit=AT_ONCE),
        tail_cache=cache,
    )


async def test_the_tail_cache_hears_of_every_commit_as_the_log_has_it() -> None:
    coordinator, cache = MemoryCoordinator(), _Heard()
    writer = _feeding(MemoryStore(), coordinator, cache)
    await writer.append_shared([group("t", 0, b"a"), group("u", 1, b"x"), group("t", 0, b"b")])
    await writer.append_shared([group("t", 0, b"c")])
    assert [heard[:4] for heard in cache.heard] == [
        ("t", 0, 1, [b"a", b"b"]),
        ("u", 1, 1, [b"x"]),
        ("t", 0, 3, [b"c"]),
    ]
    control, _ = await control_of(coordinator, PartitionKeys("t", 0))
    assert control.pending is not None
    assert cache.heard[-1][4] == control.pending.created_at_ms


@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_the_tail_cache_hears_exactly_what_a_read_will_give(codec: Codec) -> None:
    """Records without headers or times beside records with them: the log fills the gaps."""
    store, told = MemoryStore(), []

    class Kept(_Heard):
        def committed(
            self, topic: str, partition: int, start: int, batch: BytesBatch | EncodedBatch, time_ms: int
        ) -> None:
            told.append(_columns(batch))

    writer = LogWriter(
        store,
        MemoryCoordinator(),
        clock=SystemClock(),
        ids=IdSource(),
        randomness=random.Random(1),
        config=WriterConfig(codec=codec),
        tail_cache=Kept(),
    )
    rich = AppendGroup.of("t", 0, [b"b"], keys=[b"k"], timestamps_ms=[7], headers=[{"h": b"v"}])
    [result, _] = await writer.append_shared([group("t", 0, b"a"), rich])
    assert result.wal_uri is not None
    blob = (await store.get(key_of(store, result.wal_uri))).data
    [row] = shared_blob.decode(blob).partitions
    read = bytes_batch.decode(blob[row.body_offset : row.body_offset + row.body_length])
    [batch] = told
    assert (batch.values, batch.keys, batch.headers) == (read.values, read.keys, read.headers)
    assert batch.timestamps_ms is not None and read.timestamps_ms is not None
    assert batch.timestamps_ms.tolist() == read.timestamps_ms.tolist()


async def test_the_tail_cache_hears_nothing_of_what_was_not_appended() -> None:
    coordinator, cache = MemoryCoordinator(), _Heard()
    writer = _feeding(MemoryStore(), coordinator, cache)
    sent = group("t", 0, b"a", producer="p", sequence=0)
    await writer.append_shared([sent, group("t", 0, b"gap", producer="p", sequence=5)])
    await writer.append_shared([sent])
    assert [heard[:4] for heard in cache.heard] == [("t", 0, 1, [b"a"])]


async def test_the_tail_cache_hears_of_a_commit_that_was_settled_later() -> None:
    inner, cache = MemoryCoordinator(), _Heard()

    class Lossy(MemoryCoordinator):
        losses = 0

        async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
            results = await inner.write(operations)
            if not self.losses:
                return results
            self.losses -= 1
            return [WriteResult(error=OutcomeUnknown("write"))] * len(operations)

        async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
            return await inner.get(key, partition_key=partition_key)

    coordinator = Lossy()
    writer = _feeding(MemoryStore(), coordinator, cache)
    await writer.append_shared([group("t", 0, b"a")])
    coordinator.losses = 1
    await writer.append_shared([group("t", 0, b"b")])
    assert [heard[:4] for heard in cache.heard] == [("t", 0, 1, [b"a"]), ("t", 0, 2, [b"b"])]


class _Interrupted(MemoryCoordinator):
    """Lets something happen just before a control record is created."""

    def __init__(self, inner: MemoryCoordinator) -> None:
        super().__init__()
        self._inner = inner
        self.before: Callable[[], Awaitable[None]] | None = None
        self.after: Callable[[], Awaitable[None]] | None = None

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        creates = any(
            isinstance(one, Put) and one.key.endswith("meta/control") and one.when is ABSENT
            for one in operations
        )
        if creates and self.before is not None:
            before, self.before = self.before, None
            await before()
        results = await self._inner.write(operations)
        if creates and self.after is not None:
            after, self.after = self.after, None
            await after()
        return results

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        return await self._inner.get(key, partition_key=partition_key)


async def _one(writer: LogWriter, record: bytes) -> AppendResult:
    [result] = await writer.append_shared([group("t", 0, record)])
    return result


async def test_a_partition_begun_under_a_deleted_topic_is_begun_anew() -> None:
    """Between looking at the catalog and creating the partition, others use and delete the topic."""
    store, inner = MemoryStore(), MemoryCoordinator()
    coordinator, other = _Interrupted(inner), writer_of(store, inner)
    writer = writer_of(store, coordinator)
    await other.append_shared([group("t", 1, b"of another partition")])

    async def use_and_delete() -> None:
        for number in range(3):
            await _one(other, b"%d" % number)
        await other.catalog.delete("t")

    coordinator.before = use_and_delete
    assert span(await _one(writer, b"x")) == (4, 4)
    assert (await writer.catalog.describe("t")).first_offset == 4
    control, _ = await control_of(inner, PartitionKeys("t", 0))
    assert (control.start_offset, control.sequence_counter) == (4, 5)
    assert await read_log(store, inner) == [b"x"]


async def test_a_strict_writer_does_not_bring_a_deleted_topic_back() -> None:
    store, inner = MemoryStore(), MemoryCoordinator()
    coordinator, other = _Interrupted(inner), writer_of(store, inner)
    writer = writer_of(store, coordinator, config=WriterConfig(auto_create=False, commit=AT_ONCE))
    await other.catalog.create("t")

    async def delete() -> None:
        await other.catalog.delete("t")

    coordinator.before = delete
    assert isinstance((await _one(writer, b"x")).error, UnknownTopic)
    keys = PartitionKeys("t", 0)
    assert await inner.get(keys.control, partition_key=keys.partition_key) is None


async def test_a_partition_that_somebody_replaced_is_not_taken_back() -> None:
    """It began under a topic that is gone, below the first offset of the next one: nobody builds on that."""
    store, inner = MemoryStore(), MemoryCoordinator()
    coordinator, other = _Interrupted(inner), writer_of(store, inner)
    writer = writer_of(store, coordinator)
    await _one(other, b"old")
    await other.catalog.delete("t")
    await other.catalog.create("t", partitions=2)
    await other.append_shared([group("t", 1, b"1"), group("t", 1, b"2")])

    async def delete() -> None:
        await other.catalog.delete("t")

    async def replace() -> None:
        assert span(await _one(other, b"rival")) == (4, 4)

    coordinator.before, coordinator.after = delete, replace
    result = await _one(writer, b"x")
    assert isinstance(result.error, OutcomeUnknown)
    assert await read_log(store, inner) == [b"rival"]


@pytest.mark.parametrize("made_again", [False, True], ids=["deleted", "made again"])
async def test_what_a_late_request_made_after_a_deletion_is_not_built_on(made_again: bool) -> None:
    """The first append of a partition is sent twice, and one copy sleeps through the deletion of the topic.
    Whoever went on from there would give out offsets again that the topic had before."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    keys = PartitionKeys("t", 0)
    await _one(writer, b"first")
    late = await coordinator.get(keys.control, partition_key=keys.partition_key)
    assert late is not None
    await _one(writer, b"second")
    await writer.catalog.delete("t")
    if made_again:
        await writer.catalog.create("t")
    await coordinator.put(keys.control, late.value, ABSENT, partition_key=keys.partition_key)
    for other in (writer, writer_of(store, coordinator)):
        assert (await _one(other, b"next")).ok
    assert await read_log(store, coordinator) == [b"next", b"next"]
    assert (await control_of(coordinator, keys))[0].start_offset == 3


async def test_a_topic_under_deletion_takes_no_partition_from_a_writer_that_makes_no_topics() -> None:
    """It would outlive the topic, acknowledged, and its object would go with the next vacuum."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator, config=WriterConfig(commit=AT_ONCE, auto_create=False))
    await writer.catalog.create("t")
    assert (await _one(writer, b"x")).ok
    remove = writer.catalog._remove_objects

    async def append_meanwhile(topic: Topic) -> None:
        # The keys are gone, the name is not.
        assert isinstance((await _one(writer, b"y")).error, TopicDeleted)
        await remove(topic)

    writer.catalog._remove_objects = append_meanwhile  # type: ignore[method-assign]
    await writer.catalog.delete("t")
    assert await coordinator.get("llog/t/partitions/0/meta/control", partition_key="t:0") is None


@pytest.mark.parametrize("name", ["log-commit-embedded", "log-append"])
def test_the_figures_of_the_log_can_be_measured(name: str, tmp_path: Path) -> None:
    [benchmark] = suite.select([name])
    with contextlib.ExitStack() as stack:
        variants = stack.enter_context(benchmark.variants(Bench(tmp_path)))
        samples = {title: variant.run(0.001) for title, variant in variants.items()}
    assert all(figure.value(samples) > 0 for figure in benchmark.figures)
