"""Views of local objects: what is large and cached is not copied, and stays as it was."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.errors import NotFound, UsageError
from forebay.storage import InvalidRange
from forebay.storage._local import LocalStore
from forebay.storage._local._mapped import MAPPED_BYTES_MIN

DATA = random.Random(1).randbytes(3 * MAPPED_BYTES_MIN)
RANGES = [
    (4097, MAPPED_BYTES_MIN),
    (0, MAPPED_BYTES_MIN + 1),
    (len(DATA) - MAPPED_BYTES_MIN, MAPPED_BYTES_MIN),
]
WANTED = [DATA[start : start + length] for start, length in RANGES]


def is_mapped(found: Sequence[bytes | memoryview]) -> list[bool]:
    return [isinstance(each, memoryview) and isinstance(each.obj, mmap.mmap) for each in found]


async def test_large_ranges_that_are_cached_are_not_copied(tmp_path: Path) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        found = await store.view_ranges("k", RANGES)
    assert is_mapped(found) == [True] * len(RANGES)
    assert [bytes(each) for each in found] == WANTED


async def test_a_view_cannot_be_written_to(tmp_path: Path) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        [view] = await store.view_ranges("k", [(0, len(DATA))])
    assert isinstance(view, memoryview) and view.readonly


async def test_a_small_range_is_copied(tmp_path: Path) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        found = await store.view_ranges("k", [(0, len(DATA)), (5, MAPPED_BYTES_MIN - 1)])
    assert is_mapped(found) == [False, False]
    assert [bytes(each) for each in found] == [DATA, DATA[5 : 4 + MAPPED_BYTES_MIN]]


async def test_what_is_not_cached_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_cached(*_: object) -> int:
        raise BlockingIOError

    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        monkeypatch.setattr(os, "preadv", nothing_cached)
        found = await store.view_ranges("k", RANGES)
    assert is_mapped(found) == [False] * len(RANGES)
    assert list(found) == WANTED


async def test_what_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mapping(*_: object, **__: object) -> mmap.mmap:
        raise OSError(19, "no such device")

    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        monkeypatch.setattr(mmap, "mmap", no_mapping)
        assert list(await store.view_ranges("k", RANGES)) == WANTED


async def test_a_view_outlives_its_object(tmp_path: Path) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        [before] = await store.view_ranges("k", [(0, len(DATA))])
        await store.put("k", bytes(len(DATA)))
        [after] = await store.view_ranges("k", [(0, len(DATA))])
        await store.delete(["k"])
    assert is_mapped([before, after]) == [True, True]
    assert before == DATA and after == bytes(len(DATA))


async def test_views_past_the_end_and_of_nothing_are_refused(tmp_path: Path) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        with pytest.raises(InvalidRange):
            await store.view_ranges("k", [(1, len(DATA))])
        with pytest.raises(NotFound):
            await store.view_ranges("l", RANGES)


async def test_descriptors_of_views_go_with_them(tmp_path: Path) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        found = [await store.view_ranges("k", [(0, len(DATA))]) for _ in range(20)]
        held = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
        assert held <= len(found)
        del found
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_what_is_at_hand_needs_no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        found = store.views_at_hand("k", RANGES)
        assert found is not None and [bytes(each) for each in found] == WANTED
        assert store.views_at_hand("k", [(0, MAPPED_BYTES_MIN - 1)]) is None
        with pytest.raises(NotFound):
            store.views_at_hand("l", RANGES)
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        assert store.views_at_hand("k", RANGES) is None


@pytest.mark.parametrize("start", [-1, -len(DATA), 1, len(DATA), 1 << 62, 1 << 70])
async def test_what_is_not_inside_is_not_at_hand(tmp_path: Path, start: int) -> None:
    async with LocalStore(tmp_path) as store:
        await store.put("k", DATA)
        assert store.views_at_hand("k", [(start, len(DATA))]) is None
        with pytest.raises((InvalidRange, UsageError)):
            await store.view_ranges("k", [(start, len(DATA))])
