"""Jobs on Spark say the same as the local commands, and survive a killed worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.spark.jobs.job_workers import compact_and_die_once

from forebay.log import CompactorConfig, VacuumConfig
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
