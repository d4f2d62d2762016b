"""Jobs on Spark say the same as the local commands, and survive a killed worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.jobs.job_workers import compact_and_die_once

import forebay
from forebay.errors import StorageDamaged
from forebay.log import CompactorConfig, VacuumConfig
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.spark.export._spread import spread
from forebay.spark.jobs import Place, compact, vacuum, verify
from forebay.spark.jobs._place import partitions_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = CompactorConfig(min_age_ms=0, wait_for_full_ms=0)


def objects(place: Place) -> list[Path]:
    return sorted(path for path in Path(place.store, "llog").rglob("*") if path.is_file())


def test_a_compaction_whose_worker_is_killed_is_resumed(
    place: Place, spark: SparkSession, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    work = partial(compact_and_die_once, str(marks), place, NOW)
    found = spread(work, partitions_of(place, "clicks"), spark=spark)
    assert len(list(marks.iterdir())) == 1
    assert [(each.topic, each.runs, each.error) for each in found] == [("clicks", 1, "")]
    assert all(not each.error for each in compact(place, config=NOW, spark=spark))
    report = verify(place, spark=spark)
    assert report.ok
    assert sum(each.records for each in report.partitions) == 80


def test_verification_on_spark_says_what_it_says_here(place: Place, spark: SparkSession) -> None:
    compact(place, topic="orders", config=NOW)
    damaged = next(path for path in objects(place) if "/compacted/" in str(path))
    damaged.write_bytes(damaged.read_bytes()[:-3] + b"xyz")
    here, there = verify(place), verify(place, spark=spark)
    assert not here.ok
    assert there.as_json() == here.as_json() | {"orphans": sorted(here.orphans)}
    assert len(there.orphans) > 0


def spoil(place: Place, key: str, partition_key: str) -> None:
    """Leave something under a key that is no record."""
    mine, parts = place.opened()
    mine.run(parts.coordinator.put(key, b"{", partition_key=partition_key))


def test_a_damaged_catalog_is_told_by_verification_on_spark_as_here(
    place: Place, spark: SparkSession
) -> None:
    spoil(place, topic_key("broken"), CATALOG_PARTITION_KEY)
    for topic in (None, "orders"):
        here, there = verify(place, topic=topic), verify(place, topic=topic, spark=spark)
        assert there.as_json() == here.as_json()
        assert here.ok is (topic is not None)


def test_a_store_of_another_log_is_told_by_verification_on_spark_as_here(
    place: Place, spark: SparkSession, tmp_path: Path
) -> None:
    with forebay.connect(tmp_path / "other") as bay:
        bay.topics.create("orders", partitions=1)
        with bay.producer() as out:
            out.send("orders", [b"one"], partition=0).result(timeout=60)
    crossed = Place(str(tmp_path / "other"), place.store)
    here, there = verify(crossed), verify(crossed, spark=spark)
    assert not here.ok and here.problems
    assert there.as_json() == here.as_json()


def test_a_damaged_partition_is_told_by_jobs_on_spark_as_here(place: Place, spark: SparkSession) -> None:
    keys = PartitionKeys("orders", 1)
    spoil(place, keys.control, keys.partition_key)
    here, there = verify(place), verify(place, spark=spark)
    assert not here.ok
    assert there.as_json() == here.as_json()
    for where in (None, spark):
        with pytest.raises(StorageDamaged):
            vacuum(place, dry_run=True, config=VacuumConfig(grace_ms=0, mark_gap_ms=0), spark=where)


def test_the_join_finds_what_two_marks_then_delete(place: Place, spark: SparkSession) -> None:
    compact(place, topic="orders", config=NOW)
    config = VacuumConfig(grace_ms=0, mark_gap_ms=0)
    expected = vacuum(place, config=config, dry_run=True)
    first = vacuum(place, config=config, spark=spark)
    assert (first.objects, first.kept["in use"], first.deleted) == (
        expected.objects,
        expected.kept["in use"],
        0,
    )
    waiting = first.kept["waits for its second mark"]
    assert waiting == expected.kept["waits for its second mark"] > 0
    second = vacuum(place, config=config, spark=spark)
    assert second.deleted == waiting
    assert verify(place).ok
    assert vacuum(place, config=config, spark=spark).deleted == 0
