"""A topic into Delta and Parquet tables by fused tasks, against the way through the JVM.

Rows have a key of 16 bytes and a value of 100 or of 1,000, in four partitions of a log in a directory, as
appends of 4 MiB. The export reads, encodes and writes inside its tasks and commits on the driver. Beside it
the same topic through our own data source and `df.write.parquet` with zstd, which moves every row into the
JVM and encodes it there. What is compared is processor time, of the driver, the JVM and all Python workers.

One core against two: the same job with the same tasks, once with all its processes kept to one processor.
Beside it, without a target, all of it in a single task there, which also saves what Spark takes for each of
the others. What a job costs before its first task and after its last one does not become faster by more
cores: there are so many rows that it is less than a tenth of the time. Tables are deleted between the turns.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures._memory import memory_in_use
from benchmarks.figures._spark import (
    KEY_BYTES,
    cpu_seconds,
    fill,
    job,
    megabytes,
    on_one_core,
    session,
    warm,
)
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variants, at_least, at_most
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

SMALL, SMALL_ROWS = 100, 8_000_000
LARGE, LARGE_ROWS = 1_000, 1_600_000
FACTS_BYTES = 16
"""Offset and time of a row, which count as its bytes."""


def run_in_turn(config: ExportConfig, store: str, tasks: Sequence[Task]) -> list[TaskResult]:
    """All tasks one after the other."""
    return [run_task(config, store, task) for task in tasks]


def _with_driver() -> float:
    """Processor time of all processes, this one included: the driver commits."""
    return cpu_seconds() + time.process_time()


class _Exports:
    """Exports of one log into ever new tables."""

    def __init__(self, data: Path, place: Path, rows: int, spark: SparkSession) -> None:
        self._data, self._place, self._rows, self._spark = data, place, rows, spark
        self._numbers = itertools.count()

    def _table(self) -> Path:
        return self._place / f"table-{next(self._numbers)}"

    def forget(self) -> None:
        """Delete the tables."""
        for table in self._place.glob("table-*"):
            shutil.rmtree(table)

    def _config(self, kind: str) -> ExportConfig:
        return ExportConfig(
            SourceSpec.parse("t", str(self._data), None),
            TargetSpec.parse(f"{kind}:{self._table()}"),
        )

    def export(self, kind: str) -> float:
        """On Spark, a task per slot."""
        config = self._config(kind)
        report = Exporter(config, spark_runner(self._spark), parallelism=2).run_once()
        assert report.rows == self._rows
        return float(report.rows)

    def export_on_one_core(self) -> float:
        """The same job on one processor."""
        with on_one_core():
            return self.export("delta")

    def export_in_one_task(self) -> float:
        """On one processor, all of it in a single task of Spark's."""

        def runner(
            config: ExportConfig, tasks: Sequence[Task], store: str, told: Callable[[], None]
        ) -> list[TaskResult]:
            [results] = spread(partial(run_in_turn, config, store), [tasks], spark=self._spark)
            return results

        with on_one_core():
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
        "Delta: CPU of source to df.write.parquet",
        "export to Delta",
        "source to df.write.parquet",
        at_most(0.5),
        measure=Measure.CPU,
    ),
    Figure(
        "Parquet: CPU of source to df.write.parquet",
        "export to Parquet",
        "source to df.write.parquet",
        at_most(0.5),
        measure=Measure.CPU,
    ),
    Figure("two cores against one", "export to Delta", "export, one core", at_least(1.7)),
    Figure("two cores against one task", "export to Delta", "export, one task"),
    Figure("MB/s", "export to Delta, MB", measure=Measure.PLAIN),
)


@suite.benchmark(
    "spark-export-132",
    "Export of 132-byte records costs half of the way through the JVM.",
    *_FIGURES,
    jobs=True,
)
def spark_export_small(bench: Bench) -> Iterator[Variants]:
    """Eight million small rows."""
    yield from _measure(bench, SMALL_ROWS, SMALL)


@suite.benchmark(
    "spark-export-1k", "Export of 1 KiB records costs half of the way through the JVM.", *_FIGURES, jobs=True
)
def spark_export_large(bench: Bench) -> Iterator[Variants]:
    """1.6 million larger rows."""
    yield from _measure(bench, LARGE_ROWS, LARGE)


def _measure(bench: Bench, rows: int, value_bytes: int) -> Iterator[Variants]:
    data = bench.directory / "log"
    with ExitStack() as stack:
        memory = stack.enter_context(memory_in_use(bench))
        bench.say("filling a topic")
        asyncio.run(fill(data, rows, value_bytes))
        spark = stack.enter_context(session(2))
        memory.hold(data)
        exports = _Exports(data, bench.directory, rows, spark)

        def ready() -> None:
            exports.forget()
            memory.refill()

        delta, speed = megabytes(
            job(lambda: exports.export("delta"), _with_driver), KEY_BYTES + value_bytes + FACTS_BYTES
        )
        try:
            variants = {
                "export to Delta": delta,
                "export to Delta, MB": speed,
                "export to Parquet": job(lambda: exports.export("parquet"), _with_driver),
                "source to df.write.parquet": job(exports.through_the_jvm, _with_driver),
                "export, one core": job(exports.export_on_one_core, _with_driver),
                "export, one task": job(exports.export_in_one_task, _with_driver),
            }
            yield warm(variants, ready, runs=2)
        finally:
            close_clients()
