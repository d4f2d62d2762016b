"""Who does a write of the embedded coordinator, in which turn, and what a failed commit becomes."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.coordination import (
    ABSENT,
    Put,
    SqliteCoordinator,
    _sqlite_commit,
    _sqlite_file,
    _sqlite_in_place,
    _sqlite_writer,
)
from forebay.errors import OutcomeUnknown, PreconditionFailed, Unavailable


@pytest.fixture(autouse=True)
def any_disk_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done in place does not hang on how busy the machine is."""
    monkeypatch.setattr(_sqlite_in_place, "SLOW_S", 60.0)


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


Break = Callable[[SqliteCoordinator, bool], None]


@pytest.fixture(params=["in place", "in the thread"])
def break_commit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes the next commit fail, whoever does it."""
    in_place = request.param == "in place"
    if not in_place:
        monkeypatch.setattr(_sqlite_in_place, "IN_PLACE_OPERATIONS_MAX", 0)

    def break_it(coordinator: SqliteCoordinator, after_effect: bool) -> None:
        writer: Any = coordinator._writer
        committer = writer._in_place.committer if in_place else writer._committer
        committer._connection = FailingCommit(committer._connection, after_effect)

    return break_it


async def test_failed_commit_that_did_not_happen_is_not_done(tmp_path: Path, break_commit: Break) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        first = await coordinator.put("d/a", b"1")
        break_commit(coordinator, False)
        with pytest.raises(Unavailable):
            await coordinator.put("d/a", b"2", first)
        record = await coordinator.get("d/a")
        assert record is not None and record.version == first
        assert await coordinator.put("d/a", b"3", first) > first + 1, (
            "the version of the failed commit is spent"
        )


async def test_failed_commit_that_did_happen_is_done(tmp_path: Path, break_commit: Break) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"1")
        break_commit(coordinator, True)
        version = await coordinator.put("d/a", b"2")
        record = await coordinator.get("d/a")
        assert record is not None and (record.value, record.version) == (b"2", version)


async def test_failed_commit_that_cannot_be_settled_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_commit: Break
) -> None:
    def broken() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"1")
        break_commit(coordinator, False)
        monkeypatch.setattr(coordinator._file, "connect", broken)
        with pytest.raises(OutcomeUnknown) as caught:
            await coordinator.put("d/a", b"2")
        assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint


# -- in place, or in the thread


def _count_served(coordinator: SqliteCoordinator) -> list[int]:
    """Grows by the number of requests of every batch the thread serves."""
    writer: Any = coordinator._writer
    served: list[int] = []
    real = writer._serve

    def counted(batch: Any) -> Any:
        served.append(len(batch))
        return real(batch)

    writer._serve = counted
    return served


async def test_lone_write_is_done_in_place(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await coordinator.put("d/a", b"")
        served = _count_served(coordinator)
        version = await coordinator.put("d/a", b"", version)
        with pytest.raises(PreconditionFailed):
            await coordinator.put("d/a", b"", version + 1)
        await coordinator.delete("d/a", version)
        assert served == []


async def test_write_in_place_wakes_watches(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator, coordinator.watch("d") as watch:
        served = _count_served(coordinator)
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        # The task is gone to sleep on the watch; nothing else is ready, so this is done in place.
        await coordinator.put("d/a", b"")
        await waiting
        assert sum(served) <= 1


async def test_awaiting_writers_share_one_commit(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        served = _count_served(coordinator)
        versions = await asyncio.gather(*[coordinator.put(f"d/{number}", b"") for number in range(300)])
        assert len(set(versions)) == 300
        assert len(served) < 100


@pytest.mark.parametrize("what", ["write", "read", "scan"])
async def test_caller_who_never_has_to_wait_lets_timers_run_all_the_same(tmp_path: Path, what: str) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        fired: list[bool] = []
        asyncio.get_running_loop().call_later(0.001, fired.append, True)
        for _ in range(5_000):
            if what == "write":
                await coordinator.put("d/a", b"")
            elif what == "read":
                await coordinator.get("d/a")
            else:
                await coordinator.range_scan("d/", "d//")
            if fired:
                break
        assert fired


class Raising:
    """A connection that raises once, when or after it has done a statement."""

    def __init__(self, connection: sqlite3.Connection, at: str, error: BaseException) -> None:
        self._connection = connection
        self._at: str | None = at
        self._error = error

    def execute(self, statement: str, *arguments: Any) -> Any:
        done = self._connection.execute(statement, *arguments)
        if self._at is not None and statement.startswith(self._at):
            self._at = None
            raise self._error
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_interrupt_in_the_middle_of_a_write_in_place_keeps_nobody_out(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"before")
        committer = coordinator._writer._in_place.committer  # type: ignore[union-attr]
        committer._connection = Raising(committer._connection, "update counter", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            await coordinator.put("d/a", b"never")
        other = sqlite3.connect(tmp_path / "c.db", isolation_level=None, timeout=0)
        other.execute("begin immediate")
        other.execute("rollback")
        other.close()
        record = await coordinator.get("d/a")
        assert record is not None and record.value == b"before"
        await coordinator.put("d/a", b"after")


async def test_handler_that_raises_behind_the_commit_makes_its_outcome_unknown(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"before")
        committer = coordinator._writer._in_place.committer  # type: ignore[union-attr]
        committer._connection = Raising(committer._connection, "commit", TimeoutError("alarm"))
        with pytest.raises(OutcomeUnknown):
            await coordinator.put("d/a", b"after")
        record = await coordinator.get("d/a")
        assert record is not None and record.value == b"after"


async def test_large_write_is_left_to_the_thread(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        served = _count_served(coordinator)
        count = _sqlite_in_place.IN_PLACE_OPERATIONS_MAX + 1
        await coordinator.write([Put(f"d/{number}", b"") for number in range(count)])
        assert served == [1]


async def test_slow_commits_send_the_next_ones_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_in_place, "SLOW_S", 0.0)
    monkeypatch.setattr(_sqlite_in_place, "SLOW_REST", 1e9)
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        served = _count_served(coordinator)
        await coordinator.put("d/a", b"")
        assert served == [], "one may be an accident"
        await coordinator.put("d/a", b"")
        await coordinator.put("d/a", b"")
        assert served == [1, 1]


async def test_loop_that_hides_its_queue_leaves_writes_to_the_thread(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        writer: Any = coordinator._writer
        writer._in_place._ready = None
        served = _count_served(coordinator)
        await coordinator.put("d/a", b"")
        assert served == [1]


async def test_foreign_program_in_the_database_does_not_stop_the_loop(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"before")
        other = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
        other.execute("begin immediate")
        try:
            writing = asyncio.create_task(coordinator.put("d/a", b"after"))
            # Comes back while the other program still holds the database, and nothing was written.
            await asyncio.sleep(0)
            record = await coordinator.get("d/a")
            assert record is not None and record.value == b"before"
        finally:
            other.execute("rollback")
            other.close()
        await writing


async def test_reading_waits_where_sqlite_is_busy(tmp_path: Path) -> None:
    class Busy:
        """Busy for whoever does not wait."""

        patient = False

        def execute(self, statement: str, *arguments: Any) -> Any:
            if statement.startswith("pragma busy_timeout"):
                self.patient = not statement.endswith("= 0")
            elif not self.patient:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
                raise error
            return connection.execute(statement, *arguments)

    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"1")
        connection, busy = coordinator._reader, Busy()
        coordinator._reader = busy  # type: ignore[assignment]
        record = await coordinator.get("d/a")
        coordinator._reader = connection
        assert record is not None and record.value == b"1"
        assert not busy.patient


async def test_log_of_writes_in_place_is_moved_into_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_commit, "CHECKPOINT_VERSIONS", 2)
    monkeypatch.setattr(_sqlite_writer, "EXPIRY_INTERVAL_S", 0.0)
    done = threading.Event()
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        writer: Any = coordinator._writer
        real = writer._committer.checkpoint

        def checkpoint() -> None:
            real()
            done.set()

        writer._committer.checkpoint = checkpoint
        while not done.is_set():
            await coordinator.put("d/a", b"")


async def test_cancelled_write_may_still_happen_and_harms_nobody(tmp_path: Path) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        tasks = [asyncio.create_task(coordinator.put(f"d/{number}", b"")) for number in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(version, int) for version in done) == 9


# -- turns


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every turn looks as if others had been first, and is kept long enough for any second try."""
    turns: list[int] = []

    def waited(descriptor: int) -> bool:
        _sqlite_file.take_turn(descriptor)
        turns.append(descriptor)
        return True

    monkeypatch.setattr(_sqlite_writer, "take_turn", waited)
    monkeypatch.setattr(_sqlite_writer, "try_turn", lambda descriptor: False)
    monkeypatch.setattr(_sqlite_writer, "SECOND_TRY_S", 60.0)
    return turns


async def _refused(coordinator: SqliteCoordinator, crowd: list[int]) -> int:
    """A turn is kept; the version that is there."""
    version = await coordinator.put("d/a", b"")
    crowd.clear()
    with pytest.raises(PreconditionFailed):
        await coordinator.put("d/a", b"", version + 1)
    assert len(crowd) == 1
    return version


async def test_refused_caller_who_waited_succeeds_in_the_same_turn(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await _refused(coordinator, crowd)
        await coordinator.put("d/a", b"", version)
        assert len(crowd) == 1


async def test_kept_turn_ends_after_a_few_writes(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await _refused(coordinator, crowd)
        for _ in range(_sqlite_writer.WRITES_PER_TURN):
            version = await coordinator.put("d/a", b"", version)
        assert len(crowd) == 1
        await coordinator.put("d/a", b"", version)
        assert len(crowd) == 2


async def test_kept_turn_ends_when_the_loop_runs_after_a_write(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator, SqliteCoordinator(tmp_path / "c.db") as b:
        version = await _refused(coordinator, crowd)
        await coordinator.put("d/a", b"", version)
        # Would wait for ever otherwise: nobody uses the rest of the turn.
        await b.put("d/b", b"")


async def test_kept_turn_ends_after_a_second_refusal(tmp_path: Path, crowd: list[int]) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator, SqliteCoordinator(tmp_path / "c.db") as b:
        version = await _refused(coordinator, crowd)
        with pytest.raises(PreconditionFailed):
            await coordinator.put("d/a", b"", version + 1)
        assert len(crowd) == 1
        await b.put("d/b", b"")


async def test_kept_turn_is_used_by_the_thread_where_the_loop_is_busy(
    tmp_path: Path, crowd: list[int]
) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await _refused(coordinator, crowd)
        writer: Any = coordinator._writer
        commits: list[int] = []
        real = writer._committer.commit

        def counted(batch: Any) -> None:
            commits.append(len(batch))
            real(batch)

        writer._committer.commit = counted
        asyncio.get_running_loop().call_soon(lambda: None)
        await coordinator.put("d/a", b"", version)
        assert len(crowd) == 1 and commits == [1]


async def test_kept_turn_is_taken_back_from_a_loop_that_does_not_come(
    tmp_path: Path, crowd: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_writer, "SECOND_TRY_S", 0.001)
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await _refused(coordinator, crowd)
        descriptor = coordinator._file.open_turn()
        # Blocks the loop until the thread has let go of the turn by itself.
        _sqlite_file.take_turn(descriptor)
        _sqlite_file.end_turn(descriptor)
        _sqlite_file.close_turn(descriptor)


async def test_log_is_moved_into_the_database_also_in_a_fight(
    tmp_path: Path, crowd: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_commit, "CHECKPOINT_VERSIONS", 1)
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await _refused(coordinator, crowd)
        writer: Any = coordinator._writer
        for _ in range(_sqlite_writer.WRITES_PER_TURN):
            version = await coordinator.put("d/a", b"", version)
        assert writer._in_place.committer.checkpoint_due
        # Refused after a wait, so that the turn is kept for the loop and the thread does no commit.
        with pytest.raises(PreconditionFailed):
            await coordinator.put("d/a", b"", version + 1)
        assert not writer._in_place.committer.checkpoint_due


async def test_process_that_had_to_wait_stands_in_line_for_its_next_turn(
    tmp_path: Path, crowd: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        version = await _refused(coordinator, crowd)
        version = await coordinator.put("d/a", b"", version)
        await asyncio.sleep(0)
        # The turn could be had at once from now on, and is not grabbed.
        monkeypatch.setattr(_sqlite_writer, "try_turn", _sqlite_file.try_turn)
        monkeypatch.setattr(_sqlite_writer, "take_turn", _sqlite_file.take_turn)
        served = _count_served(coordinator)
        version = await coordinator.put("d/a", b"", version)
        assert served == [1]
        await coordinator.put("d/a", b"", version)
        assert served == [1], "without a crowd it is done in place again"


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
    monkeypatch.setattr(_sqlite_in_place, "IN_PLACE_OPERATIONS_MAX", 0)
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
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    async with SqliteCoordinator(tmp_path / "c.db") as coordinator:
        await coordinator.put("d/a", b"")
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", broken)
            with pytest.raises(Unavailable, match="No locks"):
                await coordinator.put("d/a", b"")
        await coordinator.put("d/a", b"")
