"""Retention: the service that trims what a topic no longer keeps, by age and by size.

Whole entries only. An entry goes by age when its newest append is too old, and by size when everything behind
it already fills the bound; so nothing young goes with something old, and the newest entry never goes by size.
Trimming up to a time inside a compacted range would need its object read and would free nothing.

A pass looks at one partition after the other, and a partition that fails does not keep the others from being
looked at. Two services at once are harmless: a start only grows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.errors import ForebayError
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.periodic import PeriodicConfig, PeriodicService
from forebay.log._errors import UnknownTopic
from forebay.log._reader import LogReader
from forebay.log._topics import Catalog, Topic
from forebay.log._trim import Trimmed, Trimmer

__all__ = ["Retention", "RetentionReport"]

INTERVAL_MS = 60_000
"""Milliseconds between two passes of the service, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What one pass did, or would do."""

    trimmed: list[Trimmed] = field(default_factory=list)
    """Partitions that lost records."""
    failed: dict[str, ForebayError] = field(default_factory=dict)
    """By `topic:partition`."""

    @property
    def records(self) -> int:
        """Records trimmed."""
        return sum(each.records for each in self.trimmed)


class Retention:
    """Trims every partition to what its topic keeps."""

    def __init__(
        self,
        reader: LogReader,
        catalog: Catalog,
        trimmer: Trimmer,
        *,
        clock: Clock,
        randomness: random.Random,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        self._reader = reader
        self._catalog = catalog
        self._trimmer = trimmer
        self._clock = clock
        self._random = randomness
        registry = metrics or MetricsRegistry()
        self._trimmed = registry.counter("log.retention_records_trimmed", "Records removed by retention")
        self._failures = registry.counter("log.retention_failures", "Partitions retention could not look at")

    async def run_once(
        self, *, topics: Sequence[str] | None = None, dry_run: bool = False
    ) -> RetentionReport:
        """One pass over all topics, or those named. With `dry_run` nothing is changed."""
        report = RetentionReport()
        for topic in await self._catalog.list():
            if topic.state == "ACTIVE" and (topics is None or topic.topic in topics):
                await self._keep(topic, report, dry_run)
        return report

    async def _keep(self, topic: Topic, report: RetentionReport, dry_run: bool) -> None:
        settings = topic.settings
        if settings.retention_ms is None and settings.retention_bytes is None:
            return
        for partition in range(topic.partitions):
            try:
                trimmed = await self._keep_partition(topic, partition, dry_run)
            except UnknownTopic:
                continue  # Deleted meanwhile.
            except ForebayError as error:
                self._failures.inc()
                report.failed[f"{topic.topic}:{partition}"] = error
                continue
            if trimmed is not None and trimmed.records:
                report.trimmed.append(trimmed)
                self._trimmed.inc(0 if dry_run else trimmed.records)

    async def _keep_partition(self, topic: Topic, partition: int, dry_run: bool) -> Trimmed | None:
        offsets = await self._reader.offsets(topic.topic, partition)
        if not offsets.records:
            return None
        offset = await self.keeps_from(topic, partition)
        # An append may have moved the end meanwhile, never below what was looked at.
        offset = min(max(offset, offsets.earliest), offsets.next)
        if offset == offsets.earliest or dry_run:
            return Trimmed(topic.topic, partition, offsets.earliest, offset, offsets.next)
        return await self._trimmer.trim(topic.topic, partition, offset)

    async def keeps_from(self, topic: Topic, partition: int) -> int:
        """The first offset that the topic's settings keep."""
        settings, name = topic.settings, topic.topic
        offset = 0
        if settings.retention_ms is not None:
            oldest_ms = self._clock.now_ms() - settings.retention_ms
            offset = await self._reader.offset_for_time(name, partition, oldest_ms, whole_entries=True)
        if settings.retention_bytes is not None:
            fits = await self._reader.offset_for_bytes(name, partition, settings.retention_bytes)
            offset = max(offset, fits)
        return offset

    def service(self, *, interval_ms: int = INTERVAL_MS) -> PeriodicService:
        """A service that runs a pass again and again."""
        return PeriodicService(
            "log-retention",
            self.run_once,
            PeriodicConfig(interval_ms=interval_ms),
            clock=self._clock,
            randomness=self._random,
        )
