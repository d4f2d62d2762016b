"""Staged appends: whatever dies or is repeated, one list is decided per batch and applied once."""

from __future__ import annotations

import pytest
from tests.log.writing import group, read_log, writer_in

from forebay.errors import LimitExceeded, OutcomeUnknown, UsageError
from forebay.log import DataLost, Publications, Published, StagedAppend, _staged, stage
from forebay.log._keys import PartitionKeys
from forebay.log._records import PRODUCERS_MAX
from forebay.log._uris import key_of
from forebay.testing import Actor, Constant, Faults, Latencies, World

PARTITIONS = 3
TASKS = 3


def publications_of(me: Actor) -> Publications:
    return Publications(writer_in(me), me.store, me.coordinator, clock=me.clock, ids=me.ids)


async def staged_by(me: Actor, name: str, *, split: int = 0, tasks: int = TASKS) -> list[StagedAppend]:
    """The same nine records, split over partitions and tasks in a way of its own."""
    writer, found = writer_in(me), []
    for task in range(tasks):
        groups = [
            group("t", (task * (1 + split) + part + split) % PARTITIONS, f"{name}-{task}-{part}".encode())
            for part in range(9 // tasks)
        ]
        found += await stage(writer, groups, me.clock)
    return found


async def batch(me: Actor, number: int, split: int = 0, tasks: int = TASKS) -> Published:
    """What a driver does: have a batch staged, publish it."""
    staged = await staged_by(me, f"b{number}", split=split, tasks=tasks)
    return await publications_of(me).publish("query", number, staged)


async def records(world: World) -> list[str]:
    found = []
    for partition in range(PARTITIONS):
        found += [record.decode() for record in await read_log(world.bucket, world.keys, "t", partition)]
    return sorted(found)


def expected(*numbers: int, tasks: int = TASKS) -> list[str]:
    return sorted(
        f"b{n}-{task}-{part}" for n in numbers for task in range(tasks) for part in range(9 // tasks)
    )


def run(step: int | None, in_flight: bool, decides_at: float) -> tuple[bool, int, int]:
    """A driver crashes after `step` steps of batch 1; another one runs the same batch, split differently."""

    async def main(world: World) -> tuple[bool, int, int]:
        await world.spawn("first", batch, 0).join()
        victim = world.spawn("victim", batch, 1)
        if step is not None:
            victim.crash_at(step, in_flight)
        await world.join()
        await world.clock().sleep(5)
        left = len(await records(world))
        await world.spawn("again", batch, 1, 1).join()
        await world.spawn("next", batch, 2, 2).join()
        assert await records(world) == expected(0, 1, 2)
        return victim.crashed, victim.steps, left

    latencies = Latencies(Constant(10), decides_at=decides_at)
    return World(3, store_latencies=latencies, coordinator_latencies=latencies).run(main)


@pytest.mark.parametrize("decides_at", [0.0, 1.0])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_crash_after_any_step_of_a_publication_repeats_and_loses_nothing(
    in_flight: bool, decides_at: float
) -> None:
    crashed, steps, whole = run(None, in_flight, decides_at)
    assert not crashed and whole == 18 and steps > 8
    outcomes = [run(step, in_flight, decides_at) for step in range(steps)]
    assert all(crashed for crashed, _, _ in outcomes)
    # Cut before anything was visible, in the middle, and after everything was.
    lefts = {left for _, _, left in outcomes}
    assert {9, 18} <= lefts and len(lefts) > 2


@pytest.mark.parametrize("seed", range(8))
def test_drivers_that_publish_one_batch_at_once_publish_one_of_them_simulated(seed: int) -> None:
    async def main(world: World) -> None:
        drivers = [world.spawn(f"driver{split}", batch, 0, split, 9) for split in range(4)]
        outcomes = [await driver.join() for driver in drivers]
        assert sum(not outcome.duplicate for outcome in outcomes) >= 1
        assert await records(world) == expected(0, tasks=9)

    World(seed).run(main)


@pytest.mark.parametrize("seed", range(8))
def test_lost_replies_and_refusals_repeat_nothing_simulated(seed: int) -> None:
    async def insist(me: Actor) -> None:
        for number in range(4):
            for attempt in range(200):
                try:
                    await batch(me, number, split=attempt % 3)
                    break
                except Exception:
                    await me.clock.sleep(0.2)
            else:
                raise AssertionError("never published")

    async def main(world: World) -> None:
        await world.spawn("driver", insist).join()
        assert await records(world) == expected(0, 1, 2, 3)

    faults = Faults.all(0.08)
    World(seed, faults=faults).run(main)


def alone(seed: int = 1) -> World:
    return World(seed)


def test_a_repeated_batch_and_an_older_one_are_recognised() -> None:
    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            assert not (await batch(me, 5)).duplicate
            again = await batch(me, 5, split=1)
            assert again.duplicate and again.topics == ("t",)
            older = await batch(me, 4)
            assert older.duplicate and older.topics == (), "nobody remembers"
            assert await publications_of(me).last("query") == 5
            assert await publications_of(me).last("other") is None
            assert not (await publications_of(me).publish("query", 6, [])).duplicate

        await world.spawn("driver", driver).join()
        assert await records(world) == expected(5)

    alone().run(main)


def test_what_a_stopped_driver_left_is_finished_before_the_next_batch() -> None:
    async def main(world: World) -> None:
        victim = world.spawn("victim", batch, 0)
        await until_some(world)
        victim.crash()
        await world.join()
        assert 0 < len(await records(world)) < 9
        await world.spawn("next", batch, 1).join()
        assert await records(world) == expected(0, 1)

    latencies = Latencies(Constant(10))
    World(2, store_latencies=latencies, coordinator_latencies=latencies).run(main)


async def until_some(world: World) -> None:
    while not await records(world):
        await world.clock().sleep(0.001)


def test_old_objects_are_copied_before_they_are_appended() -> None:
    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            staged = await staged_by(me, "b0")
            await me.clock.sleep(_staged.STAGED_AGE_MS_MAX / 1000 + 1)
            published = await publications_of(me).publish("query", 0, staged)
            old = {each.uri for each in staged}
            assert published.results and not old & {result.wal_uri for result in published.results}

        await world.spawn("driver", driver).join()
        assert await records(world) == expected(0)

    alone().run(main)


async def _vacuumed(me: Actor, staged: list[StagedAppend]) -> None:
    await me.store.delete([key_of(me.store, each.uri) for each in staged])


@pytest.mark.parametrize("half", [False, True])
def test_objects_that_are_gone_are_replaced_by_the_replay_or_reported(half: bool) -> None:
    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            publications = publications_of(me)
            staged = await staged_by(me, "b0")
            decided = await publications._decide("query", 0, staged)
            await publications._put("query", decided, None)
            if half:
                await publications._append("query", decided, decided.appends[:1])
            await me.clock.sleep(3 * 3600)
            await _vacuumed(me, staged)
            if half:
                with pytest.raises(DataLost, match="half published"):
                    await batch(me, 0, split=1)
            else:
                assert not (await batch(me, 0, split=1)).duplicate

        await world.spawn("driver", driver).join()
        if not half:
            assert await records(world) == expected(0)

    alone().run(main)


def test_a_producer_that_was_forgotten_is_not_guessed_about() -> None:
    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            publications, writer = publications_of(me), writer_in(me)
            await publications.publish("query", 0, await staged_by(me, "b0"))
            staged = await staged_by(me, "b1")
            decided = await publications._decide("query", 1, staged)
            version = await publications._read("query")
            await publications._put("query", decided, version[1])
            for number in range(PRODUCERS_MAX + 1):
                one = group("t", 0, b"other", producer=f"p{number}", sequence=0)
                [result] = await writer.append_shared([one])
                result.unwrap()
            with pytest.raises(OutcomeUnknown, match="forgotten"):
                await publications.publish("query", 1, staged)

        await world.spawn("driver", driver).join()

    alone().run(main)


def test_the_first_batch_of_a_name_that_was_forgotten_is_not_appended_again() -> None:
    """Sequence 0 of a producer that nobody knows looks like one that never wrote."""

    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            publications, writer = publications_of(me), writer_in(me)
            staged = await staged_by(me, "b0")
            decided = await publications._decide("query", 0, staged)
            await publications._put("query", decided, None)
            await publications._append("query", decided, decided.appends)
            for number in range(PRODUCERS_MAX + 1):
                one = group("t", 0, b"other", producer=f"p{number}", sequence=0)
                [result] = await writer.append_shared([one])
                result.unwrap()
            with pytest.raises(OutcomeUnknown, match="forgotten"):
                await publications.publish("query", 0, staged)

        await world.spawn("driver", driver).join()
        assert [each for each in await records(world) if each != "other"] == expected(0)

    alone().run(main)


def test_limits_and_names_are_checked() -> None:
    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            publications = publications_of(me)
            [one, *_] = await staged_by(me, "b0")
            with pytest.raises(LimitExceeded, match="PUBLICATION_BYTES_MAX"):
                await publications.publish("query", 0, [one] * 20_000)
            with pytest.raises(UsageError):
                await publications.publish("a/b", 0, [one])
            with pytest.raises(UsageError):
                await publications.publish("query", -1, [one])
            long = "x" * 200
            assert not (await publications.publish(long, 0, [one])).duplicate
            assert (await publications.publish(long, 0, [one])).duplicate

        await world.spawn("driver", driver).join()

    alone().run(main)


def test_a_group_that_cannot_be_staged_fails_the_whole_call() -> None:
    async def main(world: World) -> None:
        async def driver(me: Actor) -> None:
            with pytest.raises(UsageError):
                await stage(writer_in(me), [group("t", 0, b"x"), group("t", -1, b"y")], me.clock)
            assert await me.coordinator.get(PartitionKeys("t", 0).control, partition_key="t:0") is None

        await world.spawn("driver", driver).join()

    alone().run(main)
