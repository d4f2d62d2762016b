"""Compaction of many partitions at once: a task per partition, each the compactor of `forebay compact`.

A partition's compaction is a state machine whose steps anybody can resume, and whose slot is claimed by
compare-and-set. A task that is killed leaves a step half done; the attempt that follows it, here or on
another machine, goes on from there. Two attempts at once are two compactors, of which one is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from forebay.errors import ForebayError
from forebay.log import Compactor, CompactorConfig
from forebay.spark.export._spread import spread
from forebay.spark.jobs._place import Place, partitions_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CompactedPartition", "compact", "compact_partition"]


@dataclass(frozen=True, slots=True)
class CompactedPartition:
    """What became of one partition."""

    topic: str
    partition: int
    runs: int = 0
    """Ranges folded, those that an earlier attempt had begun included."""
    records: int = 0
    entries: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    lag_records: int = 0
    """Records that are not compacted."""
    error: str = ""


def compact(
    place: Place,
    *,
    topic: str | None = None,
    config: CompactorConfig | None = None,
    spark: SparkSession | None = None,
    told: Callable[[], None] | None = None,
) -> list[CompactedPartition]:
    """Fold what is old enough, in every partition of a topic or of all; without `spark` on threads here."""
    chosen = replace(config or CompactorConfig(), wait_for_full_ms=0)
    work = partial(compact_partition, place, chosen)
    found = spread(work, partitions_of(place, topic), spark=spark, told=told)
    return sorted(found, key=lambda each: (each.topic, each.partition))


def compact_partition(place: Place, config: CompactorConfig, which: tuple[str, int]) -> CompactedPartition:
    """What a task does."""
    mine, parts = place.opened()
    compactor = Compactor(
        parts.store,
        parts.coordinator,
        clock=parts.clock,
        ids=parts.ids,
        randomness=parts.randomness,
        config=config,
    )
    try:
        results = mine.run(compactor.compact_all(*which))
    except ForebayError as error:
        return CompactedPartition(*which, error=error.message)
    return CompactedPartition(
        *which,
        runs=sum(each.outcome in ("compacted", "resumed") for each in results),
        records=sum(each.records for each in results),
        entries=sum(each.entries for each in results),
        bytes_read=sum(each.bytes_read for each in results),
        bytes_written=sum(each.bytes_written for each in results),
        lag_records=results[-1].lag_records if results else 0,
    )
