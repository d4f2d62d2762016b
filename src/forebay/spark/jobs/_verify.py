"""Verification of a whole bucket: a task per partition, and orphans by the join that vacuum uses.

Each task is the look of `forebay verify` at one partition: every slice of every entry is fetched, decoded and
compared with index and header. Nothing is changed, so a task may be run as often as Spark likes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from forebay.log import PartitionReport, VerifyReport
from forebay.log import verify as verify_here
from forebay.log._keys import ROOT, PartitionKeys
from forebay.log._verify import _begin, _Look, _OrphanSearch
from forebay.spark.export._spread import spread
from forebay.spark.jobs._join import unnamed_objects
from forebay.spark.jobs._place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["verify", "verify_partition"]


def verify(
    place: Place,
    *,
    topic: str | None = None,
    spark: SparkSession | None = None,
    told: Callable[[], None] | None = None,
) -> VerifyReport:
    """Prove that nothing is missing or damaged, and list orphans. Without `spark` in this process."""
    mine, parts = place.opened()
    if spark is None:
        return mine.run(
            verify_here(
                parts.store,
                parts.coordinator,
                clock=parts.clock,
                randomness=parts.randomness,
                topic=topic,
                progress=None if told is None else lambda *_: told(),
            )
        )
    objects = place.objects()
    report, partitions, unsure = mine.run(_begin(objects, place.catalog(), topic))
    prefix = f"{ROOT}/" if topic is None else f"{ROOT}/{topic}/partitions/"
    names = unnamed_objects(spark, place, partitions, prefix=prefix)
    search = _OrphanSearch(objects, (), unsure=unsure or bool(names.damaged))
    search._known |= set(partitions)
    mine.run(search._compare(names.unnamed))
    report.orphans = search.orphans
    everything = [*partitions, *search.hidden]
    found = spread(partial(verify_partition, place), everything, spark=spark, told=told)
    order = {(keys.topic, keys.partition): number for number, keys in enumerate(everything)}
    report.partitions = sorted(found, key=lambda each: order[each.topic, each.partition])
    return report


def verify_partition(place: Place, keys: PartitionKeys) -> PartitionReport:
    """What a task does."""
    mine, parts = place.opened()
    return mine.run(_Look(place.objects(), keys, parts.clock, parts.randomness).verify())
