"""A topic into Delta and Parquet tables by fused tasks, against the way through the JVM.

Rows have a key of 16 bytes and a value of 100 or of 1,000, in four partitions of a log in a directory, as
appends of 4 MiB. The export reads, encodes and writes inside its tasks and commits on the driver. Beside it
the same topic through our own data source and `df.write.parquet` with zstd, which moves every row into the
JVM and encodes it there. What is compared is processor time, of the driver, the JVM and all Python workers.

One core against two: the same session with two slots, where all tasks are one Spark task, or one each.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures._spark import KEY_BYTES, cpu_seconds, per_second, records, session
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Sample, Variant, Variants, at_least
from forebay import aio
from forebay.log import AppendGroup
from forebay.spark.export import (
    ExportConfig,
    Exporter,
    SourceSpec,
    TargetSpec,
    close_clients,
    spark_runner,
)
from forebay.spark.export._facts import Task, TaskResult
from forebay.spark.export._spread import spread
from forebay.spark.export._task import run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_export_large", "spark_export_small"]

MIB = 1024 * 1024
PARTITIONS = 4
APPEND_BYTES = 4 * MIB
TASKS = 8
SMALL, SMALL_ROWS = 100, 2_000_000
LARGE, LARGE_ROWS = 1_000, 400_000


async def _fill(data: Path, rows: int, value_bytes: int) -> None:
    async with aio.connect(data) as bay:
        await bay.topics.create("t", partitions=PARTITIONS)
        step = APPEND_BYTES // (KEY_BYTES + value_bytes)
        for number, first in enumerate(range(0, rows, step)):
            keys, values = records(min(step, rows - first), value_bytes, number)
            group = AppendGroup.of("t", number % PARTITIONS, values, keys=keys)
            [result] = await bay.writer.append_shared([group])
            result.unwrap()


def run_in_turn(config: ExportConfig, store: str, tasks: Sequence[Task]) -> list[TaskResult]:
    """All tasks one after the other: one core."""
    return [run_task(config, store, task) for task in tasks]


def _per_cpu_second(work: Callable[[], float]) -> Variant:
    """Rows per second of processor time, the driver's own included."""

    def run(seconds: float) -> Sample:
        began, deadline, rows = cpu_seconds() + time.process_time(), time.perf_counter() + seconds, 0.0
        while True:
            rows += work()
            if time.perf_counter() >= deadline:
                break
        return Sample(rows / (cpu_seconds() + time.process_time() - began))

    return Variant(run, "rows per CPU second")


class _Exports:
    """Exports of one log into ever new tables."""

    def __init__(self, data: Path, place: Path, rows: int, value_bytes: int, spark: SparkSession) -> None:
        self._data, self._place, self._rows, self._spark = data, place, rows, spark
        self._size = rows * (KEY_BYTES + value_bytes) // TASKS
        self._numbers = itertools.count()

    def _table(self) -> Path:
        table = self._place / f"table-{next(self._numbers)}"
        shutil.rmtree(self._place / f"table-{int(table.name.rpartition('-')[2]) - 2}", ignore_errors=True)
        return table

    def _config(self, kind: str) -> ExportConfig:
        return ExportConfig(
            SourceSpec.parse("t", str(self._data), None),
            TargetSpec.parse(f"{kind}:{self._table()}"),
            task_bytes_min=self._size,
            task_bytes_max=self._size,
        )

    def export(self, kind: str) -> float:
        """On Spark, a task per slot."""
        config = self._config(kind)
        report = Exporter(config, spark_runner(self._spark), parallelism=2).run_once()
        assert report.rows == self._rows
        return float(report.rows)

    def export_on_one(self) -> float:
        """On Spark, all tasks in one slot."""

        def runner(
            config: ExportConfig, tasks: Sequence[Task], store: str, told: Callable[[], None]
        ) -> list[TaskResult]:
            [results] = spread(partial(run_in_turn, config, store), [tasks], spark=self._spark)
            return results

        report = Exporter(self._config("delta"), runner, parallelism=2).run_once()
        assert report.rows == self._rows
        return float(report.rows)

    def through_the_jvm(self) -> float:
        """Our source, Spark's Parquet writer."""
        frame = (
            self._spark.read.format("forebay").option("path", str(self._data)).option("subscribe", "t").load()
        )
        frame = frame.select("key", "value", "topic", "partition", "offset", "timestamp")
        frame.write.option("compression", "zstd").parquet(str(self._table()))
        return float(self._rows)


_FIGURES = (
    Figure(
        "Delta against df.write.parquet, CPU",
        of="export to Delta",
        against="source to df.write.parquet",
        target=at_least(2.0),
    ),
    Figure(
        "Parquet against df.write.parquet, CPU",
        of="export to Parquet",
        against="source to df.write.parquet",
        target=at_least(2.0),
    ),
    Figure("two cores against one", of="export, two slots", against="export, one slot", target=at_least(1.7)),
)


@suite.benchmark(
    "spark-export-132", "Export of 132-byte records costs half of the way through the JVM.", *_FIGURES
)
def spark_export_small(bench: Bench) -> Iterator[Variants]:
    """Two million small rows."""
    yield from _measure(bench, SMALL_ROWS, SMALL)


@suite.benchmark(
    "spark-export-1k", "Export of 1 KiB records costs half of the way through the JVM.", *_FIGURES
)
def spark_export_large(bench: Bench) -> Iterator[Variants]:
    """Four hundred thousand larger rows."""
    yield from _measure(bench, LARGE_ROWS, LARGE)


def _measure(bench: Bench, rows: int, value_bytes: int) -> Iterator[Variants]:
    data = bench.directory / "log"
    bench.say("filling a topic")
    asyncio.run(_fill(data, rows, value_bytes))
    with session(2) as spark:
        from forebay.spark import ForebaySource

        spark.dataSource.register(ForebaySource)
        exports = _Exports(data, bench.directory, rows, value_bytes, spark)
        try:
            yield {
                "export to Delta": _per_cpu_second(lambda: exports.export("delta")),
                "export to Parquet": _per_cpu_second(lambda: exports.export("parquet")),
                "source to df.write.parquet": _per_cpu_second(exports.through_the_jvm),
                "export, two slots": per_second(lambda: exports.export("delta")),
                "export, one slot": per_second(exports.export_on_one),
            }
        finally:
            close_clients()
