"""Two to eight writers, lost replies, crashes, clocks that disagree, a fencer: every history is checked.

FOREBAY_SEEDS says how many seeds to try.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from tests.log.auditing import Ledger
from tests.log.writing import control_of, fencing_in, group, read_log, writer_in

from forebay.errors import ForebayError, NotDone, OutcomeUnknown, Unavailable
from forebay.kit.retry import RetryPolicy
from forebay.log import (
    AppendGroup,
    AppendResult,
    BatchingProducer,
    Fenced,
    LogWriter,
    OutOfSequence,
    ProducerConfig,
    Topic,
    Trimmer,
    WriterConfig,
)
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.log._records import decode_record
from forebay.testing import Actor, Faults, World, check, run_seeds, seeds
from forebay.testing.checkers import CHECKERS, check_producer_order
from forebay.testing.history import Call

SEEDS = range(max(1, len(seeds(15))))
TOPIC = "t"


@dataclass(frozen=True)
class Plan:
    """One kind of run."""

    writers: int = 4
    appends: int = 8
    partitions: int = 2
    faults: Faults = Faults.all(0.03)  # noqa: RUF009 - frozen
    rotate_s: float = 1.0
    crash_rate: float = 0.001
    idempotent: bool = False
    epochs: bool = False
    batching: bool = False
    shards: int = 1
    hasty: bool = False
    """Writers give up soon, so that callers hear of unknown outcomes and must deal with them."""
    trims: bool = False
    """Somebody trims all there is, again and again: it removes the traces that writers look for."""
    deletes: bool = False
    """Somebody deletes the topic, again and again; the next append makes it anew."""


def _stream(partition: int) -> str:
    return f"{TOPIC}:{partition}"


def _end(call: Call, result: AppendResult) -> None:
    """Histories count from 0, logs from 1."""
    if result.error is None:
        assert result.start_offset is not None and result.end_offset is not None
        assert result.end_offset - result.start_offset + 1 == len(call.values)
        call.ok(offset=result.start_offset - 1)
    elif isinstance(result.error, OutcomeUnknown):
        call.unknown()
    else:
        assert isinstance(result.error, NotDone), result.error
        call.failed()


class Sender:
    """One writer of the cast: appends to all partitions at once and records what it was told."""

    def __init__(self, me: Actor, plan: Plan, log: LogWriter) -> None:
        self.me, self.plan, self.log = me, plan, log
        self.history = me.world.history
        self.number = 0
        self.epoch: int | None = 0 if plan.epochs else None
        self.sequences = [0] * plan.partitions
        self.producer = f"{me.name}-{me.lives}" if plan.idempotent else None

    def group(self, partition: int) -> tuple[AppendGroup, list[str]]:
        self.number += 1
        count = self.me.random.randint(1, 3)
        names = [f"{self.me.name}/{self.me.lives}/{self.number}.{part}" for part in range(count)]
        sequence = self.sequences[partition] if self.producer else None
        plain = group(TOPIC, partition, *[name.encode() for name in names])
        return replace(plain, producer_id=self.producer, sequence=sequence, epoch=self.epoch), names

    async def round(self) -> None:
        """One flush over all partitions."""
        groups, calls = [], []
        for partition in range(self.plan.partitions):
            one, names = self.group(partition)
            groups.append(one)
            calls.append(self.history.append(_stream(partition), names, epoch=self.epoch))
        results = await self._append(groups)
        for call, result in zip(calls, results, strict=True):
            _end(call, result)
            if self.producer:
                self._advance(result)
        if any(isinstance(result.error, Fenced) for result in results):
            await self._take_epoch()

    async def _append(self, groups: Sequence[AppendGroup]) -> list[AppendResult]:
        results = await self.log.append_shared(groups)
        if not self.producer:
            return results
        # An idempotent producer may repeat what is unknown until it knows.
        for _ in range(20):
            again = [
                number
                for number, one in enumerate(results)
                if isinstance(one.error, OutcomeUnknown | Unavailable)
            ]
            if not again:
                break
            await self.me.clock.sleep(0.5)
            for number, one in zip(
                again, await self.log.append_shared([groups[n] for n in again]), strict=True
            ):
                results[number] = one
        return results

    def _advance(self, result: AppendResult) -> None:
        if result.error is None:
            self.sequences[result.partition] += 1
        elif isinstance(result.error, OutOfSequence):
            raise AssertionError("the only append under way cannot be out of sequence") from result.error

    async def _take_epoch(self) -> None:
        fencing = fencing_in(self.me)
        try:
            states = [await fencing.state(TOPIC, partition) for partition in range(self.plan.partitions)]
        except ForebayError:
            return
        self.epoch = min(state.epoch for state in states)


HASTY = WriterConfig(commit=RetryPolicy(attempts_max=2, base_ms=10))


async def _write(me: Actor, plan: Plan, left: dict[str, int]) -> None:
    log = writer_in(me, HASTY if plan.hasty else None)
    async with log.background():
        sender = Sender(me, plan, log)
        while left[me.name] > 0:
            left[me.name] -= 1
            await sender.round()
            if me.random.random() < 0.3:
                await me.clock.sleep(me.random.random())


async def _write_batched(me: Actor, plan: Plan, left: dict[str, int]) -> None:
    """Three tasks of one process share a producer; each sends to one partition after the other."""
    log = writer_in(me)
    config = ProducerConfig(batch_max_delay_ms=20, batch_max_bytes=200)
    producer = BatchingProducer(log, clock=me.clock, config=config)

    async def lane(number: int) -> None:
        sent = 0
        while left[me.name] > 0:
            left[me.name] -= 1
            sent += 1
            calls, groups = [], []
            for partition in range(plan.partitions):
                names = [
                    f"{me.name}/{me.lives}/{number}/{sent}.{part}" for part in range(me.random.randint(1, 3))
                ]
                calls.append(me.world.history.append(_stream(partition), names, actor=f"{me.name}/{number}"))
                groups.append(group(TOPIC, partition, *[name.encode() for name in names]))
            for call, ticket in zip(calls, await producer.append(groups), strict=True):
                try:
                    _end(call, await ticket)
                except NotDone:
                    call.failed()
                except OutcomeUnknown:
                    call.unknown()

    await asyncio.gather(*[lane(number) for number in range(3)])
    with contextlib.suppress(ForebayError):  # Told to the callers already.
        await producer.close()


async def _fence(me: Actor, plan: Plan) -> None:
    """Shuts everybody out now and then, and lets those in who take the new epoch."""
    fencing = fencing_in(me)
    for _ in range(6):
        await me.clock.sleep(me.random.random() * 2)
        partition = me.random.randrange(plan.partitions)
        try:
            before = await fencing.state(TOPIC, partition)
        except ForebayError:
            continue
        epoch = before.epoch + 1
        with me.world.history.fence(_stream(partition), epoch) as call:
            try:
                state = await fencing.fence(TOPIC, partition, epoch=epoch)
            except ForebayError:
                call.unknown()
                continue
            call.ok(offset=state.next_offset - 1)
        await me.clock.sleep(me.random.random())
        try:
            await fencing.unfence(TOPIC, partition, epoch)
        except ForebayError:
            continue


async def _trim(me: Actor, plan: Plan, left: dict[str, int]) -> None:
    trimmer = Trimmer(me.coordinator, clock=me.clock, randomness=me.random)
    while any(left.values()):
        for partition in range(plan.partitions):
            with contextlib.suppress(ForebayError):
                ends = await trimmer.trim(TOPIC, partition, 0)
                await trimmer.trim(TOPIC, partition, ends.next)
        await me.clock.sleep(me.random.random() * 0.02)


async def _delete(me: Actor, plan: Plan, left: dict[str, int]) -> None:
    catalog = writer_in(me).catalog
    while any(left.values()):
        await me.clock.sleep(me.random.random())
        with contextlib.suppress(ForebayError):
            await catalog.delete(TOPIC)


def _run(seed: int, plan: Plan) -> tuple[int, str]:
    world = World(
        seed,
        faults=plan.faults,
        rotate_s=plan.rotate_s,
        skew_ms=5_000,
        drift_ppm=200,
        coordinator_shards=plan.shards,
    )
    return world.run(lambda world: _main(world, plan)), world.trace_hash()


async def _main(world: World, plan: Plan) -> int:
    left: dict[str, int] = {}
    ledger = Ledger(world, [PartitionKeys(TOPIC, partition) for partition in range(plan.partitions)])
    for number in range(plan.writers):
        left[f"w{number}"] = plan.appends
        actor = world.spawn(f"w{number}", _write_batched if plan.batching else _write, plan, left)
        actor.crash_randomly(plan.crash_rate, restart_after_s=0.5, crashes_max=4)
    if plan.epochs:
        fencer = world.spawn("fencer", _fence, plan)
        fencer.crash_randomly(plan.crash_rate, restart_after_s=0.5, crashes_max=4)
    if plan.trims:
        world.spawn("trimmer", _trim, plan, left)
    if plan.deletes:
        deleter = world.spawn("deleter", _delete, plan, left)
        deleter.crash_randomly(plan.crash_rate, restart_after_s=0.5, crashes_max=4)
    await world.join()
    world.heal()
    await world.clock().sleep(60)
    for partition in range(plan.partitions):
        start, left_over = await _start(world, partition)
        log = [] if left_over else await read_log(world.bucket, world.keys, TOPIC, partition)
        world.history.final(_stream(partition), [record.decode() for record in log], start=start - 1)
    # A batched writer is several senders; a sender that was told nothing may not know its own order.
    problems = check(world.history, [*CHECKERS, check_producer_order])
    assert not problems, "\n".join(map(str, problems))
    assert not ledger.twice, "\n".join(ledger.twice)
    return len(ledger.starts)


async def _start(world: World, partition: int) -> tuple[int, bool]:
    """The first offset that was not trimmed, nor deleted with the topic; whether the partition is only what a
    late request has left of a deleted topic."""
    keys = PartitionKeys(TOPIC, partition)
    record = await world.keys.get(topic_key(TOPIC), partition_key=CATALOG_PARTITION_KEY)
    first = 1 if record is None else decode_record(Topic, record.key, record.value).first_offset
    if await world.keys.get(keys.control, partition_key=keys.partition_key) is None:
        return first, False
    start = (await control_of(world.keys, keys))[0].start_offset
    return max(start, first), start < first


PLANS = {
    "two writers": Plan(writers=2),
    "four writers": Plan(),
    "eight writers": Plan(writers=8, appends=4, partitions=1),
    "storm": Plan(writers=3, appends=5, faults=Faults.all(0.1), rotate_s=0.0, crash_rate=0.004),
    "lost replies": Plan(writers=3, faults=Faults(after=0.15, lost=0.15, late=0.15, duplicate=0.1)),
    # Slow reads: much may happen between two looks of a writer that asks what became of its append.
    "lost replies and trims": Plan(
        writers=6,
        partitions=1,
        trims=True,
        rotate_s=0.0,
        faults=Faults(after={"write": 0.4}, slow={"get": 0.5}, slow_factor=40),
    ),
    "lost replies and deletions": Plan(
        writers=6,
        partitions=1,
        deletes=True,
        rotate_s=0.0,
        faults=Faults(
            after={"write": 0.2},
            late={"write": 0.2},
            duplicate={"write": 0.2},
            slow={"get": 0.3},
            slow_factor=40,
        ),
    ),
    "hasty": Plan(writers=3, hasty=True, faults=Faults.all(0.06)),
    "idempotent": Plan(writers=3, idempotent=True, hasty=True, faults=Faults.all(0.08), rotate_s=0.0),
    "fencer": Plan(writers=4, epochs=True, appends=10),
    "fencer in a storm": Plan(writers=3, epochs=True, faults=Faults.all(0.08), rotate_s=0.0),
    "batching": Plan(writers=2, batching=True, appends=12),
    "batching in a storm": Plan(writers=3, batching=True, faults=Faults.all(0.08), crash_rate=0.003),
    "four shards": Plan(writers=3, partitions=4, shards=4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_writers_keep_every_promise(plan: Plan) -> None:
    appended = sum(count for count, _ in run_seeds(lambda seed: _run(seed, plan), SEEDS))
    assert appended > len(SEEDS) * plan.writers


def test_same_seed_same_trace() -> None:
    for plan in (PLANS["four writers"], PLANS["batching"], PLANS["fencer"]):
        assert _run(3, plan) == _run(3, plan)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_writers_keep_every_promise_for_long(plan: Plan) -> None:
    for _ in run_seeds(lambda seed: _run(seed, plan), range(1_000, 1_000 + 40 * len(SEEDS))):
        pass
