"""Cores that open, adopt and let go while something is in the way."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.quiver.harness import SMALL, batch, drain
from tests.quiver.test_quiver_cores import KEEP, shards

from forebay.errors import StorageFull, UsageError
from forebay.quiver import DirectoryInUse, LocalDisk, Quiver, QuiverCore, UnknownSubscriber
from forebay.quiver._budget import SharedBudget


async def abandon(path: Path, *names: str) -> None:
    """Core 0 with a subscriber `a`, and a shard of core 1 with one batch and these subscribers."""
    async with QuiverCore(path, 0, 2, KEEP) as core:
        await core.register("a")
    async with QuiverCore(path, 1, 2, KEEP) as core:
        for name in names:
            await core.register(name)
        await core.ingest(batch(7))


@pytest.mark.parametrize("names", [(), ("b",)])
async def test_subscribers_of_the_adopter_get_what_a_shard_holds_that_never_knew_them(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    await abandon(tmp_path, *names)
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        await core.flush()
        with pytest.raises(UnknownSubscriber):
            await core.next("c", 0)
        assert await drain(core, "a") == [7]  # type: ignore[arg-type]
        await core.maintain()
        assert core.adopted == ([1] if names else [])


async def test_adoption_goes_on_where_a_subscriber_cannot_be_registered_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await abandon(tmp_path)

    async def full(*given: Any) -> None:
        raise StorageFull("no space", hint="")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "forebay.quiver"):
        patched.setattr(Quiver, "register", full)
        async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
            assert core.adopted == [1]
    assert "quiver.core.not_registered: a in core_1" in caplog.text
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        await core.flush()
        assert await drain(core, "a") == [7]  # type: ignore[arg-type]


async def test_shard_whose_directory_cannot_be_removed_is_no_error_and_goes_with_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await abandon(tmp_path, "a")

    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "forebay.quiver"):
        patched.setattr(shutil, "rmtree", refuse)
        async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
            await core.flush()
            assert await drain(core, "a") == [7]  # type: ignore[arg-type]
            await core.maintain()
            await core.ingest(batch(8))
            await core.flush()
            assert await drain(core, "a") == [8]  # type: ignore[arg-type]
    assert "quiver.core.not_removed: core_1" in caplog.text
    assert "core_1" in shards(tmp_path)
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        assert await drain(core, "a") == []  # type: ignore[arg-type]
        await core.maintain()
    assert "core_1" not in shards(tmp_path)


async def test_core_that_is_not_open_can_be_closed_and_one_that_is_cannot_be_opened_again(
    tmp_path: Path,
) -> None:
    core = QuiverCore(tmp_path, 0, 1, SMALL, sharing="shared")
    await core.close()
    async with core:
        with pytest.raises(UsageError):
            await core.open()
        await core.ingest(batch(0))
    async with core:
        assert core.own.stats().segments == 1


async def test_core_that_is_refused_changes_no_figure_of_the_one_that_has_the_directory(
    tmp_path: Path,
) -> None:
    # Nothing of its own may change its figures meanwhile, no spares that are being filled.
    calm = dataclasses.replace(KEEP, wal_spare_files=0)
    async with QuiverCore(tmp_path, 0, 2, calm, sharing="shared") as core:
        await core.ingest(batch(0))
        await core.maintain()
        budget = core._budgets[0]
        assert isinstance(budget, SharedBudget)
        before = budget._words.tolist()
        assert before[0] > 0
        refused = QuiverCore(tmp_path, 0, 2, calm, sharing="shared")
        with pytest.raises(DirectoryInUse):
            await refused.open()
        assert budget._words.tolist() == before
        assert not refused._budgets
        await refused.close()


async def test_shard_is_nobody_elses_until_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await abandon(tmp_path, "a")
    remove = QuiverCore._remove
    removed = []

    def taken(core: QuiverCore, number: int) -> None:
        with pytest.raises(BlockingIOError):
            LocalDisk(tmp_path / "core_1").lock()
        remove(core, number)
        removed.append(number)

    monkeypatch.setattr(QuiverCore, "_remove", taken)
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        await core.flush()
        assert await drain(core, "a") == [7]  # type: ignore[arg-type]
        await core.maintain()
    assert removed == [1]
    async with QuiverCore(tmp_path, 1, 2, KEEP) as core:
        await core.ingest(batch(8))


async def test_lock_of_a_directory_that_was_removed_is_no_lock_of_the_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, place = LocalDisk(tmp_path / "q"), tmp_path / "q"
    place.mkdir()
    flock = fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        shutil.rmtree(place)
        place.mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(OSError, match=str(place)):
        late.lock()
    async with Quiver(place, SMALL) as quiver:
        assert quiver.report.is_clean


async def test_closing_of_a_core_that_is_given_up_closes_all_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await abandon(tmp_path, "b")
    core = await QuiverCore(tmp_path, 0, 1, KEEP, sharing="shared").open()
    assert core.adopted == [1]
    ending, may_end, close = asyncio.Event(), asyncio.Event(), LocalDisk.close

    async def slow(disk: LocalDisk) -> None:
        ending.set()
        await may_end.wait()
        await close(disk)

    monkeypatch.setattr(LocalDisk, "close", slow)
    closing = asyncio.create_task(core.close())
    await ending.wait()
    closing.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    for number in range(2):
        disk = LocalDisk(tmp_path / f"core_{number}")
        disk.lock()
        disk.unlock()
    assert not core._budgets
