"""Turns of the local store: who waited and was refused tries again in the same turn, and nobody hangs."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import Closed, PreconditionFailed
from forebay.storage import ABSENT, ANY, LocalStore
from forebay.storage._local import _files, _writers
from forebay.storage._local._locks import Held, Stripes

KEY = "counters/one"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    async with LocalStore(tmp_path) as store:
        yield store


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every turn looks as if others had been first, and is kept long enough for any second try."""
    turns: list[str] = []
    real = Stripes.locked

    @contextmanager
    def locked(self: Stripes, key: str) -> Iterator[Held]:
        with real(self, key) as held:
            turns.append(key)
            yield held._replace(waited=True)

    monkeypatch.setattr(Stripes, "locked", locked)
    monkeypatch.setattr(_writers, "SECOND_TRY_S", 60.0)
    return turns


@contextmanager
def stripe_of(root: Path, key: str) -> Iterator[None]:
    """Another process, as far as the lock of `key` goes."""
    files = _files.LocalFiles(root, lambda: "unused")
    with files.turn(key):
        yield


async def waiting_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a thread of the store is about to wait for a lock that is held."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    real = fcntl.flock

    def flock(descriptor: int, flags: int) -> None:
        if flags == fcntl.LOCK_EX:
            loop.call_soon_threadsafe(event.set)
        real(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    return event


async def test_refused_caller_who_waited_succeeds_in_the_same_turn(
    store: LocalStore, crowd: list[str]
) -> None:
    version = await store.put(KEY, b"0")
    crowd.clear()
    with pytest.raises(PreconditionFailed) as refusal:
        await store.put(KEY, b"1", "stale")
    assert refusal.value.actual == version
    await store.put(KEY, b"1", version)
    assert crowd == [KEY]
    assert (await store.get(KEY)).data == b"1"


async def test_nobody_writes_between_a_refusal_and_its_second_try(
    tmp_path: Path, store: LocalStore, crowd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalStore(tmp_path) as other:
        version = await store.put(KEY, b"0")
        with pytest.raises(PreconditionFailed):
            await store.put(KEY, b"1", "stale")
        waits = await waiting_for_the_lock(monkeypatch)
        blocked = asyncio.ensure_future(other.put(KEY, b"other", version))
        await waits.wait()
        monkeypatch.setattr(_writers, "SECOND_TRY_S", 0.0)
        await store.put(KEY, b"1", version)
        with pytest.raises(PreconditionFailed):
            await blocked
    assert (await store.get(KEY)).data == b"1"


async def test_second_try_that_is_refused_too_ends_the_turn(
    tmp_path: Path, store: LocalStore, crowd: list[str]
) -> None:
    await store.put(KEY, b"0")
    for stale in ("stale", "staler"):
        with pytest.raises(PreconditionFailed):
            await store.put(KEY, b"1", stale)
    with stripe_of(tmp_path, KEY):
        assert (await store.get(KEY)).data == b"0"


@pytest.mark.parametrize("when", [ABSENT, ANY])
async def test_only_a_put_that_named_a_version_keeps_its_turn(
    tmp_path: Path, store: LocalStore, crowd: list[str], when: Any
) -> None:
    await store.put(KEY, b"0")
    if when is ABSENT:
        with pytest.raises(PreconditionFailed):
            await store.put(KEY, b"1", when)
    else:
        await store.put(KEY, b"1", when)
    with stripe_of(tmp_path, KEY):
        pass


async def test_refusal_without_a_wait_keeps_no_turn(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writers, "SECOND_TRY_S", 60.0)
    await store.put(KEY, b"0")
    with pytest.raises(PreconditionFailed):
        await store.put(KEY, b"1", "stale")
    with stripe_of(tmp_path, KEY):
        pass


async def test_turn_is_let_go_though_the_event_loop_stands_still(
    tmp_path: Path, store: LocalStore, crowd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writers, "SECOND_TRY_S", 0.01)
    await store.put(KEY, b"0")
    with pytest.raises(PreconditionFailed):
        await store.put(KEY, b"1", "stale")
    # No await from here on: the loop cannot help.
    freed = threading.Event()

    def other_process() -> None:
        with stripe_of(tmp_path, KEY):
            freed.set()

    thread = threading.Thread(target=other_process)
    thread.start()
    assert freed.wait(30)
    thread.join()


async def test_second_try_that_comes_too_late_waits_for_a_turn_of_its_own(
    store: LocalStore, crowd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writers, "SECOND_TRY_S", 0.0)
    version = await store.put(KEY, b"0")
    crowd.clear()
    for _ in range(50):
        with pytest.raises(PreconditionFailed):
            await store.put(KEY, b"1", "stale")
        version = await store.put(KEY, b"1", version)
    assert len(crowd) >= 50
    assert (await store.get(KEY)).version == version


async def test_second_try_needs_no_thread_that_waits_for_its_lock(
    store: LocalStore, crowd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await store.put(KEY, b"0")
    with pytest.raises(PreconditionFailed):
        await store.put(KEY, b"1", "stale")
    # More puts than the store has threads, all behind the lock that is kept; the offer is hidden from them.
    kept = store._puts._kept.pop(KEY)
    waits = await waiting_for_the_lock(monkeypatch)
    others = [asyncio.ensure_future(store.put(KEY, b"other", version)) for _ in range(40)]
    await waits.wait()
    store._puts._kept[KEY] = kept
    monkeypatch.setattr(_writers, "SECOND_TRY_S", 0.0)
    await store.put(KEY, b"1", version)
    assert all(
        isinstance(result, PreconditionFailed)
        for result in await asyncio.gather(*others, return_exceptions=True)
    )


async def test_cancelled_put_that_was_not_begun_is_not_done(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await store.put(KEY, b"0")
    waits = await waiting_for_the_lock(monkeypatch)
    with stripe_of(tmp_path, KEY):
        task = asyncio.ensure_future(store.put(KEY, b"1", version))
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await store.close()
    async with LocalStore(tmp_path) as again:
        assert (await again.get(KEY)).version == version


async def test_closing_waits_for_a_kept_turn_and_refuses_its_second_try(
    tmp_path: Path, crowd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writers, "SECOND_TRY_S", 0.05)
    store = LocalStore(tmp_path)
    version = await store.put(KEY, b"0")
    with pytest.raises(PreconditionFailed):
        await store.put(KEY, b"1", "stale")
    await store.close()
    with pytest.raises(Closed):
        await store.put(KEY, b"1", version)
    with stripe_of(tmp_path, KEY):
        pass
