"""Local files under asyncio.

What may wait for the disk or for a lock runs in threads of the store: two pools, so that writers that wait
for a stripe cannot keep readers from a thread. Small reads are tried on the event loop first, see `_reads`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from forebay.errors import ForebayError, InvalidUrl, NotFound
from forebay.kit.conditions import ANY
from forebay.kit.ids import IdSource
from forebay.storage._api import (
    LIST_PAGE_KEYS,
    Buffer,
    DeleteResult,
    ObjectInfo,
    ObjectStore,
    Range,
    StoredObject,
    When,
    copy_of,
    validate_key,
    validate_page_keys,
    validate_prefix,
    validate_when,
)
from forebay.storage._handle import Handle
from forebay.storage._local._errors import reported
from forebay.storage._local._files import LocalFiles
from forebay.storage._local._mapped import mapped_ranges
from forebay.storage._local._reads import (
    WouldWait,
    cached_range,
    read_if_changed,
    read_object,
    read_ranges,
)
from forebay.storage._local._walk import walk
from forebay.storage._local._writers import Writers
from forebay.storage._source import Source

__all__ = ["LocalStore"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WRITERS_MAX = 16
"""Writes and deletes under way at once; more wait their turn."""
READERS_MAX = 8
"""Reads and listings in threads at once; more wait their turn."""
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"
_is_plain_key = re.compile(rf"(?:{_PART}/){{0,7}}{_PART}").fullmatch
"""Most keys are so plain that one look shows there is nothing wrong with them. The others are validated."""


class LocalStore(ObjectStore):
    """A directory whose files are the objects. Any number of processes may use it at once.

    Opening it writes nothing; what killed writers left is swept if that can be done without waiting.
    """

    gathers = True

    def __init__(self, root: str | os.PathLike[str], ids: IdSource | None = None) -> None:
        if "\0" in os.fspath(root):
            raise InvalidUrl(f"{os.fspath(root)!r} is no path", hint="name a directory, new or existing")
        # Not resolve(): it would follow a link that may change later.
        path = Path(os.path.abspath(os.path.expanduser(root)))  # noqa: PTH100, PTH111
        with reported(f"opening {str(path)!r}"):
            if path.exists() and not path.is_dir():
                raise InvalidUrl(
                    f"{str(path)!r} is not a directory", hint="name a directory, new or existing"
                )
        self.root = path
        self.url = str(path)
        self._files = LocalFiles(path, (ids or IdSource()).token)
        self._handle = Handle(self.url)
        self._writers = ThreadPoolExecutor(WRITERS_MAX, thread_name_prefix="forebay-write")
        self._puts = Writers(self._files, self._writers)
        self._readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="forebay-read")
        # Opening for reading must work where nothing can be changed; `sweep` reports what stands in its way.
        with suppress(ForebayError):
            self._files.sweep(wait=False)

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """Write, sync and rename in a thread, under the lock of the key."""
        validate_key(key)
        validate_when(when)
        self._check()
        return await self._puts.put(key, [copy_of(data)], when)

    async def put_parts(self, key: str, parts: Sequence[bytes | memoryview], when: When = ANY) -> str:
        """The parts are handed to the kernel as they are."""
        validate_key(key)
        validate_when(when)
        self._check()
        return await self._puts.put(key, parts, when)

    async def put_source(self, key: str, source: Source, when: When = ANY) -> str:
        """Each piece is written as it comes; what is half-written has no name yet."""
        validate_key(key)
        validate_when(when)
        self._check()
        return await self._puts.put(key, source, when)

    async def get(self, key: str) -> StoredObject:
        """Data and version of one inode."""
        return await self._read(key, read_object)

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        """Reads the version first, and the data only where it differs."""
        return await self._read(key, partial(read_if_changed, version=version))

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """All ranges from one inode."""
        return await self._read(key, partial(read_ranges, ranges=ranges))

    def views_at_hand(self, key: str, ranges: Sequence[Range]) -> Sequence[memoryview] | None:
        """Mapped where they are large and cached: see `_mapped`."""
        validate_key(key)
        self._check()
        try:
            return mapped_ranges(self._files, key, ranges)
        except WouldWait:
            return None

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """The same as `get_ranges` with one of them, on a shorter way."""
        if type(key) is not str or not _is_plain_key(key):
            validate_key(key)
        self._check()
        try:
            return cached_range(self._files, key, start, length)
        except WouldWait:
            ranges = [(start, length)]
            [data] = await self._run(self._readers, self._ranges, key, ranges)
            return data

    def _ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return read_ranges(self._files, key, False, ranges=ranges)

    async def head(self, key: str) -> ObjectInfo:
        """Size, version and time of one inode."""
        validate_key(key)
        self._check()
        with self._files.opened(key) as found:
            return found.info()

    def list_pages(
        self, prefix: str = "", *, after: str = "", page_keys: int = LIST_PAGE_KEYS
    ) -> AsyncIterator[list[ObjectInfo]]:
        """Walks the tree as pages are asked for."""
        self._check()
        validate_prefix(prefix)
        validate_page_keys(page_keys)
        return self._pages(walk(self.root, prefix, after), page_keys)

    async def _pages(self, keys: Iterator[str], page_keys: int) -> AsyncIterator[list[ObjectInfo]]:
        while page := await self._run(self._readers, self._page, keys, page_keys):
            yield page

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Delete under the locks of the keys, with one sync per directory."""
        for key in keys:
            validate_key(key)
        return await self._run(self._writers, self._files.delete, list(keys))

    async def sweep(self) -> int:
        """Remove what killed writers left behind; how many files it was. Waits for live writers."""
        return await self._run(self._writers, self._sweep)

    async def close(self) -> None:
        """Wait for writes under way, then let go of the threads."""
        self._handle.close()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()

    def _sweep(self) -> int:
        return self._files.sweep(wait=True)

    async def _read(self, key: str, function: Callable[[LocalFiles, str, bool], T]) -> T:
        validate_key(key)
        self._check()
        try:
            return function(self._files, key, True)
        except WouldWait:
            return await self._run(self._readers, function, self._files, key, False)

    def _page(self, keys: Iterator[str], page_keys: int) -> list[ObjectInfo]:
        with reported(f"listing {self.url!r}"):
            page: list[ObjectInfo] = []
            while len(page) < page_keys and (wanted := list(islice(keys, page_keys - len(page)))):
                for key in wanted:
                    with suppress(NotFound), self._files.opened(key) as found:
                        page.append(found.info())
            return page

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        self._check()
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    def _check(self) -> None:
        self._handle.check()
