"""What is given up halfway: openings, closings, deliveries of a store that is closed."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import Closed, UsageError
from forebay.quiver import LocalDisk, Quiver, _quiver, _segment_file
from forebay.quiver._log_files import LogFiles
from forebay.quiver._recovery import recover
from forebay.testing.world import World


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Held:
    """A function that waits in its thread until it is let go on."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.entered.set()
        assert self.released.wait(60)
        return self._work(*given, **named)


class Disk(LocalDisk):
    """Says when it is about to wait for its threads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ending = asyncio.Event()

    async def close(self) -> None:
        self.ending.set()
        await super().close()


async def is_held(path: Path, disk: Disk, held: Held, ending: asyncio.Task[Any]) -> None:
    """Nobody else gets the directory until the thread is through."""
    ending.cancel()
    await disk.ending.wait()
    with pytest.raises(BlockingIOError):
        LocalDisk(path).lock()
    held.released.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    async with Quiver(path, SMALL) as quiver:
        assert quiver.report.is_clean


async def test_opening_that_is_given_up_keeps_the_directory_until_its_thread_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(recover)
    monkeypatch.setattr(_quiver, "recover", held)
    disk = Disk(tmp_path / "q")
    opening = asyncio.create_task(Quiver(disk, SMALL).open())
    assert await asyncio.to_thread(held.entered.wait, 60)
    await is_held(tmp_path / "q", disk, held, opening)


async def test_closing_that_is_given_up_keeps_the_directory_until_its_thread_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "q")
    quiver = await Quiver(disk, SMALL).open()
    held = Held(_segment_file.write)
    with monkeypatch.context() as patched:
        patched.setattr(_segment_file, "write", held)
        await quiver.register("a")
        await quiver.ingest(batch(0))
        closing = asyncio.create_task(quiver.close())
        assert await asyncio.to_thread(held.entered.wait, 60)
        await is_held(tmp_path / "q", disk, held, closing)
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        assert await drain(quiver, "a") == [0]


def test_opening_that_is_given_up_at_its_last_step_can_be_closed_and_tried_again() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            async with quiver._retention.lock:  # no file of the WAL goes
                for number in range(3):
                    await quiver.ingest(batch(number))
                    await quiver.flush()
                await quiver.ingest(batch(3))
                left = disk.after_crash(power_loss=False)
        del left.names["segments/0000000000000002.arrow"]
        left.delays["ack"] = 10.0
        quiver = store(world, left, config)
        opening = asyncio.create_task(quiver.open())
        await world.clock().sleep(5)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        left.delays.clear()
        await world.clock().sleep(60)
        before = len(left.history)
        with pytest.raises(Closed):
            await quiver.ingest(batch(4))
        await quiver.close()
        assert left.history[before:] == [], "the directory may be somebody else's by now"
        async with store(world, left, config) as quiver:
            await quiver.flush()
            assert sorted(await drain(quiver, "a")) == [0, 1, 2, 3], "the WAL has what the segment had"

    simulate(scenario)


async def test_opening_that_is_given_up_leaves_no_thread_and_no_descriptor_and_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        await quiver.register("a")
        await quiver.ingest(batch(0))
    [segment] = (tmp_path / "q" / "segments").iterdir()
    segment.unlink()  # which the next opening says in ack.log
    held = Held(LogFiles._begin_file)

    def begin(*given: Any) -> Any:
        return held(*given)

    with monkeypatch.context() as patched:
        patched.setattr(LogFiles, "_begin_file", begin)
        descriptors = open_files()
        disk = Disk(tmp_path / "q")
        opening = asyncio.create_task(Quiver(disk, SMALL).open())
        assert await asyncio.to_thread(held.entered.wait, 60)
        opening.cancel()
        await disk.ending.wait()
        held.released.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
    before = {path: path.read_bytes() for path in (tmp_path / "q" / "ack").iterdir()}
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(each.name.startswith("quiver-") for each in threading.enumerate())
    assert open_files() == descriptors
    assert {path: path.read_bytes() for path in (tmp_path / "q" / "ack").iterdir()} == before
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        assert quiver.report.segments_lost == [1]


@pytest.mark.parametrize("outcome", ["ack", "nack", "reject"])
async def test_delivery_of_a_closed_store_writes_nothing(tmp_path: Path, outcome: str) -> None:
    quiver = await Quiver(tmp_path / "q", SMALL).open()
    await quiver.register("a")
    await quiver.ingest(batch(0))
    delivery = await quiver.next("a", 60)
    await quiver.close()
    before = sorted(map(str, (tmp_path / "q").rglob("*")))
    with pytest.raises(Closed):
        await getattr(delivery, outcome)()
    assert sorted(map(str, (tmp_path / "q").rglob("*"))) == before
    assert not any(each.name.startswith("quiver-") for each in threading.enumerate())


@pytest.mark.parametrize("timeout_s", [math.nan, "1", object()])
async def test_timeout_that_is_no_number_is_refused(tmp_path: Path, timeout_s: Any) -> None:
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        await quiver.register("a")
        with pytest.raises(UsageError):
            await asyncio.wait_for(quiver.next("a", timeout_s), 10)
        assert await quiver.next("a", -1) is None
