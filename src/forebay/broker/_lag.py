"""How far consumer groups are behind, as gauges: looked up when somebody reads the metrics, not before.

Lag is not known to a broker; it is in the coordinator. A page of metrics that is read asks for it, at most
once in `LAG_TTL_S`, for so many groups at most. A broker whose metrics nobody reads asks for nothing.
"""

from __future__ import annotations

from typing import Final

from forebay.errors import ForebayError, NotFound, UsageError
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.log import Groups

__all__ = ["LagGauges"]

LAG_TTL_S: Final = 10.0
"""Seconds for which the lag last seen is shown."""
LAG_GROUPS_MAX: Final = 100
"""Groups whose lag is looked up, in order of their names."""


class LagGauges:
    """`group.lag_records` and `group.lag_seconds`, by group, topic and partition."""

    def __init__(self, groups: Groups, metrics: MetricsRegistry, *, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        labels = ("group", "topic", "partition")
        self._records = metrics.gauge("group.lag_records", "Records a group has not consumed", labels)
        self._seconds = metrics.gauge("group.lag_seconds", "Age of the oldest of these records", labels)
        self._failures = metrics.counter(
            "group.lag_failures", "Groups whose lag could not be looked up, or not all of it"
        )
        self._shown: set[tuple[str, str, int]] = set()
        self._looked_at = float("-inf")

    async def refresh(self) -> None:
        """Look again, if the last look is too old."""
        if self._clock.monotonic() - self._looked_at < LAG_TTL_S:
            return
        self._looked_at = self._clock.monotonic()
        shown: set[tuple[str, str, int]] = set()
        try:
            for name in (await self._groups.list())[:LAG_GROUPS_MAX]:
                shown |= await self._show(name)
        except ForebayError:
            self._failures.inc()
            return
        for gone in self._shown - shown:
            self._records.remove(*gone)
            self._seconds.remove(*gone)
        self._shown = shown

    async def _show(self, name: str) -> set[tuple[str, str, int]]:
        """The lag of one group; which gauges it has."""
        try:
            found = await self._groups.describe(name)
        except NotFound:
            return set()  # Deleted meanwhile.
        except UsageError:
            self._failures.inc()  # No name of a group: something else wrote it into the catalog.
            return set()
        if found.damaged:
            self._failures.inc()
        shown = set()
        for lag in found.partitions:
            labels = (name, lag.topic, lag.partition)
            self._records.labels(*labels).set(lag.records)
            self._seconds.labels(*labels).set(lag.seconds)
            shown.add(labels)
        return shown
