"""Fencing: who may append when, and that an epoch has one owner."""

from __future__ import annotations

import random

import pytest
from tests.log.writing import (
    AT_ONCE,
    as_one,
    fencing_in,
    group,
    in_world,
    read_log,
    span,
    writer_in,
    writer_of,
)

from forebay.coordination import Coordinator, MemoryCoordinator
from forebay.errors import ForebayError, UsageError
from forebay.kit.clock import SystemClock
from forebay.log import AppendResult, Fenced, Fencing, LogWriter, Topic, TopicDeleted, UnknownTopic
from forebay.log._keys import PartitionKeys
from forebay.storage import MemoryStore
from forebay.testing import Actor, Faults, World


def _fencing(writer: LogWriter, coordinator: Coordinator) -> Fencing:
    return Fencing(
        coordinator, writer.catalog, clock=SystemClock(), randomness=random.Random(1), policy=AT_ONCE
    )


async def _one(writer: LogWriter, epoch: int | None = None, record: bytes = b"x") -> AppendResult:
    [result] = await writer.append_shared([group("t", 0, record, epoch=epoch)])
    return result


async def test_a_fenced_partition_takes_nothing_until_it_is_unfenced() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    fencing = _fencing(writer, coordinator)
    await _one(writer)
    state = await fencing.fence("t", 0)
    assert (state.log_state, state.epoch, state.next_offset) == ("FENCED", 1, 2)
    for epoch in (None, 0, 1, 9):
        refused = await _one(writer, epoch)
        assert isinstance(refused.error, Fenced)
        assert refused.error.epoch == 1
    state = await fencing.unfence("t", 0, 1)
    assert (state.log_state, state.epoch) == ("OPEN", 1)
    assert span(await _one(writer)) == (2, 2)
    assert span(await _one(writer, 1)) == (3, 3)


async def test_a_stale_epoch_is_refused_for_ever() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    fencing = _fencing(writer, coordinator)
    assert (await _one(writer, 0)).ok
    await fencing.fence("t", 0)
    await fencing.unfence("t", 0, 1)
    refused = await _one(writer, 0)
    assert isinstance(refused.error, Fenced)
    assert (refused.error.state, refused.error.epoch, refused.error.writer_epoch) == ("OPEN", 1, 0)
    assert "newer writer" in refused.error.hint


async def test_epochs_only_grow() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    fencing = _fencing(writer, coordinator)
    await _one(writer)
    assert (await fencing.fence("t", 0, epoch=7)).epoch == 7
    assert (await fencing.fence("t", 0)).epoch == 8
    for epoch in (7, 8):
        with pytest.raises(Fenced):
            await fencing.fence("t", 0, epoch=epoch)
    with pytest.raises(UsageError):
        await fencing.fence("t", 0, epoch=0)
    assert (await fencing.state("t", 0)).epoch == 8


async def test_only_the_present_epoch_unfences() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    fencing = _fencing(writer, coordinator)
    await _one(writer)
    await fencing.fence("t", 0)
    await fencing.fence("t", 0)
    for epoch in (0, 1, 3):
        with pytest.raises(Fenced):
            await fencing.unfence("t", 0, epoch)
    assert (await fencing.state("t", 0)).log_state == "FENCED"
    await fencing.unfence("t", 0, 2)
    assert (await fencing.unfence("t", 0, 2)).log_state == "OPEN"


async def test_a_partition_that_was_never_written_can_be_fenced() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    fencing = _fencing(writer, coordinator)
    with pytest.raises(UnknownTopic):
        await fencing.fence("t", 0)
    await writer.catalog.create("t", partitions=1)
    assert (await fencing.state("t", 0)).epoch == 0
    await fencing.fence("t", 0)
    assert isinstance((await _one(writer)).error, Fenced)
    await fencing.unfence("t", 0, 1)
    assert span(await _one(writer)) == (1, 1)
    assert await read_log(store, coordinator) == [b"x"]
    with pytest.raises(UnknownTopic):
        await fencing.fence("t", 1)


async def test_a_fence_touches_its_partition_alone() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    await writer.append_shared([group("t", 0, b"x"), group("t", 1, b"x")])
    await _fencing(writer, coordinator).fence("t", 0)
    fenced, open_one = await writer.append_shared([group("t", 0, b"y"), group("t", 1, b"y")])
    assert isinstance(fenced.error, Fenced)
    assert open_one.start_offset == 2


async def test_groups_of_different_epochs_in_one_call_are_judged_apart() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    fencing = _fencing(writer, coordinator)
    await _one(writer, record=b"first")
    await fencing.fence("t", 0)
    await fencing.unfence("t", 0, 1)
    old, new, plain = await writer.append_shared(
        [group("t", 0, b"old", epoch=0), group("t", 0, b"new", epoch=1), group("t", 0, b"plain")]
    )
    assert isinstance(old.error, Fenced)
    assert (span(new), span(plain)) == ((2, 2), (3, 3))
    assert await read_log(store, coordinator) == [b"first", b"new", b"plain"]


async def test_a_stale_writer_learns_nothing_of_its_earlier_append() -> None:
    """Nothing is acknowledged to a lower epoch once a fence is visible, repetitions included."""
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    sent = group("t", 0, b"x", producer="p", sequence=0, epoch=0)
    [first] = await writer.append_shared([sent])
    assert first.ok
    await _fencing(writer, coordinator).fence("t", 0)
    [again] = await writer.append_shared([sent])
    assert isinstance(again.error, Fenced)


async def test_refusals_are_never_given_from_memory() -> None:
    """What a writer remembers may be old: Ann's last look showed a fence that is gone since."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    ann, bob = writer_of(store, coordinator), writer_of(store, coordinator)
    fencing = _fencing(ann, coordinator)
    await ann.append_shared([group("t", 0, b"0", producer="p", sequence=0)])
    await bob.append_shared([group("t", 0, b"1", producer="p", sequence=1)])
    [result] = await ann.append_shared([group("t", 0, b"2", producer="p", sequence=2)])
    assert span(result) == (3, 3)
    await fencing.fence("t", 0)
    assert isinstance((await _one(ann)).error, Fenced)
    await fencing.unfence("t", 0, 1)
    assert (await _one(ann)).ok


async def test_a_repetition_without_an_epoch_is_answered_while_fenced() -> None:
    coordinator = MemoryCoordinator()
    writer = writer_of(coordinator=coordinator)
    sent = group("t", 0, b"x", producer="p", sequence=0)
    await writer.append_shared([sent])
    await _fencing(writer, coordinator).fence("t", 0)
    [again] = await writer.append_shared([sent])
    assert again.duplicate and span(again) == (1, 1)


def test_two_fencers_never_hold_the_same_epoch() -> None:
    async def main(world: World) -> int:
        taken: list[int] = []

        async def fencer(me: Actor) -> None:
            fencing = fencing_in(me)
            for _ in range(5):
                try:
                    taken.append((await fencing.fence("t", 0)).epoch)
                except ForebayError:
                    continue

        await world.spawn("writer", _first).join()
        world.inject(Faults.all(0.08))
        for name in ("a", "b", "c"):
            world.spawn(name, fencer)
        await world.join()
        assert len(taken) == len(set(taken))
        return len(taken)

    assert sum(in_world(main, seed) for seed in range(20)) > 200


async def _first(me: Actor) -> None:
    assert (await _one(writer_in(me))).ok


@pytest.mark.parametrize("kind", ["after", "lost", "late"])
def test_a_fence_whose_reply_was_lost_is_settled(kind: str) -> None:
    async def fence(me: Actor) -> None:
        await _first(me)
        fencing = fencing_in(me)
        me.world.fail_next(me, "write", kind, on="coordinator")
        named = await fencing.fence("t", 0, epoch=5)
        assert (named.epoch, named.log_state) == (5, "FENCED")
        me.world.fail_next(me, "write", kind, on="coordinator")
        assert (await fencing.unfence("t", 0, 5)).log_state == "OPEN"
        me.world.fail_next(me, "write", kind, on="coordinator")
        assert (await fencing.fence("t", 0)).epoch > 5

    for seed in range(5):
        as_one(fence, seed)


def test_what_is_in_the_log_when_a_fence_returns_is_final() -> None:
    async def main(world: World) -> None:
        async def writing(me: Actor) -> None:
            writer, number = writer_in(me), 0
            while not isinstance((await _one(writer, 0, b"%d" % number)).error, Fenced):
                number += 1

        async def fencer(me: Actor) -> int:
            await me.clock.sleep(1 + me.random.random())
            return (await fencing_in(me).fence("t", 0)).next_offset

        for name in ("a", "b"):
            world.spawn(name, writing)
        end = await world.spawn("fencer", fencer).join()
        await world.join()
        world.heal()
        await world.clock().sleep(60)
        assert len(await read_log(world.bucket, world.keys)) == end - 1

    for seed in range(10):
        in_world(main, seed, faults=Faults(after=0.05, late=0.05, lost=0.05))


async def test_a_fence_behind_the_back_of_a_deletion_does_not_shut_the_next_topic() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    assert (await _one(writer)).ok
    fencing = _fencing(writer, coordinator)
    remove = writer.catalog._remove_objects

    async def fenced_meanwhile(topic: Topic) -> None:
        # The keys are gone, the name is not.
        with pytest.raises(TopicDeleted):
            await fencing.fence("t", 0)
        await remove(topic)

    writer.catalog._remove_objects = fenced_meanwhile  # type: ignore[method-assign]
    await writer.catalog.delete("t")
    await writer.catalog.create("t")
    result = await _one(writer)
    assert result.ok, result.error


async def test_nobody_opens_a_partition_whose_topic_is_being_deleted() -> None:
    """What was appended then would vanish with the topic, under offsets that the next one gives out again."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    assert (await _one(writer)).ok
    fencing = _fencing(writer, coordinator)
    remove = writer.catalog._remove_keys

    async def opened_before(topic: Topic) -> None:
        # Every partition is fenced, and the deletion has noted where offsets end.
        with pytest.raises(TopicDeleted):
            await fencing.fence("t", 0)
        with pytest.raises(TopicDeleted):
            await fencing.unfence("t", 0, (await fencing.state("t", 0)).epoch)
        assert isinstance((await _one(writer)).error, TopicDeleted)
        await remove(topic)

    writer.catalog._remove_keys = opened_before  # type: ignore[method-assign]
    await writer.catalog.delete("t")
    await writer.catalog.create("t")
    assert span(await _one(writer)) == (2, 2)


async def test_a_fence_holds_where_a_late_request_has_left_an_old_partition() -> None:
    """Writers take such a partition for none, and would take its fence for none as well."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer, keys = writer_of(store, coordinator), PartitionKeys("t", 0)
    assert (await _one(writer)).ok
    late = await coordinator.get(keys.control, partition_key=keys.partition_key)
    assert late is not None
    await writer.catalog.delete("t")
    await writer.catalog.create("t")
    await coordinator.put(keys.control, late.value, partition_key=keys.partition_key)
    fencing = _fencing(writer, coordinator)
    state = await fencing.fence("t", 0)
    assert (state.log_state, state.next_offset) == ("FENCED", 2)
    assert isinstance((await _one(writer_of(store, coordinator))).error, Fenced)
    await fencing.unfence("t", 0, state.epoch)
    assert span(await _one(writer)) == (2, 2)
