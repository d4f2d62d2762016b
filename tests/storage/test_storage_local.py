"""Local files: what is on the disk, what other tools may do there, and what goes wrong."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.sources import Pieces

from forebay.errors import (
    AccessDenied,
    InvalidUrl,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StorageDamaged,
    StorageFull,
    Unavailable,
    Unsupported,
    UsageError,
)
from forebay.storage import ABSENT, InvalidRange, KeyConflict, LocalStore
from forebay.storage._api import validate_key
from forebay.storage._local import _files
from forebay.storage._local._files import PORTION_BYTES
from forebay.storage._local._store import _is_plain_key


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "root"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[LocalStore]:
    async with LocalStore(root) as opened:
        yield opened


def leftovers(root: Path) -> list[str]:
    return names_in(root / ".forebay" / "temps")


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def put_file(path: Path, data: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


async def keys_of(store: LocalStore, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def test_objects_are_plain_files_under_the_root(root: Path, store: LocalStore) -> None:
    version = await store.put("a/b.bin", b"data")
    path = root / "a" / "b.bin"
    assert path.read_bytes() == b"data"
    assert os.getxattr(path, "user.forebay.version").decode() == version
    assert leftovers(root) == []


async def test_reading_writes_nothing(root: Path, store: LocalStore) -> None:
    with pytest.raises(NotFound):
        await store.get("a")
    assert await keys_of(store) == []
    assert [result.error for result in await store.delete(["a", "b/c"])] == [None, None]
    assert names_in(root.parent) == []
    put_file(root / "a", b"1")
    assert (await store.get("a")).data == b"1"
    assert names_in(root) == ["a"]


async def test_files_of_other_tools_are_objects_with_a_foreign_version(root: Path, store: LocalStore) -> None:
    await store.put("ours", b"1")
    theirs = root / "theirs"
    theirs.write_bytes(b"one")
    found = await store.get("theirs")
    assert found.data == b"one"
    assert found.version.startswith("foreign-")
    assert (await store.head("theirs")).version == found.version
    assert await keys_of(store) == ["ours", "theirs"]
    assert await store.get_if_changed("theirs", found.version) is None
    theirs.write_bytes(b"other")
    with pytest.raises(PreconditionFailed):
        await store.put("theirs", b"mine", found.version)
    version = await store.put("theirs", b"mine", (await store.head("theirs")).version)
    assert not version.startswith("foreign-")


async def test_what_is_no_plain_file_is_no_object(root: Path, store: LocalStore) -> None:
    await store.put("file", b"1")
    (root / "link").symlink_to(root / "file")
    (root / "linked-directory").symlink_to(root)
    os.mkfifo(root / "pipe")
    (root / "bad\nname").write_bytes(b"")
    (root / "bad\\name").write_bytes(b"")
    put_file(root / os.fsdecode(b"\xff"))
    assert await keys_of(store) == ["file"]
    for key in ("link", "pipe"):
        with pytest.raises(NotFound):
            await store.get(key)
        with pytest.raises(KeyConflict):
            await store.put(key, b"")
        assert [result.error for result in await store.delete([key])] == [None]
        assert (root / key).is_symlink() or (root / key).is_fifo()


async def test_own_directory_is_not_listed(root: Path, store: LocalStore) -> None:
    await store.put(".forebay-not-ours", b"")
    await store.put("d/.forebay/x", b"")
    assert await keys_of(store, ".fore") == [".forebay-not-ours"]
    assert await keys_of(store) == [".forebay-not-ours", "d/.forebay/x"]


async def test_empty_directories_are_removed_with_their_last_key(root: Path, store: LocalStore) -> None:
    await store.put("a/b/c", b"")
    await store.put("a/d", b"")
    await store.delete(["a/b/c"])
    assert not (root / "a" / "b").exists()
    await store.delete(["a/d"])
    assert names_in(root) == [".forebay"]


async def test_writers_survive_directories_that_vanish_under_them(store: LocalStore) -> None:
    async def come_and_go(number: int) -> None:
        for turn in range(10):
            key = f"d/e/{number}"
            await store.put(key, b"%d" % turn, ABSENT)
            await store.delete([key])

    await asyncio.gather(*map(come_and_go, range(6)))
    assert await keys_of(store) == []


async def test_a_file_as_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidUrl, match="not a directory"):
        LocalStore(tmp_path / "file")


async def test_use_after_fork_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.put("k", b"1")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (store.get("k"), store.put("k", b""), store.delete(["k"]), store.sweep()):
        with pytest.raises(UsageError, match="forked") as refused:
            await call
        assert "spawn" in refused.value.hint


async def test_leftovers_of_dead_writers_are_swept_at_open(root: Path, store: LocalStore) -> None:
    await store.put("k", b"1")
    temps = root / ".forebay" / "temps"
    for name in ("00-dead", "63-dead", "07-dead"):
        (temps / name).write_bytes(b"half")
    async with LocalStore(root) as another:
        assert leftovers(root) == []
        assert (await another.get("k")).data == b"1"


async def test_the_temp_of_a_live_writer_is_never_swept(root: Path, store: LocalStore) -> None:
    await store.put("k", b"1")
    temps = root / ".forebay" / "temps"
    (temps / "05-live").write_bytes(b"half")
    (temps / "06-dead").write_bytes(b"half")
    holder = os.open(root / ".forebay" / "locks" / "05", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        await LocalStore(root).close()
        assert leftovers(root) == ["05-live"]
        sweeping = asyncio.ensure_future(store.sweep())
        await store.put("another", b"")
        assert leftovers(root) == ["05-live"]
        assert not sweeping.done()
    finally:
        os.close(holder)
    assert await sweeping == 1
    assert leftovers(root) == []


async def test_reads_go_on_while_every_writer_waits(root: Path, store: LocalStore) -> None:
    await store.put("k", b"x" * 1_000_000)
    holders = [
        os.open(root / ".forebay" / "locks" / f"{stripe:02d}", os.O_RDWR | os.O_CREAT) for stripe in range(64)
    ]
    for holder in holders:
        fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        writes = [asyncio.ensure_future(store.put(f"w{number}", b"")) for number in range(40)]
        assert len((await store.get("k")).data) == 1_000_000
        assert await keys_of(store) == ["k"]
        assert not any(write.done() for write in writes)
    finally:
        for holder in holders:
            os.close(holder)
    await asyncio.gather(*writes)
    assert len(await keys_of(store)) == 41


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, on_call: int = 1) -> None:
    """Let the `on_call`-th call of an operating system function fail."""
    real = getattr(os, name)
    calls = 0

    def fail(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("taken", [0, 1, 5, 2_500])
async def test_parts_that_are_written_in_pieces_arrive_whole(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    parts = [b"%d," % number for number in range(3_000)]
    monkeypatch.setattr(os, "writev", lambda file, some: os.write(file, b"".join(some)[:taken]))
    await store.put_parts("k", parts)
    assert (await store.get("k")).data == b"".join(parts)


@pytest.mark.parametrize("size", [PORTION_BYTES - 1, PORTION_BYTES, PORTION_BYTES + 1, 3 * PORTION_BYTES + 7])
@pytest.mark.parametrize("part_bytes", [700, PORTION_BYTES // 3, 2 * PORTION_BYTES, 4 * PORTION_BYTES])
async def test_a_large_object_goes_to_the_disk_in_portions(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, size: int, part_bytes: int
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(_files, "begin_write_out", lambda file, at, length: begun.append((at, length)))
    data = random.Random(size).randbytes(size)
    parts = [data[at : at + part_bytes] for at in range(0, size, part_bytes)]
    await store.put_parts("parts", parts)
    assert begun == [(at, PORTION_BYTES) for at in range(0, size - PORTION_BYTES + 1, PORTION_BYTES)]
    begun.clear()
    await store.put_source("source", Pieces(data, part_bytes), ABSENT)
    assert begun == [(at, PORTION_BYTES) for at in range(0, size - PORTION_BYTES + 1, PORTION_BYTES)]
    assert (await store.get("parts")).data == (await store.get("source")).data == data


async def test_parts_that_do_not_fit_leave_nothing_behind(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        failing(patched, "writev", errno.ENOSPC)
        with pytest.raises(StorageFull):
            await store.put_parts("k", [b"1", b"2"])
    with pytest.raises(NotFound):
        await store.get("k")
    assert leftovers(root) == []


@pytest.mark.parametrize(
    ("function", "number", "expected"),
    [
        ("write", errno.ENOSPC, StorageFull),
        ("write", errno.EDQUOT, StorageFull),
        ("write", errno.EFBIG, StorageFull),
        ("fsync", errno.ENOSPC, StorageFull),
        ("fsync", errno.EIO, StorageDamaged),
        ("setxattr", errno.ENOTSUP, Unsupported),
        ("setxattr", errno.ENOSPC, StorageFull),
        ("rename", errno.ENOSPC, StorageFull),
        ("rename", errno.EXDEV, Unsupported),
        ("rename", errno.EACCES, AccessDenied),
        ("rename", errno.EROFS, AccessDenied),
        ("rename", errno.EIO, OutcomeUnknown),
        ("open", errno.EMFILE, Unavailable),
        ("open", errno.EROFS, AccessDenied),
    ],
)
async def test_a_failed_write_leaves_the_old_object_and_nothing_else(
    root: Path,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    number: int,
    expected: type[Exception],
) -> None:
    version = await store.put("d/k", b"old")
    with monkeypatch.context() as patched:
        failing(patched, function, number)
        with pytest.raises(expected) as failed:
            await store.put("d/k", b"new", version)
    assert getattr(failed.value, "hint", "")
    assert "\n" not in str(failed.value)
    found = await store.get("d/k")
    assert (found.data, found.version) == (b"old", version)
    assert leftovers(root) == []


async def test_a_failed_first_write_leaves_no_directory(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("other", b"")
    with monkeypatch.context() as patched:
        failing(patched, "rename", errno.ENOSPC)
        with pytest.raises(StorageFull):
            await store.put("deep/er/k", b"new")
    assert names_in(root) == [".forebay", "other"]


async def test_a_directory_that_cannot_be_synced_leaves_it_unknown(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("k", b"old")
    with monkeypatch.context() as patched:
        failing(patched, "fsync", errno.EIO, on_call=2)
        with pytest.raises(OutcomeUnknown, match="could not be synced"):
            await store.put("k", b"new")
    with monkeypatch.context() as patched:
        failing(patched, "fsync", errno.EIO)
        [result] = await store.delete(["k"])
    assert isinstance(result.error, OutcomeUnknown)


async def test_delete_errors_find_their_key(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.put("a", b"")
    await store.put("b", b"")
    with monkeypatch.context() as patched:
        failing(patched, "unlink", errno.EACCES)
        results = await store.delete(["a", "b"])
    assert isinstance(results[0].error, AccessDenied)
    assert results[1].error is None
    assert await keys_of(store) == ["a"]


def watch_fsync(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files and directories that are synced from now on."""
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


async def test_every_write_is_synced_with_its_new_directories(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = watch_fsync(monkeypatch)
    await store.put("a/b/k", b"1")
    above = {str(root.parent.parent), str(root.parent), str(root)}
    assert above | {f"{root}/a", f"{root}/a/b"} <= set(synced)
    assert synced[-1] == f"{root}/a/b"
    synced.clear()
    await store.put("a/b/k", b"2")
    assert len(synced) == 2
    assert "/.forebay/temps/" in synced[0]
    assert synced[1] == f"{root}/a/b"


async def test_a_directory_made_by_a_writer_that_died_is_synced_by_the_next(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("k", b"1")
    (root / "d").mkdir()
    synced = watch_fsync(monkeypatch)
    await store.put("d/k", b"1")
    assert str(root) in synced


async def test_a_read_that_is_not_cached_goes_to_a_thread(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("k", b"0123456789")

    def refuse(*_: Any) -> int:
        raise BlockingIOError(errno.EAGAIN, "not in the cache")

    monkeypatch.setattr(os, "preadv", refuse)
    assert (await store.get("k")).data == b"0123456789"
    assert await store.get_ranges("k", [(8, 2), (0, 1)]) == [b"89", b"0"]
    assert await store.get_range("k", 8, 2) == b"89"


async def test_a_range_of_what_is_no_plain_file_is_not_found(root: Path, store: LocalStore) -> None:
    await store.put("directory/file", b"1")
    (root / "link").symlink_to(root / "directory" / "file")
    os.mkfifo(root / "pipe")
    for key in ("link", "pipe", "directory", "directory/file/below", "absent"):
        with pytest.raises(NotFound):
            await store.get_range(key, 0, 1)
        with pytest.raises(NotFound):
            await store.get_ranges(key, [(0, 1)])


@pytest.mark.parametrize("wrong", [(11, 0), (9, 2), (-1, 1), (0, -1), (1 << 70, 1), (0, 1 << 70)])
async def test_a_range_that_is_not_there_is_refused_on_either_way(
    store: LocalStore, wrong: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("k", b"0123456789")
    assert await store.get_range("k", 10, 0) == b""
    for _ in range(2):
        with pytest.raises(InvalidRange):
            await store.get_range("k", *wrong)
        with pytest.raises(InvalidRange):
            await store.get_ranges("k", [(0, 1), wrong])
        monkeypatch.setattr(os, "preadv", _uncached)


def _uncached(*_: Any) -> int:
    raise BlockingIOError(errno.EAGAIN, "not in the cache")


async def test_store_copied_without_its_empty_directories_takes_writes(store: LocalStore, root: Path) -> None:
    await store.put("a", b"1")
    (root / ".forebay" / "temps").rmdir()
    await store.put("a", b"2")
    assert (await store.get("a")).data == b"2"


@given(st.from_regex(re.compile(r"[A-Za-z0-9._/\n\\é -]{0,24}"), fullmatch=True))
def test_a_key_that_looks_plain_is_valid(key: str) -> None:
    if _is_plain_key(key):
        assert validate_key(key) == key


@pytest.mark.parametrize("key", ["", ".", "a/..", "../a", "/a", "a/", "a//b", ".forebay/a", "a\n", "a\\b", 5])
async def test_a_range_of_a_key_that_cannot_be_is_refused(store: LocalStore, key: Any) -> None:
    with pytest.raises(UsageError):
        await store.get_range(key, 0, 1)


def test_the_longest_key_that_looks_plain_is_valid() -> None:
    longest = "/".join(["a" * 100] * 8)
    assert _is_plain_key(longest)
    assert validate_key(longest)
    assert not _is_plain_key("a" * 101)
