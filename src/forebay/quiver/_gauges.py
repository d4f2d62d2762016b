"""Gauges of a store, set once per pass of maintenance."""

from __future__ import annotations

import math
from typing import Final

from forebay.kit.clock import Clock
from forebay.quiver._acks import Acks
from forebay.quiver._backlog import Backlog
from forebay.quiver._disk import Disk
from forebay.quiver._group_log import GroupLog
from forebay.quiver._metrics import QuiverMetrics
from forebay.quiver._recovery import DIRECTORIES
from forebay.quiver._stats import QuiverStats

__all__ = ["Gauges"]

MEASURE_S: Final = 60.0
"""Seconds between two listings of the directory for `quiver.disk.bytes_actual`."""


class Gauges:
    """Those of one instance; `core` tells it from others in the same registry.

    One that is not alone there, an adopted shard, shows only what has the number of the core: it would write
    over the figures of its adopter.
    """

    def __init__(
        self, metrics: QuiverMetrics, disk: Disk, clock: Clock, core: int, *, is_alone: bool = True
    ) -> None:
        self._metrics = metrics
        self._disk = disk
        self._clock = clock
        self._core = str(core)
        self._is_alone = is_alone
        self._measured_at = -math.inf
        self._subscribers: set[str] = set()

    async def measure(self) -> None:
        """List the files now and then, to see whether the accounts are right."""
        now = self._clock.monotonic()
        if not self._is_alone or now - self._measured_at < MEASURE_S:
            return
        self._measured_at = now

        def work() -> int:
            return sum(size for each in DIRECTORIES for _, size in self._disk.list(each))

        self._metrics.disk_actual.set(await self._disk.run("files", work))

    def show(self, stats: QuiverStats, wal: GroupLog, acks: Acks, backlog: Backlog, cap_bytes: int) -> None:
        """Everything that is known without a look at the disk."""
        metrics = self._metrics
        metrics.core_bytes.labels(self._core).set(stats.used_bytes)
        for kind, count in stats.losses.items():
            what, _, reason = kind.partition(".")
            metrics.losses_ever.labels(self._core, what, reason).set(count)
        if not self._is_alone:
            return
        metrics.unsynced_bytes.set(wal.pending_bytes)
        oldest = wal.oldest_pending_at
        metrics.unsynced_age.set(0 if oldest is None else self._clock.monotonic() - oldest)
        metrics.wal_bytes.set(stats.wal_bytes)
        metrics.spare_bytes.set(wal.spare_bytes)
        metrics.open_bytes.set(stats.open_bytes)
        for signal, rows in backlog.rows.items():
            metrics.items_queued.labels(signal).set(rows)
        metrics.ack_bytes.set(stats.ack_bytes)
        metrics.ack_records.set(acks.records_since_checkpoint)
        metrics.checkpoint_age.set(acks.checkpoint_age_s)
        metrics.disk_accounted.set(stats.used_bytes)
        metrics.disk_cap.set(cap_bytes)
        metrics.cap_fraction.set(stats.used_bytes / cap_bytes)
        self._forget({each.name for each in stats.subscribers})
        for each in stats.subscribers:
            metrics.lag.labels(each.name).set(each.lag_segments)
            metrics.oldest_pending.labels(each.name).set(each.oldest_pending_ms / 1000)
            metrics.gap_set.labels(each.name).set(each.gap_set_size)
            metrics.in_flight.labels(each.name).set(each.in_flight)
            metrics.orphaned.labels(each.name).set(each.pinned_bytes if each.is_orphaned else 0)

    def _forget(self, present: set[str]) -> None:
        """A subscriber that was removed has no lag any more, and nobody should be woken for it."""
        metrics = self._metrics
        for name in self._subscribers - present:
            for family in (
                metrics.lag,
                metrics.oldest_pending,
                metrics.gap_set,
                metrics.in_flight,
                metrics.orphaned,
            ):
                family.remove(name)
        self._subscribers = present
