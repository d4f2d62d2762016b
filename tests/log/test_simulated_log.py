"""The whole cast at once: writers, readers, two compactors, vacuum, trim, a fencer; faults, crashes, skew.

Every seed's history goes through every checker, an auditor looks after every effect, and at the end `verify`
must find nothing wrong and a last vacuum must leave nothing that nobody names. FOREBAY_SEEDS says how many
seeds to try.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.log.auditing import Auditor
from tests.log.writing import fencing_in, group, writer_in

from forebay.errors import ForebayError, NotDone, OutcomeUnknown
from forebay.log import (
    Compactor,
    CompactorConfig,
    CompactorService,
    CompactorServiceConfig,
    DataLost,
    LogReader,
    OffsetOutOfRange,
    UnknownTopic,
    Vacuum,
    VacuumConfig,
    WriterConfig,
    verify,
)
from forebay.log._keys import PartitionKeys
from forebay.log._trim import Trimmer
from forebay.testing import Actor, Faults, Latencies, Uniform, World, check, run_seeds, seeds

TOPIC = "t"
PARTITIONS = (0, 1)
KEYS = [PartitionKeys(TOPIC, partition) for partition in PARTITIONS]
WRITING = WriterConfig(upload_deadline_ms=4_000, idle_ms=500)
COMPACTING = CompactorConfig(
    target_bytes=300,
    entries_max=6,
    entries_min=1,
    min_age_ms=0,
    wait_for_full_ms=0,
    commit_deadline_ms=4_000,
    fetches_max=3,
)
VACUUMING = VacuumConfig(grace_ms=15_000, mark_gap_ms=5_000)
QUICK = Latencies(Uniform(1, 20))


@dataclass(frozen=True)
class Plan:
    """One kind of run."""

    writers: int
    appends: int = 8
    faults: Faults = Faults.all(0.03)  # noqa: RUF009 - frozen
    crash_rate: float = 0.002
    epochs: bool = False
    trims: bool = True
    service: bool = False
    min_age_ms: int = 0

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Every seed another cast."""
        draw = random.Random(f"plan {seed}")
        return cls(
            writers=draw.randint(2, 8),
            appends=draw.randint(4, 8),
            faults=Faults() if draw.random() < 0.15 else Faults.all(draw.choice([0.01, 0.03, 0.06])),
            crash_rate=draw.choice([0.0, 0.001, 0.004]),
            epochs=draw.random() < 0.5,
            trims=draw.random() < 0.7,
            service=draw.random() < 0.4,
            min_age_ms=draw.choice([0, 500, 3_000]),
        )


class Stage:
    """What the actors of one run share, beside the world: when to stop, and what is left to write."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.over = False
        self.left: dict[str, int] = {}
        self.trimmed = dict.fromkeys(PARTITIONS, 1)
        self.reads = 0
        self.folded = 0
        self.deleted = 0


def stream(partition: int) -> str:
    return f"{TOPIC}:{partition}"


# -- the cast


async def write(me: Actor, stage: Stage) -> None:
    log = writer_in(me, WRITING)
    epoch: int | None = 0 if stage.plan.epochs else None
    number = 0
    async with log.background():
        while stage.left[me.name] > 0:
            stage.left[me.name] -= 1
            groups, calls = [], []
            for partition in PARTITIONS:
                number += 1
                names = [f"{me.name}/{me.lives}/{number}.{n}" for n in range(me.random.randint(1, 3))]
                plain = group(TOPIC, partition, *[name.encode() for name in names])
                groups.append(replace(plain, epoch=epoch))
                calls.append(me.world.history.append(stream(partition), names, epoch=epoch))
            refused = False
            for call, result in zip(calls, await log.append_shared(groups), strict=True):
                if result.error is None:
                    assert result.start_offset is not None
                    call.ok(offset=result.start_offset - 1)
                elif isinstance(result.error, OutcomeUnknown):
                    call.unknown()
                else:
                    assert isinstance(result.error, NotDone), result.error
                    call.failed()
                    refused = True
            if refused and epoch is not None:
                epoch = await _epoch(me, epoch)
            await me.clock.sleep(me.random.random() * 2)


async def _epoch(me: Actor, epoch: int) -> int:
    try:
        states = [await fencing_in(me).state(TOPIC, partition) for partition in PARTITIONS]
    except ForebayError:
        return epoch
    return min(state.epoch for state in states)


async def read(me: Actor, stage: Stage, partition: int) -> None:
    """Follow one partition from the start; then again from a random place."""
    reader = LogReader(me.store, me.coordinator, clock=me.clock, randomness=me.random)
    position = 1
    while not stage.over:
        with me.world.history.read(stream(partition)) as call:
            try:
                found = await reader.read(TOPIC, partition, position, max_records=me.random.randint(1, 20))
            except OffsetOutOfRange as error:
                # Trimmed away under our feet.
                position = max(error.earliest, 1)
                continue
            except UnknownTopic:
                await me.clock.sleep(0.5)
                continue
            except DataLost:
                raise
            except ForebayError:
                await me.clock.sleep(0.2)
                continue
            values = [value.decode() for value in found.records()]
            call.ok(offset=position - 1, values=values, tail=found.high_watermark - 1)
        stage.reads += len(values)
        position = found.next_offset
        if me.random.random() < 0.1:
            position = me.random.randint(found.earliest, found.high_watermark)
        await me.clock.sleep(me.random.random() * 0.5)


async def compact(me: Actor, stage: Stage) -> None:
    config = replace(COMPACTING, min_age_ms=stage.plan.min_age_ms)
    compactor = Compactor(
        me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, config=config
    )
    while not stage.over:
        try:
            result = await compactor.compact_once(TOPIC, me.random.choice(PARTITIONS))
            stage.folded += result.outcome in ("compacted", "resumed")
        except ForebayError as error:
            assert not isinstance(error, DataLost), error
        await me.clock.sleep(me.random.random())


async def compact_as_service(me: Actor, stage: Stage) -> None:
    config = CompactorServiceConfig(
        interval_ms=500,
        discovery_interval_ms=2_000,
        vacuum_interval_ms=0,
        compaction=replace(COMPACTING, min_age_ms=stage.plan.min_age_ms),
    )
    service = CompactorService(
        me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, config=config
    )
    async with service:
        while not stage.over:
            await me.clock.sleep(0.5)
            failing = service.health().details["failing"]
            assert not any("missing" in text or "damaged" in text for text in failing.values()), failing


async def vacuum(me: Actor, stage: Stage) -> None:
    sweeper = Vacuum(
        me.store, me.coordinator, clock=me.clock, randomness=me.random, ids=me.ids, config=VACUUMING
    )
    while not stage.over:
        try:
            stage.deleted += (await sweeper.run_once()).deleted
        except ForebayError as error:
            assert not isinstance(error, DataLost), error
        await me.clock.sleep(3 + me.random.random() * 3)


async def trim(me: Actor, stage: Stage) -> None:
    trimmer = Trimmer(me.coordinator, clock=me.clock, randomness=me.random)
    reader = LogReader(me.store, me.coordinator, clock=me.clock, randomness=me.random)
    while not stage.over:
        await me.clock.sleep(4 + me.random.random() * 8)
        partition = me.random.choice(PARTITIONS)
        try:
            offsets = await reader.offsets(TOPIC, partition)
            to = me.random.randint(offsets.earliest, offsets.next)
            stage.trimmed[partition] = max(stage.trimmed[partition], to)
            await trimmer.trim(TOPIC, partition, to)
        except ForebayError:
            continue


async def fence(me: Actor, stage: Stage) -> None:
    fencing = fencing_in(me)
    while not stage.over:
        await me.clock.sleep(3 + me.random.random() * 6)
        partition = me.random.choice(PARTITIONS)
        try:
            before = await fencing.state(TOPIC, partition)
            wanted = before.epoch + 1
            with me.world.history.fence(stream(partition), wanted) as call:
                state = await fencing.fence(TOPIC, partition, epoch=wanted)
                call.ok(offset=state.next_offset - 1)
            await me.clock.sleep(me.random.random())
            await fencing.unfence(TOPIC, partition, wanted)
        except ForebayError:
            continue


# -- the play


def play(seed: int, plan: Plan) -> Stage:
    stage = Stage(plan)
    world = World(
        seed,
        faults=plan.faults,
        rotate_s=2.0,
        store_latencies=QUICK,
        skew_ms=300,
        drift_ppm=100,
        timeout_s=1.0,
    )
    world.run(lambda world: _main(world, stage))
    return stage


async def _main(world: World, stage: Stage) -> None:
    plan = stage.plan
    auditor = Auditor(world, KEYS)
    writers = []
    for number in range(plan.writers):
        name = f"writer-{number}"
        stage.left[name] = plan.appends
        writers.append(world.spawn(name, write, stage))
    others = [world.spawn(f"reader-{partition}", read, stage, partition) for partition in PARTITIONS]
    kind: Any = compact_as_service if plan.service else compact
    others += [world.spawn(f"compactor-{number}", kind, stage) for number in (1, 2)]
    others.append(world.spawn("vacuum", vacuum, stage))
    others.append(world.spawn("fencer", fence, stage))
    if plan.trims:
        others.append(world.spawn("trimmer", trim, stage))
    for actor in (*writers, *others):
        actor.crash_randomly(plan.crash_rate, restart_after_s=0.5, crashes_max=3)
    victim = world.randomness("victim").choice([*writers, *others])
    world.loop.call_later(3.0, victim.pause, 2.0)
    await world.join(*writers)
    await world.clock().sleep(10)
    world.heal()
    await world.clock().sleep(10)
    stage.over = True
    await world.join(*others)
    await world.clock().sleep(30)
    await _settle(world, stage)
    assert auditor.problems == [], "\n".join(auditor.problems)
    assert auditor.looks
    problems = check(world.history)
    assert not problems, "\n".join(map(str, problems))


async def _settle(world: World, stage: Stage) -> None:
    """All is quiet: compact the rest, vacuum the rest, verify, and read what there is."""
    parts: dict[str, Any] = {"clock": world.clock(), "randomness": world.randomness("settle")}
    ids = world.ids()
    compactor = Compactor(world.bucket, world.keys, ids=ids, config=COMPACTING, **parts)
    for partition in PARTITIONS:
        last = (await compactor.compact_all(TOPIC, partition))[-1]
        assert last.outcome == "idle" and last.lag_records == 0, last
    sweeper = Vacuum(world.bucket, world.keys, ids=ids, config=VACUUMING, **parts)
    for _ in range(3):
        await world.clock().sleep(30)
        report = await sweeper.run_once()
    assert not report.stalled and not report.marked_bytes, report
    stage.deleted += report.deleted
    found = await verify(world.bucket, world.keys, **parts)
    assert found.ok and found.orphans == [], found.as_json()
    reader = LogReader(world.bucket, world.keys, **parts)
    for partition in PARTITIONS:
        offsets = await reader.offsets(TOPIC, partition)
        values = [
            value.decode()
            async for batch in reader.scan_batches(TOPIC, partition)
            for value in batch.batch.records()
        ]
        assert offsets.earliest <= stage.trimmed[partition]
        world.history.final(stream(partition), values, start=offsets.earliest - 1)


def test_the_whole_cast_keeps_every_promise() -> None:
    stages = list(run_seeds(lambda seed: play(seed, Plan.of(seed)), range(max(1, len(seeds(12))))))
    assert sum(stage.folded for stage in stages) > len(stages)
    assert sum(stage.deleted for stage in stages) > len(stages)
    assert sum(stage.reads for stage in stages) > 10 * len(stages)


def test_a_healthy_cast_keeps_every_promise() -> None:
    stage = play(1, Plan(writers=4, faults=Faults(), crash_rate=0.0))
    assert stage.folded and stage.deleted


@pytest.mark.nightly
@pytest.mark.timeout(24 * 3600)
def test_the_whole_cast_for_a_night() -> None:
    for _ in run_seeds(lambda seed: play(seed, Plan.of(seed)), range(10_000, 10_000 + len(seeds(2_000)))):
        pass


def test_the_same_seed_plays_the_same_way() -> None:
    def trace() -> str:
        plan = Plan(writers=3, appends=3)
        world = World(3, faults=plan.faults, rotate_s=2.0, store_latencies=QUICK)
        stage = Stage(plan)
        world.run(lambda world: _main(world, stage))
        return world.trace_hash()

    assert trace() == trace()
