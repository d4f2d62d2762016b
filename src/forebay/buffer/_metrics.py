"""The metrics of a queue, under the names that the other implementations use.

Counters and gauges that only one role needs are still made by all of them: a dashboard then shows zero where
nothing happened, instead of nothing.
"""

from __future__ import annotations

from forebay.kit.metrics import Counter, Gauge, Histogram, MetricsRegistry

__all__ = ["BufferMetrics", "Writes"]

_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class Writes:
    """Manifest writes of one role: attempts, and how many of them somebody else was faster."""

    def __init__(self, attempts: Counter, conflicts: Counter) -> None:
        self._attempts, self._conflicts = attempts, conflicts
        self.attempts = 0
        self.conflicts = 0

    def attempted(self) -> None:
        """One more write is sent."""
        self.attempts += 1
        self._attempts.inc()

    def conflicted(self) -> None:
        """One of them lost."""
        self.conflicts += 1
        self._conflicts.inc()

    def conflict_rate(self) -> float:
        """Percent of the attempts that lost."""
        return 100.0 * self.conflicts / self.attempts if self.attempts else 0.0


class BufferMetrics:
    """The series of one producer, consumer or collector."""

    def __init__(self, registry: MetricsRegistry | None, role: str, instance: str) -> None:
        self.registry = registry if registry is not None else MetricsRegistry({"instance": instance})
        self._labels = () if "instance" in self.registry.constant_labels else ("instance",)
        self._values = (instance,) if self._labels else ()
        self.writes = self._writes(role)
        self.batches_flushed = self.counter("batches_flushed", "Batches that became durable")
        self.entries_flushed = self.counter("entries_flushed", "Records that became durable")
        self.bytes_flushed = self.counter("bytes_flushed", "Bytes of them before compression")
        self.bytes_written = self.counter("bytes_written", "Bytes of them as stored")
        self.batches_collected = self.counter("batches_collected", "Batches handed out")
        self.entries_collected = self.counter("entries_collected", "Records handed out")
        self.bytes_collected = self.counter("bytes_collected", "Bytes of batches handed out, as stored")
        self.acks = self.counter("acks", "Batches acknowledged")
        self.descriptors_handed_out = self.counter("descriptors_handed_out", "Descriptors handed out")
        self.gc_files_deleted = self.counter("gc_files_deleted", "Batches deleted")
        self.gc_files_failed = self.counter("gc_files_failed", "Batches that could not be deleted")
        self.fenced = self.counter("fenced", "Times this consumer learned that it was fenced")
        self.commit_unknown = self.counter("commit_unknown", "Batches of unknown outcome")
        self.commit_failed = self.counter("commit_failed", "Batches certainly not enqueued")
        self.reuploads = self.counter("reuploads", "Uploads repeated because they had become too old")
        self.duplicates_seen = self.counter("duplicates_seen", "Batches whose location was seen before")
        self.batches_missing = self.counter("batches_missing", "Batches whose object was gone")
        self.queue_length = self.gauge("queue_length", "Entries in the manifest when last seen")
        self.manifest_bytes = self.gauge("manifest_bytes", "Bytes of the manifest when last seen")
        self.oldest_entry_age = self.gauge("oldest_entry_age_seconds", "Age of the first entry")
        self.orphans = self.gauge("orphans", "Unreferenced batches that are not old enough to delete")
        self.consumer_lag = self.gauge("consumer_lag_seconds", "Age of the last batch handed out")
        self.consumer_sequence_lag = self.gauge("consumer_sequence_lag", "Sequences not acknowledged yet")
        self.flush_duration = self.histogram("flush_duration_seconds", "Upload and enqueue of a batch")
        self.upload_duration = self.histogram("upload_duration_seconds", "Upload of a batch")
        self.enqueue_duration = self.histogram("enqueue_duration_seconds", "Enqueueing of a group")
        self.fetch_duration = self.histogram("fetch_duration_seconds", "Fetch of a batch")
        self.gc_duration = self.histogram("gc_duration_seconds", "One garbage collection")
        self.commit_batches = self.count_histogram("commit_batches", "Batches per commit")

    def _writes(self, role: str) -> Writes:
        labels = ("role", *self._labels)
        attempts = self.registry.counter("buffer.manifest_writes", "Manifest writes attempted", labels)
        conflicts = self.registry.counter("buffer.manifest_conflicts", "Manifest writes that lost", labels)
        return Writes(attempts.labels(role, *self._values), conflicts.labels(role, *self._values))

    def counter(self, name: str, help_text: str) -> Counter:
        """A counter of this instance."""
        return self.registry.counter(f"buffer.{name}", help_text, self._labels).labels(*self._values)

    def labelled_counter(self, name: str, help_text: str, label: str, value: str) -> Counter:
        """A counter of this instance that one more label tells apart."""
        family = self.registry.counter(f"buffer.{name}", help_text, (label, *self._labels))
        return family.labels(value, *self._values)

    def gauge(self, name: str, help_text: str) -> Gauge:
        """A gauge of this instance."""
        return self.registry.gauge(f"buffer.{name}", help_text, self._labels).labels(*self._values)

    def histogram(self, name: str, help_text: str) -> Histogram:
        """A histogram of seconds."""
        return self.registry.histogram(f"buffer.{name}", help_text, self._labels).labels(*self._values)

    def count_histogram(self, name: str, help_text: str) -> Histogram:
        """A histogram of small numbers."""
        family = self.registry.histogram(f"buffer.{name}", help_text, self._labels, _COUNT_BUCKETS)
        return family.labels(*self._values)
