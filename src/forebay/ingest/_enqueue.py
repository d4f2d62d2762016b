"""The queue's producer side: locations are appended to `pending`, each at most once.

The location is the idempotency key: it is made once and never used again. An append whose answer was lost is
settled by looking for its locations, in this order:

1. in `pending`: it happened;
2. in `claimed` or `done`: it happened;
3. the batch object: collectors delete it before they take the location out of `pending`, so if it is gone the
   batch has been processed and cleaned up, and if it is there, `pending` as read in step 1 was the truth.

Crash points. Before the append: the object is an orphan, see `_orphans`. After it: the batch is in the queue,
the caller never heard of it and sends it again, which is the caller's affair.

What remains open where versions are hashes of the content: a lost append may land after the batch was
enqueued by a second attempt, processed and cleaned up, if `pending` happens to hold exactly the same again.
The location then stands in the queue without an object; collectors call that `BatchMissing`.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import NotFound
from forebay.formats.ingest_manifest import ProducerManifest, encode
from forebay.ingest._errors import CommitUnknown, QueueFull
from forebay.ingest._manifest_file import Manifests
from forebay.storage import ObjectStore

__all__ = ["Enqueuer"]


class Enqueuer:
    """Appends locations to the producer manifest."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: Manifests,
        *,
        manifest_bytes_max: int,
    ) -> None:
        self._store = store
        self._producers = manifests.producers
        self._consumers = manifests.consumers
        self._bytes_max = manifest_bytes_max

    async def append(self, locations: Sequence[str]) -> None:
        """Enqueue all, in order, in one write. Raises `CommitFailed`, `CommitUnknown`, `QueueFull`."""

        async def change(manifest: ProducerManifest, maybe: bool) -> ProducerManifest | None:
            pending = manifest.pending
            there = set(pending)
            missing = [location for location in locations if location not in there]
            if maybe and missing:
                missing = await self._never_enqueued(missing)
            if not missing:
                return None
            wanted = ProducerManifest([*pending, *missing])
            self._check_size(wanted, maybe)
            return wanted

        await self._producers.update(change)

    async def _never_enqueued(self, locations: Sequence[str]) -> list[str]:
        """Those of the locations, absent from `pending`, that collectors have not cleaned up either."""
        consumers = await self._consumers.load()
        done = {*consumers.claimed, *consumers.done}
        return [
            location for location in locations if location not in done and await self._has_object(location)
        ]

    async def _has_object(self, location: str) -> bool:
        try:
            await self._store.head(location)
        except NotFound:
            return False
        return True

    def _check_size(self, manifest: ProducerManifest, maybe: bool) -> None:
        # An upper bound first: encoding the list only to measure it would double the work of every append.
        if sum(map(len, manifest.pending)) + 4 * len(manifest.pending) + 16 <= self._bytes_max:
            return
        size = len(encode(manifest))
        if size <= self._bytes_max:
            return
        if maybe:
            raise CommitUnknown(self._producers.key, "the queue is full and an earlier write is unanswered")
        raise QueueFull(self._producers.key, limit=self._bytes_max, actual=size)
