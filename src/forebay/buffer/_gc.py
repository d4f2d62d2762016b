"""Garbage collection: deleting batches that no manifest names any more.

Acknowledged batches leave the manifest, crashed producers leave uploads that never entered it. Both lie under
the prefix until they are collected. An object goes only if all of this holds:

* It is a direct child of the prefix named `{ULID}.batch` (or, if asked for, a batch of the Go producer).
* The manifest, read after the listing and again before every delete request, does not name it.
* Its ULID is older than every ULID in the manifest, so an upload that overtook another one is not taken.
* `now - max(time in its ULID, time of the store)` has reached the grace period. Two clocks must agree: one
  that is wrong cannot make an object look old. Producers do not enqueue an upload older than half of it.

And nothing at all goes where the manifest is missing, unreadable or unused: a mistyped path must not look
like an empty queue. The same where the prefix is marked as belonging to another manifest, or where the
collector works for a consumer that was fenced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from forebay.buffer._config import BufferConfig
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.buffer._names import OWNER_NAME, batch_time_ms, is_go_name
from forebay.errors import ForebayError, FormatError, NotFound, OutcomeUnknown, PreconditionFailed
from forebay.formats.buffer_manifest import Manifest
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.conditions import ABSENT
from forebay.kit.retry import retry
from forebay.storage import ObjectInfo, ObjectStore, open_store

__all__ = ["GarbageCollector", "GcReport", "KeptObject", "collect_while_alive"]

_log = logging.getLogger(__name__)

KEPT_LISTED_MAX = 10_000
"""Kept objects that a report names; beyond that they are only counted."""


@dataclass(frozen=True, slots=True)
class KeptObject:
    """An object that stays, and why."""

    key: str
    reason: str
    """`referenced`, `young`, `newer than the oldest entry`, `not a batch`, or `nested`."""


@dataclass(slots=True)
class GcReport:
    """What one collection did."""

    dry_run: bool = False
    """Whether it only looked: `deleted` then lists what would be."""
    refused: str = ""
    """Why nothing may be deleted at all; empty where it may."""
    deleted: list[str] = field(default_factory=list)
    deleted_bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Keys that could not be deleted, with what the store said. They are tried again next time."""
    kept: list[KeptObject] = field(default_factory=list)
    kept_counts: Counter[str] = field(default_factory=Counter)
    """How many are kept, by reason."""

    def keep(self, key: str, reason: str) -> None:
        """Note an object that stays."""
        self.kept_counts[reason] += 1
        if len(self.kept) < KEPT_LISTED_MAX:
            self.kept.append(KeptObject(key, reason))

    def as_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "dry_run": self.dry_run,
            "refused": self.refused or None,
            "deleted": self.deleted,
            "deleted_bytes": self.deleted_bytes,
            "failed": self.failed,
            "kept": [{"key": item.key, "reason": item.reason} for item in self.kept],
            "kept_counts": dict(self.kept_counts),
        }


class GarbageCollector:
    """Collects the garbage of one queue. Any number may run; they only ever delete what nobody needs."""

    def __init__(
        self,
        config: BufferConfig,
        clock: Clock | None = None,
        *,
        store: ObjectStore | None = None,
        randomness: random.Random | None = None,
        metrics: BufferMetrics | None = None,
        epoch: int | None = None,
    ) -> None:
        """With `epoch`, nothing is deleted once the manifest holds another one."""
        self._config = config
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._owns_store = store is None
        self._store = store if store is not None else open_store(config.url, clock=self._clock)
        self._metrics = metrics or BufferMetrics(None, "collector", "collector")
        self._epoch = epoch
        self._prefix = f"{config.data_path_prefix}/"

    async def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._owns_store:
            await self._store.close()

    async def collect(self, *, dry_run: bool = False) -> GcReport:
        """One collection. Raises only what keeps it from looking; failed deletes are in the report."""
        began = self._clock.monotonic()
        report = GcReport(dry_run=dry_run)
        # The listing comes first: whatever is enqueued after it is in the manifest that is read after it.
        listed = [info async for page in self._store.list_pages(self._prefix) for info in page]
        file = ManifestFile(
            self._store,
            self._config.manifest_path,
            self._clock,
            bytes_max=self._config.manifest_bytes_max,
        )
        manifest = await self._manifest(file, report)
        if manifest is not None and await self._owns_prefix(report, dry_run=dry_run):
            garbage = self._garbage(listed, manifest, report)
            if dry_run:
                self._count_deleted(garbage, report)
            else:
                await self._delete(garbage, file, report)
        self._metrics.gc_duration.observe(self._clock.monotonic() - began)
        self._metrics.orphans.set(
            report.kept_counts["young"] + report.kept_counts["newer than the oldest entry"]
        )
        return report

    async def _manifest(self, file: ManifestFile, report: GcReport) -> Manifest | None:
        """The manifest as it is now, or None where nothing may be deleted by it."""
        try:
            manifest = await retry(
                file.load, policy=self._config.read_retry, clock=self._clock, randomness=self._random
            )
            if not file.exists:
                report.refused = f"there is no manifest {file.path!r}"
            elif manifest.next_sequence == 0:
                report.refused = f"the manifest {file.path!r} has never held an entry"
            elif self._epoch is not None and manifest.epoch != self._epoch:
                report.refused = f"the queue is at epoch {manifest.epoch}, this collector at {self._epoch}"
        except (FormatError, OutcomeUnknown) as error:
            report.refused = f"the manifest cannot be used: {error}"
        return None if report.refused else manifest

    async def _owns_prefix(self, report: GcReport, *, dry_run: bool) -> bool:
        """Whether the batches of this prefix belong to our manifest. The first collection marks them."""
        key = f"{self._prefix}{OWNER_NAME}"
        mark = json.dumps({"manifest": self._config.manifest_path}).encode()
        try:
            found = (await self._store.get(key)).data
        except NotFound:
            found = b""
        if not found and not dry_run:
            try:
                await self._store.put(key, mark, ABSENT)
                return True
            except (PreconditionFailed, OutcomeUnknown):
                found = (await self._store.get(key)).data
        if found and found != mark:
            report.refused = f"{key!r} says that the batches belong to another manifest: {found[:200]!r}"
        return not report.refused

    def _garbage(self, listed: list[ObjectInfo], manifest: Manifest, report: GcReport) -> list[ObjectInfo]:
        verdict = self._verdict(manifest)
        garbage = []
        for info in listed:
            reason = verdict(info)
            if reason is None:
                garbage.append(info)
            else:
                report.keep(info.key, reason)
        return garbage

    def _verdict(self, manifest: Manifest) -> Callable[[ObjectInfo], str | None]:
        """A function that tells why an object stays, or None where it goes."""
        referenced = set(manifest.locations())
        times = [batch_time_ms(location.rpartition("/")[2]) for location in referenced]
        oldest_ms = min((time for time in times if time is not None), default=None)
        now_ms, grace_ms = self._clock.now_ms(), self._config.gc_grace_period_ms

        def verdict(info: ObjectInfo) -> str | None:
            name = info.key.removeprefix(self._prefix)
            time_ms = batch_time_ms(name) if "/" not in name else None
            if time_ms is None and not (self._config.gc_go_names and is_go_name(name)):
                return "nested" if "/" in name else "not a batch"
            if info.key in referenced:
                return "referenced"
            if now_ms - max(time_ms or 0, info.last_modified_ms) < grace_ms:
                return "young"
            if time_ms is not None and oldest_ms is not None and time_ms >= oldest_ms:
                return "newer than the oldest entry"
            return None

        return verdict

    async def _delete(self, garbage: list[ObjectInfo], file: ManifestFile, report: GcReport) -> None:
        step = min(self._config.gc_delete_keys, 1_000)
        for start in range(0, len(garbage), step):
            manifest = await self._manifest(file, report)
            if manifest is None:
                return
            chunk = self._garbage(garbage[start : start + step], manifest, report)
            if not chunk:
                continue
            try:
                results = await self._store.delete([info.key for info in chunk])
                failed = {result.key: str(result.error) for result in results if result.error is not None}
            except ForebayError as error:
                failed = dict.fromkeys([info.key for info in chunk], str(error))
            report.failed |= failed
            self._count_deleted([info for info in chunk if info.key not in failed], report)
            self._metrics.gc_files_deleted.inc(len(chunk) - len(failed))
            self._metrics.gc_files_failed.inc(len(failed))
            if failed:
                _log.warning("%d batches could not be deleted and are tried again later", len(failed))

    def _count_deleted(self, infos: list[ObjectInfo], report: GcReport) -> None:
        report.deleted += [info.key for info in infos]
        report.deleted_bytes += sum(info.size for info in infos)


class Owner(Protocol):
    """Whoever the collections are for."""

    @property
    def is_collecting(self) -> bool:
        """Whether they may go on."""
        ...


async def collect_while_alive(
    owner: Callable[[], Owner | None], collector: GarbageCollector, interval_s: float
) -> None:
    """Collect again and again for as long as `owner` is there and wants it.

    `owner` is a weak reference: a consumer that was dropped without being closed ends its collections too.
    """
    clock = collector._clock
    while True:
        await clock.sleep(interval_s)
        alive = owner()
        if alive is None or not alive.is_collecting:
            return
        del alive  # Not to be kept alive by its own collections.
        try:
            report = await collector.collect()
            if report.refused:
                _log.warning("garbage collection deleted nothing: %s", report.refused)
        except asyncio.CancelledError:
            raise
        except ForebayError as error:
            _log.warning("garbage collection failed and is tried again later: %s", error)
