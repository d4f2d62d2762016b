"""Lost replies and lost races: what the writer makes of each, one at a time.

The commit-related holes of the protocol are named here, each with a test that fails when its guard is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from tests.log.writing import (
    as_one,
    control_of,
    group,
    in_world,
    index_of,
    metric,
    read_log,
    span,
    writer_in,
    writer_of,
)

from forebay.coordination import ABSENT, MemoryCoordinator, Operation, Record, WriteResult
from forebay.errors import NotDone, OutcomeUnknown, Unavailable
from forebay.kit.clock import SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy
from forebay.log import AppendResult, Contended, LogWriter, Trimmer, WriterConfig
from forebay.log import _commit as commit_module
from forebay.log._keys import PartitionKeys
from forebay.log._records import Compaction, Cursor, IndexEntry, encode_record
from forebay.log._settle import Verdict
from forebay.storage import MemoryStore
from forebay.testing import Actor, World

KEYS = PartitionKeys("t", 0)


async def _one(writer: LogWriter, *records: bytes) -> AppendResult:
    [result] = await writer.append_shared([group("t", 0, *records)])
    return result


@pytest.mark.parametrize("first", [True, False], ids=["first append", "later append"])
@pytest.mark.parametrize("kind", ["after", "lost", "late", "before", "duplicate"])
def test_one_lost_reply_is_settled_without_a_duplicate(kind: str, first: bool) -> None:
    async def append(me: Actor) -> None:
        metrics = MetricsRegistry()
        writer = writer_in(me, metrics=metrics)
        expected = [b"x"]
        if not first:
            await _one(writer, b"a")
            expected = [b"a", b"x"]
        me.world.fail_next(me, "write", kind, on="coordinator", times=2 if first else 1)
        result = await _one(writer, b"x")
        assert span(result) == (len(expected), len(expected))
        await me.clock.sleep(60)
        assert await read_log(me.world.bucket, me.world.keys) == expected
        settled = metric(metrics, "log.outcomes_resolved", "committed")
        assert first or kind == "late" or settled == (kind == "after")

    for seed in range(5):
        as_one(append, seed)


@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("kind", ["after", "lost", "late"])
def test_lost_replies_in_a_row_are_settled_without_a_duplicate(kind: str, rounds: int) -> None:
    async def append(me: Actor) -> None:
        writer = writer_in(me)
        await _one(writer, b"a")
        me.world.fail_next(me, "write", kind, on="coordinator", times=rounds)
        assert (await _one(writer, b"x")).ok
        await me.clock.sleep(60)
        assert await read_log(me.world.bucket, me.world.keys) == [b"a", b"x"]

    as_one(append)


def test_hole_e_ambiguous_commit_then_a_rival_moves_on() -> None:
    """The reply is lost, the append was done, and a rival has appended since: the index tells."""

    async def main(world: World) -> None:
        async def ann(me: Actor) -> AppendResult:
            writer = writer_in(me)
            await _one(writer, b"a")
            world.fail_next(me, "write", "after", on="coordinator")
            world.fail_next(me, "get", "before", on="coordinator", times=8)
            return await _one(writer, b"x")

        async def bob(me: Actor) -> None:
            while (await control_of(world.keys, KEYS))[0].sequence_counter < 3:
                await me.clock.sleep(0.005)
            assert (await _one(writer_in(me), b"rival")).start_offset == 3

        first = world.spawn("ann", ann)
        await world.clock().sleep(0.2)
        while not await world.keys.get(KEYS.control, partition_key=KEYS.partition_key):
            await world.clock().sleep(0.01)
        world.spawn("bob", bob)
        assert span(await first.join()) == (2, 2)
        await world.join()
        assert await read_log(world.bucket, world.keys) == [b"a", b"x", b"rival"]

    in_world(main)


def test_hole_e_guard_removed_makes_a_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: a writer that does not look before it tries again is caught."""

    async def blind(*_: object) -> Verdict:
        return Verdict.NOT_COMMITTED

    monkeypatch.setattr(commit_module, "settle", blind)

    async def append(me: Actor) -> list[bytes]:
        writer = writer_in(me)
        await _one(writer, b"a")
        me.world.fail_next(me, "write", "after", on="coordinator")
        await _one(writer, b"x")
        return await read_log(me.world.bucket, me.world.keys)

    assert as_one(append) == [b"a", b"x", b"x"]


def test_hole_c_late_index_put_never_replaces_an_entry() -> None:
    """A writer that stalls before its request arrives puts an entry that was compacted since."""

    async def main(world: World) -> None:
        async def ann(me: Actor) -> None:
            writer = writer_in(me)
            await _one(writer, b"a", b"b")
            world.fail_next(me, "write", "late", on="coordinator")
            await _one(writer, b"c")

        actor = world.spawn("ann", ann)
        home = KEYS.partition_key
        while await world.keys.get(KEYS.control, partition_key=home) is None:
            await world.clock().sleep(0.001)
        compacted = IndexEntry(
            type="COMPACTED", msg_count=2, data_key="x", encoding="bytes-batch-v1", created_at_ms=1
        )
        await world.keys.put(KEYS.index(2), encode_record(compacted), ABSENT, partition_key=home)
        await actor.join()
        await world.clock().sleep(60)
        assert (await index_of(world.keys, KEYS))[2] == compacted

    for seed in range(5):
        in_world(main, seed)


async def test_an_index_entry_is_never_put_before_its_append_is_committed() -> None:
    """A refused commit must leave nothing of itself behind: every entry belongs to a committed append."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    ann, bob = writer_of(store, coordinator), writer_of(store, coordinator)
    committed = set()
    for number in range(6):
        for writer in (ann, bob):
            assert (await _one(writer, b"%d" % number)).ok
            control, _ = await control_of(coordinator, KEYS)
            assert control.pending is not None
            committed.add(control.pending.append_id)
            entries = await index_of(coordinator, KEYS)
            assert {entry.append_id for entry in entries.values()} <= committed


def test_an_unreachable_coordinator_is_not_done_and_leaves_nothing() -> None:
    async def append(me: Actor) -> None:
        writer = writer_in(me, _hasty())
        await _one(writer, b"a")
        me.world.partition(me, "coordinator")
        result = await _one(writer, b"x")
        assert isinstance(result.error, OutcomeUnknown | Unavailable)
        me.world.heal()
        await me.clock.sleep(60)
        log = await read_log(me.world.bucket, me.world.keys)
        assert log in ([b"a"], [b"a", b"x"])
        if isinstance(result.error, NotDone):
            assert log == [b"a"]
        assert (await _one(writer, b"b")).start_offset == len(log) + 1

    as_one(append)


def _hasty() -> WriterConfig:
    return WriterConfig(commit=RetryPolicy(attempts_max=3, base_ms=10))


def test_an_append_whose_fate_stays_dark_says_so_and_nothing_overtakes_it() -> None:
    """Replies are lost for good. The caller hears `OutcomeUnknown`; a later append is behind it."""

    async def append(me: Actor) -> None:
        writer = writer_in(me, _hasty())
        await _one(writer, b"a")
        me.world.partition(me, "coordinator", replies_only=True)
        result = await _one(writer, b"x")
        assert isinstance(result.error, OutcomeUnknown)
        assert "producer id" in result.error.hint
        me.world.heal()
        assert (await _one(writer, b"b")).ok
        await me.clock.sleep(60)
        log = await read_log(me.world.bucket, me.world.keys)
        assert log in ([b"a", b"x", b"b"], [b"a", b"b"])

    for seed in range(5):
        as_one(append, seed)


def test_an_unreachable_store_is_not_done() -> None:
    async def append(me: Actor) -> None:
        config = WriterConfig(upload=RetryPolicy(attempts_max=2, base_ms=1))
        writer = writer_in(me, config)
        await _one(writer, b"a")
        for kind in ("before", "lost"):
            me.world.fail_next(me, "put", kind, times=2)
            result = await _one(writer, b"x")
            assert isinstance(result.error, Unavailable)
        assert await read_log(me.world.bucket, me.world.keys) == [b"a"]

    as_one(append)


@pytest.mark.parametrize("kind", ["after", "lost", "late", "before", "duplicate"])
def test_one_lost_reply_of_the_upload_is_repeated(kind: str) -> None:
    async def append(me: Actor) -> None:
        writer = writer_in(me)
        me.world.fail_next(me, "put", kind)
        assert span(await _one(writer, b"x")) == (1, 1)
        await me.clock.sleep(60)
        assert await read_log(me.world.bucket, me.world.keys) == [b"x"]

    as_one(append)


async def test_losing_every_round_is_contended_and_certainly_not_done() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    rival = writer_of(store, coordinator)
    config = WriterConfig(commit=RetryPolicy(attempts_max=3, base_ms=0))

    class Overtaken(MemoryCoordinator):
        async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
            await _one(rival, b"r")
            return await coordinator.write(operations)

        async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
            return await coordinator.get(key, partition_key=partition_key)

    await _one(rival, b"r")
    result = await _one(writer_of(store, Overtaken(), config=config), b"x")
    assert isinstance(result.error, Contended)
    assert result.error.attempts == 3
    assert set(await read_log(store, coordinator)) == {b"r"}


class _Compacting(MemoryCoordinator):
    """Does the commit, loses its reply, and lets a rival and a compactor in before anybody looks."""

    def __init__(self, store: MemoryStore, inner: MemoryCoordinator, trace: str) -> None:
        super().__init__()
        self._store, self._inner, self._trace = store, inner, trace
        self._lost = False

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        results = await self._inner.write(operations)
        if self._lost:
            return results
        self._lost = True
        await _one(writer_of(self._store, self._inner), b"r")
        await _compact_two(self._inner, self._trace)
        return [WriteResult(error=OutcomeUnknown("write"))] * len(operations)

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        return await self._inner.get(key, partition_key=partition_key)


@pytest.mark.parametrize("trace", ["record", "cursor", "overwritten"])
async def test_traces_removed_by_compaction_make_the_outcome_unknown(trace: str) -> None:
    """Compaction leaves young entries alone. Where it does not, the writer must not guess."""
    store, inner = MemoryStore(), MemoryCoordinator()
    await _one(writer_of(store, inner), b"a")
    result = await _one(writer_of(store, _Compacting(store, inner, trace)), b"x")
    assert isinstance(result.error, OutcomeUnknown)
    assert "compaction" in str(result.error)
    control, _ = await control_of(inner, KEYS)
    assert control.sequence_counter == 4, "it must not be appended again"


async def _compact_two(coordinator: MemoryCoordinator, trace: str) -> None:
    """Leave the index as a compaction of offsets 1 and 2 does, with one of the traces it may leave."""
    home = KEYS.partition_key
    if trace == "overwritten":
        entry = IndexEntry(
            type="COMPACTED", msg_count=2, data_key="x", encoding="bytes-batch-v1", created_at_ms=1
        )
        await coordinator.put(KEYS.index(2), encode_record(entry), partition_key=home)
        return
    await coordinator.delete(KEYS.index(1), partition_key=home)
    await coordinator.delete(KEYS.index(2), partition_key=home)
    if trace == "cursor":
        await coordinator.put(KEYS.cursor, encode_record(Cursor(offset=3)), partition_key=home)
    else:
        record = Compaction(
            compaction_id="c",
            state="DELETING_OLD",
            start_offset=1,
            end_offset=3,
            msg_count=3,
            data_key="x",
            encoding="bytes-batch-v1",
            created_at_ms=1,
        )
        await coordinator.put(KEYS.compaction, encode_record(record), partition_key=home)


class _Trimming(MemoryCoordinator):
    """Does the commit, loses its reply, and lets a trim or a deletion in between two looks of its writer."""

    def __init__(self, store: MemoryStore, inner: MemoryCoordinator, rival: str) -> None:
        super().__init__()
        self._store, self._inner, self._rival = store, inner, rival
        self._lost = False

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        results = await self._inner.write(operations)
        if self._lost:
            return results
        self._lost = True
        await _one(writer_of(self._store, self._inner), b"r")
        return [WriteResult(error=OutcomeUnknown("write"))] * len(operations)

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        if key == KEYS.index(2):
            # The control record was read a moment ago, and named nothing of this.
            await self._interfere()
        return await self._inner.get(key, partition_key=partition_key)

    async def _interfere(self) -> None:
        clock, randomness = SystemClock(), random.Random(1)
        if self._rival == "trim":
            await Trimmer(self._inner, clock=clock, randomness=randomness).trim("t", 0, 3)
        else:
            await writer_of(self._store, self._inner).catalog.delete("t")


@pytest.mark.parametrize("rival", ["trim", "deletion"])
async def test_traces_removed_between_two_looks_make_the_outcome_unknown(rival: str) -> None:
    """The append was committed, and perhaps read. Its entry is gone by the time the writer looks for it."""
    store, inner = MemoryStore(), MemoryCoordinator()
    await _one(writer_of(store, inner), b"a")
    result = await _one(writer_of(store, _Trimming(store, inner, rival)), b"x")
    assert isinstance(result.error, OutcomeUnknown), f"it was appended twice: {result}"
    if rival == "trim":
        control, _ = await control_of(inner, KEYS)
        assert control.sequence_counter == 4, "it must not be appended again"


def test_a_cancelled_commit_does_not_poison_the_next_one() -> None:
    async def append(me: Actor) -> None:
        for wait_s in (0.0, 0.001, 0.05, 0.062, 0.07, 0.1, 0.2):
            writer = writer_in(me)
            await _one(writer, b"a%f" % wait_s)
            task = asyncio.ensure_future(_one(writer, b"x%f" % wait_s))
            await me.clock.sleep(wait_s)
            task.cancel()
            await asyncio.wait([task])
            assert (await _one(writer, b"b%f" % wait_s)).ok
        await me.clock.sleep(60)
        log = await read_log(me.world.bucket, me.world.keys)
        assert len(log) == len(set(log))
        assert len([one for one in log if one[:1] in b"ab"]) == 14

    for seed in range(3):
        as_one(append, seed)


def test_a_partition_in_trouble_does_not_undo_the_others() -> None:
    """One flush, three partitions; rivals win one of them all the time, the rest is committed once."""

    async def main(world: World) -> None:
        async def rival(me: Actor) -> None:
            writer = writer_in(me)
            for number in range(12):
                [result] = await writer.append_shared([group("t", 1, b"r%d" % number)])
                assert result.ok

        async def ann(me: Actor) -> None:
            writer = writer_in(me)
            for number in range(6):
                results = await writer.append_shared(
                    [group("t", partition, b"%d/%d" % (partition, number)) for partition in range(3)]
                )
                assert all(result.ok for result in results)

        world.spawn("rival", rival)
        world.spawn("ann", ann)
        await world.join()
        for partition in (0, 2):
            log = await read_log(world.bucket, world.keys, "t", partition)
            assert log == [b"%d/%d" % (partition, number) for number in range(6)]
        assert len(await read_log(world.bucket, world.keys, "t", 1)) == 18

    for seed in range(5):
        in_world(main, seed)
