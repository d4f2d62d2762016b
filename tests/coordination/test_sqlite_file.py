"""The embedded coordinator and its file: what is refused, and that it is left as it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.coordination import ABSENT, Put, SqliteCoordinator, _sqlite_file, _sqlite_writer
from forebay.errors import (
    AccessDenied,
    ForebayError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
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
        with _sqlite_file.turn(descriptor), pytest.raises(Unavailable) as caught:
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


class FailingCommit:
    """A connection whose next commit fails, before or after it took effect."""

    def __init__(self, connection: sqlite3.Connection, after_effect: bool) -> None:
        self._connection = connection
        self._after_effect = after_effect
        self._armed = True

    def execute(self, statement: str, *arguments: Any) -> Any:
        if statement != "commit" or not self._armed:
            return self._connection.execute(statement, *arguments)
        self._armed = False
        if self._after_effect:
            self._connection.execute("commit")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_failed_commit_that_did_not_happen_is_not_done(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        first = await coordinator.put("d/a", b"1")
        writer: Any = coordinator._writer
        writer._connection = FailingCommit(writer._connection, after_effect=False)
        with pytest.raises(Unavailable):
            await coordinator.put("d/a", b"2", first)
        record = await coordinator.get("d/a")
        assert record is not None and record.version == first
        assert await coordinator.put("d/a", b"3", first) > first + 1, (
            "the version of the failed commit is spent"
        )


async def test_failed_commit_that_did_happen_is_done(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"1")
        writer: Any = coordinator._writer
        writer._connection = FailingCommit(writer._connection, after_effect=True)
        version = await coordinator.put("d/a", b"2")
        record = await coordinator.get("d/a")
        assert record is not None and (record.value, record.version) == (b"2", version)


async def test_failed_commit_that_cannot_be_settled_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"1")
        writer: Any = coordinator._writer
        writer._connection = FailingCommit(writer._connection, after_effect=False)
        monkeypatch.setattr(coordinator._file, "connect", broken)
        with pytest.raises(OutcomeUnknown) as caught:
            await coordinator.put("d/a", b"2")
        _check_message(caught.value)


async def test_awaiting_writers_share_one_commit(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        writer: Any = coordinator._writer
        commits = 0
        real = writer._commit

        def counted(batch: Any) -> None:
            nonlocal commits
            commits += 1
            real(batch)

        writer._commit = counted
        versions = await asyncio.gather(*[coordinator.put(f"d/{number}", b"") for number in range(300)])
        assert len(set(versions)) == 300
        assert commits < 100


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every turn looks as if others had been first, and is kept long enough for any second try."""
    turns: list[int] = []

    @contextlib.contextmanager
    def waited(descriptor: int) -> Iterator[bool]:
        with _sqlite_file.turn(descriptor):
            turns.append(descriptor)
            yield True

    monkeypatch.setattr(_sqlite_writer, "turn", waited)
    monkeypatch.setattr(_sqlite_writer, "SECOND_TRY_S", 60.0)
    return turns


async def test_refused_caller_who_waited_succeeds_in_the_same_turn(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await coordinator.put("d/a", b"")
        crowd.clear()
        with pytest.raises(PreconditionFailed):
            await coordinator.put("d/a", b"", version + 1)
        await coordinator.put("d/a", b"", version)
        assert len(crowd) == 1


async def test_kept_turn_ends_after_one_write(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await coordinator.put("d/a", b"")
        crowd.clear()
        with pytest.raises(PreconditionFailed):
            await coordinator.put("d/a", b"", version + 1)
        version = await coordinator.put("d/a", b"", version)
        assert len(crowd) == 1
        await coordinator.put("d/a", b"", version)
        assert len(crowd) == 2


@pytest.mark.parametrize("written", [True, False])
async def test_refusal_by_one_read_says_what_is_there(
    tmp_path: Path, crowd: list[int], written: bool
) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        found: object = await coordinator.put("d/a", b"") if written else ABSENT
        with pytest.raises(PreconditionFailed) as refusal:
            await coordinator.put("d/a", b"", 7)
        assert (refusal.value.expected, refusal.value.actual) == (7, found)


async def test_key_of_a_session_that_is_over_refuses_nobody_after_a_wait(
    tmp_path: Path, crowd: list[int]
) -> None:
    now_ms = 1_000
    async with SqliteCoordinator(tmp_path / "c.db", now_ms=lambda: now_ms) as coordinator:
        session = await coordinator.open_session(2_000)
        version = await coordinator.put("d/a", b"", session=session)
        now_ms = 5_000
        with pytest.raises(PreconditionFailed) as refusal:
            await coordinator.put("d/a", b"", version + 1)
        assert refusal.value.actual is ABSENT


async def test_turn_is_not_kept_after_a_write_that_was_done(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as first, SqliteCoordinator(tmp_path / "c.db") as second:
        for number in range(3):
            await first.put(f"d/{number}", b"")
            await second.write([Put(f"d/{number}", b"", ABSENT), Put("d/x", b"")])


async def test_closing_gives_a_kept_turn_back(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as other:
        async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
            with pytest.raises(PreconditionFailed):
                await coordinator.put("d/a", b"", 7)
        await other.put("d/a", b"free")


async def test_offer_of_a_second_try_becomes_rare_when_nobody_takes_it(
    tmp_path: Path, crowd: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_writer, "SECOND_TRY_S", 0.0)
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        writer: Any = coordinator._writer
        offers = 0
        real = writer._second_tries.is_due

        def counted() -> bool:
            nonlocal offers
            offered = bool(real())
            offers += offered
            return offered

        take_within = writer._take_within
        writer._second_tries.is_due = counted
        # However fast the next put comes, it is too late for the turn that was kept.
        writer._take_within = lambda seconds: take_within(seconds) if seconds else []
        for _ in range(40):
            with pytest.raises(PreconditionFailed):
                await coordinator.put("d/a", b"", ABSENT)
        assert 0 < offers < 20


async def test_lock_that_fails_is_reported_and_the_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(37, "No locks available")

    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        with monkeypatch.context() as patch:
            patch.setattr(_sqlite_writer, "turn", broken)
            with pytest.raises(Unavailable, match="No locks"):
                await coordinator.put("d/a", b"")
        await coordinator.put("d/a", b"")


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
