"""What cannot be read of a group is named, and hides nothing else of it."""

from __future__ import annotations

import pytest
from tests.log.test_groups import ALL, Log, at

from forebay.coordination import MemoryCoordinator
from forebay.errors import ForebayError, StorageDamaged, Unavailable
from forebay.log import DataLost
from forebay.log._group_records import GroupBusy
from forebay.log._keys import GroupKeys, PartitionKeys
from forebay.log._trim import Trimmer

GROUP = GroupKeys("billing")
PARTITION = PartitionKeys("orders", 1)


@pytest.fixture
async def log() -> Log:
    made = Log()
    await made.catalog.create("orders", partitions=4)
    for partition in range(4):
        await made.write(partition, [b"a", b"b", b"c"])
        await made.write(partition, [b"d"])
    await made.groups.commit("billing", dict.fromkeys(ALL, 2))
    return made


async def damage(log: Log, key: str, home: str) -> None:
    await log.coordinator.put(key, b"torn", partition_key=home)


@pytest.mark.parametrize(
    "key",
    [PARTITION.control, PARTITION.cursor, PARTITION.index(3)],
    ids=["control", "cursor", "index"],
)
async def test_a_damaged_partition_is_named_and_the_others_are_shown(log: Log, key: str) -> None:
    await damage(log, key, PARTITION.partition_key)
    found = await log.groups.describe("billing")
    assert [lag.partition for lag in found.partitions] == [0, 2, 3]
    assert found.records == 9
    [error] = found.damaged
    assert key in error.message


async def test_a_partition_that_lost_an_entry_is_named_and_the_others_are_shown(log: Log) -> None:
    await log.coordinator.delete(PARTITION.index(3), partition_key=PARTITION.partition_key)
    found = await log.groups.describe("billing")
    assert [lag.partition for lag in found.partitions] == [0, 2, 3]
    [error] = found.damaged
    assert isinstance(error, DataLost) and "orders:1" in error.message


async def test_damaged_records_of_the_group_are_named_and_the_others_are_shown(log: Log) -> None:
    keys = [GROUP.offset("orders", 1), GROUP.state, GROUP.member("ghost")]
    for key in keys:
        await damage(log, key, GROUP.partition_key)
    found = await log.groups.describe("billing")
    assert [lag.partition for lag in found.partitions] == [0, 2, 3]
    assert found.members == ()
    assert all(any(key in error.message for error in found.damaged) for key in keys)
    assert len(found.damaged) == 3


async def test_a_member_that_cannot_be_read_keeps_the_group_from_being_deleted(log: Log) -> None:
    """Its key is there, so it may be alive."""
    await damage(log, GROUP.member("ghost"), GROUP.partition_key)
    with pytest.raises(GroupBusy):
        await log.groups.delete("billing")
    await log.groups.delete("billing", force=True)
    assert await log.groups.list() == []


async def test_a_coordinator_that_is_away_is_no_damage(log: Log) -> None:
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("away")

    log.reader.offsets = away  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable):
        await log.groups.describe("billing")


async def test_a_partition_that_is_trimmed_during_the_look_is_still_described() -> None:
    """It was left out; and a consumer to whom nothing is committed begins elsewhere."""
    coordinator = MemoryCoordinator()
    log = Log(coordinator=coordinator)
    for value in (b"a", b"b", b"c"):
        await log.write(0, [value])
    await log.groups.commit("billing", {at(0): 1})
    time_of = log.reader.time_of

    async def trimmed_before(topic: str, partition: int, offset: int) -> int | None:
        await Trimmer(coordinator, clock=log.clock, randomness=log.random).trim("orders", 0, 3)
        return await time_of(topic, partition, offset)

    log.reader.time_of = trimmed_before  # type: ignore[method-assign]
    [lag] = (await log.groups.describe("billing")).partitions
    assert (lag.committed, lag.records) == (1, 3)


@pytest.mark.parametrize("named", [False, True], ids=["all it knows", "named"])
@pytest.mark.parametrize(
    ("key", "home"),
    [(PARTITION.control, PARTITION.partition_key), (GROUP.offset("orders", 1), GROUP.partition_key)],
    ids=["partition", "commit"],
)
async def test_a_reset_moves_the_others_and_names_what_is_damaged(
    log: Log, key: str, home: str, named: bool
) -> None:
    await damage(log, key, home)
    places = list(ALL) if named else None
    damaged: list[ForebayError] = []
    with pytest.raises(StorageDamaged):
        await log.groups.reset("billing", places, to="latest")
    plan = await log.groups.reset("billing", places, to="latest", damaged=damaged)
    assert [(each.partition, each.before, each.after) for each in plan] == [(0, 2, 5), (2, 2, 5), (3, 2, 5)]
    [error] = damaged
    assert key in error.message
    found, _ = await log.groups._offsets("billing").survey()
    moved = {place.partition for place, held in found.items() if held.record.offset == 5}
    assert moved == {0, 2, 3}
