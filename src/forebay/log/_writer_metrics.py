"""What a writer counts. Without a registry it counts into one of its own, which nobody reads.

log.appends{outcome}                 groups answered: ok, duplicate, refused, unknown
log.records_appended                 records committed
log.bytes_appended                   bytes of the slices committed
log.flushes                          objects uploaded
log.blob_bytes                       sizes of those objects
log.commit_conflicts                 commits refused because another writer was first
log.outcomes_resolved{result}        unknown outcomes looked into: committed, not_committed, unknown
log.coordination_requests{operation} round trips to the coordinator
log.store_requests{operation}        requests to the store
log.upload_duration_seconds          encoding and uploading one object
log.commit_duration_seconds          committing one flush
log.append_duration_seconds          from the beginning of a flush to its acknowledgement
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay.errors import OutcomeUnknown
from forebay.kit.metrics import BYTES_BUCKETS, Counter, MetricsRegistry
from forebay.log._append import AppendResult

__all__ = ["WriterMetrics"]

_STORE_OPERATIONS = ("put", "list", "delete")
_COORDINATION_OPERATIONS = ("get", "write", "lookup")


class WriterMetrics:
    """The families of a writer, with the series of its hot path at hand."""

    def __init__(self, registry: MetricsRegistry | None) -> None:
        registry = registry or MetricsRegistry()
        appends = registry.counter("log.appends", "Groups answered, by what became of them", ("outcome",))
        self._ok = appends.labels("ok")
        self._others = {name: appends.labels(name) for name in ("duplicate", "refused", "unknown")}
        self._records = registry.counter("log.records_appended", "Records committed").labels()
        self._bytes = registry.counter("log.bytes_appended", "Bytes of slices committed").labels()
        self._flushes = registry.counter("log.flushes", "Shared objects uploaded").labels()
        self._blob_bytes = registry.histogram(
            "log.blob_bytes", "Sizes of shared objects", buckets=BYTES_BUCKETS
        ).labels()
        self.conflicts = registry.counter("log.commit_conflicts", "Commits refused: another writer was first")
        resolved = registry.counter("log.outcomes_resolved", "Unknown outcomes looked into", ("result",))
        self.resolved = {name: resolved.labels(name) for name in ("committed", "not_committed", "unknown")}
        coordination = registry.counter(
            "log.coordination_requests", "Round trips to the coordinator", ("operation",)
        )
        self.coordination_requests: dict[str, Counter] = {
            name: coordination.labels(name) for name in _COORDINATION_OPERATIONS
        }
        store = registry.counter("log.store_requests", "Requests to the store", ("operation",))
        self.store_requests: dict[str, Counter] = {name: store.labels(name) for name in _STORE_OPERATIONS}
        upload_s = registry.histogram("log.upload_duration_seconds", "Encoding and uploading an object")
        self._upload_s = upload_s.labels()
        self._commit_s = registry.histogram("log.commit_duration_seconds", "Committing one flush").labels()
        append_s = registry.histogram("log.append_duration_seconds", "From flush to acknowledgement")
        self._append_s = append_s.labels()

    def uploaded(self, blob_bytes: int, seconds: float) -> None:
        """An object was put."""
        self._flushes.inc()
        self._blob_bytes.observe(blob_bytes)
        self._upload_s.observe(seconds)

    def committed(self, seconds: float) -> None:
        """A call of commit ended, well or not."""
        self._commit_s.observe(seconds)

    def appended(self, slice_bytes: int) -> None:
        """Units with slices of so many bytes were committed."""
        self._bytes.inc(slice_bytes)

    def answered(self, flushes: Sequence[Sequence[AppendResult]], seconds: Iterable[float]) -> None:
        """All groups of some flushes were answered, so long after each of them began."""
        results = [result for flush in flushes for result in flush]
        appended = [result.count for result in results if result.error is None and not result.duplicate]
        self._ok.inc(len(appended))
        self._records.inc(sum(appended))
        if len(appended) < len(results):
            for result in results:
                self._count_other(result)
        for each in seconds:
            self._append_s.observe(each)

    def _count_other(self, result: AppendResult) -> None:
        """Count what was not appended."""
        if result.error is not None:
            self._others["unknown" if isinstance(result.error, OutcomeUnknown) else "refused"].inc()
        elif result.duplicate:
            self._others["duplicate"].inc()
