"""Readers beside writers in the simulated world: every read is a prefix of the truth, none is stale."""

from __future__ import annotations

from tests.log.hand_log import HandLog

from forebay.errors import NotDone
from forebay.kit.retry import RetryPolicy
from forebay.log import (
    AppendGroup,
    LogReader,
    LogWriter,
    OffsetOutOfRange,
    ReaderConfig,
    Trimmer,
    UnknownTopic,
)
from forebay.testing import Actor, Faults, World, check, run_seeds, seeds

STREAM = "orders:0"
PATIENT = ReaderConfig(retry=RetryPolicy(attempts_max=30))


def reader_of(me: Actor) -> LogReader:
    return LogReader(me.store, me.coordinator, clock=me.clock, randomness=me.random, config=PATIENT)


async def write(me: Actor, appends: int) -> None:
    writer = LogWriter(me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random)
    for number in range(appends):
        values = [f"{me.name}/{me.lives}/{number}/{place}" for place in range(me.random.randint(1, 3))]
        group = AppendGroup.of("orders", 0, [value.encode() for value in values])
        with me.world.history.append(STREAM, values) as call:
            [result] = await writer.append_shared([group])
            call.ok(offset=result.unwrap().start_offset)
        if me.random.random() < 0.2:
            await writer.materialize_idle(idle_ms=0)


async def read(me: Actor, reads: int) -> None:
    """Reads from random offsets, and what the end of the log was."""
    reader = reader_of(me)
    for _ in range(reads):
        await me.clock.sleep(me.random.random() * 0.4)
        try:
            with me.world.history.read(STREAM) as call:
                ends = await reader.offsets("orders", 0)
                offset = me.random.randint(ends.earliest, ends.next)
                fetched = await reader.read("orders", 0, offset, max_records=me.random.randint(1, 8))
                values = [value.decode() for value in fetched.records()]
                call.ok(offset=offset, values=values, tail=fetched.high_watermark)
                assert values or offset == fetched.high_watermark
        except (UnknownTopic, OffsetOutOfRange, NotDone):
            continue


async def follow(me: Actor, until: int) -> None:
    """One reader that reads on and on: no skip, no repetition."""
    reader = reader_of(me)
    position, found = 1, 0
    while found < until:
        try:
            if not await reader.wait_for_data([("orders", 0, position)], timeout_s=5):
                continue
            async for batch in reader.scan_batches("orders", 0, position):
                assert batch.start_offset == position
                position = batch.end_offset + 1
                found += len(batch)
        except (UnknownTopic, NotDone):
            await me.clock.sleep(0.2)
        except OffsetOutOfRange as error:
            assert error.earliest > position
            found += error.earliest - position
            position = error.earliest


async def trim(me: Actor) -> None:
    trimmer = Trimmer(me.coordinator, clock=me.clock, randomness=me.random)
    for offset in (2, 5, 9):
        await me.clock.sleep(1)
        try:
            await trimmer.trim("orders", 0, offset)
        except (UnknownTopic, OffsetOutOfRange):
            continue


def run(seed: int, *, faults: float, trims: bool, crashes: bool) -> None:
    async def main(world: World) -> None:
        world.inject(Faults.all(faults), rotate_s=1.5)
        writers = [world.spawn(f"writer-{number}", write, 8) for number in range(2)]
        for writer in writers if crashes else []:
            writer.crash_randomly(0.004, restart_after_s=1.0, crashes_max=1)
        for number in range(2):
            world.spawn(f"reader-{number}", read, 12)
        world.spawn("follower", follow, 12)
        if trims:
            world.spawn("trimmer", trim)
        await world.join()
        world.heal()
        await world.clock().sleep(120)
        reader = HandLog(store=world.bucket, coordinator=world.keys).reader()
        ends = await reader.offsets("orders", 0)
        final = [
            value.decode()
            async for batch in reader.scan_batches("orders", 0)
            for value in batch.batch.records()
        ]
        offsets = range(ends.earliest, ends.next)
        world.history.final(STREAM, final, start=ends.earliest if trims else 1, offsets=offsets)
        problems = check(world.history)
        assert not problems, "\n".join(map(str, problems))

    World(seed).run(main)


def test_reads_beside_writers_are_never_stale_and_never_wrong() -> None:
    assert list(run_seeds(lambda seed: run(seed, faults=0.03, trims=False, crashes=True), seeds(20)))


def test_reads_beside_writers_and_trims_are_never_wrong() -> None:
    assert list(run_seeds(lambda seed: run(seed, faults=0.02, trims=True, crashes=False), seeds(20)))
