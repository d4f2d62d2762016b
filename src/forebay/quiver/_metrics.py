"""What Quiver counts. Names of the design where it gives one."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.kit.metrics import SERIES_PER_METRIC_MAX, Counter, MetricsRegistry

__all__ = ["GroupSeries", "QuiverMetrics"]


class QuiverMetrics:
    """The families of one instance."""

    def __init__(self, registry: MetricsRegistry) -> None:
        counter, gauge, histogram = registry.counter, registry.gauge, registry.histogram
        self.batches = counter("quiver.ingest.batches_total", "Batches made durable")
        self.rows = counter("quiver.ingest.rows_total", "Rows in them", ("signal",))
        self.throttled = counter("quiver.ingest.throttle_total", "Batches refused at the size cap")
        self.failures = counter("quiver.ingest.failures_total", "Batches that were not taken", ("failure",))
        self.unsynced_bytes = gauge("quiver.wal.unsynced_bytes", "Bytes that wait for a sync")
        self.unsynced_age = gauge("quiver.wal.unsynced_age_seconds", "Age of the oldest of them")
        self.wal_bytes = gauge("quiver.wal.bytes", "Bytes of the WAL files")
        self.spare_bytes = gauge("quiver.wal.spare_bytes", "Bytes of WAL files that wait to be used again")
        self.fsync_seconds = histogram("quiver.wal.fsync_seconds", "Write and sync of one group")
        self.group_size = histogram(
            "quiver.wal.group_size", "Batches in one group", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
        )
        self.replayed = counter("quiver.wal.replayed_entries_total", "WAL entries replayed at opening")
        self.open_bytes = gauge("quiver.open_segment.bytes", "Logical bytes that are in no file yet")
        self.finalize_seconds = histogram("quiver.segment.finalize_seconds", "Writing of one segment")
        self.finalize_failures = counter("quiver.segment.finalize_failures_total", "Attempts that failed")
        self.spared = counter("quiver.segment.spared_total", "Segments that all had before they were files")
        self.quarantined = counter("quiver.segment.quarantined_total", "Segments or parts that are damaged")
        self.damaged = counter("quiver.recovery.damaged_total", "Damage found at opening", ("kind",))
        self.segment_dropped = counter("quiver.segment.dropped_total", "Segments dropped before all had them")
        self.evictions = counter("quiver.gc.evictions_total", "Segments deleted", ("reason",))
        self.reclaimed = counter("quiver.gc.reclaimed_bytes_total", "Bytes of segments deleted")
        self.lost_segments = counter("quiver.loss.segments_total", "Segments somebody never got", ("reason",))
        self.lost_bytes = counter("quiver.loss.bytes_total", "Logical bytes in them", ("reason",))
        self.lost_rows = counter("quiver.loss.rows_total", "Rows in them", ("signal", "reason"))
        self.losses_ever = gauge(
            "quiver.loss.recorded",
            "Segments, entries, rows or bytes lost since the store was made",
            ("core_id", "what", "reason"),
        )
        self.emergencies = counter(
            "quiver.retention.size_emergency_total", "Times the cap forced unprocessed data out"
        )
        self.delete_failures = counter("quiver.gc.delete_failures_total", "Deletions to be tried again")
        self.ack_bytes = gauge("quiver.acklog.bytes", "Bytes of ack.log and its checkpoints")
        self.ack_records = gauge("quiver.acklog.records_since_checkpoint", "Records a replay would read")
        self.checkpoint_age = gauge("quiver.acklog.checkpoint_age_seconds", "Age of the last checkpoint")
        self.read_errors = counter("quiver.read.errors_total", "Reads of a segment that failed")
        self.disk_actual = gauge("quiver.disk.bytes_actual", "Bytes of all files, as listed once a minute")
        self.disk_accounted = gauge("quiver.disk.bytes_accounted", "Bytes of all files, as counted")
        self.disk_cap = gauge("quiver.disk.bytes_cap", "Bytes that all files may have")
        self.core_bytes = gauge("quiver.core.bytes", "Bytes of all files of a core", ("core_id",))
        self.cap_fraction = gauge("quiver.core.cap_fraction", "Share of the size cap in use")
        self.clock_jumps = counter("quiver.clock.jump_total", "Steps of the wall clock that paused expiry")
        self._add_subscribers(registry)

    def _add_subscribers(self, registry: MetricsRegistry) -> None:
        counter, gauge, labels = registry.counter, registry.gauge, ("subscriber",)
        self.dropped = counter("quiver.subscriber.dropped_segments_total", "Segments it never got", labels)
        self.outcomes = counter(
            "quiver.subscriber.outcomes_total", "Outcomes by kind", ("subscriber", "outcome")
        )
        self.retries = counter("quiver.subscriber.retries_total", "Deliveries put back for later", labels)
        items = ("subscriber", "signal")
        self.items_delivered = counter("quiver.items.delivered_total", "Rows acknowledged", items)
        self.items_requeued = counter("quiver.items.requeued_total", "Rows put back for later", items)
        self.items_rejected = counter("quiver.items.rejected_total", "Rows refused for good", items)
        self.items_queued = gauge("quiver.items.queued", "Rows in finished segments", ("signal",))
        self.lag = gauge("quiver.subscriber.lag_segments", "Segments it has not resolved", labels)
        self.oldest_pending = gauge(
            "quiver.subscriber.oldest_pending_age_seconds", "Age of the oldest of them", labels
        )
        self.gap_set = gauge("quiver.subscriber.gap_set_size", "Segments resolved above a hole", labels)
        self.orphaned = gauge(
            "quiver.subscriber.orphaned_pinned_bytes", "Bytes pinned by one that never reads", labels
        )
        self.in_flight = gauge("quiver.subscriber.in_flight", "Segments under a lease", labels)


class GroupSeries:
    """What counts with every group of the WAL, looked up once."""

    def __init__(self, metrics: QuiverMetrics) -> None:
        self._batches = metrics.batches.labels()
        self._fsync_seconds = metrics.fsync_seconds.labels()
        self._group_size = metrics.group_size.labels()
        self._rows_family = metrics.rows
        self._rows: dict[str, Counter] = {}

    def durable(self, batches: int, rows: Mapping[str, int]) -> None:
        """So many batches are durable, with so many rows of each signal type."""
        self._batches.inc(batches)
        for signal, count in rows.items():
            series = self._rows.get(signal)
            if series is None:
                if len(self._rows) >= SERIES_PER_METRIC_MAX:
                    self._rows.clear()
                series = self._rows[signal] = self._rows_family.labels(signal)
            series.inc(count)

    def synced(self, group: int, seconds: float) -> None:
        """A group of so many batches was written and synced, or was not."""
        self._fsync_seconds.observe(seconds)
        self._group_size.observe(group)
