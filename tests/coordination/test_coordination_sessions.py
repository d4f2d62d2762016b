"""The contract of sessions and ephemeral keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.coordination import (
    ABSENT,
    SESSION_TIMEOUT_MS_MAX,
    SESSION_TIMEOUT_MS_MIN,
    Coordinator,
    MemoryCoordinator,
    Put,
    children,
)
from forebay.errors import PreconditionFailed, SessionExpired, UsageError

TIMEOUT_MS = 3_000


def _die(session: Any) -> None:
    """What a crash of the owner does: nobody renews any more, and nobody says goodbye."""
    (getattr(session, "_renewal", None) or session._task).cancel()


async def test_ephemeral_key_names_its_session(coordinator: Coordinator, directory: str) -> None:
    async with await coordinator.open_session() as session:
        assert session.alive and session.timeout_ms == 15_000
        await coordinator.put(f"{directory}/a", b"", session=session)
        record = await coordinator.get(f"{directory}/a")
        assert record is not None and record.session_id == session.id
        [scanned] = await coordinator.range_scan(*children(directory))
        assert scanned == record
        assert await coordinator.ceiling(f"{directory}/a") == record


async def test_closing_a_session_takes_its_keys_and_no_others(
    coordinator: Coordinator, directory: str
) -> None:
    mine = await coordinator.open_session()
    other = await coordinator.open_session()
    assert mine.id != other.id
    await coordinator.write(
        [
            Put(f"{directory}/mine1", b"", session=mine),
            Put(f"{directory}/mine2", b"", session=mine, partition_key="p"),
            Put(f"{directory}/other", b"", session=other),
            Put(f"{directory}/plain", b""),
        ]
    )
    await mine.close()
    assert not mine.alive
    assert await coordinator.list(*children(directory)) == [f"{directory}/other", f"{directory}/plain"]
    await mine.close()
    await other.close()
    assert await coordinator.list(*children(directory)) == [f"{directory}/plain"]


async def test_closed_session_cannot_write(coordinator: Coordinator, directory: str) -> None:
    session = await coordinator.open_session()
    await session.close()
    results = await coordinator.write(
        [Put(f"{directory}/a", b"", session=session), Put(f"{directory}/b", b"")]
    )
    assert isinstance(results[0].error, SessionExpired) and results[0].error.hint
    assert results[1].error is None
    assert await coordinator.list(*children(directory)) == [f"{directory}/b"]


async def test_closing_the_client_ends_its_sessions(tenant: Any, directory: str) -> None:
    watcher = tenant.open()
    client = tenant.open()
    session = await client.open_session()
    await client.put(f"{directory}/a", b"", session=session)
    assert await watcher.get(f"{directory}/a") is not None
    await client.close()
    assert await watcher.get(f"{directory}/a") is None
    assert not session.alive


async def test_claim_conflicts_while_the_owner_lives(tenant: Any, directory: str) -> None:
    owner, rival = tenant.open(), tenant.open()
    mine, theirs = await owner.open_session(), await rival.open_session()
    await owner.put(f"{directory}/claim", b"owner", ABSENT, session=mine)
    with pytest.raises(PreconditionFailed):
        await rival.put(f"{directory}/claim", b"rival", ABSENT, session=theirs)
    await mine.close()
    await rival.put(f"{directory}/claim", b"rival", ABSENT, session=theirs)


async def test_put_by_another_session_takes_the_key_over(tenant: Any, directory: str) -> None:
    first, second = tenant.open(), tenant.open()
    old, new = await first.open_session(), await second.open_session()
    version = await first.put(f"{directory}/a", b"first", session=old)
    await second.put(f"{directory}/a", b"second", version, session=new)
    await old.close()
    record = await first.get(f"{directory}/a")
    assert record is not None and (record.value, record.session_id) == (b"second", new.id)
    await new.close()
    assert await first.get(f"{directory}/a") is None


async def test_put_without_a_session_makes_the_key_permanent(
    coordinator: Coordinator, directory: str
) -> None:
    session = await coordinator.open_session()
    await coordinator.put(f"{directory}/a", b"", session=session)
    await coordinator.put(f"{directory}/a", b"")
    await session.close()
    record = await coordinator.get(f"{directory}/a")
    assert record is not None and record.session_id is None


async def test_refused_put_leaves_the_owner(coordinator: Coordinator, directory: str) -> None:
    owner, rival = await coordinator.open_session(), await coordinator.open_session()
    await coordinator.put(f"{directory}/a", b"", session=owner)
    with pytest.raises(PreconditionFailed):
        await coordinator.put(f"{directory}/a", b"", ABSENT, session=rival)
    await rival.close()
    record = await coordinator.get(f"{directory}/a")
    assert record is not None and record.session_id == owner.id
    await owner.close()


async def test_deleted_ephemeral_key_does_not_take_a_later_one_along(
    coordinator: Coordinator, directory: str
) -> None:
    session = await coordinator.open_session()
    await coordinator.put(f"{directory}/a", b"", session=session)
    await coordinator.delete(f"{directory}/a")
    await coordinator.put(f"{directory}/a", b"plain", ABSENT)
    await session.close()
    record = await coordinator.get(f"{directory}/a")
    assert record is not None and record.value == b"plain"


async def test_session_lives_while_its_owner_does(tenant: Any, directory: str, eventually: Any) -> None:
    coordinator, clock = tenant.open(), tenant.clock
    session = await coordinator.open_session(TIMEOUT_MS)
    await coordinator.put(f"{directory}/a", b"", session=session)
    if isinstance(coordinator, MemoryCoordinator):
        await clock.advance(4 * TIMEOUT_MS / 1000)
    else:
        # Renewal sleeps on the machine's clock here: two thirds pass on the session's, then one renewal.
        clock.step(TIMEOUT_MS / 1500)
        before = session._deadline_ms

        async def renewed() -> bool:
            return bool(session._deadline_ms > before)

        await eventually(renewed)
        clock.step(TIMEOUT_MS / 1500)
    assert session.alive
    assert await coordinator.get(f"{directory}/a") is not None


async def test_keys_of_a_dead_owner_vanish(tenant: Any, directory: str, eventually: Any) -> None:
    clock = tenant.clock
    owner, rival = tenant.open(), tenant.open()
    session = await owner.open_session(TIMEOUT_MS)
    await owner.put(f"{directory}/a", b"", session=session)
    _die(session)
    clock.step(TIMEOUT_MS / 1000 - 0.001)
    assert session.alive
    assert await rival.get(f"{directory}/a") is not None
    clock.step(0.001)
    assert not session.alive

    async def gone() -> bool:
        return await rival.get(f"{directory}/a") is None

    assert await eventually(gone)


async def test_claim_of_a_dead_owner_is_free_at_once(tenant: Any, directory: str) -> None:
    clock = tenant.clock
    owner, rival = tenant.open(), tenant.open()
    session = await owner.open_session(TIMEOUT_MS)
    version = await owner.put(f"{directory}/claim", b"dead", ABSENT, session=session)
    await owner.put(f"{directory}/second", b"dead", ABSENT, session=session)
    _die(session)
    clock.step(TIMEOUT_MS / 1000)
    theirs = await rival.open_session()
    assert await rival.put(f"{directory}/claim", b"alive", ABSENT, session=theirs) > version
    assert await rival.list(*children(directory)) == [f"{directory}/claim"]


async def test_expired_session_cannot_write(tenant: Any, directory: str) -> None:
    clock = tenant.clock
    coordinator = tenant.open()
    session = await coordinator.open_session(TIMEOUT_MS)
    _die(session)
    clock.step(TIMEOUT_MS / 1000)
    with pytest.raises(SessionExpired):
        await coordinator.put(f"{directory}/a", b"", session=session)
    await session.close()


async def test_expiry_wakes_a_watch(tenant: Any, directory: str) -> None:
    clock = tenant.clock
    owner, other = tenant.open(), tenant.open()
    session = await owner.open_session(TIMEOUT_MS)
    await owner.put(f"{directory}/a", b"", session=session)
    _die(session)
    async with other.watch(directory) as watch:
        waiting = asyncio.create_task(watch.changed())
        await clock.advance(TIMEOUT_MS / 1000)
        while await other.get(f"{directory}/a") is not None:
            await waiting
            waiting = asyncio.create_task(watch.changed())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_sessions_that_begin_while_a_watch_sleeps_wake_it_too(tenant: Any, directory: str) -> None:
    clock = tenant.clock
    coordinator = tenant.open()
    async with coordinator.watch(directory) as watch:
        waiting = asyncio.create_task(watch.changed())
        await clock.advance(0.1)
        session = await coordinator.open_session(TIMEOUT_MS)
        await coordinator.put(f"{directory}/a", b"", session=session)
        await waiting
        waiting = asyncio.create_task(watch.changed())
        _die(session)
        await clock.advance(TIMEOUT_MS / 1000)
        while await coordinator.get(f"{directory}/a") is not None:
            await waiting
            waiting = asyncio.create_task(watch.changed())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("timeout_ms", [0, -1, SESSION_TIMEOUT_MS_MIN - 1, SESSION_TIMEOUT_MS_MAX + 1])
async def test_timeouts_out_of_bounds_are_refused(coordinator: Coordinator, timeout_ms: int) -> None:
    with pytest.raises(UsageError):
        await coordinator.open_session(timeout_ms)


async def test_session_of_another_store_is_refused(coordinator: Coordinator, directory: str) -> None:
    async with MemoryCoordinator() as elsewhere, await elsewhere.open_session() as session:
        with pytest.raises(UsageError):
            await coordinator.put(f"{directory}/a", b"", session=session)
    assert await coordinator.get(f"{directory}/a") is None
