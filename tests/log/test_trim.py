"""Trims: what goes, what stays, and what happens to offsets."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.log.hand_log import HandLog, numbered
from tests.log.writing import writer_of

from forebay.errors import UsageError
from forebay.kit.clock import SystemClock
from forebay.log._errors import OffsetOutOfRange, UnknownPartition, UnknownTopic
from forebay.log._records import Control, decode_record
from forebay.log._trim import Trimmer
from forebay.testing import Actor, Faults, World, run_seeds, seeds


async def log_of(*sizes: int) -> HandLog:
    log = HandLog()
    for size in sizes:
        await log.append(numbered(log.control.sequence_counter, size))
    return log


def trimmer_of(log: HandLog) -> Trimmer:
    return Trimmer(log.coordinator, clock=SystemClock(), randomness=random.Random(1))


async def index_ends(log: HandLog) -> list[int]:
    low, high = log.keys.index_range()
    keys = await log.coordinator.list(low, high, partition_key=log.keys.partition_key)
    return [log.keys.end_offset(key) for key in keys]


async def control_of(log: HandLog) -> Control:
    record = await log.coordinator.get(log.keys.control, partition_key=log.keys.partition_key)
    assert record is not None
    return decode_record(Control, record.key, record.value)


async def test_everything_below_goes_and_a_straddling_entry_stays() -> None:
    log = await log_of(3, 3, 3, 1)
    trimmed = await trimmer_of(log).trim(*log.place, 5)
    assert (trimmed.before, trimmed.earliest, trimmed.next, trimmed.records) == (1, 5, 11, 4)
    assert await index_ends(log) == [6, 9]
    assert await log.everything() == numbered(5, 6)


async def test_a_trim_never_goes_back() -> None:
    log = await log_of(3, 3, 1)
    await trimmer_of(log).trim(*log.place, 5)
    again = await trimmer_of(log).trim(*log.place, 2)
    assert (again.earliest, again.records) == (5, 0)
    assert await log.everything() == numbered(5, 3)


async def test_everything_may_be_trimmed_and_offsets_go_on() -> None:
    log = await log_of(3, 2)
    await trimmer_of(log).trim(*log.place, 6)
    assert await log.everything() == []
    log.control = await control_of(log)
    await log.append(numbered(6, 2))
    assert await log.everything() == numbered(6, 2)


async def test_a_trim_beyond_the_end_is_refused_and_changes_nothing() -> None:
    log = await log_of(3)
    with pytest.raises(OffsetOutOfRange) as caught:
        await trimmer_of(log).trim(*log.place, 5)
    assert (caught.value.earliest, caught.value.next) == (1, 4)
    assert await log.everything() == numbered(1, 3)
    with pytest.raises(UsageError):
        await trimmer_of(log).trim(*log.place, -1)
    with pytest.raises(UnknownTopic):
        await trimmer_of(log).trim("nobody", 0, 1)


async def test_a_partition_that_was_never_written_to_has_nothing_to_trim() -> None:
    log = HandLog()
    writer = writer_of(log.store, log.coordinator)
    await writer.catalog.create("fresh", partitions=2)
    trimmed = await trimmer_of(log).trim("fresh", 1, 1)
    assert (trimmed.earliest, trimmed.next, trimmed.records) == (1, 1, 0)
    with pytest.raises(OffsetOutOfRange):
        await trimmer_of(log).trim("fresh", 1, 2)
    with pytest.raises(UnknownPartition, match="no partition 2"):
        await trimmer_of(log).trim("fresh", 2, 1)


async def test_leftovers_of_a_crash_between_the_steps_go_with_the_next_trim() -> None:
    log = await log_of(1, 1, 1, 1)
    log.control = msgspec.structs.replace(log.control, start_offset=3)
    await log.put_control()
    assert await index_ends(log) == [1, 2, 3]
    assert await log.everything() == numbered(3, 2)
    await trimmer_of(log).trim(*log.place, 3)
    assert await index_ends(log) == [3]


def test_trims_under_faults_and_crashes_only_move_forward() -> None:
    def scenario(seed: int) -> None:
        async def main(world: World) -> None:
            log = HandLog(store=world.bucket, coordinator=world.keys)
            for start in range(1, 31):
                await log.append(numbered(start, 1))
            world.inject(Faults.all(0.1))

            async def trim(me: Actor, targets: list[int]) -> None:
                trimmer = Trimmer(me.coordinator, clock=me.clock, randomness=me.random)
                for target in targets:
                    trimmed = await trimmer.trim("orders", 0, target)
                    assert trimmed.earliest >= target

            world.spawn("one", trim, [5, 12, 20])
            other = world.spawn("two", trim, [8, 15, 25])
            other.crash_randomly(0.05, restart_after_s=0.1, crashes_max=3)
            await world.join()
            world.heal()
            await world.clock().sleep(120)
            start = (await control_of(log)).start_offset
            assert start >= 20
            found = [
                value
                async for batch in log.reader().scan_batches(*log.place)
                for value in batch.batch.records()
            ]
            assert found == numbered(start, 31 - start)

        World(seed).run(main)

    assert list(run_seeds(scenario, seeds(30)))
