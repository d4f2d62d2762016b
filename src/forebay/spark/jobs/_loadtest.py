"""What a load test's ledgers tell, for runs whose ledgers are too many or too large for one machine.

A ledger is an Arrow file, `ledger-N.arrow` in the directory of a run, with a line per request: its records,
what became of them, when it ended, how long it took. A task reads one ledger and returns counts, records per
second, and a histogram of latencies whose buckets are one percent wide, so that results of any number of
tasks add up; a percentile read from it is off by at most that percent. Nothing is changed by it: a task that
is run twice counts the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from forebay.errors import FormatError, UsageError
from forebay.spark.export._spread import spread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LoadtestReport", "analyse_loadtest", "read_ledger"]

BUCKET: Final = 1.01
"""Width of a latency bucket, as a ratio."""
LATENCY_S_MIN: Final = 1e-6
"""Latencies below it count as this."""
OUTCOMES: Final = ("acked", "failed", "unknown")
COLUMNS: Final = ("count", "outcome", "attempts", "ended_s", "latency_s")


@dataclass(slots=True)
class LoadtestReport:
    """One or more ledgers, added up."""

    ledgers: int = 0
    requests: int = 0
    retried: int = 0
    """Requests that took more than one attempt."""
    records: dict[str, int] = field(default_factory=dict)
    """Records by outcome: acked, failed, unknown."""
    per_second: dict[int, int] = field(default_factory=dict)
    """Acknowledged records by the second in which their request ended."""
    latencies: dict[int, int] = field(default_factory=dict)
    """Acknowledged requests by bucket of latency."""

    def add(self, other: LoadtestReport) -> None:
        """Add another report to this one."""
        self.ledgers += other.ledgers
        self.requests += other.requests
        self.retried += other.retried
        for name in ("records", "per_second", "latencies"):
            mine: dict[Any, int] = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + count

    def latency_ms(self, percent: float) -> float | None:
        """The latency that so many percent of acknowledged requests did not exceed; None without any."""
        total = sum(self.latencies.values())
        seen = 0
        for bucket in sorted(self.latencies):
            seen += self.latencies[bucket]
            if seen >= total * percent / 100:
                return float(BUCKET ** (bucket + 1) * LATENCY_S_MIN * 1000)
        return None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        seconds = max(self.per_second, default=-1) - min(self.per_second, default=0) + 1
        acked = self.records.get("acked", 0)
        return {
            "ledgers": self.ledgers,
            "requests": self.requests,
            "retried": self.retried,
            "records": {name: self.records.get(name, 0) for name in OUTCOMES},
            "records_per_s": acked / seconds if acked else 0.0,
            "latency_ms": {f"p{percent:g}": self.latency_ms(percent) for percent in (50, 95, 99, 99.9, 100)},
        }


def analyse_loadtest(
    runs: Sequence[str | Path],
    *,
    spark: SparkSession | None = None,
    told: Callable[[], None] | None = None,
) -> LoadtestReport:
    """Add up all ledgers of these run directories, which every executor must be able to read."""
    found = {str(run): sorted(Path(run).glob("ledger-*.arrow")) for run in runs}
    if lacking := [run for run, ledgers in found.items() if not ledgers]:
        raise UsageError(
            f"there is no ledger-N.arrow in {lacking[0]}", hint="name the directories of load-test runs"
        )
    if not found:
        raise UsageError("there is no ledger-N.arrow", hint="name the directories of load-test runs")
    paths = [str(path.absolute()) for ledgers in found.values() for path in ledgers]
    total = LoadtestReport()
    for report in spread(read_ledger, paths, spark=spark, told=told):
        total.add(report)
    return total


def read_ledger(path: str) -> LoadtestReport:
    """What a task does."""
    try:
        with pa.memory_map(path) as source:
            table = pa.ipc.open_file(source).read_all().select(COLUMNS)
            columns = {name: np.array(table.column(name)) for name in COLUMNS}
    except (pa.ArrowInvalid, KeyError) as error:
        raise FormatError(f"{path} is no ledger: {error}", hint="was the run broken off?") from error
    counts, outcomes = columns["count"].astype(np.int64), columns["outcome"]
    acked = outcomes == 0
    waits = np.maximum(columns["latency_s"][acked], LATENCY_S_MIN)
    buckets = np.floor(np.log(waits / LATENCY_S_MIN) / np.log(BUCKET)).astype(np.int64)
    seconds = np.floor(columns["ended_s"][acked]).astype(np.int64)
    return LoadtestReport(
        ledgers=1,
        requests=len(counts),
        retried=int((columns["attempts"] > 1).sum()),
        records={name: int(counts[outcomes == number].sum()) for number, name in enumerate(OUTCOMES)},
        per_second=_sums(seconds, counts[acked]),
        latencies=_sums(buckets, np.ones(len(buckets), np.int64)),
    )


def _sums(keys: Any, counts: Any) -> dict[int, int]:
    found, where = np.unique(keys, return_inverse=True)
    totals = np.bincount(where, weights=counts, minlength=len(found)).astype(np.int64)
    return dict(zip(found.tolist(), totals.tolist(), strict=True))
