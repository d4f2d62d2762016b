"""What everybody waits for is written and synced in the event loop's own thread: when, and that it changes
nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.formats.quiver_frame import WAL_MAGIC, Frame, decode_file_header, scan
from forebay.quiver import LocalDisk, Quiver, QuiverFailed
from forebay.quiver._disk import Disk, Lane
from forebay.quiver._group_log import HERE_BYTES_MAX, QUICK_SYNC_S, GroupLog, Item
from forebay.quiver._local_disk import _LocalFile
from forebay.quiver._log_files import LogFile, LogSettings
from forebay.testing.world import World

EAGER = LogSettings("wal", "wal", "wal", WAL_MAGIC, 1 << 24, is_eager=True)
ONE_FILE = dataclasses.replace(SMALL, wal_file_bytes=32_768)
WARM_UP_MAX = 200
"""Appends after which a quick disk is known to be one."""


class OwnTime:
    """A clock that stands still unless it is told: every disk is quick, and no timer ends."""

    def __init__(self) -> None:
        self.now = 100.0

    def now_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.get_running_loop().create_future()


def append(log: GroupLog, body: bytes = b"x", *, is_waited_for: bool = True) -> Item:
    return log.append(1, 0, [body], len(body), is_waited_for=is_waited_for)


async def outcome(log: GroupLog, item: Item) -> None:
    """Wait as `Quiver.ingest` does."""
    if item.done.done():
        await log.next_turn()
    await item.done


async def until_here(log: GroupLog) -> None:
    """Append alone until it happens in this thread."""
    for _ in range(WARM_UP_MAX):
        item = append(log)
        is_here = item.done.done()
        await outcome(log, item)
        if is_here:
            return
    raise AssertionError("never written here")


async def until_ingested_here(quiver: Quiver, disk: SimDisk) -> int:
    """The same with batches. Returns how many it took."""
    for number in range(WARM_UP_MAX):
        await quiver.ingest(batch(number))
        if disk.run_here_count:
            return number + 1
    raise AssertionError("never written here")


def started(disk: SimDisk, world: World, **named: Any) -> GroupLog:
    log = GroupLog(disk, EAGER, world.clock(), **{"on_durable": lambda group: None} | named)
    log.start([], 1, 1, [])
    return log


def frames(disk: SimDisk) -> list[int]:
    files = [data for name, data in disk.files("wal/").items() if name.endswith(".wal")]
    found = [each for data in files for each in scan(data, decode_file_header(data, WAL_MAGIC))]
    return [each.sequence for each in found if isinstance(each, Frame)]


def test_whoever_is_alone_on_a_quick_disk_is_durable_when_append_returns() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        log = started(disk, world)
        await until_here(log)
        lanes_before, synced = dict(disk.lane_counts), len(disk.history)
        for _ in range(10):
            item = append(log)
            assert item.done.done()
            assert not disk.names["wal/0000000000000001.wal"].pending, "synced"
            await outcome(log, item)
        assert disk.lane_counts == lanes_before
        assert [line.split()[0] for line in disk.history[synced:]] == ["write", "sync"] * 10
        await log.close()
        assert frames(disk) == list(range(1, log.next_sequence))

    simulate(scenario)


def test_who_does_not_wait_for_the_frame_is_left_to_the_lane() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        log = started(disk, world)
        await until_here(log)
        item = append(log, is_waited_for=False)
        assert not item.done.done()
        await item.done
        await log.close()

    simulate(scenario)


def test_large_frame_is_left_to_the_lane() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        log = started(disk, world)
        await until_here(log)
        disk.delays["wal"] = 1.0
        item = append(log, bytes(HERE_BYTES_MAX))
        assert not item.done.done()
        await item.done
        disk.delays.clear()
        assert append(log).done.done(), "and says nothing of the disk's pace"
        await log.close()

    simulate(scenario)


def test_who_comes_second_in_a_turn_of_the_loop_collects_a_group() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        groups: list[int] = []
        log = started(disk, world, on_durable=lambda group: groups.append(len(group)))
        await until_here(log)
        groups.clear()
        # One task, or sixteen, makes no difference: what counts is the turn of the loop.
        await asyncio.gather(*(append(log).done for _ in range(16)))
        assert groups == [1, 15]
        await log.close()

    simulate(scenario)


def test_crowd_that_is_all_there_is_written_here_and_one_that_is_not_by_the_lane() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        groups: list[int] = []
        log = started(disk, world, on_durable=lambda group: groups.append(len(group)))
        await until_here(log)
        await asyncio.gather(*(append(log).done for _ in range(16)))
        groups.clear()

        async def run(count: int, *, waited_for: int) -> bool:
            """Whether a group of so many frames is written here."""
            here = disk.run_here_count
            items = [append(log, is_waited_for=number < waited_for) for number in range(count)]
            assert not any(item.done.done() for item in items), "the loop goes on first"
            await asyncio.gather(*(item.done for item in items))
            return disk.run_here_count > here

        assert await run(16, waited_for=16)
        assert await run(20, waited_for=20), "newcomers are welcome"
        assert not await run(19, waited_for=19), "somebody is missing, and may come meanwhile"
        assert await run(19, waited_for=19)
        assert not await run(19, waited_for=18), "somebody has something else to do"
        assert await run(19, waited_for=19)
        disk.delays["wal"] = 1.0
        assert not await run(18, waited_for=18)
        assert not await run(18, waited_for=18), "the disk is slow"
        assert groups == [16, 20, 19, 19, 19, 19, 18, 18], "one sync each"
        await log.close()
        assert frames(disk) == list(range(1, log.next_sequence))

    simulate(scenario)


def test_crowd_with_much_to_write_is_left_to_the_lane() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        log = started(disk, world)
        await until_here(log)
        for body, is_here in ((b"x", True), (bytes(HERE_BYTES_MAX // 4), False), (b"x", True)):
            await asyncio.gather(*(append(log).done for _ in range(4)))
            here = disk.run_here_count
            await asyncio.gather(*(append(log, body).done for _ in range(4)))
            assert (disk.run_here_count > here) is is_here
        await log.close()

    simulate(scenario)


def test_producers_of_a_crowd_share_syncs_after_one_of_them_was_alone() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            began = await until_ingested_here(quiver, disk)

            async def produce(which: int) -> None:
                for at in range(10):
                    await quiver.ingest(batch(1_000 + which * 10 + at))

            before, here = len(disk.history), disk.run_here_count
            await asyncio.gather(*(produce(which) for which in range(8)))
            syncs = sum(line.startswith("sync wal/") for line in disk.history[before:])
            assert syncs <= 30, "of 80 batches"
            assert disk.run_here_count <= here + 2
            await quiver.register("a")
            await quiver.flush()
            assert len(await drain(quiver, "a")) == began + 80

    simulate(scenario)


def test_one_producer_with_many_in_flight_shares_syncs_still() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await until_ingested_here(quiver, disk)
            before, here = len(disk.history), disk.run_here_count
            await asyncio.gather(*[await quiver.submit(batch(number)) for number in range(60)])
            assert sum(line.startswith("sync wal/") for line in disk.history[before:]) <= 12
            assert disk.run_here_count == here

    simulate(scenario)


async def test_producer_who_is_alone_lets_the_loop_go_on_with_every_batch() -> None:
    # On asyncio's own loop, whose order is fixed: every batch is written here.
    disk = SimDisk()
    async with Quiver(disk, ONE_FILE, clock=OwnTime()) as quiver:
        await until_ingested_here(quiver, disk)
        turns, here = 0, disk.run_here_count

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns())
        for number in range(10):
            await quiver.ingest(batch(number))
            assert turns > number
        other.cancel()
        assert disk.run_here_count == here + 10


def test_work_here_never_overtakes_what_is_under_way_in_the_lane(tmp_path: Path) -> None:
    async def in_order(disk: Disk) -> None:
        order: list[str] = []
        all_done = asyncio.Event()

        def done(name: str) -> Callable[[object, BaseException | None], None]:
            def told(result: object, problem: BaseException | None) -> None:
                assert problem is None
                order.append(f"{name} told")
                if name == "second":
                    all_done.set()

            return told

        disk.run_here("wal", lambda: order.append("alone"), done("alone"))
        assert order == ["alone", "alone told"]
        order.clear()
        disk.submit("wal", lambda: order.append("first"), done("first"))
        disk.run_here("wal", lambda: order.append("second"), done("second"))
        await all_done.wait()
        assert [each for each in order if "told" not in each] == ["first", "second"]
        assert [each for each in order if "told" in each] == ["first told", "second told"]
        order.clear()
        disk.run_here("wal", lambda: order.append("alone"), done("alone"))
        assert order == ["alone", "alone told"]
        await disk.close()

    asyncio.run(in_order(LocalDisk(tmp_path)))
    simulate(lambda world, disk: in_order(disk))


async def test_frame_waits_for_a_file_that_the_lane_still_closes(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_directory("wal")
    log = GroupLog(disk, EAGER, OwnTime(), on_durable=lambda group: None)
    log.start([], 1, 1, [])
    await until_here(log)
    may_close = threading.Event()
    disk.submit("wal", may_close.wait, lambda result, problem: None)
    item = append(log)
    assert not item.done.done()
    may_close.set()
    await outcome(log, item)
    await until_here(log)  # The lane had it this once.
    await log.close()
    await disk.close()


async def test_work_here_is_done_by_the_thread_of_the_loop(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    found: list[object] = []
    disk.run_here("wal", threading.current_thread, lambda result, problem: found.append(result))
    assert found == [threading.main_thread()]
    assert not [each for each in threading.enumerate() if each.name == "quiver-wal"]
    await disk.close()


FAULTS: dict[str, list[tuple[str, str, int]]] = {
    "full": [("write", "wal/", errno.ENOSPC)],
    "broken": [("write", "wal/", errno.EIO)],
    "not synced": [("sync", "wal/", errno.EIO)],
    "not cut": [("write", "wal/", errno.ENOSPC), ("truncate", "wal/", errno.EIO)],
    "cut not synced": [("write", "wal/", errno.ENOSPC), ("sync", "wal/", errno.EIO)],
}


class Half(random.Random):
    """Every write that fails is torn in the middle, whatever else was left to chance before."""

    def randint(self, a: int, b: int) -> int:
        return (a + b) // 2


def outcome_of_faults(
    faults: Sequence[tuple[str, str, int]], *, is_here: bool, producers: int = 1
) -> list[object]:
    """Whatever can be seen of a failed write and of two groups of frames behind it."""

    async def scenario(world: World, disk: SimDisk) -> list[object]:
        log = started(disk, world)
        await until_here(log)
        while log._crowd != producers:
            await asyncio.gather(*(append(log).done for _ in range(producers)))
        first, begin = log.next_sequence, len(disk.history)
        disk.faults += faults
        disk.rng = Half(0)
        seen: list[object] = []
        for _ in range(3):
            here = disk.run_here_count
            try:
                items = [append(log, b"y" * 100, is_waited_for=is_here) for _ in range(producers)]
                await asyncio.gather(*(outcome(log, item) for item in items), return_exceptions=True)
                assert disk.run_here_count == here + is_here
                seen += [repr(item.done.exception()) for item in items]
            except QuiverFailed as error:
                seen.append(f"refused: {error}")
        active = log._files.active
        assert active is not None
        numbers = [each - first for each in frames(disk) if each >= first]
        rest = (log.failure is None, log.pending_bytes, log._idle.is_set(), log.bytes - active.size)
        seen += [disk.history[begin:], numbers, rest, active.allocated == active.size]
        await log.close()
        return seen

    return simulate(scenario)


@pytest.mark.parametrize("producers", [1, 5])
@pytest.mark.parametrize("name", FAULTS)
def test_failure_here_is_that_of_the_lane(name: str, producers: int) -> None:
    here, lane = (
        outcome_of_faults(FAULTS[name], is_here=each, producers=producers) for each in (True, False)
    )
    assert here == lane
    assert here[0] != "None"


async def test_short_write_here_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_directory("wal")
    log = GroupLog(disk, EAGER, OwnTime(), on_durable=lambda group: None)
    log.start([], 1, 1, [])
    await until_here(log)
    whole, calls = os.pwritev, 0

    def some(descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return whole(descriptor, [b"".join(pieces)[:1_000]], offset)

    monkeypatch.setattr(os, "pwritev", some)
    assert append(log, b"z" * 10_000).done.done()
    assert calls > 10
    monkeypatch.undo()
    await log.close()
    await disk.close()
    [name] = [each for each, _ in disk.list("wal")]
    data = disk.read(f"wal/{name}")
    *_, last = scan(data, decode_file_header(data, WAL_MAGIC))
    assert isinstance(last, Frame)
    assert bytes(last.body) == b"z" * 10_000


async def test_who_is_cancelled_after_the_write_has_written() -> None:
    disk = SimDisk()
    async with Quiver(disk, ONE_FILE, clock=OwnTime()) as quiver:
        ahead = await until_ingested_here(quiver, disk)
        here = disk.run_here_count
        task = asyncio.create_task(quiver.ingest(batch(500)))
        never = asyncio.create_task(quiver.ingest(batch(501)))
        never.cancel()
        await asyncio.sleep(0)
        task.cancel()
        done = await asyncio.gather(task, never, return_exceptions=True)
        assert [type(each) for each in done] == [asyncio.CancelledError] * 2
        assert disk.run_here_count == here + 1
        await quiver.ingest(batch(502))
        assert disk.run_here_count == here + 2, "its turn is over"
        await quiver.register("a")
        await quiver.flush()
        found: list[int] = []
        while ahead + 2 > len(found):
            delivery = await quiver.next("a")
            assert delivery is not None
            found += numbers(delivery)
            await delivery.ack()
        assert found[ahead:] == [500, 502]


class SlowDisk(SimDisk):
    """Work here takes as long as it is told."""

    seconds = 0.0
    time: OwnTime

    def run_here(
        self, lane: Lane, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        def slow() -> object:
            self.time.now += self.seconds
            return work()

        super().run_here(lane, slow, done)


def test_slow_sync_sends_the_log_back_to_its_lane_for_a_while() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        assert isinstance(disk, SlowDisk)
        time = disk.time = OwnTime()
        disk.clock = None
        log = GroupLog(disk, EAGER, time, on_durable=lambda group: None)
        log.start([], 1, 1, [])

        async def syncs_until_here() -> int:
            for count in range(WARM_UP_MAX):
                item = append(log)
                is_here = item.done.done()
                await outcome(log, item)
                if is_here:
                    return count
            raise AssertionError

        assert await syncs_until_here() >= 3, "a disk is not known by one sync"
        assert await syncs_until_here() == 0
        disk.seconds = QUICK_SYNC_S * 2
        assert await syncs_until_here() == 0
        disk.seconds = 0
        assert await syncs_until_here() == 0, "one that is a little slow is made up for by those before"
        disk.seconds = 0.1
        assert await syncs_until_here() == 0
        disk.seconds = 0
        assert 10 <= await syncs_until_here() <= 30
        assert await syncs_until_here() == 0
        await log.close()

    simulate(scenario, disk=SlowDisk())


async def test_interrupt_during_the_sync_latches_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_directory("wal")
    log = GroupLog(disk, EAGER, OwnTime(), on_durable=lambda group: None)
    log.start([], 1, 1, [])
    await until_here(log)

    def interrupted(file: _LocalFile) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_LocalFile, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        append(log)
    monkeypatch.undo()
    # Nobody knows whether the frame is there: none may follow it.
    with pytest.raises(QuiverFailed):
        append(log)
    await log.drained()
    await log.close()
    await disk.close()


def test_file_that_is_let_go_is_not_written_here() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        log = started(disk, world)
        await until_here(log)
        files: list[LogFile] = list(log.files.values())
        removal = asyncio.create_task(log.remove(files))
        await world.clock().sleep(0)
        await world.clock().sleep(0)
        assert log._files.active is None
        last = append(log)
        assert not last.done.done()
        await asyncio.gather(removal, last.done)
        assert frames(disk) == [last.sequence]
        await log.close()

    simulate(scenario)
