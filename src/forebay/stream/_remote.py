"""The remote tier as its writer sees it: resolve, append, persist, retain.

State: `held`, the record as last read or swapped; `persisted`, the manifest of its root; `pending`, fragments
that are in the bucket and not yet in a root. What readers, trimming and deletion may rely on is `persisted`;
nothing is ever concluded from `pending`.

Order of durability, which is also the list of crash points:

    fragment PUT | group PUTs | root PUT | swap of the record | copy of the record | deletes

A crash before the swap leaves objects that nobody names: fragments are found again by the chain of trailers,
groups and roots are collected as orphans. A crash after it leaves a stale copy, which the next swap renews,
and objects to delete, which are collected. The swap is the only step that changes what is true.

One mutator at a time: persist and retention share a lock. Appends only add to `pending`, so they may happen
meanwhile; how many of them a root took is remembered, and the rest stays pending.

Two writers: the swap compares the version, and the epoch of the record is never above the writer's own. A
writer that lost resolves again if its epoch is not lower, and stands down if it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from forebay.coordination import Coordinator
from forebay.errors import ForebayError, LimitExceeded, NotFound, PreconditionFailed, Unavailable
from forebay.formats import stream_manifest as fmt
from forebay.formats.stream_manifest import FRAGMENT, Entries, uid_text
from forebay.kit.clock import Clock
from forebay.storage import ObjectStore
from forebay.stream._calls import Calls
from forebay.stream._config import RetentionPolicy, TierConfig
from forebay.stream._errors import Deposed, RootMissing, StreamDeleted
from forebay.stream._fragments import FragmentStore
from forebay.stream._keys import StreamKeys
from forebay.stream._lookup import Lookup
from forebay.stream._manifest import EMPTY, FragmentInfo, Manifest, next_group
from forebay.stream._nodes import NodeStore
from forebay.stream._pointer import BucketPointer, CoordinatorPointer, Head, Held, Pointer, read_current
from forebay.stream._retention import Retention

__all__ = ["RemoteTier"]

RESOLVE_ATTEMPTS_MAX = 10
"""How often a root that vanished under the reader is looked up anew: its writer may swap meanwhile."""
GAPS_MAX = 10_000
"""Most declared gaps of a stream."""


class RemoteTier:
    """One stream's remote tier, held by one writer."""

    def __init__(
        self,
        stream: str,
        store: ObjectStore,
        *,
        coordinator: Coordinator | None = None,
        epoch: int,
        config: TierConfig,
        clock: Clock,
        randomness: random.Random,
    ) -> None:
        self.keys = StreamKeys(stream)
        self.epoch = epoch
        self.calls = Calls(
            store,
            clock=clock,
            randomness=randomness,
            policy=config.retry,
            timeout_ms=config.request_timeout_ms,
        )
        self.fragments = FragmentStore(self.calls, self.keys)
        self.nodes = NodeStore(self.calls, self.keys)
        self.pointer: Pointer = (
            BucketPointer(self.calls, self.keys)
            if coordinator is None
            else CoordinatorPointer(self.calls, self.keys, coordinator)
        )
        self.held: Held | None = None
        self.persisted: Manifest = EMPTY
        self.pending: list[FragmentInfo] = []
        self._gaps: tuple[tuple[int, int], ...] = ()
        self._config = config
        self._clock = clock
        self._turn = asyncio.Lock()
        self.root_writes = 0
        """Roots swapped in."""

    @property
    def next_offset(self) -> int:
        """Where the next fragment begins; 0 for a tier that has none yet."""
        return self.pending[-1].next_offset if self.pending else self.persisted.next_offset

    @property
    def empty(self) -> bool:
        """Whether no fragment is known."""
        return self.persisted.empty and not self.pending

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Offsets that are declared as lost."""
        return self._gaps

    async def resolve(self, local_first: int | None = None) -> None:
        """Learn the truth: the record, its root, and the fragments that no root names yet.

        Before there is any root, the chain begins with the first fragment in the bucket, unless that is above
        `local_first`, where the local log begins: then an upload before it is still to be made up for.

        Raises `Deposed`, `StreamDeleted`, or `RootMissing`; a root that cannot be read is never taken as
        empty.
        """
        self.pending = []
        for attempt in range(RESOLVE_ATTEMPTS_MAX):
            held = await self._record()
            if held is not None and held.head.epoch > self.epoch:
                raise Deposed(self.keys.stream, own_epoch=self.epoch, epoch=held.head.epoch)
            try:
                manifest = EMPTY
                if held is not None and held.head.uid:
                    manifest = await self.nodes.root_or_error(held.head.root)
            except RootMissing:
                # Its writer may have swapped in another one between the two reads.
                if attempt + 1 == RESOLVE_ATTEMPTS_MAX:
                    raise
                await self._clock.sleep(self._config.retry.wait_s(attempt + 1, self.calls.random))
                continue
            break
        self.held, self.persisted = held or await self._anchor(), manifest
        self._gaps = held.head.gaps if held else ()
        if not manifest.empty:
            self.pending = await self.fragments.chain(manifest.next_offset)
        else:
            first = await self.fragments.first()
            if first is not None and (local_first is None or first <= local_first):
                self.pending = await self.fragments.chain(first)

    async def _anchor(self) -> Held:
        """A first record without root, before the first object: collection knows the stream from then on."""
        head = Head(epoch=self.epoch, revision=1, authority=self.pointer.authority)
        held = await self.pointer.swap(None, head)
        await self.pointer.publish(held)
        return held

    async def _record(self) -> Held | None:
        held = await self.pointer.read()
        if held is None and self.pointer.authority == "coordinator":
            held = await self._recovered_record()
        if held is not None and held.head.deleted:
            raise StreamDeleted(self.keys.stream)
        return held

    async def _recovered_record(self) -> Held | None:
        """A record that is gone from the coordinator while its copy lives was lost, not removed."""
        copy = await read_current(self.calls, self.keys)
        if copy is None:
            return None
        if copy.head.deleted:
            raise StreamDeleted(self.keys.stream)
        head = _head_as(copy.head, revision=copy.head.revision + 1, authority="coordinator")
        return await self.pointer.swap(None, head)

    def append(self, fragments: Sequence[FragmentInfo]) -> None:
        """Take fragments that are durable in the bucket, in order and without a gap."""
        for fragment in fragments:
            expected = self.next_offset
            if self._gaps and self._gaps[-1][0] == expected:
                expected = self._gaps[-1][1]
            if not self.empty and fragment.first_offset != expected:
                raise ValueError(f"{fragment} does not follow offset {expected}")
            self.pending.append(fragment)

    def declare_gap(self, offset: int) -> None:
        """Say that nothing between the end of the tier and `offset` will ever come."""
        start = self.next_offset
        if self.empty or offset <= start:
            raise ValueError(f"no gap can be declared from {start} to {offset}")
        if len(self._gaps) >= GAPS_MAX:
            raise LimitExceeded(
                "GAPS_MAX",
                limit=GAPS_MAX,
                actual=len(self._gaps) + 1,
                hint="let the log keep its segments until they are tiered; retention drops old gaps",
            )
        self._gaps = (*[gap for gap in self._gaps if gap[0] != start], (start, offset))

    async def persist(self) -> bool:
        """Make the pending fragments part of the root. False where there was nothing to do."""
        async with self._turn:
            assert self.held is not None
            if not self.pending and self._gaps == self.held.head.gaps:
                return False
            taken = list(self.pending)
            balanced = await self._rebalance(self._grown(taken))
            await self._swap_in(balanced, taken=len(taken))
            return True

    def _grown(self, fragments: Sequence[FragmentInfo]) -> Manifest:
        return self.persisted.append(fragments)

    async def _rebalance(self, manifest: Manifest) -> Manifest:
        """Put runs of M entries into groups until the root is small. One that fails waits for next time."""
        branching = self._config.branching
        try:
            while (found := next_group(manifest.entries, branching)) is not None:
                start, kind = found
                entry = await self.nodes.put_group(kind, manifest.entries[start : start + branching])
                manifest = manifest.grouped(start, branching, entry)
        except Unavailable:
            return manifest
        return manifest

    async def _swap_in(
        self, manifest: Manifest, *, taken: int, retired: Sequence[str] = (), generations: int = 0
    ) -> None:
        before = self.held
        # What lies before the stream's beginning is gone like everything there, and not worth telling.
        self._gaps = tuple(gap for gap in self._gaps if gap[1] > manifest.first_offset)
        uid = await self.nodes.put_root(manifest)
        head = Head(
            uid=uid_text(uid),
            epoch=self.epoch,
            revision=1 + (before.head.revision if before else 0),
            generation=generations + (before.head.generation if before else 0),
            gaps=self._gaps,
            authority=self.pointer.authority,
        )
        try:
            self.held = await self.pointer.swap(before, head)
        except PreconditionFailed:
            await self._lost_race()
            raise
        self.persisted = manifest
        self.pending = self.pending[taken:]
        self.root_writes += 1
        await self._after_swap(before, uid, retired)

    async def _after_swap(self, before: Held | None, uid: int, retired: Sequence[str]) -> None:
        """Nothing here may undo or hide the swap: what fails is left for the next one or for collection."""
        assert self.held is not None
        try:
            await self.pointer.publish(self.held)
            old = [self.keys.root(before.head.root)] if before and before.head.uid else []
            await self.calls.delete([key for key in old if key != self.keys.root(uid)] + list(retired))
        except ForebayError:
            return

    async def _lost_race(self) -> None:
        """Somebody else swapped: stand down if that is a newer writer, or learn what is true now."""
        now = await self.pointer.read()
        if now is None and self.held is not None:
            raise StreamDeleted(self.keys.stream)
        if now is not None and now.head.deleted:
            raise StreamDeleted(self.keys.stream)
        if now is not None and now.head.epoch > self.epoch:
            raise Deposed(self.keys.stream, own_epoch=self.epoch, epoch=now.head.epoch)

    async def retain(self, policy: RetentionPolicy) -> int:
        """Remove what the policy no longer keeps; the number of fragments removed. No change, no root."""
        if policy.unlimited:
            return 0
        async with self._turn:
            work = Retention(self.nodes, self.keys, policy, self._clock.now_ms())
            trimmed = await work.trim(self.persisted)
            if trimmed is None:
                return 0
            await self._swap_in(trimmed, taken=0, retired=work.retired)
            return work.fragments

    async def cut_back(self, next_offset: int) -> None:
        """Drop every fragment that ends behind `next_offset`: the one way in which the next offset falls.

        It is recorded as a new generation. The objects go after the swap, so that their keys are free again.
        """
        async with self._turn:
            assert self.held is not None
            lookup = Lookup(self.nodes, self.fragments)
            self.pending = []
            dropped = [ref async for ref in lookup.from_offset(self.persisted, next_offset)]
            dropped = [ref for ref in dropped if ref.offset >= next_offset]
            loose = await self.fragments.chain(self.persisted.next_offset)
            manifest = replace(
                self.persisted,
                next_offset=next_offset,
                total_bytes=self.persisted.total_bytes - sum([ref.data_bytes for ref in dropped]),
                entries=await self._entries_below(self.persisted.entries, next_offset),
            )
            self._gaps = tuple(gap for gap in self._gaps if gap[1] <= next_offset)
            offsets = [ref.offset for ref in dropped] + [info.first_offset for info in loose]
            await self._swap_in(
                manifest if len(manifest.entries) else EMPTY,
                taken=0,
                # Filters first: where a fragment's key is free again, no older filters are left beside it.
                retired=[
                    key(offset) for key in (self.keys.filters, self.keys.fragment) for offset in offsets
                ],
                generations=1,
            )

    async def _entries_below(self, entries: Entries, next_offset: int) -> Entries:
        """The entries below an offset; a group that lies across it is replaced by its children below."""
        kept = entries[entries["offset"] < next_offset]
        if len(kept) == 0 or int(fmt.kinds_of(kept[-1:])[0]) == FRAGMENT:
            return kept
        children = await self._entries_below(await self.nodes.children(kept[-1:]), next_offset)
        return fmt.join_entries(kept[:-1], children)

    async def delete_stream(self) -> None:
        """Mark the stream as deleted, then remove its objects. Late writes are left to collection."""
        async with self._turn:
            await self._mark_deleted()
        await self.remove_objects()

    async def _mark_deleted(self) -> None:
        while True:
            held = await self.pointer.read()
            if held is not None and held.head.deleted:
                return
            if held is None:
                copy = await read_current(self.calls, self.keys)
                if copy is not None and copy.head.deleted:
                    return
            head = held.head if held else Head(authority=self.pointer.authority)
            tombstone = _head_as(head, revision=head.revision + 1, deleted=True)
            try:
                await self.pointer.delete(held, tombstone)
            except PreconditionFailed:
                continue
            return

    async def remove_objects(self) -> int:
        """Remove every object of the stream but its tombstone, page by page."""
        removed = 0
        after = ""
        while True:
            page = await self.calls.again(lambda after=after: self._page(after))  # type: ignore[misc]
            if not page:
                return removed
            keys = [key for key in page if key != self.keys.current]
            await self.calls.delete(keys)
            removed += len(keys)
            after = page[-1]

    async def _page(self, after: str) -> list[str]:
        async for page in self.calls.store.list_pages(self.keys.prefix, after=after):
            return [info.key for info in page]
        return []

    async def trailing(self) -> FragmentInfo | None:
        """The last fragment of the tier, with what only its trailer knows."""
        if self.pending:
            return self.pending[-1]
        if self.persisted.empty:
            return None
        entry = await self.nodes.last_fragment(self.persisted.entries)
        try:
            return FragmentInfo.from_trailer(await self.fragments.trailer(int(entry["offset"][0])))
        except NotFound as error:
            raise RootMissing(self.keys.stream, error.key, "the root names it, and it is gone") from error


def _head_as(head: Head, **changes: object) -> Head:
    fields = {name: getattr(head, name) for name in head.__struct_fields__}
    return Head(**fields | changes)
