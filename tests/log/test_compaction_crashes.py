"""A compactor that loses power between any two awaits, another that goes on, and readers all the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tests.log.auditing import Auditor
from tests.log.writing import group

from forebay.errors import ForebayError
from forebay.log import Compactor, CompactorConfig, LogReader, LogWriter, verify
from forebay.log._compaction_steps import CompactionSteps
from forebay.log._keys import PartitionKeys
from forebay.log._meta import read_meta
from forebay.testing import Actor, Faults, Latencies, Uniform, World, run_seeds, seeds

KEYS = PartitionKeys("t", 0)
SIZES = (2, 1, 3, 2, 1)
VALUES = [b"%03d" % number for number in range(sum(SIZES))]
CONFIG = CompactorConfig(min_age_ms=0, wait_for_full_ms=0, entries_max=3, entries_min=1, fetches_max=2)


def compactor_in(me: Actor, config: CompactorConfig = CONFIG) -> Compactor:
    return Compactor(
        me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, config=config
    )


async def compact(me: Actor) -> None:
    await compactor_in(me).compact_all("t", 0)


async def compact_once(me: Actor) -> None:
    await compactor_in(me).compact_once("t", 0)


async def read_on(me: Actor, stop: list[bool], reads: list[int]) -> None:
    """Read everything, again and again; anything but all records is an error."""
    while not stop:
        reader = LogReader(me.store, me.coordinator, clock=me.clock, randomness=me.random)
        found = [value async for batch in reader.scan_batches("t", 0) for value in batch.batch.records()]
        assert found == VALUES
        offset = me.random.randint(1, len(VALUES))
        one = await reader.read("t", 0, offset, max_records=1)
        assert one.records() == [VALUES[offset - 1]]
        reads.append(len(found))
        await me.clock.sleep(me.random.random() * 0.2)


async def prepare(world: World) -> None:
    """A log of small appends, by a hand that meets no faults."""
    writer = LogWriter(
        world.bucket,
        world.keys,
        clock=world.clock(),
        ids=world.ids(),
        randomness=world.randomness("prepare"),
    )
    left = list(VALUES)
    for size in SIZES:
        part, left = left[:size], left[size:]
        [result] = await writer.append_shared([group("t", 0, *part)])
        assert result.error is None


async def check_whole(world: World, auditor: Auditor) -> None:
    assert auditor.problems == []
    report = await verify(
        world.bucket, world.keys, clock=world.clock(), randomness=world.randomness("verify")
    )
    assert report.ok, report.as_json()
    assert [each.records for each in report.partitions] == [len(VALUES)]
    meta = await read_meta(world.keys, KEYS)
    assert (meta.cursor, meta.compaction) == (len(VALUES) + 1, None)


@dataclass(frozen=True)
class Run:
    steps: int
    crashed: bool
    reads: int


def crash_after(step: int | None, in_flight: bool, work: Any = compact_once) -> Run:
    async def main(world: World) -> Run:
        await prepare(world)
        auditor = Auditor(world, [KEYS])
        stop: list[bool] = []
        reads: list[int] = []
        reader = world.spawn("reader", read_on, stop, reads)
        first = world.spawn("first", work)
        if step is not None:
            first.crash_at(step, in_flight)
        await world.join(first)
        steps, crashed = first.steps, first.crashed
        await world.join(world.spawn("second", compact))
        await world.clock().sleep(5)
        stop.append(True)
        await world.join(reader)
        await check_whole(world, auditor)
        return Run(steps, crashed, len(reads))

    return World(seed=step or 0).run(main)


def test_every_offset_stays_readable_wherever_a_compactor_dies_and_another_goes_on() -> None:
    steps = crash_after(None, True).steps
    runs = [crash_after(step, flying) for step in range(steps + 1) for flying in (True, False)]
    assert steps > 20
    assert sum(run.crashed for run in runs) >= 2 * steps - 2
    assert all(run.reads for run in runs)


def test_every_offset_stays_readable_wherever_a_compactor_dies_that_reads_ahead() -> None:
    steps = crash_after(None, True, compact).steps
    runs = [crash_after(step, step % 2 == 0, compact) for step in range(steps + 1)]
    assert steps > 40
    assert sum(run.crashed for run in runs) >= steps - 2
    assert all(run.reads for run in runs)


STATES = ("_write_index", "_delete_old", "_move_cursor")


@pytest.mark.parametrize("name", STATES)
def test_any_process_resumes_from_every_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before and after each step; the state that is found says where."""

    class Stop(Exception):
        pass

    original = getattr(CompactionSteps, name)
    for after in (False, True):

        async def stop(self: CompactionSteps, *arguments: Any, after: bool = after) -> None:
            if after:
                await original(self, *arguments)
            raise Stop

        async def main(world: World, stop: Any = stop) -> str | None:
            await prepare(world)
            auditor = Auditor(world, [KEYS])
            with monkeypatch.context() as patched:
                patched.setattr(CompactionSteps, name, stop)
                actor = world.spawn("first", compact_once)
                with pytest.raises(Stop):
                    await actor.join()
            result = await world.spawn("second", _resume).join()
            await world.join(world.spawn("third", compact))
            await check_whole(world, auditor)
            state: str | None = result
            return state

        found = World(seed=1).run(main)
        assert (
            found
            == {
                "_write_index": "WRITING_COMPACTED_INDEX",
                "_delete_old": "DELETING_OLD",
                "_move_cursor": "UPDATING_CURSOR",
            }[name]
        )


async def _resume(me: Actor) -> str | None:
    result = await compactor_in(me).compact_once("t", 0)
    assert result.outcome == "resumed"
    return result.recovered_from


STORMY = Faults.all(0.04)


def test_two_compactors_at_once_without_a_claim_with_faults_and_crashes() -> None:
    looks = 0
    for found in run_seeds(_rivals, range(max(1, len(seeds(15))))):
        looks += found
    assert looks


def _rivals(seed: int, work: Any = None) -> int:
    async def main(world: World) -> int:
        await prepare(world)
        auditor = Auditor(world, [KEYS])
        stop: list[bool] = []
        reads: list[int] = []
        world.inject(STORMY, rotate_s=1.0)
        reader = world.spawn("reader", read_on, stop, reads)
        rivals = [world.spawn(name, work or _patient_compact) for name in ("ann", "bob")]
        for rival in rivals:
            rival.crash_randomly(0.01, restart_after_s=0.5, crashes_max=4)
        await world.join(*rivals)
        world.heal()
        await world.clock().sleep(30)
        await world.join(world.spawn("last", compact))
        stop.append(True)
        await world.join(reader)
        await check_whole(world, auditor)
        return auditor.looks

    return World(seed, store_latencies=_quick()).run(main)


def _quick() -> Any:
    return Latencies(Uniform(1, 20))


async def _patient_compact(me: Actor) -> None:
    """Until nothing is left, whatever happens meanwhile."""
    compactor = compactor_in(me)
    for _ in range(30):
        try:
            result = await compactor.compact_once("t", 0)
        except ForebayError:
            await me.clock.sleep(0.2)
            continue
        if result.outcome == "idle":
            return
        await me.clock.sleep(me.random.random() * 0.1)


def test_two_compactors_at_once_that_read_ahead_with_faults_and_crashes() -> None:
    assert sum(run_seeds(_rivals_ahead, range(max(1, len(seeds(5))))))


def _rivals_ahead(seed: int) -> int:
    return _rivals(seed, _patient_compact_all)


async def _patient_compact_all(me: Actor) -> None:
    """As `_patient_compact`, with a call that does several runs."""
    for _ in range(30):
        try:
            await compactor_in(me).compact_all("t", 0)
            return
        except ForebayError:
            await me.clock.sleep(0.2)


def test_a_stalled_compactor_wakes_after_its_rival_and_does_no_harm() -> None:
    """Paused at every step for longer than the rival needs."""

    async def main(world: World, step: int) -> bool:
        await prepare(world)
        auditor = Auditor(world, [KEYS])
        sleeper = world.spawn("sleeper", compact)
        while sleeper.steps < step and not sleeper.done:
            await world.clock().sleep(0.0005)
        paused = not sleeper.done
        sleeper.pause(60)
        await world.join(world.spawn("rival", compact))
        await world.join(sleeper)
        await world.join(world.spawn("last", compact))
        await check_whole(world, auditor)
        return paused

    pauses = [
        World(seed=step).run(lambda world, step=step: main(world, step))  # type: ignore[misc]
        for step in range(1, 60, 2)
    ]
    assert sum(pauses) > 10


def test_the_same_seed_gives_the_same_run() -> None:
    def trace() -> str:
        world = World(seed=5, faults=STORMY)

        async def main(world: World) -> None:
            await prepare(world)
            await world.join(*[world.spawn(name, _patient_compact) for name in ("ann", "bob")])

        world.run(main)
        return world.trace_hash()

    assert trace() == trace()
