"""The commit broker: fewer requests, lower latency, and nothing lost or doubled when it goes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from tests.buffer.broker_world import CONFIG, Mailbox, Told, broker, check, produce, queued
from tests.buffer.scripted_store import ManualClock

from forebay.buffer import BufferConfig, ManifestLost, Producer, QueueFull
from forebay.buffer._commit_broker import (
    REQUESTS_WAITING_MAX,
    CommitBroker,
    CommitReply,
    CommitRequest,
    ReplyKind,
)
from forebay.buffer._commit_broker_client import BrokeredCommitter, BrokerGone
from forebay.buffer._committer import Committed, Upload
from forebay.errors import OutcomeUnknown, UsageError
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import Entry, Metadata, NewEntry
from forebay.kit.clock import SystemClock
from forebay.storage import MemoryStore
from forebay.testing import Faults, World, run_seeds
from forebay.testing.faults import Constant, Latencies
from forebay.testing.world import seeds

S3_MODEL = Latencies(Constant(25), {"put": Constant(60)}, decides_at=1.0)


def crowd(seed: int, producers: int, seconds: float) -> tuple[float, float, Told]:
    """Requests per batch, the 99th percentile of durability in ms, and what was told."""
    told = Told()

    async def main(world: World) -> int:
        mailbox = Mailbox()
        world.spawn("broker", broker, mailbox)
        actors = [
            world.spawn(f"p{number}", produce, mailbox, told, int(seconds / 0.005), 0.005)
            for number in range(producers)
        ]
        await world.join(*actors)
        check(await queued(world), told)
        return len(buffer_manifest.decode((await world.bucket.get(CONFIG.manifest_path)).data))

    world = World(seed, store_latencies=S3_MODEL)
    batches = world.run(main)
    ordered = sorted(told.latencies_s)
    return world.requests.count() / batches, ordered[int(len(ordered) * 0.99)] * 1000, told


def test_sixteen_producers_with_a_broker_cost_as_much_as_one() -> None:
    requests, p99_ms, told = crowd(seed=1, producers=16, seconds=2.0)
    assert requests <= 2.2
    assert p99_ms <= 500
    assert len(told.durable) == 16 * 400


def test_one_producer_with_a_broker_is_no_slower_than_alone() -> None:
    requests, p99_ms, _ = crowd(seed=1, producers=1, seconds=2.0)
    assert requests <= 2.2
    assert p99_ms <= 300


@pytest.mark.parametrize("restart", [True, False])
def test_a_broker_killed_at_any_step_loses_and_doubles_nothing(restart: bool) -> None:
    def killed_at(step: int | None, in_flight: bool) -> int:
        async def main(world: World) -> int:
            mailbox, told = Mailbox(), Told()
            serving = world.spawn("broker", broker, mailbox)
            if step is not None:
                serving.crash_at(step, in_flight)
            actors = [world.spawn(f"p{n}", produce, mailbox, told, 3, 0.05) for n in range(3)]
            if restart and step is not None:
                await world.clock().sleep(1.5)
                if serving.crashed:
                    serving.restart()
            await world.join(*actors)
            steps = serving.steps
            await world.clock().sleep(60)
            check(await queued(world), told)
            assert len(told.durable) == 9
            return steps

        return World(seed=1).run(main)

    steps = killed_at(None, True)
    for step in range(0, steps + 1, 1):
        for in_flight in (True, False):
            killed_at(step, in_flight)


def storm(seed: int) -> None:
    async def main(world: World) -> None:
        mailbox, told = Mailbox(), Told()
        serving = world.spawn("broker", broker, mailbox)
        serving.crash_randomly(0.01, restart_after_s=0.8, crashes_max=4)
        actors = [world.spawn(f"p{n}", produce, mailbox, told, 10, 0.1) for n in range(4)]
        if seed % 2:
            world.loop.call_later(0.4, serving.pause, 2.5, context=world.context)
        await world.join(*actors)
        world.heal()
        await world.clock().sleep(60)
        records = await queued(world) if told.durable or told.unknown else []
        check(records, told)
        assert len(told.durable) + len(told.unknown) + len(told.failed) == 40

    faults = Faults(before=0.03, after=0.04, lost={"put": 0.04}, late=0.03, duplicate=0.02, slow=0.04)
    World(seed, faults=faults, rotate_s=1.0).run(main)


def test_crashes_pauses_and_faults_lose_and_double_nothing() -> None:
    for _ in run_seeds(storm, seeds(80)):
        pass


def test_a_batch_consumed_before_its_producer_could_look_is_unknown() -> None:
    class Silent:
        """A broker that enqueues and whose answer never comes; then the entry is consumed."""

        def __init__(self, store: MemoryStore) -> None:
            self._broker = CommitBroker(store, CONFIG)
            self._store = store

        async def request(self, request: CommitRequest) -> CommitReply:
            await self._broker.commit(request)
            found = await self._store.get(CONFIG.manifest_path)
            manifest = buffer_manifest.decode(found.data)
            rest = buffer_manifest.dequeue(manifest, manifest.next_sequence - 1)
            await self._store.put(CONFIG.manifest_path, rest.data, found.version)
            raise OutcomeUnknown("a commit")

        async def close(self) -> None:
            """Nothing is open."""

    async def main() -> None:
        store = MemoryStore()
        # Long enough for the broker to begin on a busy machine; then it is waited for.
        committer = BrokeredCommitter(
            Silent(store), store, CONFIG, clock=SystemClock(), randomness=random.Random(1), permission_ms=500
        )
        out = Producer(BufferConfig(flush_interval_ms=0), store=store, committer=committer)
        handle = await out.produce([b"x"])
        with pytest.raises(OutcomeUnknown):
            await handle.watcher.await_durable()
        with pytest.raises(OutcomeUnknown):
            await out.close()

    asyncio.run(main())


class Fixed:
    """A link that always says the same."""

    def __init__(self, answer: CommitReply | Exception) -> None:
        self._answer = answer

    async def request(self, request: CommitRequest) -> CommitReply:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def close(self) -> None:
        """Nothing is open."""


async def producing_over(answer: CommitReply | Exception) -> tuple[MemoryStore, Producer, BrokeredCommitter]:
    store = MemoryStore()
    committer = BrokeredCommitter(
        Fixed(answer), store, CONFIG, clock=SystemClock(), randomness=random.Random(1), permission_ms=20
    )
    config = BufferConfig(flush_interval_ms=0, manifest_path="q/manifest", data_path_prefix="q/data")
    return store, Producer(config, store=store, committer=committer), committer


@pytest.mark.parametrize(
    "answer",
    [
        BrokerGone("nobody"),
        CommitReply(1, ReplyKind.NOT_DONE, reason="its deadline has passed"),
        OutcomeUnknown("a commit"),
        CommitReply(1, ReplyKind.UNKNOWN),
    ],
)
async def test_without_a_broker_that_commits_the_producer_does(answer: CommitReply | Exception) -> None:
    store, out, committer = await producing_over(answer)
    async with out:
        await (await out.produce([b"x"])).watcher.await_durable()
    manifest = buffer_manifest.decode((await store.get("q/manifest")).data)
    assert len(manifest) == 1
    assert committer.alone + committer.settled == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (CommitReply(1, ReplyKind.FULL, limit=1, actual=2), QueueFull),
        (CommitReply(1, ReplyKind.LOST, reason="gone"), ManifestLost),
    ],
)
async def test_what_the_broker_knows_for_certain_reaches_the_producer(
    answer: CommitReply, error: type[Exception]
) -> None:
    _, out, _ = await producing_over(answer)
    handle = await out.produce([b"x"])
    with pytest.raises(error):
        await handle.watcher.await_durable()
    with pytest.raises(error):
        await out.close()


async def test_a_fresh_batch_is_given_to_the_broker_whatever_the_clock_shows() -> None:
    clock = ManualClock()
    committer = BrokeredCommitter(
        Fixed(CommitReply(1, ReplyKind.COMMITTED, sequence=0)),
        MemoryStore(),
        CONFIG,
        clock=clock,
        randomness=random.Random(1),
        permission_ms=20,
    )
    draw = random.Random(1)
    for number in range(1, 101):
        clock.seconds = draw.uniform(0, 1e6)  # now + 0.02 - now is less than 0.02 at every other of them
        await committer.commit([Upload(NewEntry(f"q/data/{number}"), clock.seconds, clock.seconds)])
        assert (committer.brokered, committer.alone) == (number, 0)


def request(number: int, deadline: float, count: int = 1) -> CommitRequest:
    return CommitRequest(
        number, deadline, tuple((f"q/data/{number}-{index}", (), b"") for index in range(count))
    )


async def test_the_broker_sends_nothing_after_a_deadline() -> None:
    store, clock = MemoryStore(), SystemClock()
    serving = CommitBroker(store, CONFIG, clock=clock)
    late = await serving.commit(request(1, clock.monotonic() - 0.001))
    assert late.kind == ReplyKind.NOT_DONE
    assert [info.key async for info in store.list()] == []


async def test_requests_that_wait_are_enqueued_together_and_in_order() -> None:
    store, clock = MemoryStore(), SystemClock()
    serving = CommitBroker(store, CONFIG, clock=clock)
    far = clock.monotonic() + 100
    replies = await asyncio.gather(*(serving.commit(request(number, far, 2)) for number in range(5)))
    assert [reply.sequence for reply in replies] == [0, 2, 4, 6, 8]
    assert serving.commits == 1
    manifest = buffer_manifest.decode((await store.get(CONFIG.manifest_path)).data)
    assert [entry.location for entry in manifest.entries] == [
        f"q/data/{number}-{index}" for number in range(5) for index in range(2)
    ]


async def test_an_old_request_does_not_hold_up_the_others_of_its_group() -> None:
    class Slow(MemoryStore):
        async def get(self, key):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.05)
            return await super().get(key)

    clock = SystemClock()
    serving = CommitBroker(Slow(), CONFIG, clock=clock)
    now = clock.monotonic()
    old, young = await asyncio.gather(
        serving.commit(request(1, now + 0.02)), serving.commit(request(2, now + 100))
    )
    assert old.kind == ReplyKind.NOT_DONE
    assert young.kind == ReplyKind.COMMITTED


async def test_a_closing_broker_hands_back_what_waits() -> None:
    serving = CommitBroker(MemoryStore(), CONFIG)
    waiting = asyncio.create_task(serving.commit(request(1, 1e12)))
    await asyncio.sleep(0)
    await serving.close()
    assert (await waiting).kind in (ReplyKind.NOT_DONE, ReplyKind.COMMITTED)


async def test_a_full_line_is_refused_at_once() -> None:
    serving = CommitBroker(MemoryStore(), CONFIG)
    serving._line.extend([None] * REQUESTS_WAITING_MAX)  # type: ignore[list-item]
    assert (await serving.commit(request(1, 1e12))).kind == ReplyKind.NOT_DONE
    with pytest.raises(UsageError):
        await serving.commit(CommitRequest(1, 1e12, ()))


async def test_a_unit_found_in_part_was_enqueued_as_a_whole() -> None:
    """The first entries of a request are consumed, the last is still there: all of them were enqueued."""
    store = MemoryStore()

    class Half:
        async def request(self, sent: CommitRequest) -> CommitReply:
            location = sent.entries[-1][0]
            data = buffer_manifest.encode([Entry(len(sent.entries) - 1, location)])
            await store.put("q/manifest", data)
            raise OutcomeUnknown("a commit")

        async def close(self) -> None:
            """Nothing is open."""

    committer = BrokeredCommitter(
        Half(), store, CONFIG, clock=SystemClock(), randomness=random.Random(1), permission_ms=10
    )
    config = BufferConfig(
        flush_interval_ms=60_000, flush_size_bytes=1, manifest_path="q/manifest", data_path_prefix="q/data"
    )
    async with Producer(config, store=store, committer=committer) as out:
        handles = [await out.produce([b"%d" % number]) for number in range(3)]
        places = [await handle.watcher.await_durable() for handle in handles]
    assert [place.sequence for place in places] == list(range(3))


class Straight:
    """A link without a wire."""

    def __init__(self, serving: CommitBroker) -> None:
        self._serving = serving

    async def request(self, request: CommitRequest) -> CommitReply:
        return await self._serving.commit(request)

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("room", [1_024, 4_096])
async def test_a_request_cut_in_two_by_a_full_queue_is_committed_as_far_as_it_is_there(room: int) -> None:
    """The broker's bound holds one entry; the producer's own bound the second one, or not."""
    store, clock = MemoryStore(), SystemClock()
    serving = CommitBroker(store, replace(CONFIG, manifest_append_bytes_max=1_024))
    committer = BrokeredCommitter(
        Straight(serving),
        store,
        replace(CONFIG, manifest_append_bytes_max=room),
        clock=clock,
        randomness=random.Random(1),
        permission_ms=10,
    )
    now = clock.monotonic()
    payload = (Metadata(0, 1, bytes(600)),)
    uploads = [Upload(NewEntry(f"q/data/{number}", payload), now, now) for number in range(2)]
    answers = await committer.commit(uploads)
    manifest = buffer_manifest.decode((await store.get(CONFIG.manifest_path)).data)
    there = [Committed(entry.sequence, entry.location) for entry in manifest.entries]
    assert [answer for answer in answers if isinstance(answer, Committed)] == there
    assert len(answers) == 2
    assert len(there) == (1 if room == 1_024 else 2)
