"""Writers of different epochs in the simulated world: crashes at every step, faults after effect, races.

The invariants of the remote tier are looked at all the time, not only at the end: whatever the record names
exists, is contiguous and adds up; next offset and epoch never fall.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.stream.logs import STREAM, HandClock, expected, write_log

from forebay.errors import ForebayError, NotDone, OutcomeUnknown, Unavailable
from forebay.formats.osiris_entry import decode_records
from forebay.kit.retry import RetryPolicy
from forebay.stream import (
    BlockCache,
    Deposed,
    Overtaken,
    ReaderConfig,
    RetentionPolicy,
    Spec,
    StreamReader,
    StreamTier,
    TierConfig,
    collect,
    verify_stream,
)
from forebay.testing import Actor, Faults, World, run_seeds
from forebay.testing.world import seeds

POLICY = RetryPolicy(attempts_max=6, base_ms=10, cap_ms=200, deadline_ms=20_000)
STORMY = Faults(before=0.04, after=0.05, lost=0.03, late=0.04, duplicate=0.03, slow=0.05)
SEEDS_DEFAULT = 6


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The log of an old writer, and that of its successor, which goes on in a new epoch."""
    base = tmp_path_factory.mktemp("logs")
    write_log(base / "old", 12, clock=HandClock(1_749_999_000_000))
    shutil.copytree(base / "old", base / "new")
    write_log(base / "new", 10, epoch=2, clock=HandClock(1_749_999_500_000))
    return base / "old", base / "new"


def tier_for(me: Actor, path: Path, *, epoch: int, with_keys: bool, keep: int | None = None) -> StreamTier:
    config = TierConfig(
        fragment_bytes=120,
        fragment_age_ms=0,
        branching=2,
        uploads_max=3,
        changes_max=2,
        root_interval_ms=50,
        poll_interval_ms=50,
        retention=RetentionPolicy(max_bytes=keep),
        retry=POLICY,
    )
    return StreamTier(
        path,
        me.store,
        stream=STREAM,
        coordinator=me.coordinator if with_keys else None,
        epoch=epoch,
        config=config,
        clock=me.clock,
        randomness=me.random,
    )


async def writer(me: Actor, path: Path, epoch: int, with_keys: bool, keep: int | None) -> None:
    """Tier until everything is in, however often it fails; a deposed writer stops."""
    tier = tier_for(me, path, epoch=epoch, with_keys=with_keys, keep=keep)
    while True:
        try:
            await tier.run_once()
            return
        except Deposed:
            assert epoch == 1
            return
        except (NotDone, OutcomeUnknown):
            await me.clock.sleep(0.2)


def spectator(world: World, with_keys: bool) -> StreamReader:
    return StreamReader(
        STREAM,
        world.bucket,
        coordinator=world.keys if with_keys else None,
        cache=BlockCache(),
        config=ReaderConfig(block_bytes=4096, ahead_bytes=0, retry=POLICY),
        clock=world.clock(),
        randomness=random.Random(0),
    )


async def watch(world: World, with_keys: bool, done: list[bool]) -> None:
    """Look at the remote tier again and again, by a way that meets no faults."""
    offset = epoch = revision = 0
    while not done:
        await world.clock().sleep(0.02)
        reader = spectator(world, with_keys)
        try:
            report = await verify_stream(reader.remote)
        except ForebayError:
            continue  # No record yet.
        held = reader.remote.held
        assert held is not None
        now = await reader.remote._record()
        if now is not None and now.head != held.head:
            continue  # It changed while we looked.
        assert report.problems == []
        assert reader.remote.manifest.next_offset >= offset
        assert held.head.epoch >= epoch
        assert held.head.revision >= revision
        offset, epoch, revision = reader.remote.manifest.next_offset, held.head.epoch, held.head.revision


async def consumer(me: Actor, end: int, with_keys: bool, may_lose: bool) -> None:
    """Read everything while it is being written: each record once, in order, or be told what is gone."""
    reader = StreamReader(
        STREAM,
        me.store,
        coordinator=me.coordinator if with_keys else None,
        cache=BlockCache(100_000),
        config=ReaderConfig(block_bytes=4096, ahead_bytes=1000, poll_interval_ms=50, retry=POLICY),
        clock=me.clock,
        randomness=me.random,
    )
    place = 0
    while place < end:
        try:
            async for chunk in reader.chunks(place, follow=True):
                header = chunk.header
                records = decode_records(chunk.data, entries=header.entries, records=header.records)
                found = [bytes(record) for record in records]
                assert header.chunk_id == place
                assert found == expected(place, header.next_id)
                place = header.next_id
                if place >= end:
                    return
        except Overtaken as gone:
            assert may_lose
            assert gone.offset == place
            place = gone.resume_offset
        except (Unavailable, ForebayError):
            await me.clock.sleep(0.1)


async def finish(world: World, path: Path, with_keys: bool, keep: int | None) -> None:
    """Heal everything, let the rightful writer end its work, and look at all there is."""
    world.heal()
    await world.clock().sleep(120)
    actor = world.spawn("last", writer, path, 2, with_keys, keep)
    await world.join(actor)
    reader = spectator(world, with_keys)
    report = await verify_stream(reader.remote)
    assert report.problems == []
    manifest = reader.remote.manifest
    place, found = manifest.first_offset, []
    async for chunk in reader.chunks(Spec("first")):
        header = chunk.header
        found += [
            bytes(record)
            for record in decode_records(chunk.data, entries=header.entries, records=header.records)
        ]
    assert found == expected(place, manifest.next_offset)
    if keep is None:
        assert place == 0
    now_ms = world.clock().now_ms() + 1
    await collect(reader.remote, now_ms=now_ms, grace_ms=0, dry_run=False)
    assert (await collect(reader.remote, now_ms=now_ms, grace_ms=0)).orphans == []
    assert (await verify_stream(spectator(world, with_keys).remote)).problems == []


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("keep", [None, 600])
def test_two_epochs_with_crashes_and_faults_keep_every_invariant(
    logs: tuple[Path, Path], with_keys: bool, keep: int | None
) -> None:
    old, new = logs
    end = len(expected_records(new))

    def scenario(seed: int) -> None:
        async def main(world: World) -> None:
            done: list[bool] = []
            watcher = world.loop.create_task(watch(world, with_keys, done))
            first = world.spawn("old", writer, old, 1, with_keys, keep)
            first.crash_randomly(0.01, restart_after_s=0.5, crashes_max=3)
            await world.clock().sleep(random.Random(seed).uniform(0, 2))
            second = world.spawn("new", writer, new, 2, with_keys, keep)
            second.crash_randomly(0.01, restart_after_s=0.5, crashes_max=3)
            reading = world.spawn("reader", consumer, end, with_keys, keep is not None)
            await world.join(first, second)
            world.heal()
            await world.join(reading)
            done.append(True)
            await watcher
            await finish(world, new, with_keys, keep)

        World(seed, faults=STORMY, rotate_s=1.0).run(main)

    for _ in run_seeds(scenario, seeds(SEEDS_DEFAULT)):
        pass


def expected_records(path: Path) -> range:
    from forebay.stream._local import LocalLog

    log = LocalLog(path)
    log.refresh()
    return range(log.next_offset)


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_crash_after_any_step_loses_nothing(
    logs: tuple[Path, Path], with_keys: bool, in_flight: bool
) -> None:
    def crash_after(step: int | None) -> int:
        async def main(world: World) -> int:
            actor = world.spawn("old", writer, logs[0], 1, with_keys, 700)
            if step is not None:
                actor.crash_at(step, in_flight)
            await world.join()
            steps = actor.steps
            await finish(world, logs[1], with_keys, 700)
            return steps

        return World(seed=3).run(main)

    steps = crash_after(None)
    stride = max(steps // 20, 1)
    for step in range(0, steps + 1, stride):
        crash_after(step)


@pytest.mark.nightly
@pytest.mark.parametrize("with_keys", [False, True])
def test_a_crash_after_every_single_step_loses_nothing(logs: tuple[Path, Path], with_keys: bool) -> None:
    def crash_after(step: int | None, in_flight: bool) -> int:
        async def main(world: World) -> int:
            actor = world.spawn("old", writer, logs[0], 1, with_keys, 700)
            if step is not None:
                actor.crash_at(step, in_flight)
            await world.join()
            steps = actor.steps
            await finish(world, logs[1], with_keys, 700)
            return steps

        return World(seed=4).run(main)

    for step in range(crash_after(None, True) + 1):
        for in_flight in (True, False):
            crash_after(step, in_flight)
