"""What a compactor counts. One table, so that dashboards and documentation have one place to look."""

from __future__ import annotations

from forebay.kit.metrics import MetricsRegistry
from forebay.log._compactor import CompactionResult
from forebay.log._keys import PartitionKeys

__all__ = ["CompactorMetrics"]

_PARTITION = ("topic", "partition")


class CompactorMetrics:
    """The families of the compactor service. The store's own are in `_billing`."""

    def __init__(self, registry: MetricsRegistry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.registry = registry
        self._runs = counter("log.compaction.runs", "Attempts, by what became of them", labels=("outcome",))
        self._recoveries = counter(
            "log.compaction.recoveries", "Compactions of others that were finished", labels=("state",)
        )
        self._claims = counter("log.compaction.claims", "Claims, by what became of them", labels=("outcome",))
        self._records = counter("log.compaction.records", "Records compacted")
        self._entries = counter("log.compaction.entries", "Index entries folded")
        self._read = counter("log.compaction.read_bytes", "Bytes of slices read")
        self._written = counter("log.compaction.written_bytes", "Bytes of compacted objects written")
        self._swept = counter("log.compaction.swept_index_keys", "Stale index keys removed")
        self._stages = registry.histogram(
            "log.compaction.stage_duration_seconds", "Time of each stage", labels=("stage",)
        )
        self._lag = gauge("log.compaction.lag_records", "Records not compacted yet", labels=_PARTITION)
        self._candidates = gauge(
            "log.compaction.candidate_entries", "Index entries ready to be compacted", labels=_PARTITION
        )
        self._candidate_bytes = gauge(
            "log.compaction.candidate_bytes", "Bytes ready to be compacted", labels=_PARTITION
        )
        self._pending = gauge(
            "log.compaction.pending_appends", "Whether the last append is pending", labels=_PARTITION
        )
        self.targets = gauge("log.compaction.targets", "Partitions looked after").labels()
        self.passes = counter("log.compaction.passes", "Passes over all partitions").labels()

    def stage(self, name: str, seconds: float) -> None:
        """A stage was done."""
        self._stages.labels(name).observe(seconds)

    def claim(self, outcome: str) -> None:
        """A claim was taken, refused or broken."""
        self._claims.labels(outcome).inc()

    def failed(self) -> None:
        """An attempt ended with an error."""
        self._runs.labels("failed").inc()

    def ran(self, result: CompactionResult) -> None:
        """An attempt ended well."""
        self._runs.labels(result.outcome).inc()
        if result.recovered_from is not None:
            self._recoveries.labels(result.recovered_from).inc()
        if result.outcome == "compacted":
            self._records.inc(result.records)
        self._entries.inc(result.entries)
        self._read.inc(result.bytes_read)
        self._written.inc(result.bytes_written)
        self._swept.inc(result.swept)
        place = (result.topic, result.partition)
        # What was folded is no candidate any more.
        left = 0 if result.progressed else 1
        self._candidates.labels(*place).set(left * result.candidate_entries)
        self._candidate_bytes.labels(*place).set(left * result.candidate_bytes)
        self.seen(PartitionKeys(*place), lag=result.lag_records, pending=result.pending)

    def seen(self, keys: PartitionKeys, *, lag: int, pending: bool) -> None:
        """A partition was looked at."""
        self._lag.labels(keys.topic, keys.partition).set(lag)
        self._pending.labels(keys.topic, keys.partition).set(int(pending))

    def forget(self, keys: PartitionKeys) -> None:
        """A partition is gone; its gauges would show its last state for ever."""
        for family in (self._lag, self._pending, self._candidates, self._candidate_bytes):
            family.remove(keys.topic, keys.partition)
