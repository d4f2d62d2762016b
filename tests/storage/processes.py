"""What spawned processes do in the tests of local files. Each function is the body of one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, NotFound, PreconditionFailed
from forebay.storage import ABSENT, ObjectStore, open_store
from forebay.storage._api import When

UNPRIVILEGED = 65534
"""The uid of `nobody`: a reader that owns nothing."""


@contextlib.contextmanager
def running(context: SpawnContext, target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """A process that does not outlive the block."""
    process = context.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


async def add_one(store: ObjectStore, key: str, name: str) -> int:
    """Count up by compare-and-set; the count that was written. Other writers' names stand in the body."""
    when: When
    while True:
        try:
            found = await store.get(key)
            count, when = int(found.data.split()[0]) + 1, found.version
        except NotFound:
            count, when = 1, ABSENT
        try:
            await store.put(key, f"{count} {name} ".encode() + b"." * (count % 5000), when)
            return count
        except PreconditionFailed:
            continue


def count_up(root: Path, key: str, name: str, turns: int) -> None:
    """Add `turns` to the counter."""

    async def main() -> None:
        async with open_store(root) as store:
            for _ in range(turns):
                await add_one(store, key, name)

    asyncio.run(main())


def count_until_killed(root: Path, name: str, report: Connection) -> None:
    """Count up for ever; say before and after each attempt."""

    async def main() -> None:
        store = open_store(root)
        while True:
            report.send("try")
            await add_one(store, "counter", name)
            report.send("done")

    asyncio.run(main())


def put_with_small_files_only(root: Path, limit: int, report: Connection) -> None:
    """Write under a limit of file size, as if the disk were full."""

    async def main() -> None:
        async with open_store(root) as store:
            report.send(await outcome(store.put("dir/large", b"x" * (limit * 2))))
            report.send(await outcome(store.put("kept", b"y" * (limit * 2))))
            report.send(await outcome(store.put("small", b"fits")))

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    asyncio.run(main())


def use_without_rights(root: Path, report: Connection) -> None:
    """Read, then try to change, as a user who may only read."""
    _drop_rights()

    async def main() -> None:
        async with open_store(root) as store:
            report.send((await store.get("a/b")).data)
            report.send([info.key async for info in store.list()])
            report.send(await outcome(store.put("a/new", b"")))
            report.send(await outcome(store.put("a/b", b"")))
            report.send([repr(type(result.error)) for result in await store.delete(["a/b"])])

    asyncio.run(main())


def open_without_rights(root: Path, report: Connection) -> None:
    """Open a store below a directory that only its owner may enter."""
    _drop_rights()
    try:
        open_store(root)
    except ForebayError as error:
        report.send((type(error).__name__, error.message, error.hint))


def _drop_rights() -> None:
    os.setgroups([])
    os.setgid(UNPRIVILEGED)
    os.setuid(UNPRIVILEGED)


async def outcome(call: Any) -> tuple[str, str, str]:
    """Name, message and hint of the error, or `done`."""
    try:
        await call
    except ForebayError as error:
        return type(error).__name__, error.message, error.hint
    return "done", "", ""
