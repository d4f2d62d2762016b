"""Orphans: objects of a stream that nothing names any more, found by reachability and removed by age.

Marked as reachable: the current root, every group below it, every fragment in those. An object is an orphan
if it is not marked, is of a form we know, is older than the grace period by the store's own clock, and

* a root: always; a group: always;
* a fragment, or its filters: if it begins below the next offset. One beyond it may be on its way into the
  manifest: a writer finds it by the chain of trailers, or adopts it when it wants the same key.

Why a mark cannot go stale: keys of roots and groups are never used again, and a fragment below the next
offset that is not reachable never becomes so, unless the tier was cut back to a common point. The record
counts those cuts as its generation, which is read again before each page of deletes.

A stream whose tombstone is there loses everything but the tombstone, so writes that landed after its deletion
go too. A stream without any record loses nothing: that a record is missing proves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import NotFound
from forebay.formats import stream_manifest as fmt
from forebay.formats.stream_manifest import FRAGMENT, Entries
from forebay.storage import ObjectInfo
from forebay.stream._errors import RootMissing, StreamDeleted, StreamMissing
from forebay.stream._view import RemoteView

__all__ = ["Collection", "collect"]

GRACE_MS_DEFAULT = 24 * 3_600_000
DELETE_PAGE_KEYS = 1000


@dataclass(slots=True)
class Collection:
    """What a collection found and did."""

    stream: str
    seen: int = 0
    """Objects listed."""
    orphans: list[str] = field(default_factory=list)
    removed: int = 0
    unknown: list[str] = field(default_factory=list)
    """Keys of no form we know; they are left alone."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


async def collect(
    view: RemoteView, *, now_ms: int, grace_ms: int = GRACE_MS_DEFAULT, dry_run: bool = True
) -> Collection:
    """Find the orphans of one stream and, unless it is a dry run, remove them."""
    found = Collection(view.keys.stream)
    reachable: set[str] = set()
    try:
        await view.refresh()
    except StreamDeleted:
        reachable, next_offset, generation = {view.keys.current}, None, None
    except StreamMissing:
        return found
    else:
        assert view.held is not None
        reachable = await _mark(view)
        next_offset, generation = view.manifest.next_offset, view.held.head.generation
    async for info in _listing(view):
        found.seen += 1
        if info.key in reachable or info.last_modified_ms > now_ms - grace_ms:
            continue
        name = view.keys.parse(info.key)
        if name is None:
            found.unknown.append(info.key)
        elif (
            next_offset is None
            or name.what in ("root", "group")
            or (name.what in ("fragment", "filters") and name.offset < next_offset)
        ):
            found.orphans.append(info.key)
    if not dry_run:
        await _sweep(view, found, generation)
    return found


async def _listing(view: RemoteView) -> AsyncIterator[ObjectInfo]:
    async for info in view.calls.store.list(view.keys.prefix):
        yield info


async def _mark(view: RemoteView) -> set[str]:
    """Every key that the current root leads to. A node that cannot be read ends the collection."""
    assert view.held is not None
    marked = {view.keys.current}
    if view.held.head.uid:
        marked.add(view.keys.root(view.held.head.root))
    waiting: list[Entries] = [view.manifest.entries]
    while waiting:
        entries = waiting.pop()
        if len(entries) == 0:
            continue
        fragments = fmt.kinds_of(entries) == FRAGMENT
        for offset in entries["offset"][fragments].tolist():
            marked |= {view.keys.fragment(offset), view.keys.filters(offset)}
        groups = entries[~fragments]
        for number in range(len(groups)):
            entry = groups[number : number + 1]
            marked.add(view.nodes.group_key(entry))
            try:
                waiting.append(await view.nodes.children(entry))
            except NotFound as error:
                raise RootMissing(view.keys.stream, error.key, "retention was faster: run again") from error
    return marked


async def _sweep(view: RemoteView, found: Collection, generation: int | None) -> None:
    for at in range(0, len(found.orphans), DELETE_PAGE_KEYS):
        if generation is not None:
            await view.refresh()
            assert view.held is not None
            if view.held.head.generation != generation:
                return
        page = found.orphans[at : at + DELETE_PAGE_KEYS]
        await view.calls.delete(page)
        found.removed += len(page)
