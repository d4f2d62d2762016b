"""Local files shared by processes that are killed, that have no room, or that have no rights."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.storage.processes import (
    count_until_killed,
    count_up,
    open_without_rights,
    put_with_small_files_only,
    running,
    use_without_rights,
)

from forebay.errors import StorageFull, Unsupported
from forebay.storage import LocalStore, open_store

SPAWN = multiprocessing.get_context("spawn")
WRITERS = 4
"""Processes at once; each of them is killed once per round."""
ROUNDS = 6


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that every user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="forebay-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@contextmanager
def report_of(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """What a process has to say, which gets the sending end as its last argument."""
    reader, writer = SPAWN.Pipe(duplex=False)
    with reader, running(SPAWN, target, *arguments, writer):
        writer.close()
        yield reader


def leftovers(root: Path) -> list[Path]:
    return list((root / ".forebay" / "temps").iterdir())


async def test_processes_that_count_on_one_key_lose_no_update(tmp_path: Path) -> None:
    processes, turns = 4, 25
    with ExitStack() as stack:
        workers = [
            stack.enter_context(running(SPAWN, count_up, tmp_path, "n/count", f"p{number}", turns))
            for number in range(processes)
        ]
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * processes
    async with open_store(tmp_path) as store:
        assert int((await store.get("n/count")).data.split()[0]) == processes * turns
    assert leftovers(tmp_path) == []


def run_and_kill(root: Path, moments: random.Random) -> list[str]:
    """Let writers count until each was killed at some moment; everything they reported."""
    reports: list[str] = []
    with ExitStack() as stack:
        lives = []
        for number in range(WRITERS):
            reader, writer = SPAWN.Pipe(duplex=False)
            stack.enter_context(reader)
            process = stack.enter_context(running(SPAWN, count_until_killed, root, f"p{number}", writer))
            writer.close()
            lives.append((process, reader))
        for process, reader in lives:
            reports += [reader.recv() for _ in range(moments.randrange(1, 20))]
            process.kill()
            process.join()
        for _, reader in lives:
            with suppress(EOFError):
                while True:
                    reports.append(reader.recv())
    return reports


async def test_kill_at_any_moment_leaves_the_old_or_the_new_object(tmp_path: Path) -> None:
    """A life ends by SIGKILL after a random number of reports, so anywhere in the write that follows."""
    moments = random.Random()
    reports: list[str] = []
    async with LocalStore(tmp_path) as store:
        for _ in range(ROUNDS):
            reports += run_and_kill(tmp_path, moments)
            found = (await store.get("counter")).data
            count, name, dots = found.split(b" ", 2)
            assert dots == b"." * (int(count) % 5000)
            assert name in {b"p%d" % number for number in range(WRITERS)}
            assert 0 < reports.count("done") <= int(count) <= reports.count("try")
        await store.sweep()
        assert leftovers(tmp_path) == []
        assert [info.key async for info in store.list()] == ["counter"]


async def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        version = await store.put("kept", b"old")
        with report_of(put_with_small_files_only, tmp_path, 64 * 1024) as reader:
            for key in ("dir/large", "kept"):
                name, message, hint = reader.recv()
                assert name == "StorageFull"
                assert key in message
                assert "space" in hint
            assert reader.recv()[0] == "done"
        assert (await store.get("kept")).version == version
        assert [info.key async for info in store.list()] == ["kept", "small"]
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "dir").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte, where one may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,nr_inodes=120", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def test_a_disk_that_is_really_full_can_be_emptied_again(small_disk: Path) -> None:
    async with LocalStore(small_disk / "data") as store:
        try:
            await store.put("first", b"1")
        except Unsupported as error:
            pytest.skip(f"this kernel's tmpfs keeps no attributes: {error}")
        with pytest.raises(StorageFull):
            await store.put("large", b"x" * 600_000)
        written = []
        with pytest.raises(StorageFull):
            for number in range(200):
                await store.put(f"d{number}/k", b"x" * 3000)
                written.append(f"d{number}/k")
        assert [info.key async for info in store.list()] == sorted([*written, "first"])
        assert leftovers(small_disk / "data") == []
        results = await store.delete(written)
        assert [result.error for result in results] == [None] * len(written)
        assert len((await store.get("first")).data) == 1
        await store.put("large", b"x" * 300_000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_directory_without_write_permission_can_be_read(public_directory: Path) -> None:
    root = public_directory / "data"
    async with open_store(root) as store:
        await store.put("a/b", b"1")
    with report_of(use_without_rights, root) as reader:
        assert reader.recv() == b"1"
        assert reader.recv() == ["a/b"]
        for _ in range(2):
            name, message, hint = reader.recv()
            assert name == "AccessDenied"
            assert "writing 'a/" in message
            assert "mode" in hint
        assert "AccessDenied" in reader.recv()[0]
    async with open_store(root) as store:
        assert (await store.get("a/b")).data == b"1"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_directory_that_cannot_be_reached_is_denied_at_open(public_directory: Path) -> None:
    closed = public_directory / "closed"
    closed.mkdir(mode=0o700)
    with report_of(open_without_rights, closed / "data") as reader:
        name, message, hint = reader.recv()
        assert name == "AccessDenied"
        assert "closed" in message
        assert hint
