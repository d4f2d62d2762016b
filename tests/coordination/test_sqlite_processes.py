"""The embedded coordinator with real processes: shared, killed, forked."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.coordination import SqliteCoordinator, _sqlite_file

WORKER = Path(__file__).with_name("sqlite_worker.py")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", str(WORKER), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


async def _value(path: Path, key: str) -> int:
    async with SqliteCoordinator(path) as coordinator:
        record = await coordinator.get(key)
        return int(record.value) if record else 0


async def test_sixteen_processes_lose_no_increment(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    workers = [start("count", path, "d/counter", 5) for _ in range(16)]
    assert [worker.wait() for worker in workers] == [0] * 16
    assert await _value(path, "d/counter") == 80


async def test_kill_9_of_writers_loses_nothing_acknowledged(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    randomness = random.Random(7)
    acknowledged = attempted = 0
    for _ in range(8):
        workers = [start("count", path, "d/counter", -1) for _ in range(3)]
        for worker in workers:
            lines = _read_lines(worker, randomness.randrange(1, 30))
            worker.kill()
            output, _ = worker.communicate()
            lines += output.split()
            acknowledged += lines.count("ack")
            # A refused attempt certainly did nothing: only those without an answer may count.
            attempted += lines.count("try") - lines.count("lost")
    assert acknowledged <= await _value(path, "d/counter") <= attempted
    assert acknowledged > 0


async def test_no_writer_is_starved(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    workers = [start("count", path, f"d/{number}", -1) for number in range(4)]
    for worker in workers:
        _read_lines(worker, 2)
    async with SqliteCoordinator(path) as coordinator:

        async def values() -> list[int]:
            return [int(record.value) for record in await coordinator.range_scan("d/", "d//")]

        before = await values()
        # Reading keeps the pipes from filling up while the shares are counted.
        drains = [asyncio.create_task(asyncio.to_thread(worker.communicate)) for worker in workers]
        async with coordinator.watch("d") as watch:
            while sum(await values()) - sum(before) < 400:
                await watch.changed()
        shares = [now - then for now, then in zip(await values(), before, strict=True)]
    for worker in workers:
        worker.kill()
    await asyncio.gather(*drains)
    assert min(shares) * 4 >= sum(shares) / len(shares), shares


async def test_no_writer_is_starved_in_a_fight_for_one_key(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    workers = [start("count", path, "d/counter", -1) for _ in range(4)]
    for worker in workers:
        _read_lines(worker, 1)
    begun = await _value(path, "d/counter")
    drains = [asyncio.create_task(asyncio.to_thread(worker.communicate)) for worker in workers]
    async with SqliteCoordinator(path) as coordinator, coordinator.watch("d") as watch:
        while (record := await coordinator.get("d/counter")) is None or int(record.value) < begun + 400:
            await watch.changed()
    for worker in workers:
        worker.kill()
    shares = [output.split().count("ack") for output, _ in await asyncio.gather(*drains)]
    # One that is too late for its further writes gets a quarter; on a busy machine that is not the floor yet.
    assert min(shares) * 8 >= sum(shares) / len(shares), shares


async def test_ephemeral_key_of_a_killed_process_vanishes(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    worker = start("hold", path, "d/claim", 2_000)
    assert _read_lines(worker, 1) == ["held"]
    async with SqliteCoordinator(path) as coordinator, coordinator.watch("d") as watch:
        record = await coordinator.get("d/claim")
        assert record is not None and record.session_id is not None
        worker.kill()
        while await coordinator.get("d/claim") is not None:
            await watch.changed()


async def test_change_by_another_process_wakes_a_watch(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    async with SqliteCoordinator(path) as coordinator, coordinator.watch("d") as watch:
        worker = start("count", path, "d/counter", 3)
        while (record := await coordinator.get("d/counter")) is None or record.value != b"3":
            await watch.changed()
        assert await asyncio.to_thread(worker.wait) == 0


def test_use_after_fork_is_refused(start: Start, tmp_path: Path) -> None:
    worker = start("fork", tmp_path / "c.db")
    output, _ = worker.communicate()
    lines = output.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["UsageError"] * 3 + ["parent"]
    assert "child process" in lines[0]
    assert worker.returncode == 0


async def test_forked_child_does_not_hold_the_turn_of_a_parent_that_was_killed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "OPEN_TIMEOUT_S", 1.0)
    worker = start("orphan", tmp_path / "c.db")
    [child] = _read_lines(worker, 1)
    try:
        worker.kill()
        worker.wait()
        async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
            await coordinator.put("d/a", b"goes on")
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_full_disk_is_not_done_and_heals(start: Start, tmp_path: Path) -> None:
    worker = start("full", tmp_path / "c.db")
    output, _ = worker.communicate()
    assert output.splitlines() == ["NotDone: True", "healed"]


async def test_many_processes_may_create_the_file_at_once(start: Start, tmp_path: Path) -> None:
    workers: list[Any] = [start("count", tmp_path / "new.db", f"d/{number}", 1) for number in range(6)]
    assert [worker.wait() for worker in workers] == [0] * 6
    async with SqliteCoordinator(tmp_path / "new.db") as coordinator:
        assert len(await coordinator.list("d/", "d//")) == 6
