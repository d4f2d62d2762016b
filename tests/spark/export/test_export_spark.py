"""The same tasks on Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from tests.spark.export.bed import Bed, all_places, order, places
from tests.spark.export.spark_workers import double, killed_once, refuse, unreachable

import forebay
from forebay.errors import LimitExceeded, Unavailable
from forebay.spark.export import BadRecords, Exporter, RecordsTrimmed, export, spark_runner
from forebay.spark.export._spread import _attempts_of, spread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_tasks_on_spark_write_what_tasks_here_write(bed: Bed, spark: SparkSession) -> None:
    bed.fill(50, appends=5)
    bed.send([b"{bad"])
    here = bed.config(table="here", dead_letter="topic:dead")
    there = bed.config(table="there", dead_letter="topic:dead_too", partition_by=("date",))
    heard: list[tuple[str, int, int]] = []
    report = export(there, spark=spark, step=lambda *told: heard.append(told))
    assert report.rows == export(here).rows == 100
    assert export(there, spark=spark).records == 0
    keys = [("_partition", "ascending"), ("_offset", "ascending")]
    wanted = bed.rows(table="here").sort_by(keys)
    assert bed.rows(table="there").drop_columns(["_date"]).sort_by(keys).equals(wanted)
    tasks = [each for each in heard if each[0] == "task"]
    assert tasks[-1][1] == tasks[-1][2] == len(tasks)


def test_a_worker_that_is_killed_costs_a_second_attempt(spark: SparkSession, tmp_path: Path) -> None:
    work = partial(killed_once, str(tmp_path))
    assert sorted(spread(work, [1, 2, 3], spark=spark)) == [2, 4, 6]
    assert len(list(tmp_path.iterdir())) == 3


def test_errors_come_back_with_their_fields(bed: Bed, spark: SparkSession) -> None:
    bed.fill(3)
    bed.send([b"{bad"])
    with pytest.raises(BadRecords, match="orders:0 4"):
        export(bed.config(), spark=spark)
    with pytest.raises(LimitExceeded) as caught:
        spread(refuse, [7], spark=spark)
    assert caught.value.limit == 7
    assert sorted(spread(double, [1, 2], spark=None)) == [2, 4]
    assert RecordsTrimmed("a:0", position=1, earliest=2).final


def test_a_store_that_does_not_answer_is_tried_again_and_then_itself_the_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A continuous export waits for that one; of an error of Spark's own it would end."""
    with pytest.raises(Unavailable, match="store 1 does not answer"):
        spread(partial(unreachable, str(tmp_path)), [1], spark=spark)
    assert len(list(tmp_path.iterdir())) == _attempts_of(spark)


@pytest.mark.parametrize(
    ("master", "failures", "attempts"),
    [
        ("local", "4", 1),
        ("local[*]", "4", 1),
        ("local[2,3]", "4", 3),
        ("local[*, 5]", None, 5),
        ("local-cluster[2,1,512]", None, 4),
        ("spark://host:7077", "7", 7),
        (None, None, 4),
    ],
)
def test_spark_tries_a_task_so_often(master: str | None, failures: str | None, attempts: int) -> None:
    given = {"spark.master": master, "spark.task.maxFailures": failures}
    conf = SimpleNamespace(get=lambda name, default: given[name] or default)
    assert _attempts_of(cast("SparkSession", SimpleNamespace(conf=conf))) == attempts


def test_a_driver_killed_with_its_jvm_loses_and_doubles_nothing(bed: Bed, java: None) -> None:
    """A process of its own with a Spark of its own, killed between the files and the commit."""
    bed.fill(20)
    command = [sys.executable, "-m", "tests.spark.export.spark_workers", str(bed.directory)]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "written\n"
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert bed.rows().num_rows == 0
    bed.send([order(1)])
    export(bed.config())
    assert places(bed.rows()) == sorted([*all_places(bed, 20), (0, 21)])


def test_a_runner_that_forgets_a_task_is_noticed(bed: Bed, spark: SparkSession) -> None:
    from forebay.errors import NotDone

    bed.fill(20)
    honest = spark_runner(spark)
    exporter = Exporter(bed.config(), lambda *given: honest(*given)[1:], parallelism=4)
    with pytest.raises(NotDone, match="did not report"):
        exporter.run_once()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_four_executors_give_the_same_table_bit_for_bit(bed: Bed, java: None) -> None:
    bed.fill(400, appends=20)
    bed.send([b"{bad"])
    root = Path(__file__).resolve().parents[3]
    # Executors have what is on this path: the package that is tested here, installed or not, and the tests.
    package = Path(str(forebay.__file__)).resolve()
    path = os.pathsep.join([str(package.parents[1]), str(root)])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.export.spark_workers", str(bed.directory), "cluster"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=1500,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert ran.stdout.splitlines()[-1] == str(package)
    export(bed.config(table="here", dead_letter="topic:dead_here"))
    keys = [("_partition", "ascending"), ("_offset", "ascending")]
    assert bed.rows(table="cluster").sort_by(keys).equals(bed.rows(table="here").sort_by(keys))
    dead = [[row["value"] for row in bed.read_topic(topic)] for topic in ("dead_here", "dead_cluster")]
    assert dead == [[b"{bad"], [b"{bad"]]
