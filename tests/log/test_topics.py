"""The catalog: create, list, describe, alter, delete; deletion may be cut anywhere and gone on with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.log.writing import (
    AT_ONCE,
    as_one,
    counted_store,
    group,
    in_world,
    read_log,
    span,
    values,
    writer_in,
    writer_of,
)

from forebay.coordination import (
    ABSENT,
    Coordinator,
    MemoryCoordinator,
    Operation,
    Record,
    WriteResult,
    children,
)
from forebay.errors import StorageDamaged, UsageError
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import (
    Catalog,
    Fenced,
    TopicDeleted,
    TopicExists,
    TopicSettings,
    UnknownTopic,
    WriterConfig,
)
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.log._records import Cursor, decode_record
from forebay.log._topics import Topic
from forebay.storage import MemoryStore, ObjectStore
from forebay.testing import Actor, Faults, World


def _catalog(store: ObjectStore | None = None, coordinator: Coordinator | None = None) -> Catalog:
    return Catalog(
        store or MemoryStore(),
        coordinator or MemoryCoordinator(),
        clock=SystemClock(),
        ids=IdSource(),
        randomness=random.Random(1),
        policy=AT_ONCE,
    )


async def test_a_topic_is_created_and_described() -> None:
    catalog = _catalog()
    settings = TopicSettings(retention_ms=1_000, compaction=False)
    made = await catalog.create("a.b-c", partitions=4, settings=settings)
    found = await catalog.describe("a.b-c")
    assert found == made
    assert (found.topic, found.partitions, found.settings, found.grows) == ("a.b-c", 4, settings, False)
    assert found.topic_id and found.created_at_ms > 0


async def test_topics_are_listed_by_name() -> None:
    catalog = _catalog()
    for name in ("b", "a.2", "c", "a~1", "a"):
        if "~" in name:
            with pytest.raises(UsageError):
                await catalog.create(name)
        else:
            await catalog.create(name)
    assert [topic.topic for topic in await catalog.list()] == ["a", "a.2", "b", "c"]


async def test_a_thousand_and_more_topics_are_listed() -> None:
    catalog = _catalog()
    for number in range(1_050):
        await catalog.create(f"t{number:04d}")
    assert [topic.topic for topic in await catalog.list()] == [f"t{number:04d}" for number in range(1_050)]


async def test_a_name_is_taken_once() -> None:
    catalog = _catalog()
    await catalog.create("t")
    with pytest.raises(TopicExists, match="'t' exists"):
        await catalog.create("t")


@pytest.mark.parametrize("partitions", [0, -1, 100_001])
async def test_impossible_partition_counts_are_refused(partitions: int) -> None:
    with pytest.raises(UsageError):
        await _catalog().create("t", partitions=partitions)


@pytest.mark.parametrize("name", ["", "a/b", ".a", "-a", "wal-shared", "x" * 201, "ä"])
async def test_impossible_names_are_refused(name: str) -> None:
    catalog = _catalog()
    for call in (catalog.create(name), catalog.describe(name), catalog.delete(name)):
        with pytest.raises(UsageError):
            await call


@pytest.mark.parametrize(
    "settings",
    [{"retention_ms": 0}, {"retention_bytes": -1}, {"target_bytes": 0}, {"compact_min_age_ms": -1}],
)
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        TopicSettings(**settings)  # type: ignore[arg-type]


async def test_an_unknown_topic_is_not_described_altered_or_deleted() -> None:
    catalog = _catalog()
    assert await catalog.find("t") is None
    for call in (catalog.describe("t"), catalog.alter("t", partitions=2), catalog.delete("t")):
        with pytest.raises(UnknownTopic):
            await call


@pytest.mark.parametrize("wrong", [{"retention_ms": -1}, {}, "7d"])
async def test_settings_that_are_none_do_not_get_into_the_catalog(wrong: Any) -> None:
    """They were stored, and then nobody could read the entry: the topic was gone, and the vacuum stopped."""
    catalog = _catalog()
    with pytest.raises(UsageError, match="settings"):
        await catalog.create("t", settings=wrong)
    await catalog.create("t")
    with pytest.raises(UsageError, match="settings"):
        await catalog.alter("t", settings=wrong)
    assert [topic.topic for topic in await catalog.list()] == ["t"]


async def test_settings_and_partitions_are_altered_apart() -> None:
    catalog = _catalog()
    made = await catalog.create("t", partitions=2)
    settings = TopicSettings(retention_bytes=5)
    altered = await catalog.alter("t", settings=settings)
    assert (altered.settings, altered.partitions, altered.topic_id) == (settings, 2, made.topic_id)
    altered = await catalog.alter("t", partitions=5)
    assert (altered.settings, altered.partitions) == (settings, 5)
    assert await catalog.alter("t", partitions=5) == altered
    with pytest.raises(UsageError, match="not fewer"):
        await catalog.alter("t", partitions=4)
    assert await catalog.describe("t") == altered


async def test_records_of_newer_versions_are_read() -> None:
    coordinator = MemoryCoordinator()
    value = b'{"topic":"t","topic_id":"x","partitions":2,"created_at_ms":1,"colour":"green"}'
    await coordinator.put(topic_key("t"), value, ABSENT, partition_key=CATALOG_PARTITION_KEY)
    found = await _catalog(coordinator=coordinator).describe("t")
    assert (found.partitions, found.state, found.settings) == (2, "ACTIVE", TopicSettings())


@pytest.mark.parametrize(
    "field", ['"partitions":0', '"partitions":9223372036854775807', '"partitions":2,"first_offset":0']
)
async def test_an_impossible_record_is_damage_and_nobody_counts_up_to_it(field: str) -> None:
    coordinator = MemoryCoordinator()
    value = b'{"topic":"t","topic_id":"x","created_at_ms":1,%s}' % field.encode()
    await coordinator.put(topic_key("t"), value, ABSENT, partition_key=CATALOG_PARTITION_KEY)
    catalog = _catalog(coordinator=coordinator)
    with pytest.raises(StorageDamaged, match="llog-catalog/topics/t"):
        await catalog.describe("t")
    with pytest.raises(StorageDamaged, match="llog-catalog/topics/t"):
        (await catalog.survey()).whole()
    assert await catalog.list() == []


@pytest.mark.parametrize(
    "value",
    [
        b"not JSON",
        b'{"topic":"other","topic_id":"x","partitions":2,"created_at_ms":1}',
        b'{"topic":"../up","topic_id":"x","partitions":2,"created_at_ms":1}',
    ],
)
async def test_an_entry_that_cannot_be_read_hides_no_other_topic(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = MemoryCoordinator()
    catalog = _catalog(coordinator=coordinator)
    for name in ("a", "b", "c"):
        await catalog.create(name)
    await coordinator.put(topic_key("b"), value, partition_key=CATALOG_PARTITION_KEY)
    assert [topic.topic for topic in await catalog.list()] == ["a", "c"]
    assert "llog-catalog/topics/b" in caplog.text
    survey = await catalog.survey()
    assert [topic.topic for topic in survey.topics] == ["a", "c"]
    [error] = survey.damaged
    assert "llog-catalog/topics/b" in error.message and error.hint
    with pytest.raises(StorageDamaged):
        survey.whole()
    # Nothing is done to it, and nothing is built on it, until somebody has put it right.
    for ask in (catalog.describe("b"), catalog.create("b"), catalog.ensure("b", 1), catalog.delete("b")):
        with pytest.raises(StorageDamaged, match="llog-catalog/topics/b"):
            await ask


async def _leftovers(coordinator: Coordinator, store: ObjectStore, partitions: int) -> list[str]:
    """Keys and objects of topic `t` that should not be there any more."""
    left = []
    for partition in range(partitions):
        keys = PartitionKeys("t", partition)
        for directory in (f"{keys.root}/meta", f"{keys.root}/index"):
            scan = coordinator.scan_all(*children(directory), partition_key=keys.partition_key)
            left += [record.key async for record in scan]
    left += [info.key async for info in store.list("llog/t/")]
    return left


async def test_deleting_removes_keys_and_own_objects_and_leaves_the_shared_to_the_vacuum() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    for _ in range(2):
        await writer.append_shared([group("t", 0, b"x"), group("t", 2, b"y"), group("u", 0, b"z")])
    await store.put("llog/t/partitions/0/data/compacted/1", b"compacted")
    await store.put("llog/tt/partitions/0/data/compacted/1", b"of another topic")
    await writer.catalog.delete("t")
    assert await _leftovers(coordinator, store, 3) == []
    assert [topic.topic for topic in await writer.catalog.list()] == ["u"]
    assert await writer.catalog.find("t") is None
    objects = [info.key async for info in store.list()]
    assert "llog/tt/partitions/0/data/compacted/1" in objects
    assert len([key for key in objects if "wal-shared" in key]) == 2
    assert await read_log(store, coordinator, "u") == [b"z", b"z"]
    with pytest.raises(UnknownTopic):
        await writer.catalog.delete("t")


async def test_offsets_go_on_when_a_topic_is_created_again() -> None:
    """A stale index put of before the deletion must never stand where a new entry belongs."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    stale, writer = writer_of(store, coordinator), writer_of(store, coordinator)
    await stale.append_shared([group("t", 0, b"a", b"b"), group("t", 1, b"c")])
    before = await writer.catalog.describe("t")
    await writer.catalog.delete("t")
    # The sleeper wakes up and puts the entry of its last append, which nobody has put for it.
    assert await stale.materialize_idle(idle_ms=0) == 2
    results = await writer.append_shared([group("t", 0, b"d"), group("t", 1, b"e"), group("t", 2, b"f")])
    assert values(results) == [(3, 3)] * 3
    after = await writer.catalog.describe("t")
    assert after.topic_id != before.topic_id
    assert (after.first_offset, before.first_offset) == (3, 1)
    keys = PartitionKeys("t", 0)
    record = await coordinator.get(keys.cursor, partition_key=keys.partition_key)
    assert record is not None and decode_record(Cursor, record.key, record.value).offset == 3


async def test_a_writer_that_slept_through_a_deletion_begins_anew() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    sleeper = writer_of(store, coordinator)
    strict = writer_of(store, coordinator, config=WriterConfig(auto_create=False, commit=AT_ONCE))
    await sleeper.append_shared([group("t", 0, b"a")])
    await strict.append_shared([group("t", 0, b"b")])
    await sleeper.catalog.delete("t")
    [refused] = await strict.append_shared([group("t", 0, b"c")])
    assert isinstance(refused.error, UnknownTopic)
    [result] = await sleeper.append_shared([group("t", 0, b"d")])
    assert span(result) == (3, 3)


async def test_a_topic_half_deleted_takes_no_appends_and_no_changes() -> None:
    """The state a deleter leaves that dies after its first step."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    await writer.append_shared([group("t", 0, b"a")])
    topic = await writer.catalog.describe("t")

    def cut(_: Topic) -> Topic:
        raise RuntimeError("power cut")

    writer.catalog._fence_all = cut  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="power cut"):
        await writer.catalog.delete("t")
    catalog = _catalog(store, coordinator)
    assert (await catalog.describe("t")).state == "FENCING"
    for call in (catalog.create("t"), catalog.alter("t", partitions=9), catalog.ensure("t", 9)):
        with pytest.raises(TopicDeleted, match="being deleted"):
            await call
    [refused] = await writer_of(store, coordinator).append_shared([group("t", 5, b"new partition")])
    assert isinstance(refused.error, TopicDeleted)
    await catalog.delete("t")
    assert await _leftovers(coordinator, store, topic.partitions) == []
    again = await catalog.create("t", partitions=1)
    assert again.first_offset == 2


class _Sleeper(MemoryCoordinator):
    """Shares the keys of another one, and lets somebody else go first before one of its requests."""

    def __init__(
        self, other: MemoryCoordinator, before: int, meanwhile: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(state=other.state)
        self.left = before
        self._meanwhile = meanwhile

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        await self._sleep()
        return await super().get(key, partition_key=partition_key)

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        await self._sleep()
        return await super().write(operations)

    async def _sleep(self) -> None:
        self.left -= 1
        if self.left == -1:
            await self._meanwhile()


@pytest.mark.parametrize("sleeps_before", range(3, 22))
async def test_a_deleter_that_wakes_up_late_leaves_the_next_topic_of_that_name_alone(
    sleeps_before: int,
) -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    for _ in range(2):
        await writer.append_shared([group("t", 0, b"old"), group("t", 1, b"old")])

    async def meanwhile() -> None:
        with contextlib.suppress(UnknownTopic):
            await _catalog(store, coordinator).delete("t")
        for _ in range(2):
            results = await writer.append_shared([group("t", 0, b"new"), group("t", 1, b"new")])
            assert all(result.ok for result in results)
        await store.put("llog/t/partitions/0/data/compacted/9", b"of the new topic")

    sleeper = _Sleeper(coordinator, sleeps_before, meanwhile)
    with contextlib.suppress(UnknownTopic):
        await _catalog(store, sleeper).delete("t")
    assert sleeper.left < 0
    assert [await read_log(store, coordinator, "t", partition) for partition in (0, 1)] == [[b"new"] * 2] * 2
    assert "llog/t/partitions/0/data/compacted/9" in [info.key async for info in store.list()]
    [result] = await writer.append_shared([group("t", 0, b"more")])
    assert result.ok


async def test_a_partition_that_began_under_a_deleted_topic_begins_anew_under_the_next() -> None:
    """Its first offset would lie below what the deleted topic had given out."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    await writer_of(store, coordinator).append_shared([group("t", 0, b"a", b"b", b"c"), group("t", 1, b"d")])

    class Late(MemoryCoordinator):
        """Sends the commit of a new partition after its topic was deleted."""

        late = False

        async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
            first = any(getattr(each, "key", "") == PartitionKeys("t", 2).control for each in operations)
            if first and not self.late:
                self.late = True
                await _catalog(store, coordinator).delete("t")
            return await super().write(operations)

    sleeper = Late(state=coordinator.state)
    [result] = await writer_of(store, sleeper).append_shared([group("t", 2, b"new")])
    assert sleeper.late
    assert result.ok and result.start_offset == 4
    assert await read_log(store, coordinator, "t", 2) == [b"new"]


def _delete(step: int | None, in_flight: bool) -> tuple[bool, int]:
    async def prepare(me: Actor) -> None:
        writer = writer_in(me)
        for _ in range(2):
            await writer.append_shared([group("t", partition, b"x") for partition in range(3)])
        await me.store.put("llog/t/partitions/1/data/compacted/1", b"compacted")

    async def delete(me: Actor) -> None:
        try:
            await writer_in(me).catalog.delete("t")
        except UnknownTopic:
            assert me.name == "second"

    async def main(world: World) -> tuple[bool, int]:
        await world.spawn("writer", prepare).join()
        first = world.spawn("first", delete)
        if step is not None:
            first.crash_at(step, in_flight)
        await world.join()
        await world.clock().sleep(30)
        await world.spawn("second", delete).join()
        assert await _leftovers(world.keys, world.bucket, 3) == []
        record = await world.keys.get(topic_key("t"), partition_key=CATALOG_PARTITION_KEY)
        assert record is not None
        topic = decode_record(Topic, record.key, record.value)
        assert (topic.state, topic.first_offset) == ("DELETED", 3)
        return first.crashed, first.steps

    return World(1).run(main)


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_deletion_cut_after_any_step_is_finished_by_another(in_flight: bool) -> None:
    _, steps = _delete(None, in_flight)
    assert steps >= 5
    assert [_delete(step, in_flight) for step in range(steps)] == [(True, step) for step in range(steps)]


def test_creating_and_deleting_survive_lost_replies() -> None:
    async def churn(me: Actor) -> None:
        catalog = writer_in(me).catalog
        for _ in range(4):
            made = await catalog.create("t", partitions=2)
            assert (await catalog.describe("t")).topic_id == made.topic_id
            await catalog.alter("t", partitions=3)
            await catalog.delete("t")
            assert await catalog.find("t") is None

    for seed in range(10):
        as_one(churn, seed, faults=Faults(after=0.1, lost=0.1, before=0.1))


def test_one_of_many_creators_wins() -> None:
    async def main(world: World) -> None:
        made: list[Topic] = []

        async def create(me: Actor) -> None:
            try:
                made.append(await writer_in(me).catalog.create("t", partitions=me.random.randint(1, 9)))
            except TopicExists:
                return

        for number in range(5):
            world.spawn(f"c{number}", create)
        await world.join()
        [winner] = made
        found = await _catalog(world.bucket, world.keys).describe("t")
        assert found == winner

    for seed in range(20):
        in_world(main, seed, faults=Faults(after=0.1, lost=0.1, late=0.1))


async def _race_write(me: Actor) -> None:
    writer = writer_in(me)
    for number in range(15):
        results = await writer.append_shared([group("t", number % 3, b"x"), group("u", 0, b"y")])
        for result in results:
            assert result.ok or isinstance(result.error, Fenced | TopicDeleted)


async def _race_delete(me: Actor) -> None:
    catalog = writer_in(me).catalog
    for _ in range(4):
        await me.clock.sleep(me.random.random())
        with contextlib.suppress(UnknownTopic):
            await catalog.delete("t")


def test_writers_and_a_deleter_leave_a_log_that_can_be_read() -> None:
    """Appends race with deletions. Whatever exists in the end is whole, and every topic is in the catalog."""

    async def main(world: World) -> None:
        for number in range(2):
            world.spawn(f"w{number}", _race_write)
        world.spawn("deleter", _race_delete)
        await world.join()
        await world.clock().sleep(60)
        names = [topic.topic for topic in await _catalog(world.bucket, world.keys).list()]
        for partition in range(3):
            keys = PartitionKeys("t", partition)
            if await world.keys.get(keys.control, partition_key=keys.partition_key) is not None:
                assert "t" in names
        assert len(await read_log(world.bucket, world.keys, "u")) == 30

    for seed in range(6):
        in_world(main, seed)


async def test_looking_costs_no_object_request() -> None:
    store, requests = counted_store(MemoryStore())
    catalog = _catalog(store)
    await catalog.create("t")
    requests.clear()
    await catalog.list()
    await catalog.describe("t")
    assert not requests
