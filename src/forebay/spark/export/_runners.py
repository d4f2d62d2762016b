"""Where the tasks of an export run: on threads of this process, or on Spark. The tasks are the same.

Threads are enough locally: parsing, compressing and writing happen in compiled code without the interpreter's
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from forebay.spark.export._config import ExportConfig
from forebay.spark.export._exporter import Runner
from forebay.spark.export._facts import Task, TaskResult
from forebay.spark.export._spread import spread
from forebay.spark.export._task import run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["local_runner", "spark_runner"]


def local_runner(workers: int | None = None) -> Runner:
    """Tasks on threads of this process."""
    return _runner(None, workers)


def spark_runner(spark: SparkSession) -> Runner:
    """Tasks on Spark, wherever its executors are. They need this package installed."""
    return _runner(spark, None)


def _runner(spark: SparkSession | None, workers: int | None) -> Runner:
    def run(
        config: ExportConfig, tasks: Sequence[Task], store: str, told: Callable[[], None]
    ) -> list[TaskResult]:
        work = partial(run_task, config, store)
        return spread(work, tasks, spark=spark, told=told, workers=workers)

    return run
