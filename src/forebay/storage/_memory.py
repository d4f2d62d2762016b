"""Objects in a dictionary: the store of tests, of demonstrations and of the simulated world.

No operation awaits anything real, so each one is a single step of the event loop: atomic without a lock and
the same in every run. Versions are a counter behind a tag of the store, so a seeded `IdSource` gives the
same versions every time, and a version of one store is never mistaken for one of another.

`memory://name` is shared by everything in the process that opens the same name; the objects then live in a
table of this module. Plain `memory://` and `MemoryStore()` begin empty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.errors import Closed, NotFound, PreconditionFailed
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.conditions import ABSENT, ANY
from forebay.kit.ids import IdSource
from forebay.storage._api import (
    LIST_PAGE_KEYS,
    Buffer,
    DeleteResult,
    KeyConflict,
    ObjectInfo,
    ObjectStore,
    Range,
    StoredObject,
    When,
    copy_of,
    parents_of,
    validate_key,
    validate_page_keys,
    validate_prefix,
    validate_range,
    validate_when,
)

__all__ = ["MemoryStore"]

_TAG_LENGTH = 8


class _Entry(msgspec.Struct, frozen=True, gc=False):
    data: bytes
    version: str
    modified_ms: int


@dataclass(slots=True)
class _Objects:
    """What several handles of one name share."""

    tag: str
    entries: dict[str, _Entry] = field(default_factory=dict)
    sorted_keys: list[str] | None = None
    """Made by the first listing after a change: to keep them sorted at every put would be to move half of
    them each time. Python orders text by code point, which is the byte order of UTF-8."""
    directories: dict[str, int] = field(default_factory=dict)
    """How many keys lie below each directory."""
    writes: int = 0

    def set(self, key: str, data: bytes, now_ms: int) -> str:
        if key not in self.entries:
            self._add(key)
        self.writes += 1
        version = f"{self.tag}-{self.writes}"
        self.entries[key] = _Entry(data, version, now_ms)
        return version

    def remove(self, key: str) -> None:
        if self.entries.pop(key, None) is None:
            return
        self.sorted_keys = None
        for parent in parents_of(key):
            self.directories[parent] -= 1
            if not self.directories[parent]:
                del self.directories[parent]

    def in_order(self) -> list[str]:
        if self.sorted_keys is None:
            self.sorted_keys = sorted(self.entries)
        return self.sorted_keys

    def _add(self, key: str) -> None:
        """Make room for a new key; raises where it and another one could not both be files."""
        if key in self.directories:
            raise KeyConflict(key, "it is a directory of other keys")
        parents = parents_of(key)
        for parent in parents:
            if parent in self.entries:
                raise KeyConflict(key, f"{parent!r} is an object, so nothing can lie below it")
        for parent in parents:
            self.directories[parent] = self.directories.get(parent, 0) + 1
        self.sorted_keys = None


_shared: dict[str, _Objects] = {}


class MemoryStore(ObjectStore):
    """A store that lives as long as its process. With a `name`, every handle of that name sees the same."""

    def __init__(self, clock: Clock | None = None, ids: IdSource | None = None, *, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._clock = clock or SystemClock()
        self._closed = False
        tag = (ids or IdSource()).token()[:_TAG_LENGTH]
        self._objects = _shared.setdefault(name, _Objects(tag)) if name else _Objects(tag)

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """Store a copy of `data`."""
        self._check_open()
        validate_key(key)
        validate_when(when)
        entry = self._objects.entries.get(key)
        found = entry.version if entry else ABSENT
        if when is not ANY and when != found:
            raise PreconditionFailed(key, expected=when, actual=found)
        return self._objects.set(key, copy_of(data), self._clock.now_ms())

    async def get(self, key: str) -> StoredObject:
        """The whole object."""
        entry = self._entry(key)
        return StoredObject(key, entry.data, entry.version)

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        """The object unless it is still at `version`."""
        found = await self.get(key)
        return None if found.version == version else found

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Copies of the ranges asked for."""
        data = self._entry(key).data
        for start, length in ranges:
            validate_range(key, start, length, len(data))
        return [data[start : start + length] for start, length in ranges]

    async def head(self, key: str) -> ObjectInfo:
        """Size, version and time."""
        return _info(key, self._entry(key))

    def list_pages(
        self, prefix: str = "", *, after: str = "", page_keys: int = LIST_PAGE_KEYS
    ) -> AsyncIterator[list[ObjectInfo]]:
        """Pages of what is there when each of them is made."""
        self._check_open()
        validate_prefix(prefix)
        validate_page_keys(page_keys)
        return self._pages(prefix, after, page_keys)

    async def _pages(self, prefix: str, after: str, page_keys: int) -> AsyncIterator[list[ObjectInfo]]:
        while True:
            self._check_open()
            keys = self._objects.in_order()
            first = max(bisect_left(keys, prefix), bisect_right(keys, after) if after else 0)
            found = [key for key in keys[first : first + page_keys] if key.startswith(prefix)]
            if found:
                after = found[-1]
                yield [_info(key, self._objects.entries[key]) for key in found]
            if len(found) < page_keys:
                return

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Delete many objects in one step."""
        self._check_open()
        for key in keys:
            validate_key(key)
        for key in keys:
            self._objects.remove(key)
        return [DeleteResult(key) for key in keys]

    async def close(self) -> None:
        """Refuse further use of this handle. The objects stay for the other handles of the same name."""
        self._closed = True

    def _entry(self, key: str) -> _Entry:
        self._check_open()
        entry = self._objects.entries.get(validate_key(key))
        if entry is None:
            raise NotFound(key)
        return entry

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store {self.url} was closed", hint="open it again with open_store")


def _info(key: str, entry: _Entry) -> ObjectInfo:
    return ObjectInfo(key, len(entry.data), entry.version, entry.modified_ms)
