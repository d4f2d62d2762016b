"""The embedded coordinator and its file: what is refused, and that it is left as it was."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.coordination import ABSENT, SqliteCoordinator, _sqlite_file, _sqlite_writer
from forebay.errors import (
    AccessDenied,
    ForebayError,
    NotFound,
    StorageDamaged,
    StorageFull,
    Unavailable,
    Unsupported,
    UsageError,
)

NOBODY = 65534


def _check_message(error: ForebayError) -> None:
    assert error.hint and "\n" not in error.message + error.hint


@pytest.mark.parametrize("content", [b"hello, this is my diary\n" * 100, b"x", b"SQLite format 2\0" * 9])
def test_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "diary.txt"
    path.write_bytes(content)
    with pytest.raises(StorageDamaged) as caught:
        SqliteCoordinator(path)
    _check_message(caught.value)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["diary.txt"]


def test_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    connection = sqlite3.connect(path)
    connection.execute("create table kv(a)")
    connection.commit()
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StorageDamaged) as caught:
        SqliteCoordinator(path)
    _check_message(caught.value)
    assert path.read_bytes() == content


def test_layout_of_a_later_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    asyncio.run(_fill(path))
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 99")
    connection.close()
    with pytest.raises(StorageDamaged, match="layout 99"):
        SqliteCoordinator(path)


async def _fill(path: Path) -> None:
    async with SqliteCoordinator(path) as coordinator:
        for number in range(50):
            await coordinator.put(f"d/{number}", os.urandom(2000))


def test_corrupt_file_is_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    asyncio.run(_fill(path))
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)

    async def use() -> None:
        coordinator = SqliteCoordinator(path)
        try:
            await coordinator.range_scan("d/", "d//")
        finally:
            await coordinator.close()

    with pytest.raises(StorageDamaged) as caught:
        asyncio.run(use())
    _check_message(caught.value)
    assert path.read_bytes() == bytes(content)


def test_truncated_file_is_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    asyncio.run(_fill(path))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StorageDamaged):
        asyncio.run(_fill(path))


def test_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.touch()
    asyncio.run(_fill(path))


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        SqliteCoordinator(tmp_path / "nowhere" / "c.db")
    assert str(tmp_path / "nowhere") in caught.value.message
    _check_message(caught.value)


def test_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageDamaged) as caught:
        SqliteCoordinator(tmp_path)
    _check_message(caught.value)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory that can be read but not written, and a user who is held to that."""
    directory = Path(tempfile.mkdtemp())
    asyncio.run(_fill(directory / "there.db"))
    for entry in directory.iterdir():
        entry.chmod(0o444)
    directory.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(NOBODY)
        yield directory
    finally:
        if root:
            os.seteuid(0)
        directory.chmod(0o755)
        shutil.rmtree(directory)


@pytest.mark.parametrize("name", ["new.db", "there.db"])
def test_read_only_directory_is_access_denied(unprivileged: Path, name: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        SqliteCoordinator(unprivileged / name)
    _check_message(caught.value)


def test_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sqlite_file, "_file_system", lambda directory: "nfs4")
    with pytest.raises(Unsupported, match="nfs4") as caught:
        SqliteCoordinator(tmp_path / "c.db")
    _check_message(caught.value)


def test_stuck_turn_is_reported_instead_of_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_file, "OPEN_TIMEOUT_S", 0.0)
    file = _sqlite_file.SqliteFile(tmp_path / "c.db")
    descriptor = file.open_turn()
    try:
        _sqlite_file.take_turn(descriptor)
        with pytest.raises(Unavailable) as caught:
            SqliteCoordinator(tmp_path / "c.db")
    finally:
        os.close(descriptor)
    _check_message(caught.value)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "tiny"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no permission to mount a small file system")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


async def test_full_disk_is_storage_full_and_keeps_what_was_acknowledged(tiny_disk: Path) -> None:
    async with SqliteCoordinator(tiny_disk / "c.db") as coordinator:
        written = 0
        with pytest.raises(StorageFull) as caught:
            for written in range(10_000):
                await coordinator.put(f"d/{written:05d}", os.urandom(4000), ABSENT)
        _check_message(caught.value)
        assert len(await coordinator.list("d/", "d//")) == written


async def test_full_queue_makes_callers_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sqlite_writer, "QUEUE_OPERATIONS_MAX", 3)
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await asyncio.gather(*[coordinator.put(f"d/{number}", b"") for number in range(50)])
        assert len(await coordinator.list("d/", "d//")) == 50


async def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    coordinator = SqliteCoordinator(tmp_path / "c.db")
    writing = [asyncio.create_task(coordinator.put(f"d/{number}", b"")) for number in range(20)]
    await asyncio.sleep(0)
    await coordinator.close()
    await asyncio.gather(*writing)
    async with SqliteCoordinator(tmp_path / "c.db") as again:
        assert len(await again.list("d/", "d//")) == 20


def test_other_event_loop_is_refused(tmp_path: Path) -> None:
    coordinator = SqliteCoordinator(tmp_path / "c.db")
    asyncio.run(coordinator.put("d/a", b""))
    with pytest.raises(UsageError, match="another event loop"):
        asyncio.run(coordinator.put("d/a", b""))
    coordinator._reader.close()


async def test_sessions_of_another_boot_are_over(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db", boot="before") as before:
        session = await before.open_session(300_000)
        await before.put("d/a", b"", session=session)
        async with SqliteCoordinator(tmp_path / "c.db", boot="after") as after:
            await after.put("d/a", b"", ABSENT)
            assert (await after.get("d/a")) is not None
