"""Where tasks run: on threads of this process, or on Spark. The tasks are the same.

Threads are enough locally: parsing, compressing and writing happen in compiled code without the interpreter's
lock. On Spark one `mapInArrow` gets the numbers of the tasks and returns a description per task; no row goes
through the JVM.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from forebay.errors import ForebayError, NotDone, UsageError
from forebay.spark.export._config import ExportConfig
from forebay.spark.export._errors import BadRecords, RecordsTrimmed
from forebay.spark.export._exporter import Runner
from forebay.spark.export._facts import Task, TaskResult
from forebay.spark.export._task import run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["cores", "local_runner", "spark_runner"]

POLL_SECONDS: Final = 0.5
"""How often Spark is asked how far it is."""
RESULT: Final = pa.schema([pa.field("result", pa.binary())])


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def local_runner(workers: int | None = None) -> Runner:
    """Tasks on threads of this process."""

    def run(
        config: ExportConfig, tasks: Sequence[Task], store: str, told: Callable[[], None]
    ) -> list[TaskResult]:
        if len(tasks) == 1:
            results = [run_task(config, tasks[0], store)]
            told()
            return results
        with ThreadPoolExecutor(workers or cores(), thread_name_prefix="forebay-export") as pool:
            futures = [pool.submit(run_task, config, task, store) for task in tasks]
            try:
                results = []
                for future in as_completed(futures):
                    results.append(future.result())
                    told()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    return run


def spark_runner(spark: SparkSession) -> Runner:
    """Tasks on Spark, wherever its executors are. They need this package installed."""

    def run(
        config: ExportConfig, tasks: Sequence[Task], store: str, told: Callable[[], None]
    ) -> list[TaskResult]:
        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    data = pickle.dumps(_attempt(config, tasks[number], store))
                    yield pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], schema=RESULT)

        numbers = spark.range(0, len(tasks), 1, len(tasks))
        with _Watch(spark, told) as watch:
            rows = numbers.mapInArrow(work, "result binary").toArrow().column(0)
        results = [pickle.loads(row) for row in rows.to_pylist()]
        for result in results:
            if isinstance(result, ForebayError):
                raise result
        for _ in range(len(results) - watch.told):
            told()
        return results

    return run


def _attempt(config: ExportConfig, task: Task, store: str) -> TaskResult | ForebayError:
    """A result, or an error that a second attempt would meet again. Others are raised: Spark tries again."""
    try:
        return run_task(config, task, store)
    except (UsageError, RecordsTrimmed, BadRecords) as error:
        return error


class _Watch:
    """Asks Spark now and then how many tasks are done. Silent where Spark does not tell, as over Connect."""

    def __init__(self, spark: SparkSession, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.told = 0
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._tracker: Any = None
        try:
            self._tracker = spark.sparkContext.statusTracker()
        except Exception as error:  # Connect has no context, and says so in its own way.
            del error
        self._before = set(self._stages())
        self._thread = threading.Thread(target=self._watch, name="forebay-export-progress", daemon=True)

    def _stages(self) -> list[int]:
        return [] if self._tracker is None else list(self._tracker.getActiveStageIds())

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS) and self._error is None:
            try:
                infos = [
                    self._tracker.getStageInfo(stage) for stage in self._stages() if stage not in self._before
                ]
                done = max((info.numCompletedTasks for info in infos if info is not None), default=0)
                while self.told < done:
                    self.told += 1
                    self._tell()
            except BaseException as error:
                self._error = error

    def __enter__(self) -> _Watch:
        if self._tracker is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if isinstance(self._error, NotDone):
            raise self._error
