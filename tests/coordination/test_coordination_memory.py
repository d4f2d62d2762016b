"""What only the memory tenant promises: shards that hide, answers that never wait, watches that are exact."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.coordination import ABSENT, Coordinator, MemoryCoordinator, Put, children
from forebay.errors import UsageError

NAMES = [f"p{number}" for number in range(20)]


async def test_wrong_partition_key_does_not_find_the_record() -> None:
    async with MemoryCoordinator(shards=4) as coordinator:
        await coordinator.put("d/a", b"", partition_key="p0")
        found = [name for name in NAMES if await coordinator.get("d/a", partition_key=name) is not None]
        assert "p0" in found and len(found) < len(NAMES)
        assert await coordinator.list(*children("d")) == ["d/a"]
        listed = [name for name in NAMES if await coordinator.list(*children("d"), partition_key=name)]
        assert listed == found


async def test_first_version_and_session_are_zero() -> None:
    async with MemoryCoordinator() as coordinator:
        assert await coordinator.put("d/a", b"", ABSENT) == 0
        assert (await coordinator.open_session()).id == 0


def _finish(work: Any) -> Any:
    """Run a coroutine that must not wait for anything."""
    with pytest.raises(StopIteration) as caught:
        work.send(None)
    return caught.value.value


async def test_no_operation_waits() -> None:
    coordinator: Coordinator = MemoryCoordinator(shards=4)
    session = _finish(coordinator.open_session())
    assert [result.error for result in _finish(coordinator.write([Put("d/a", b"", session=session)]))] == [
        None
    ]
    assert _finish(coordinator.get("d/a")) is not None
    assert _finish(coordinator.floor("d/b")) is not None
    assert len(_finish(coordinator.range_scan(*children("d")))) == 1
    _finish(session.close())
    assert _finish(coordinator.list(*children("d"))) == []
    _finish(coordinator.close())


async def test_watch_sleeps_through_other_directories_and_refused_writes() -> None:
    async with MemoryCoordinator() as coordinator, coordinator.watch("d") as watch:
        waiting = asyncio.create_task(watch.changed())
        await asyncio.sleep(0)
        await coordinator.put("d/sub/a", b"")
        await coordinator.put("d0/a", b"")
        await coordinator.write([Put("d/a", b"", 7)])
        await coordinator.delete("d/a")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(UsageError, match="two tasks"):
            await watch.changed()
        await coordinator.put("d/a", b"")
        await waiting


async def test_top_level_keys_are_a_directory_of_their_own() -> None:
    async with MemoryCoordinator() as coordinator:
        for key in ("a", "a/b", "c"):
            await coordinator.put(key, b"")
        found = await coordinator.higher("a")
        assert found is not None and found.key == "c"
        assert await coordinator.lower("a") is None


def test_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="0 shards"):
        MemoryCoordinator(shards=0)
