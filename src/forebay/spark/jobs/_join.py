"""Which objects nobody names, found by a join: objects on one side, names on the other.

    list, a task per prefix         -> objects        first, and to its end
    visit, a task per partition     -> names          second
    objects without a name          left anti join

The order is what makes it safe without a lock, as in `forebay.log._references`: what is named only after its
partition was visited lies in an object that was uploaded shortly before, and such an object is either not
listed or too young for whoever deletes. The listing is therefore materialized before the first visit. Should
Spark lose a piece of it, the job fails; it is not listed again behind our back.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from forebay.errors import StorageDamaged
from forebay.log._keys import ROOT, PartitionKeys
from forebay.log._references import Visit
from forebay.spark.jobs._place import Place
from forebay.storage import ObjectInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Names", "unnamed_objects"]

OBJECTS: Final = pa.schema(
    [("key", pa.string()), ("size", pa.int64()), ("version", pa.string()), ("modified", pa.int64())]
)
OBJECTS_DDL: Final = "key string, size long, version string, modified long"
NAMES: Final = pa.schema([("key", pa.string()), ("visit", pa.binary())])
NAMES_DDL: Final = "key string, visit binary"
BATCH_ROWS: Final = 10_000
"""Rows of one batch handed to Spark."""
HEX: Final = "0123456789abcdef"
"""What the random names of shared objects begin with; any other name is in one of the ranges, too."""
END: Final = chr(0x10FFFF)
"""Above every key."""


@dataclass(frozen=True, slots=True)
class Names:
    """The outcome of the join."""

    objects: int
    """Objects listed."""
    unnamed: list[ObjectInfo]
    """Those that no visited partition names."""
    visits: list[Visit]
    damaged: list[StorageDamaged]
    """Why partitions could not be visited: then some of the objects without a name may have one."""


def unnamed_objects(
    spark: SparkSession,
    place: Place,
    partitions: Sequence[PartitionKeys],
    *,
    prefix: str = f"{ROOT}/",
    sweep: bool = False,
) -> Names:
    """List everything, visit every partition, and join. With `sweep` visits remove stale index keys."""
    shards = _shards(prefix, partitions)
    listed = _rows(spark, partial(list_shard, place, prefix), shards, OBJECTS_DDL)
    objects = listed.localCheckpoint(eager=True)
    visited = _rows(spark, partial(visit_partition, place, sweep), list(partitions), NAMES_DDL)
    visited = visited.localCheckpoint(eager=True)
    names = visited.where("key is not null").select("key")
    rows = objects.join(names, "key", "left_anti").toArrow().to_pylist()
    visits = visited.where("visit is not null").select("visit").toArrow().column(0).to_pylist()
    unnamed = [ObjectInfo(row["key"], row["size"], row["version"], row["modified"]) for row in rows]
    by_key = sorted(unnamed, key=lambda each: each.key)
    found = [pickle.loads(each) for each in visits]
    damaged = [each for each in found if isinstance(each, StorageDamaged)]
    return Names(objects.count(), by_key, [each for each in found if isinstance(each, Visit)], damaged)


def _shards(prefix: str, partitions: Sequence[PartitionKeys]) -> list[tuple[str, str]]:
    """Ranges of keys, low end exclusive, high end inclusive, that together hold every key once."""
    cuts = {f"{ROOT}/{keys.topic}/" for keys in partitions}
    cuts |= {f"{ROOT}/wal-shared/{digit}" for digit in HEX}
    ordered = ["", *sorted(cut for cut in cuts if cut.startswith(prefix)), END]
    return list(pairwise(ordered))


def list_shard(place: Place, prefix: str, shard: tuple[str, str]) -> Iterator[pa.RecordBatch]:
    """What a listing task yields."""
    mine, _ = place.opened()
    low, high = shard

    async def listed() -> list[ObjectInfo]:
        found = []
        async for info in place.objects().listed(prefix, low):
            if info.key > high:
                break
            found.append(info)
        return found

    infos = mine.run(listed())
    for first in range(0, len(infos), BATCH_ROWS):
        part = infos[first : first + BATCH_ROWS]
        columns = [
            [info.key for info in part],
            [info.size for info in part],
            [info.version for info in part],
            [info.last_modified_ms for info in part],
        ]
        yield pa.RecordBatch.from_arrays(list(map(pa.array, columns)), schema=OBJECTS)


def visit_partition(place: Place, sweep: bool, keys: PartitionKeys) -> Iterator[pa.RecordBatch]:
    """What a visiting task yields: a row per name, and one for the visit itself, or for why there is none."""
    mine, _ = place.opened()
    objects = place.objects()
    named: list[str] = []

    async def visited() -> Visit:
        visit = await objects.visit(keys, named.append)
        swept = await objects.sweep(visit) if sweep else 0
        return Visit(visit.keys, visit.exists, visit.compaction_since_ms, visit.stale[:swept])

    try:
        visit = pickle.dumps(mine.run(visited()))
    except StorageDamaged as error:  # A second attempt would meet it again.
        visit = pickle.dumps(error)
    for first in range(0, len(named), BATCH_ROWS):
        part = named[first : first + BATCH_ROWS]
        yield pa.RecordBatch.from_arrays([pa.array(part), pa.nulls(len(part), pa.binary())], schema=NAMES)
    yield pa.RecordBatch.from_arrays([pa.nulls(1, pa.string()), pa.array([visit], pa.binary())], schema=NAMES)


def _rows(
    spark: SparkSession,
    function: Callable[[Any], Iterator[pa.RecordBatch]],
    items: Sequence[Any],
    columns: str,
) -> DataFrame:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from function(items[number])

    return spark.range(0, len(items), 1, max(len(items), 1)).mapInArrow(work, columns)
