"""What the claiming queue counts. Names as those of the buffer, under `ingest.`."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kit.metrics import Counter, MetricsRegistry

__all__ = ["CollectorMetrics", "IngestorMetrics", "ManifestMetrics"]


@dataclass(frozen=True, slots=True)
class ManifestMetrics:
    """Writes of one manifest by one role."""

    writes: Counter
    conflicts: Counter

    @classmethod
    def of(cls, registry: MetricsRegistry, manifest: str, role: str) -> ManifestMetrics:
        """The counters of this manifest and role."""
        labels = ("manifest", "role")
        writes = registry.counter("ingest.manifest_writes", "Attempts to write a manifest", labels)
        conflicts = registry.counter("ingest.manifest_conflicts", "Attempts lost to another writer", labels)
        return cls(writes.labels(manifest, role), conflicts.labels(manifest, role))


class IngestorMetrics:
    """What an ingestor counts."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.batches = registry.counter("ingest.batches_flushed", "Batches made durable and enqueued")
        self.entries = registry.counter("ingest.entries_flushed", "Entries in them")
        self.bytes = registry.counter("ingest.bytes_flushed", "Bytes of these entries")
        self.bytes_written = registry.counter("ingest.bytes_written", "Bytes of the batch objects")
        self.commit_unknown = registry.counter("ingest.commit_unknown", "Enqueues of unknown outcome")
        self.reuploads = registry.counter(
            "ingest.reuploads", "Batches uploaded anew because they were too old"
        )
        self.queue_length = registry.gauge("ingest.queue_length", "Locations in the producer manifest")
        self.manifest_bytes = registry.gauge("ingest.manifest_size_bytes", "Bytes of the producer manifest")
        self.upload_seconds = registry.histogram("ingest.upload_duration_seconds", "Upload of one batch")
        self.enqueue_seconds = registry.histogram("ingest.enqueue_duration_seconds", "Enqueue of one group")


class CollectorMetrics:
    """What a collector counts."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.batches = registry.counter("ingest.batches_collected", "Batches handed out")
        self.entries = registry.counter("ingest.entries_collected", "Entries in them")
        self.bytes = registry.counter("ingest.bytes_collected", "Bytes of these entries")
        self.acks = registry.counter("ingest.acks", "Batches acknowledged")
        self.taken_over = registry.counter("ingest.claims_taken_over", "Stale claims of others taken over")
        self.lost = registry.counter("ingest.claims_lost", "Own claims lost")
        self.heartbeats = registry.counter("ingest.heartbeats", "Heartbeats written")
        self.heartbeats_failed = registry.counter("ingest.heartbeats_failed", "Heartbeats not written")
        self.missing = registry.counter("ingest.batches_missing", "Batches whose object was gone")
        self.cleaned = registry.counter("ingest.batches_cleaned", "Finished batches removed for good")
        self.cleanups_failed = registry.counter(
            "ingest.cleanups_failed", "Cleanups to be finished by the next"
        )
        self.queue_length = registry.gauge(
            "ingest.collector_queue_length", "Locations pending when last seen"
        )
        self.fetch_seconds = registry.histogram("ingest.fetch_duration_seconds", "Read of one batch")
