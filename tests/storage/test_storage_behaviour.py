"""The contract of `ObjectStore`, the same for every tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.storage.tenants import Site, behaviour

from forebay.errors import Closed, InvalidKey, NotFound, PreconditionFailed, UsageError
from forebay.storage import ABSENT, ANY, InvalidRange, KeyConflict, ObjectStore

STALE = '"00000000000000000000000000000000"'


async def keys_of(store: ObjectStore, prefix: str = "", after: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix, after=after)]


async def fill(store: ObjectStore, *keys: str) -> None:
    for key in keys:
        await store.put(key, key.encode())


@behaviour
async def test_get_returns_what_was_put_with_its_version(site: Site, store: ObjectStore) -> None:
    version = await store.put("a/b", b"one")
    found = await store.get("a/b")
    assert (found.key, found.data, found.version) == ("a/b", b"one", version)
    assert (await site.open().get("a/b")) == found


@behaviour
async def test_empty_and_large_objects_come_back_whole(site: Site, store: ObjectStore) -> None:
    await store.put("empty", b"")
    assert (await store.get("empty")).data == b""
    large = bytes(range(256)) * 4096
    version = await store.put("large", large, ABSENT)
    assert (await store.get("large")).data == large
    assert await store.put("large", large[:-1], version) != version
    assert (await store.head("large")).size == len(large) - 1


@behaviour
async def test_parts_are_put_as_one_object(site: Site, store: ObjectStore) -> None:
    whole = bytes(range(256)) * 40
    parts = [memoryview(whole)[start : start + 3] for start in range(0, len(whole), 3)]
    version = await store.put_parts("k", [b"<", b"", *parts, b">"], ABSENT)
    found = await store.get("k")
    assert (found.data, found.version) == (b"<" + whole + b">", version)
    with pytest.raises(PreconditionFailed):
        await store.put_parts("k", [b"other"], ABSENT)
    with pytest.raises(InvalidKey):
        await store.put_parts("a//b", parts)
    await store.put_parts("k", [], version)
    assert (await store.get("k")).data == b""


@behaviour
async def test_every_write_has_a_version_of_its_own(site: Site, store: ObjectStore) -> None:
    versions = [await store.put("k", b"%d" % number) for number in range(5)]
    assert len(set(versions)) == 5
    assert (await store.head("k")).version == versions[-1]


@behaviour
async def test_absent_is_granted_once(site: Site, store: ObjectStore) -> None:
    version = await store.put("k", b"first", ABSENT)
    with pytest.raises(PreconditionFailed) as refused:
        await store.put("k", b"second", ABSENT)
    assert refused.value.key == "k"
    assert refused.value.expected is ABSENT
    assert (await store.get("k")).version == version


@behaviour
async def test_a_stale_version_is_refused_and_changes_nothing(site: Site, store: ObjectStore) -> None:
    first = await store.put("k", b"1")
    second = await store.put("k", b"2", first)
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"3", first)
    assert (await store.get("k")).data == b"2"
    assert await store.put("k", b"3", second) not in (first, second)


@behaviour
async def test_a_version_of_a_missing_key_is_refused(site: Site, store: ObjectStore) -> None:
    with pytest.raises(PreconditionFailed):
        await store.put("nothing", b"1", STALE)
    with pytest.raises(NotFound):
        await store.get("nothing")


@behaviour
async def test_a_version_does_not_survive_delete_and_create(site: Site, store: ObjectStore) -> None:
    first = await store.put("k", b"1", ABSENT)
    await store.delete(["k"])
    await store.put("k", b"2", ABSENT)
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"3", first)


@behaviour
async def test_of_racing_creators_one_wins(site: Site, store: ObjectStore) -> None:
    other = site.open()

    async def create(number: int) -> int | None:
        try:
            await (store if number % 2 else other).put("race", b"%d" % number, ABSENT)
        except PreconditionFailed:
            return None
        return number

    winners = [won for won in await asyncio.gather(*map(create, range(8))) if won is not None]
    assert len(winners) == 1
    assert (await store.get("race")).data == b"%d" % winners[0]


@behaviour
async def test_racing_counters_lose_no_update(site: Site, store: ObjectStore) -> None:
    await store.put("count", b"0 start")

    async def add(name: str, handle: ObjectStore) -> None:
        for turn in range(3):
            while True:
                found = await handle.get("count")
                count = int(found.data.split()[0]) + 1
                try:
                    await handle.put("count", f"{count} {name} {turn}".encode(), found.version)
                    break
                except PreconditionFailed:
                    await asyncio.sleep(0)

    await asyncio.gather(*(add(f"w{number}", site.open()) for number in range(4)))
    assert int((await store.get("count")).data.split()[0]) == 12


@behaviour
async def test_missing_keys_are_not_found(site: Site, store: ObjectStore) -> None:
    await store.put("dir/there", b"1")
    for key in ("nothing", "dir", "dir/there/below", "dir/nothing"):
        for call in (store.get(key), store.head(key), store.get_ranges(key, [(0, 1)])):
            with pytest.raises(NotFound) as missing:
                await call
            assert missing.value.key == key
        with pytest.raises(NotFound):
            await store.get_if_changed(key, STALE)


@behaviour
async def test_get_if_changed_is_none_only_at_the_known_version(site: Site, store: ObjectStore) -> None:
    first = await store.put("k", b"1")
    assert await store.get_if_changed("k", first) is None
    second = await store.put("k", b"2")
    changed = await store.get_if_changed("k", first)
    assert changed is not None
    assert (changed.data, changed.version) == (b"2", second)
    assert await store.get_if_changed("k", second) is None


@behaviour
async def test_ranges_come_in_the_order_asked_for(site: Site, store: ObjectStore) -> None:
    await store.put("k", b"0123456789")
    assert await store.get_range("k", 2, 3) == b"234"
    assert await store.get_ranges("k", [(8, 2), (0, 1), (3, 4), (0, 10)]) == [
        b"89",
        b"0",
        b"3456",
        b"0123456789",
    ]
    assert await store.get_ranges("k", [(4, 0), (5, 1), (10, 0)]) == [b"", b"5", b""]
    assert await store.get_ranges("k", []) == []
    assert [bytes(each) for each in await store.view_ranges("k", [(8, 2), (0, 1)])] == [b"89", b"0"]


@behaviour
async def test_a_range_past_the_end_is_refused(site: Site, store: ObjectStore) -> None:
    await store.put("k", b"0123456789")
    for wrong in ((8, 3), (10, 1), (500, 1), (11, 0), (-1, 2), (0, -1)):
        with pytest.raises(InvalidRange):
            await store.get_ranges("k", [(0, 1), wrong])


@behaviour
async def test_head_tells_size_version_and_time(site: Site, store: ObjectStore) -> None:
    version = await store.put("a/b", b"12345")
    info = await store.head("a/b")
    assert (info.key, info.size, info.version) == ("a/b", 5, version)
    [listed] = [found async for found in store.list()]
    assert (listed.key, listed.size, listed.version) == ("a/b", 5, version)
    assert abs(listed.last_modified_ms - info.last_modified_ms) <= 1000


@behaviour
async def test_listing_is_in_byte_order_of_whole_keys(site: Site, store: ObjectStore) -> None:
    keys = ["a/1", "a-b", "a.1", "a/z/1", "a/z-1", "aä", "b", "B", "a0", "zz/1/2/3", "a b", "a+b", "a%2F"]
    await fill(store, *keys)
    assert await keys_of(store) == sorted(keys, key=str.encode)


@behaviour
async def test_a_prefix_may_end_inside_a_name(site: Site, store: ObjectStore) -> None:
    await fill(store, "l/001", "l/002", "l/01", "l-1", "m", "l/00/1", "log")
    assert await keys_of(store, "l/00") == ["l/00/1", "l/001", "l/002"]
    assert await keys_of(store, "l/") == ["l/00/1", "l/001", "l/002", "l/01"]
    assert await keys_of(store, "l") == ["l-1", "l/00/1", "l/001", "l/002", "l/01", "log"]
    assert await keys_of(store, "l/001") == ["l/001"]
    assert await keys_of(store, "nothing/here") == []


@behaviour
async def test_listing_starts_after_any_text(site: Site, store: ObjectStore) -> None:
    await fill(store, "a-b", "a/1", "a/2", "b/1", "c")
    for after in ("a", "a-b", "a/", "a/1", "a/1/x", "a/9", "b", "zzz"):
        expected = [key for key in ("a-b", "a/1", "a/2", "b/1", "c") if key > after]
        assert await keys_of(store, after=after) == expected, after
    assert await keys_of(store, "a/", after="a/1") == ["a/2"]


@behaviour
async def test_pages_hold_what_was_asked_for(site: Site, store: ObjectStore) -> None:
    keys = [f"k/{number:02d}" for number in range(7)]
    await fill(store, *keys)
    pages = [[info.key for info in page] async for page in store.list_pages("k/", page_keys=3)]
    assert pages == [keys[:3], keys[3:6], keys[6:]]
    assert [page async for page in store.list_pages("none/", page_keys=3)] == []
    with pytest.raises(UsageError):
        [page async for page in store.list_pages(page_keys=0)]


@behaviour
async def test_delete_answers_for_every_key_in_order(site: Site, store: ObjectStore) -> None:
    await fill(store, "a", "d/b", "d/c", "keep")
    results = await store.delete(["d/c", "missing", "a", "no/such/dir", "a"])
    assert [result.key for result in results] == ["d/c", "missing", "a", "no/such/dir", "a"]
    assert [result.error for result in results] == [None] * 5
    assert await keys_of(store) == ["d/b", "keep"]
    assert await store.delete([]) == []


@behaviour
async def test_a_directory_is_not_deleted_as_a_key(site: Site, store: ObjectStore) -> None:
    await fill(store, "d/b")
    assert [result.error for result in await store.delete(["d", "d/b/c"])] == [None, None]
    assert await keys_of(store) == ["d/b"]


@behaviour
async def test_bytes_are_copied_before_put_returns(site: Site, store: ObjectStore) -> None:
    data = bytearray(b"before")
    await store.put("array", data)
    await store.put("view", memoryview(data)[1:3])
    data[:] = b"after!"
    assert (await store.get("array")).data == b"before"
    found = (await store.get("view")).data
    assert found == b"ef"
    assert type(found) is bytes


@behaviour
async def test_bad_keys_are_refused_everywhere(site: Site, store: ObjectStore) -> None:
    for key in (
        "",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "..",
        ".",
        "a/.",
        "a\nb",
        "a\\b",
        "a\0",
        ".forebay/locks",
        "x" * 241,
        "é" * 121,
    ):
        for call in (
            store.put(key, b""),
            store.get(key),
            store.head(key),
            store.get_if_changed(key, STALE),
            store.get_ranges(key, [(0, 1)]),
            store.delete(["fine", key]),
        ):
            with pytest.raises(InvalidKey):
                await call
    for prefix in ("/", "a//", "../", ".forebay/"):
        with pytest.raises(InvalidKey):
            await keys_of(store, prefix)


@behaviour
async def test_wrong_types_are_refused_before_anything_is_written(site: Site, store: ObjectStore) -> None:
    wrong: list[Any] = [None, 5, b"key"]
    for key in wrong:
        for call in (store.put(key, b""), store.get(key), store.head(key), store.delete([key])):
            with pytest.raises(UsageError, match="a key is text"):
                await call
    for data in (None, 5, "text"):
        with pytest.raises(UsageError, match="an object is bytes"):
            await store.put("key", data)  # type: ignore[arg-type]
    assert await keys_of(store) == []


@behaviour
async def test_odd_but_valid_keys_work(site: Site, store: ObjectStore) -> None:
    keys = ["ä ö/ü", "a b", "50%", "50%25", "x#1", "~t", "q?a=b&c", "e=mc²", "...", "x" * 240, "日本"]
    await fill(store, *keys)
    for key in keys:
        assert (await store.get(key)).data == key.encode(), key
    assert await keys_of(store) == sorted(keys, key=str.encode)
    assert all(result.error is None for result in await store.delete(keys))
    assert await keys_of(store) == []


@behaviour
async def test_no_key_may_be_a_directory_of_another(site: Site, store: ObjectStore) -> None:
    if not site.refuses_conflicts:
        pytest.skip("a bucket does not look for directories")
    await fill(store, "a/b/c")
    for key in ("a", "a/b", "a/b/c/d", "a/b/c/d/e"):
        for when in (ANY, ABSENT):
            with pytest.raises(KeyConflict):
                await store.put(key, b"", when)
    assert await keys_of(store) == ["a/b/c"]


@behaviour
async def test_a_directory_whose_keys_are_gone_may_become_a_key(site: Site, store: ObjectStore) -> None:
    if site.keeps_empty_directories:
        pytest.skip("SeaweedFS keeps an empty directory for a while and takes it for the key")
    await fill(store, "a/b/c", "a/d")
    await store.delete(["a/b/c", "a/d"])
    await store.put("a", b"now a key", ABSENT)
    await store.delete(["a"])
    await store.put("a/b", b"and back", ABSENT)
    assert await keys_of(store) == ["a/b"]


@behaviour
async def test_an_empty_condition_is_refused(site: Site, store: ObjectStore) -> None:
    with pytest.raises(UsageError):
        await store.put("k", b"", "")
    assert await keys_of(store) == []


@behaviour
async def test_a_closed_store_refuses_use_and_keeps_the_data(site: Site, store: ObjectStore) -> None:
    await store.put("k", b"1")
    async with site.open() as closed:
        assert (await closed.get("k")).data == b"1"
    for call in (closed.put("k", b"2"), closed.get("k"), closed.head("k"), closed.delete(["k"])):
        with pytest.raises(Closed):
            await call
    with pytest.raises(Closed):
        await keys_of(closed)
    await closed.close()
    assert (await store.get("k")).data == b"1"
