"""Consumer groups: who owns what, who may commit, how far behind they are."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.coordination import Coordinator, MemoryCoordinator, Operation, WriteResult
from forebay.errors import Closed, NotFound, UsageError
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, Catalog, LogReader, LogWriter
from forebay.log._group_assign import assign
from forebay.log._group_member import GroupConfig
from forebay.log._group_records import GenerationFenced, GroupBusy, TopicPartition
from forebay.log._groups import Groups
from forebay.log._keys import CATALOG_PARTITION_KEY, GroupKeys, group_key
from forebay.log._trim import Trimmer
from forebay.storage import MemoryStore, ObjectStore


class Log:
    """A log with a writer, for tests of groups."""

    def __init__(
        self,
        store: ObjectStore | None = None,
        coordinator: Coordinator | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        randomness: random.Random | None = None,
        config: GroupConfig | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        self.coordinator = coordinator or MemoryCoordinator()
        self.clock = clock or SystemClock()
        self.ids = ids or IdSource()
        self.random = randomness or random.Random(1)
        parts = {"clock": self.clock, "randomness": self.random}
        self.writer = LogWriter(self.store, self.coordinator, ids=self.ids, **parts)  # type: ignore[arg-type]
        self.catalog: Catalog = self.writer.catalog
        self.reader = LogReader(self.store, self.coordinator, **parts)  # type: ignore[arg-type]
        self.groups = Groups(
            self.coordinator,
            self.reader,
            self.catalog,
            clock=self.clock,
            ids=self.ids,
            randomness=self.random,
            config=config,
        )

    async def write(self, partition: int, records: Sequence[bytes], topic: str = "orders") -> int:
        [result] = await self.writer.append_shared([AppendGroup.of(topic, partition, records)])
        start = result.unwrap().start_offset
        assert start is not None
        return start


@pytest.fixture
async def log() -> AsyncIterator[Log]:
    made = Log()
    await made.catalog.create("orders", partitions=4)
    yield made
    await made.coordinator.close()


def at(partition: int, topic: str = "orders") -> TopicPartition:
    return TopicPartition(topic, partition)


ALL = [at(number) for number in range(4)]


# -- Assignment


def test_partitions_are_shared_out_evenly() -> None:
    members = {name: ["orders"] for name in "abc"}
    chosen = assign(members, {"orders": 8}, {})
    assert sorted(len(places) for places in chosen.values()) == [2, 3, 3]
    assert sorted(place for places in chosen.values() for place in places) == [at(n) for n in range(8)]


def test_a_partition_stays_where_it_was_if_it_can() -> None:
    before = assign({"a": ["orders"], "b": ["orders"]}, {"orders": 8}, {})
    after = assign({"a": ["orders"], "b": ["orders"], "c": ["orders"]}, {"orders": 8}, before)
    moved = [place for member in "ab" for place in before[member] if place not in after[member]]
    assert len(moved) == len(after["c"]) == 2


@given(
    members=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=2), st.lists(st.sampled_from("xyz"), min_size=1), max_size=6
    ),
    counts=st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)),
    seed=st.integers(0, 10),
)
def test_every_partition_has_exactly_one_owner_that_asked_for_it(
    members: dict[str, list[str]], counts: dict[str, int], seed: int
) -> None:
    before: dict[str, list[TopicPartition]] = {}
    for name in random.Random(seed).sample(sorted(members), k=len(members) // 2):
        before[name] = [TopicPartition("x", seed), TopicPartition("y", 0)]
    chosen = assign(members, counts, before)
    assert chosen.keys() == members.keys()
    given_out = [place for places in chosen.values() for place in places]
    wanted = {
        TopicPartition(topic, number)
        for topic, count in counts.items()
        for number in range(count)
        if any(topic in topics for topics in members.values())
    }
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == wanted
    assert all(place.topic in members[member] for member, places in chosen.items() for place in places)
    same = {tuple(sorted(set(topics))) for topics in members.values()}
    if len(same) == 1 and chosen:
        sizes = [len(places) for places in chosen.values()]
        assert max(sizes) - min(sizes) <= 1


# -- Members


async def test_one_member_owns_everything_and_two_share(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        assert sorted(one.owned) == ALL
        async with log.groups.member("billing", ["orders"]) as two:
            await one.changed()
            assert len(one.owned) == len(two.owned) == 2
            assert sorted([*one.owned, *two.owned]) == ALL
        while len(one.owned) < 4:
            await one.changed()


async def test_a_commit_is_found_by_the_next_owner(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        assert one.owned[at(2)] is None
        await one.commit({at(2): 7, at(3): 9})
    async with log.groups.member("billing", ["orders"]) as two:
        assert two.owned == {at(0): None, at(1): None, at(2): 7, at(3): 9}
        assert two.generation > 0
    with pytest.raises(Closed):
        await two.commit({at(2): 8})


async def test_a_commit_never_goes_back(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        await one.commit({at(0): 7})
        await one.commit({at(0): 7})
        with pytest.raises(UsageError, match="committed up to 7"):
            await one.commit({at(0): 6})


async def test_an_owner_that_was_overtaken_cannot_commit(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        await one.commit({at(0): 5})
        stale = dict(one._held)
        async with log.groups.member("billing", ["orders"]) as two:
            await one.changed()
            moved = next(iter(two.owned))
            one._held[moved] = stale[moved]  # as if it had not heard of the new generation
            with pytest.raises(GenerationFenced) as caught:
                await one.commit({moved: 99})
            assert caught.value.partition == moved
            assert moved not in one.owned
            await two.commit({moved: 6})
        assert (await log.groups.committed("billing"))[moved].offset == 6


async def test_a_slow_member_cannot_claim_back_what_a_newer_generation_has(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        generation = one.generation
        async with log.groups.member("billing", ["orders"]) as two:
            await one.changed()
            moved = next(iter(two.owned))
            one.generation = generation
            await one._claim([moved])
            assert moved not in one.owned
            await two.commit({moved: 3})


async def test_a_commit_of_many_partitions_is_one_round_trip() -> None:
    coordinator = MemoryCoordinator()
    log = Log(coordinator=coordinator)
    await log.catalog.create("orders", partitions=50)
    async with log.groups.member("billing", ["orders"]) as one:
        writes = 0
        original = coordinator.write

        async def counted(operations):  # type: ignore[no-untyped-def]
            nonlocal writes
            writes += 1
            return await original(operations)

        coordinator.write = counted  # type: ignore[method-assign]
        await one.commit(dict.fromkeys(one.owned, 3))
        assert writes == 1
    assert {record.offset for record in (await log.groups.committed("billing")).values()} == {3}
    await coordinator.close()


async def test_new_partitions_and_topics_with_dots_are_picked_up() -> None:
    log = Log(config=GroupConfig(refresh_ms=1))
    await log.catalog.create("a.b", partitions=1)
    async with log.groups.member("bill.ing", ["a.b", "not.there"]) as one:
        assert sorted(one.owned) == [at(0, "a.b")]
        await log.catalog.alter("a.b", partitions=3)
        while len(one.owned) < 3:
            await one.changed()
        await one.commit({at(2, "a.b"): 1})
    assert await log.groups.list() == ["bill.ing"]
    assert (await log.groups.committed("bill.ing"))[at(2, "a.b")].offset == 1
    await log.coordinator.close()


async def test_a_member_that_cannot_start_leaves_nothing_behind(log: Log) -> None:
    with pytest.raises(UsageError):
        log.groups.member("billing", [])
    with pytest.raises(UsageError):
        log.groups.member("bil/ling", ["orders"])
    member = log.groups.member("billing", ["orders"])
    async with member:
        with pytest.raises(UsageError, match="joined already"):
            await member.start()


# -- From outside


async def test_a_start_that_is_cancelled_leaves_no_member(log: Log) -> None:
    member, joined = log.groups.member("billing", ["orders"]), asyncio.Event()

    async def never() -> None:
        joined.set()
        await asyncio.Event().wait()

    member._refresh = never  # type: ignore[method-assign]
    start = asyncio.get_running_loop().create_task(member.start())
    await joined.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    async with log.groups.member("billing", ["orders"]) as other:
        assert list(other.owned) == ALL


async def test_a_member_that_could_not_enter_its_key_tries_again_with_the_next_look(log: Log) -> None:
    """A session alone is no membership: nobody would assign anything to it, and nothing would say so."""
    async with log.groups.member("billing", ["orders"]) as one:
        assert one._session is not None
        await one._session.close()
        put = log.coordinator.put

        async def refuse(*_: Any, **__: Any) -> int:
            raise Closed("cut off")

        log.coordinator.put = refuse  # type: ignore[method-assign]
        with pytest.raises(Closed):
            await one._look()
        assert one.owned == {}
        log.coordinator.put = put  # type: ignore[method-assign]
        await one._look()
        assert list(one.owned) == ALL


async def test_what_is_held_is_committed_beside_what_is_not(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        del one._held[at(1)]
        with pytest.raises(GenerationFenced) as refused:
            await one.commit({at(0): 2, at(1): 2, at(2): 2})
        assert refused.value.partition == at(1)
        assert (one.owned[at(0)], one.owned[at(2)]) == (2, 2)


@pytest.mark.parametrize(
    ("place", "offset", "generation"),
    [
        (TopicPartition("or/ders", 0), 1, 0),
        (TopicPartition("orders", -1), 1, 0),
        (("orders", 0), 1, 0),
        (TopicPartition("orders", 0), -1, 0),
        (TopicPartition("orders", 0), "1", 0),
        (TopicPartition("orders", 0), 2**70, 0),
        (TopicPartition("orders", 0), 1, -1),
        (TopicPartition("orders", 0), 1, 2**64 - 1),
    ],
)
async def test_commits_that_nobody_could_read_again_are_refused(
    log: Log, place: Any, offset: Any, generation: int
) -> None:
    with pytest.raises(UsageError):
        await log.groups.commit("billing", {at(1): 1, place: offset}, generation=generation)
    assert await log.groups.list() == []


async def test_commits_from_outside_are_fenced_by_generation_and_by_members(log: Log) -> None:
    for partition in range(3):
        await log.write(partition, [b"x"] * 9)
    await log.groups.commit("spark", {at(0): 5, at(1): 6}, generation=3)
    with pytest.raises(GenerationFenced) as caught:
        await log.groups.commit("spark", {at(0): 9, at(2): 4}, generation=2)
    assert (caught.value.generation, caught.value.current) == (2, 3)
    committed = await log.groups.committed("spark")
    assert (committed[at(0)].offset, committed[at(2)].offset) == (5, 4)
    async with log.groups.member("spark", ["orders"]):
        with pytest.raises(GenerationFenced):
            await log.groups.commit("spark", {at(0): 9}, generation=1_000)
    await log.groups.commit("spark", {at(0): 9}, generation=1_000)
    with pytest.raises(UsageError, match="committed up to 9"):
        await log.groups.commit("spark", {at(0): 8}, generation=1_000)


async def test_lag_is_told_in_records_and_seconds(log: Log) -> None:
    await log.write(0, [b"a", b"b", b"c"])
    await log.write(1, [b"d"])
    await log.groups.commit("billing", {at(0): 2, at(1): 2, at(2): 1})
    described = await log.groups.describe("billing")
    lags = {lag.partition: lag for lag in described.partitions}
    assert [lags[number].records for number in range(3)] == [2, 0, 0]
    assert lags[0].seconds >= 0.0
    assert lags[1].seconds == lags[2].seconds == 0.0
    assert (described.records, described.members) == (2, ())
    with pytest.raises(NotFound):
        await log.groups.describe("nobody")


async def test_lag_counts_from_the_oldest_record_and_is_never_negative() -> None:
    class Later(SystemClock):
        ahead_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.ahead_ms

    clock = Later()
    log = Log(clock=clock)
    await log.write(0, [b"a", b"b"])
    await log.groups.commit("billing", {at(0): 2})
    clock.ahead_ms = 60_000
    lag = await log.groups.lag("billing", "orders", 0)
    assert lag is not None
    assert 60 <= lag.seconds < 120
    clock.ahead_ms = -60_000
    lag = await log.groups.lag("billing", "orders", 0)
    assert lag is not None
    assert lag.seconds == 0.0
    await Trimmer(log.coordinator, clock=clock, randomness=log.random).trim("orders", 0, 3)
    lag = await log.groups.lag("billing", "orders", 0)
    assert lag is not None
    assert (lag.records, lag.committed, lag.earliest) == (0, 2, 3)
    assert await log.groups.lag("billing", "nobody", 0) is None


async def test_lag_is_also_told_for_partitions_that_were_never_committed(log: Log) -> None:
    await log.write(3, [b"a", b"b"])
    async with log.groups.member("billing", ["orders"], name="host.one") as one:
        described = await log.groups.describe("billing")
        assert described.records == 2
        assert [lag.committed for lag in described.partitions] == [None] * 4
        assert {lag.owner for lag in described.partitions} == {one.member_id}
        assert [member.member_id for member in described.members] == [one.member_id]


# -- Reset and delete


async def test_a_reset_goes_to_either_end_an_offset_or_a_time(log: Log) -> None:
    await log.write(0, [b"a", b"b", b"c"])
    await log.groups.commit("billing", {at(0): 2})

    async def after(**where: object) -> int:
        [plan] = await log.groups.reset("billing", **where)  # type: ignore[arg-type]
        found = (await log.groups.committed("billing"))[at(0)].offset
        assert found == plan.after
        return plan.after

    assert await after(to="latest") == 4
    assert await after(to="earliest") == 1
    assert await after(to=3) == 3
    assert await after(to=99) == 4
    assert await after(to_time_ms=0) == 1
    assert await after(to_time_ms=1 << 50) == 4
    with pytest.raises(UsageError, match="one place"):
        await log.groups.reset("billing")


async def test_a_dry_run_of_a_reset_changes_nothing(log: Log) -> None:
    await log.write(0, [b"a", b"b", b"c"])
    await log.groups.commit("billing", {at(0): 2})
    [plan] = await log.groups.reset("billing", to="latest", dry_run=True)
    assert (plan.before, plan.after) == (2, 4)
    assert (await log.groups.committed("billing"))[at(0)].offset == 2


async def test_a_reset_of_a_live_group_needs_force_and_fences_its_members(log: Log) -> None:
    await log.write(0, [b"a", b"b", b"c"])
    async with log.groups.member("billing", ["orders"]) as one:
        await one.commit({at(0): 3})
        with pytest.raises(GroupBusy):
            await log.groups.reset("billing", to="earliest")
        await log.groups.reset("billing", [at(0)], to="earliest", force=True)
        with pytest.raises(GenerationFenced):
            await one.commit({at(0): 4})
        await one._refresh()
        assert one.owned[at(0)] == 1


async def test_a_deleted_group_is_gone_and_its_members_are_fenced(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        await one.commit({at(0): 3})
        with pytest.raises(GroupBusy):
            await log.groups.delete("billing")
        await log.groups.delete("billing", force=True)
        with pytest.raises(GenerationFenced):
            await one.commit({at(0): 4})
    with contextlib.suppress(NotFound):  # The member may have entered it again.
        await log.groups.delete("billing")
    assert await log.groups.list() == []
    assert await log.groups.committed("billing") == {}


async def test_what_a_deletion_that_was_cut_short_has_left_can_be_deleted(log: Log) -> None:
    await log.groups.commit("billing", {at(0): 1})
    await log.coordinator.delete(group_key("billing"), partition_key=CATALOG_PARTITION_KEY)
    await log.groups.delete("billing")
    assert await log.groups.committed("billing") == {}
    with pytest.raises(NotFound):
        await log.groups.delete("billing")


async def test_a_reset_passes_over_topics_that_were_deleted(log: Log) -> None:
    await log.write(0, [b"a", b"b"])
    await log.write(0, [b"a"], topic="gone")
    await log.groups.commit("billing", {at(0): 3, at(0, "gone"): 2})
    await log.catalog.delete("gone")
    [plan] = await log.groups.reset("billing", to="earliest")
    assert (plan.topic, plan.before, plan.after) == ("orders", 3, 1)
    with pytest.raises(LookupError):
        await log.groups.reset("billing", [at(0, "gone")], to="earliest")


async def test_a_reset_of_no_group_or_to_no_place_is_refused_and_makes_none(log: Log) -> None:
    with pytest.raises(NotFound):
        await log.groups.reset("billign", to="earliest")
    await log.groups.commit("billing", {at(0): 1})
    for place in ("banana", True, 1.0):
        with pytest.raises(UsageError, match="no place"):
            await log.groups.reset("billing", to=place)  # type: ignore[arg-type]
    assert await log.groups.list() == ["billing"]


async def test_a_member_with_nothing_to_commit_hears_of_a_forced_reset(log: Log) -> None:
    await log.write(0, [b"a", b"b"])
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        await consumer.poll()
        await consumer.commit()
        await log.groups.reset("billing", to="earliest", force=True)
        await consumer.member._refresh()
        [batch] = await consumer.poll(timeout_s=10)
        assert batch.start_offset == 1
        await consumer.commit()
    assert (await log.groups.committed("billing"))[at(0)].offset == 3


async def test_a_reset_wins_over_a_commit_that_comes_in_between(log: Log) -> None:
    await log.write(0, [b"a", b"b", b"c"])
    async with log.groups.member("billing", ["orders"]) as one:
        await one.commit({at(0): 2})
        write = log.coordinator.write

        async def commit_first(operations: Sequence[Operation]) -> list[WriteResult]:
            log.coordinator.write = write  # type: ignore[method-assign]
            await one.commit({at(0): 3})
            return await write(operations)

        entered = log.groups._retry

        async def then(operation: Any) -> Any:
            log.coordinator.write = commit_first  # type: ignore[method-assign]
            log.groups._retry = entered  # type: ignore[method-assign]
            return await entered(operation)

        check = log.groups._check_idle

        async def idle(keys: GroupKeys, force: bool) -> None:
            await check(keys, force)
            log.groups._retry = then  # type: ignore[method-assign]

        log.groups._check_idle = idle  # type: ignore[method-assign]
        await log.groups.reset("billing", [at(0)], to="earliest", force=True)
        assert (await log.groups.committed("billing"))[at(0)].offset == 1


async def test_a_group_that_was_deleted_under_its_members_is_listed_while_they_live(log: Log) -> None:
    async with log.groups.member("billing", ["orders"]) as one:
        await log.groups.delete("billing", force=True)
        await one._refresh()
        assert await log.groups.list() == ["billing"]
        await one.commit({at(0): 1})
        assert (await log.groups.describe("billing")).members[0].member_id == one.member_id


# -- Consumers


async def test_a_consumer_reads_commits_and_goes_on_where_it_was(log: Log) -> None:
    await log.write(0, [b"a", b"b"])
    await log.write(3, [b"c"])
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        batches = await consumer.poll()
        assert sorted(value for batch in batches for value in batch.batch.records()) == [b"a", b"b", b"c"]
        assert await consumer.poll() == []
        await consumer.commit()
    await log.write(0, [b"d"])
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        [batch] = await consumer.poll(timeout_s=10)
        assert (batch.start_offset, batch.batch.records()) == (3, [b"d"])
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        [batch] = await consumer.poll(timeout_s=10)  # it was not committed
        assert batch.start_offset == 3


async def test_a_consumer_without_offsets_begins_where_it_is_told(log: Log) -> None:
    await log.write(0, [b"a"])
    async with log.groups.consumer("late", ["orders"], start_at="latest") as consumer:
        assert await consumer.poll() == []
        await log.write(0, [b"b"])
        [batch] = await consumer.poll(timeout_s=10)
        assert batch.batch.records() == [b"b"]


async def test_a_consumer_whose_offset_was_trimmed_goes_on_at_the_earliest(log: Log) -> None:
    for value in (b"a", b"b", b"c"):
        await log.write(0, [value])
    await log.groups.commit("billing", {at(0): 1})
    await Trimmer(log.coordinator, clock=log.clock, randomness=log.random).trim("orders", 0, 3)
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        [batch] = await consumer.poll(timeout_s=10)
        assert batch.batch.records() == [b"c"]


async def test_what_was_read_under_a_lost_claim_is_not_committed_under_the_next(log: Log) -> None:
    await log.write(0, [b"a", b"b"])
    async with log.groups.consumer("billing", ["orders"]) as consumer:
        await consumer.poll()
        await log.groups.reset("billing", [at(0)], to="earliest", force=True)
        with pytest.raises(GenerationFenced):
            await consumer.member.commit({at(0): 3})
        await consumer.member._refresh()
        with pytest.raises(GenerationFenced):
            await consumer.commit()
        [batch] = await consumer.poll(timeout_s=10)
        assert batch.start_offset == 1
        await consumer.commit()
    assert (await log.groups.committed("billing"))[at(0)].offset == 3


async def test_a_consumer_outside_of_its_group_is_told_so(log: Log) -> None:
    """A poll without an answer looks like a log without records."""
    await log.write(0, [b"x"])
    consumer = log.groups.consumer("billing", ["orders"])
    with pytest.raises(Closed, match="not in its group"):
        await consumer.poll(timeout_s=0.0)
    async with consumer:
        assert await consumer.poll(timeout_s=5)
    with pytest.raises(Closed, match="not in its group"):
        await consumer.poll(timeout_s=0.0)


@pytest.mark.parametrize("wrong", [("orders", 0), TopicPartition("orders", "0"), TopicPartition("../x", 0)])  # type: ignore[arg-type]
async def test_a_reset_of_what_is_no_partition_is_refused(log: Log, wrong: Any) -> None:
    with pytest.raises(UsageError):
        await log.groups.reset("billing", [wrong], to="earliest")
