"""Puts under conditions that go to sqlite together: each is answered as if it had gone there alone."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from forebay.coordination import ABSENT, ANY, Put, SqliteCoordinator
from forebay.errors import PreconditionFailed

TIMEOUT_MS = 5_000


class Clock:
    """Time that passes when a test says so."""

    now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def coordinator(tmp_path: Path, clock: Clock) -> AsyncIterator[SqliteCoordinator]:
    async with SqliteCoordinator(tmp_path / "c.db", now_ms=clock) as coordinator:
        yield coordinator


def _counter(coordinator: SqliteCoordinator) -> int:
    with closing(sqlite3.connect(coordinator.path)) as connection:
        [(version,)] = connection.execute("select version from counter").fetchall()
    return int(version)


async def test_a_refused_put_among_many_is_the_only_one_refused(coordinator: SqliteCoordinator) -> None:
    versions = [await coordinator.put(f"d/{name}", b"old") for name in "abcd"]
    await coordinator.put("d/b", b"moved")
    writes = [Put(f"d/{name}", b"new", version) for name, version in zip("abcd", versions, strict=True)]
    writes += [Put("d/c", b"there", ABSENT), Put("d/e", b"first", ABSENT), Put("d/e", b"second", ABSENT)]
    results = await coordinator.write(writes)
    refused = [place for place, result in enumerate(results) if result.error is not None]
    assert refused == [1, 4, 6]
    assert all(isinstance(results[place].error, PreconditionFailed) for place in refused)
    for name, place, value in (("a", 0, b"new"), ("c", 2, b"new"), ("d", 3, b"new"), ("e", 5, b"first")):
        found = await coordinator.get(f"d/{name}")
        assert found is not None and (found.value, found.version) == (value, results[place].version)
    given = [result.version for result in results if result.version is not None]
    assert given == sorted(set(given)) and given[-1] <= _counter(coordinator)


async def test_puts_that_are_all_refused_leave_the_counter_where_it_is(
    coordinator: SqliteCoordinator,
) -> None:
    version = await coordinator.put("d/a", b"old")
    before = _counter(coordinator)
    results = await coordinator.write([Put("d/a", b"new", ABSENT), Put("d/b", b"new", version)])
    assert all(isinstance(result.error, PreconditionFailed) for result in results)
    assert _counter(coordinator) == before


async def test_records_of_a_session_that_is_over_refuse_none_of_many_puts(
    coordinator: SqliteCoordinator, clock: Clock
) -> None:
    session = await coordinator.open_session(TIMEOUT_MS)
    for name in "abc":
        await coordinator.put(f"d/{name}", b"of the session", session=session)
    clock.now_ms += TIMEOUT_MS + 1
    results = await coordinator.write([Put(f"d/{name}", b"mine", ABSENT) for name in "xayb"])
    assert [result.error for result in results] == [None] * 4
    for name, result in zip("xayb", results, strict=True):
        found = await coordinator.get(f"d/{name}")
        assert found is not None and (found.value, found.version) == (b"mine", result.version)
    assert await coordinator.get("d/c") is None


async def test_a_put_at_its_version_takes_the_key_from_a_living_session(
    coordinator: SqliteCoordinator,
) -> None:
    session = await coordinator.open_session(TIMEOUT_MS)
    version = await coordinator.put("d/a", b"of the session", session=session)
    results = await coordinator.write([Put("d/a", b"mine", version), Put("d/b", b"mine", ABSENT)])
    assert [result.error for result in results] == [None] * 2
    await session.close()
    assert await coordinator.get("d/a") is not None


async def test_a_key_that_comes_back_in_one_write_is_seen_as_the_put_before_left_it(
    coordinator: SqliteCoordinator,
) -> None:
    version = await coordinator.put("d/a", b"0")
    writes = [
        Put("d/a", b"1", version),
        Put("d/a", b"2", version),
        Put("d/a", b"3", ANY),
        Put("d/a", b"4", ABSENT),
        Put("d/a", b"5", version + 2),
    ]
    results = await coordinator.write(writes)
    assert [result.error is None for result in results] == [True, False, True, False, True]
    found = await coordinator.get("d/a")
    assert found is not None and found.value == b"5"
