"""What is put aside, whole or not at all, and files of others that lie about."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver import DirectoryInUse, LocalDisk, Quiver, repair
from forebay.quiver._aside import ASIDE, keep
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
"""Segments are cut by hand."""
SYNC = (0x9E51B7F3).to_bytes(4, "little")
"""How a frame begins."""


def test_file_that_is_too_large_to_be_kept_costs_no_other() -> None:
    disk = SimDisk()
    for directory in ASIDE:
        disk.make_directory(directory)
    assert keep(disk, "dead", {"1": b"x" * 60}, 100) == 60
    assert keep(disk, "dead", {"2": b"y" * 101}, 100) == 60
    assert keep(disk, "dead", {"3": b"z" * 40}, 100) == 100
    assert list(disk.files()) == ["dead/1", "dead/3"]


def test_damaged_bytes_that_a_full_disk_does_not_take_are_put_aside_by_the_next_opening() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        for number in range(5):
            await quiver.ingest(batch(number))
        left = disk.after_crash(power_loss=False)
        disk.crashed = True
        name, data = max(left.files("wal/").items(), key=lambda each: each[1].count(SYNC))
        left.flip(name, data.index(SYNC, data.index(SYNC) + 1) + 60)
        full = left.after_crash(power_loss=False)
        full.faults.append(("write", "quarantine", errno.ENOSPC))
        opened = await store(world, full, SLOW).open()
        assert (opened.report.damaged_ranges, opened.report.quarantined) == (1, [])
        assert not full.files("quarantine/")
        again = full.after_crash(power_loss=False)
        full.crashed = True
        async with store(world, again, SLOW) as quiver:
            [kept] = quiver.report.quarantined
            assert len(again.files()[kept]) == quiver.report.damaged_bytes

    simulate(scenario)


async def test_repair_leaves_files_alone_that_are_no_segments(tmp_path: Path) -> None:
    path = tmp_path / "q"
    async with Quiver(path, SMALL) as quiver:
        await quiver.register("a")
        await quiver.ingest(batch(1))
    for name in ("notes.txt", ".nfs0000000012", "7.arrow"):
        (path / "segments" / name).write_bytes(b"not ours")
    done = await repair(path)
    assert (done.rewritten, done.put_aside) == ([], [])
    assert (path / "segments" / "notes.txt").read_bytes() == b"not ours"
    async with Quiver(path, SMALL) as quiver:
        assert await drain(quiver, "a", timeout_s=0.1) == [1]


async def test_repair_that_is_overtaken_by_another_process_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q"
    async with Quiver(path, SMALL) as quiver:
        await quiver.ingest(batch(1))
    other, unlock = LocalDisk(path), LocalDisk.unlock

    def overtaken(disk: LocalDisk) -> None:
        unlock(disk)
        monkeypatch.setattr(LocalDisk, "unlock", unlock)
        other.lock()

    monkeypatch.setattr(LocalDisk, "unlock", overtaken)
    with pytest.raises(DirectoryInUse):
        await repair(path)
    other.unlock()
