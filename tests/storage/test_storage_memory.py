"""The store in memory: the same in every run, shared by name, one step per operation."""

from __future__ import annotations

import asyncio
import random

from forebay.kit.ids import IdSource
from forebay.storage import MemoryStore, open_store


class Stopped:
    """A clock that shows one time for ever."""

    def now_ms(self) -> int:
        return 1_700_000_000_000

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a store in memory never waits")


async def versions_from(seed: int) -> list[str]:
    clock = Stopped()
    store = MemoryStore(clock, IdSource(clock, random.Random(seed)))
    return [await store.put(f"k{number % 2}", b"") for number in range(4)]


async def test_the_same_parts_give_the_same_versions() -> None:
    assert await versions_from(1) == await versions_from(1)
    assert not set(await versions_from(1)) & set(await versions_from(2))


async def test_times_come_from_the_clock() -> None:
    store = MemoryStore(Stopped())
    await store.put("k", b"")
    assert (await store.head("k")).last_modified_ms == 1_700_000_000_000


async def test_no_operation_lets_another_task_run() -> None:
    store = MemoryStore()
    others: list[str] = []
    asyncio.get_running_loop().call_soon(others.append, "ran")
    version = await store.put("k", b"1")
    await store.put("k", b"2", version)
    await store.get("k")
    await store.head("k")
    assert [info.key async for info in store.list()] == ["k"]
    await store.delete(["k"])
    assert others == []


async def test_stores_of_one_name_share_their_objects() -> None:
    one, same, other = (open_store(f"memory://{name}") for name in ("shared-a", "shared-a", "shared-b"))
    version = await one.put("k", b"1")
    assert (await same.get("k")).version == version
    assert [info async for info in other.list()] == []
    await one.close()
    assert (await same.get("k")).data == b"1"


async def test_stores_without_a_name_share_nothing() -> None:
    one, other = open_store("memory://"), open_store("memory://")
    await one.put("k", b"1")
    assert [info async for info in other.list()] == []


async def test_a_listing_goes_on_through_changes_made_meanwhile() -> None:
    store = MemoryStore()
    for number in range(6):
        await store.put(f"k{number}", b"")
    seen = []
    async for page in store.list_pages(page_keys=2):
        seen += [info.key for info in page]
        await store.delete(["k0", "k1", "k2"])
        await store.put("k9", b"")
    assert seen == ["k0", "k1", "k3", "k4", "k5", "k9"]
