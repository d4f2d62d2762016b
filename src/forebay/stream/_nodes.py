"""Roots and groups in the bucket: written once, checked by their uid at every fetch, groups held in a cache.

Groups are immutable and small, so the last ones used are held: a reader that walks through a group, and a
retention that comes back to the leading one, ask for it once. Readers share the cache of their blocks for it;
a writer has a small one of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.errors import NotFound, PreconditionFailed
from forebay.formats import stream_manifest as fmt
from forebay.formats.stream_manifest import FRAGMENT, Entries
from forebay.stream._cache import BlockCache, store_name
from forebay.stream._calls import Calls
from forebay.stream._errors import RootMissing
from forebay.stream._keys import StreamKeys
from forebay.stream._manifest import Manifest

__all__ = ["NodeStore"]

OWN_CACHE_BYTES = 8 * 1024 * 1024
"""Budget of the cache of a tree that shares none: some 256 groups at the default branching."""
UID_DRAWS_MAX = 16
"""How often a uid is drawn anew where one of the same content exists already."""


class NodeStore:
    """The nodes of one stream's manifest tree."""

    def __init__(self, calls: Calls, keys: StreamKeys, cache: BlockCache | None = None) -> None:
        self._calls = calls
        self._keys = keys
        self._cache = cache or BlockCache(OWN_CACHE_BYTES)

    async def root(self, uid: int) -> Manifest:
        """The root with this uid. Raises `NotFound`, or `Corrupt` where it is not what it was."""
        key = self._keys.root(uid)
        data = await self._calls.get(key)
        fmt.check_uid(data, uid, key)
        return Manifest.decode(data)

    async def put_root(self, manifest: Manifest) -> int:
        """Write a root under a uid of its own."""
        data = manifest.encode()
        Manifest.decode(data)  # What readers would refuse is never written.
        return await self._put(data, self._keys.root)

    def group_key(self, entry: Entries) -> str:
        """The key of the group that a single entry stands for."""
        kind, uid = int(fmt.kinds_of(entry)[0]), int(fmt.uids_of(entry)[0])
        return self._keys.group(kind, int(entry["offset"][0]), uid)

    async def children(self, entry: Entries) -> Entries:
        """The entries below a single entry that stands for a group."""
        key, kind, uid = self.group_key(entry), int(fmt.kinds_of(entry)[0]), int(fmt.uids_of(entry)[0])

        async def fetch() -> bytes:
            data = await self._calls.get(key)
            fmt.check_uid(data, uid, key)
            return data

        data = await self._cache.get((f"{store_name(self._calls.store)}/{key}", 0, 0), fetch)
        return fmt.decode_group(data, kind)

    async def put_group(self, kind: int, entries: Entries) -> Entries:
        """Write a group of `kind` over these entries; the entry that stands for it."""
        data = fmt.encode_group(kind, entries)
        offset = int(entries["offset"][0])
        uid = await self._put(data, lambda uid: self._keys.group(kind, offset, uid))
        return fmt.group_entry(kind, entries, uid)

    async def _put(self, data: bytes, key_of: Callable[[int], str]) -> int:
        for _ in range(UID_DRAWS_MAX):
            uid = fmt.make_uid(data, self._calls.random.getrandbits(fmt.UID_RANDOM_BITS))
            try:
                await self._calls.put_new(key_of(uid), data)
            except PreconditionFailed:
                continue
            return uid
        raise RootMissing(self._keys.stream, key_of(uid), "no free uid was found")

    async def first_fragment(self, entries: Entries) -> Entries:
        """The leftmost fragment below these entries, as a single entry."""
        while int(fmt.kinds_of(entries[:1])[0]) != FRAGMENT:
            entries = await self.children(entries[:1])
        return entries[:1]

    async def last_fragment(self, entries: Entries) -> Entries:
        """The rightmost fragment below these entries, as a single entry."""
        while int(fmt.kinds_of(entries[-1:])[0]) != FRAGMENT:
            entries = await self.children(entries[-1:])
        return entries[-1:]

    async def root_or_error(self, uid: int) -> Manifest:
        """The root; `RootMissing` where it is not there, since a record names it."""
        try:
            return await self.root(uid)
        except NotFound as error:
            raise RootMissing(self._keys.stream, self._keys.root(uid), "it does not exist") from error
