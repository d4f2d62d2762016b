"""Uploads that nobody enqueued: found by comparing the prefix with both manifests, deleted with care.

A crash between upload and enqueue leaves an object that no manifest names. The draft has no collector for
them. Ours deletes an object only if every one of these holds:

1. The prefix carries the owner marker, and it names this manifest. These manifests have no sequence that
   would prove that they were ever used, so without the marker a mistyped path would make every batch of the
   real queue look like an orphan.
2. The producer manifest is there and can be read. A missing manifest is not an empty one. The consumer
   manifest may be missing: before the first claim there is none, and what it names stands in `pending` too.
3. It is a direct child of the prefix, named like a batch.
4. Neither manifest names it; both are read after the listing, and again before each round of deletes.
5. It is older than the grace period by its name and by the store's clock.

Ingestors do not enqueue an upload older than half the grace period, which closes the gap between 4 and 5.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

from forebay.errors import NotFound, UsageError
from forebay.ingest._config import OrphanConfig
from forebay.ingest._errors import ManifestLost, PrefixTaken
from forebay.ingest._ingestor import read_owner
from forebay.ingest._manifest_file import Manifests
from forebay.ingest._paths import batch_time_ms, owner_marker
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy
from forebay.storage import ObjectInfo, ObjectStore

__all__ = ["OrphanCollector", "OrphanReport"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OrphanReport:
    """What one pass did, and why not more."""

    deleted: list[str] = field(default_factory=list)
    """Gone, or in a dry run what would be."""
    kept: dict[str, str] = field(default_factory=dict)
    """Why, by key."""
    failed: dict[str, str] = field(default_factory=dict)
    """Deletes that did not succeed, by key; the next pass tries again."""


class OrphanCollector:
    """Deletes batches that no manifest names. Run `collect` now and then, from one process or several."""

    def __init__(
        self,
        store: ObjectStore,
        config: OrphanConfig | None = None,
        *,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        """The store is the caller's and stays open."""
        self._config = config = config or OrphanConfig()
        self._store = store
        self._clock = clock = clock or SystemClock()
        registry = metrics or MetricsRegistry()
        self._deleted = registry.counter("ingest.orphans_deleted", "Batches deleted that nobody enqueued")
        self._manifests = Manifests.of(
            store,
            config.manifest_path,
            "orphans",
            clock=clock,
            randomness=randomness or random.Random(),
            policy=RetryPolicy(),
            registry=registry,
        )

    async def collect(self, *, dry_run: bool = False) -> OrphanReport:
        """One pass. Raises, and deletes nothing, where it cannot be sure whose prefix it is."""
        await self._check_owner()
        report = OrphanReport()
        listed = await self._children()
        named = await self._named()
        now_ms = self._clock.now_ms()
        candidates = []
        for info in listed:
            reason = self._reason_to_keep(info, named, now_ms)
            if reason:
                report.kept[info.key] = reason
            else:
                candidates.append(info.key)
        if dry_run:
            report.deleted = candidates
            return report
        for first in range(0, len(candidates), self._config.delete_keys_max):
            await self._delete(candidates[first : first + self._config.delete_keys_max], report)
        self._deleted.inc(len(report.deleted))
        return report

    async def _check_owner(self) -> None:
        prefix, manifest = self._config.data_path_prefix, self._config.manifest_path
        try:
            owner = read_owner((await self._store.get(owner_marker(prefix))).data)
        except NotFound:
            raise UsageError(
                f"prefix {prefix!r} carries no mark of its owner; nothing was deleted",
                hint="ingestors write it before their first batch; check data_path_prefix",
            ) from None
        if owner != manifest:
            raise PrefixTaken(prefix, owner or "?", manifest)

    async def _children(self) -> list[ObjectInfo]:
        prefix = self._config.data_path_prefix + "/"
        return [info async for info in self._store.list(prefix) if "/" not in info.key[len(prefix) :]]

    async def _named(self) -> set[str]:
        """Every location that either manifest names now."""
        consumers = await self._manifests.consumers.load()
        producers = await self._manifests.producers.load()
        if not self._manifests.producers.exists:
            raise ManifestLost(self._config.manifest_path)
        return {*producers.pending, *consumers.claimed, *consumers.done}

    def _reason_to_keep(self, info: ObjectInfo, named: set[str], now_ms: int) -> str:
        named_ms = batch_time_ms(info.key)
        if named_ms is None:
            return "not named like a batch"
        if info.key in named:
            return "in the queue"
        if now_ms - max(named_ms, info.last_modified_ms) < self._config.grace_ms:
            return "younger than the grace period"
        return ""

    async def _delete(self, keys: list[str], report: OrphanReport) -> None:
        named = await self._named()
        report.kept.update(dict.fromkeys((key for key in keys if key in named), "in the queue"))
        for result in await self._store.delete([key for key in keys if key not in named]):
            if result.error is None:
                report.deleted.append(result.key)
            else:
                report.failed[result.key] = result.error.message
                _log.warning("orphan %s was not deleted: %s", result.key, result.error)
