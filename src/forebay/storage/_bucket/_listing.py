"""Listings in byte order, also where the server's are not.

The providers' own services list in byte order, and their listings are passed on as they come. Other servers
may not: SeaweedFS lists directory by directory, so `a/1` comes before `a-b`. Wherever the URL or the
environment names an endpoint the whole listing is collected first, up to a limit, and sorted if need be.

obstore matches prefixes by whole parts (`l/00` does not find `l/001`), so the directory of the prefix is
listed and the rest is filtered here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from forebay.errors import LimitExceeded, StorageDamaged
from forebay.storage._api import ObjectInfo
from forebay.storage._bucket._url import Client

if TYPE_CHECKING:
    from obstore import ObjectMeta  # A type that exists in the stubs alone.

__all__ = ["info_of", "listed", "listed_and_sorted"]

SORTED_KEYS_MAX = 1_000_000
"""Most keys of one listing that has to be collected before it can be handed out. About 0.4 GB."""
CHUNK_KEYS = 1000
"""Keys asked for at once; a page of S3."""


def info_of(meta: ObjectMeta, *, by_generation: bool) -> ObjectInfo:
    """What obstore tells of an object, in our words."""
    version = (by_generation and meta["version"]) or meta["e_tag"] or ""
    return ObjectInfo(meta["path"], meta["size"], version, int(meta["last_modified"].timestamp() * 1000))


async def listed(
    client: Client, prefix: str, after: str, *, by_generation: bool
) -> AsyncIterator[ObjectInfo]:
    """Pass on what the server lists, which must be in order."""
    last = ""
    directory = prefix.rpartition("/")[0] or None
    async for chunk in client.list(directory, offset=after or None, chunk_size=CHUNK_KEYS):
        for meta in chunk:
            if not meta["path"].startswith(prefix) or meta["path"] <= after:
                continue
            if meta["path"] <= last:
                raise StorageDamaged(
                    f"the server lists {meta['path']!r} after {last!r}",
                    hint="name the server by the endpoint option of the URL; then listings are sorted",
                )
            last = meta["path"]
            yield info_of(meta, by_generation=by_generation)


async def listed_and_sorted(
    client: Client, prefix: str, after: str, *, by_generation: bool
) -> list[ObjectInfo]:
    """Collect everything, then sort it if the server did not."""
    found: list[ObjectInfo] = []
    in_order = True
    directory = prefix.rpartition("/")[0] or None
    async for chunk in client.list(directory, chunk_size=CHUNK_KEYS):
        for meta in chunk:
            if meta["path"].startswith(prefix) and meta["path"] > after:
                in_order = in_order and (not found or found[-1].key < meta["path"])
                found.append(info_of(meta, by_generation=by_generation))
        if len(found) > SORTED_KEYS_MAX:
            raise LimitExceeded(
                "keys in one listing", limit=SORTED_KEYS_MAX, actual=len(found), hint="list a longer prefix"
            )
    if not in_order:
        found.sort(key=lambda info: info.key)
    return found
