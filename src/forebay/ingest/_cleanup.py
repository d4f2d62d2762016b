"""Cleaning up after finished batches: object, then `pending`, then `done`.

The order is the whole point. While a location stands in `done`, nobody claims it; so it leaves `done` last.

    (a) delete the objects        a collector that lost its claim may now read a 404: its claim is lost
    (b) take them out of pending  only those whose object is gone
    (c) take them out of done     only those that pending, read or written after (a), does not hold

Every step may be repeated. A crash between two of them leaves the locations in `done`, where the next cleanup
finds them. Two collectors may clean at once: each takes out exactly the locations it saw, never the whole
list, and writes nothing where nothing changes.

Only objects that are named like a batch are deleted, whatever `done` says: a damaged or foreign manifest must
not make us delete something else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from forebay.formats.ingest_manifest import ConsumerManifest, ProducerManifest
from forebay.ingest._manifest_file import Change, Manifests
from forebay.ingest._paths import batch_time_ms
from forebay.storage import ObjectStore

__all__ = ["Cleanup"]

DELETE_KEYS_MAX: Final = 1000
"""Objects per delete request."""

_log = logging.getLogger(__name__)


class Cleanup:
    """Removes finished batches from the bucket and from both manifests."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: Manifests,
    ) -> None:
        self._store = store
        self._producers = manifests.producers
        self._consumers = manifests.consumers

    async def run(self) -> int:
        """Clean up everything that is done now. Returns how many locations were removed for good."""
        finished = list(dict.fromkeys((await self._consumers.load()).done))
        if not finished:
            return 0
        gone = frozenset(await self._delete_objects(finished))
        if not gone:
            return 0
        await self._producers.update(_without_pending(gone), refresh=True)
        await self._consumers.update(_without_done(gone))
        return len(gone)

    async def _delete_objects(self, locations: Sequence[str]) -> list[str]:
        """The locations that have no object any more."""
        gone: list[str] = []
        ours = [location for location in locations if batch_time_ms(location) is not None]
        if len(ours) < len(locations):
            foreign = sorted(set(locations) - set(ours))
            _log.warning(
                "%d finished locations are not named like batches, the first is %r; their objects stay",
                len(foreign),
                foreign[0],
            )
            gone.extend(foreign)
        for first in range(0, len(ours), DELETE_KEYS_MAX):
            results = await self._store.delete(ours[first : first + DELETE_KEYS_MAX])
            gone.extend(result.key for result in results if result.error is None)
            failed = [result for result in results if result.error is not None]
            if failed:
                _log.warning("%d batches were not deleted, the first: %s", len(failed), failed[0].error)
        return gone


def _without_pending(gone: frozenset[str]) -> Change[ProducerManifest]:
    async def change(manifest: ProducerManifest, maybe: bool) -> ProducerManifest | None:
        rest = [location for location in manifest.pending if location not in gone]
        return ProducerManifest(rest) if len(rest) < len(manifest.pending) else None

    return change


def _without_done(gone: frozenset[str]) -> Change[ConsumerManifest]:
    async def change(manifest: ConsumerManifest, maybe: bool) -> ConsumerManifest | None:
        rest = [location for location in manifest.done if location not in gone]
        return ConsumerManifest(manifest.claimed, rest) if len(rest) < len(manifest.done) else None

    return change
