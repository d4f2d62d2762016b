"""One function over many items: on Spark, or on threads of this process. The function is the same.

On Spark one `mapInArrow` gets the numbers of the items and returns one pickled result each; nothing else goes
through the JVM. An executor that is killed takes its items with it, and Spark runs them again elsewhere: so
whatever is spread must bear being run twice, or twice at once.

An error that a second attempt would meet again travels back as a value and is raised on the driver, with its
fields and its hint. Any other is left to Spark, which tries the item again; what the last attempt meets comes
back as well, so that a store that is down is the same error here and there, and can be waited for.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from forebay.errors import ForebayError, NotFound, OutcomeUnknown, Unavailable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["cores", "slots_of", "spread"]

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS: Final = 0.5
"""How often Spark is asked how far it is."""
ATTEMPTS_OF_SPARK: Final = "4"
"""What `spark.task.maxFailures` is where nobody sets it."""
RESULT: Final = pa.schema([pa.field("result", pa.binary())])


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def slots_of(spark: SparkSession | None) -> int:
    """Tasks that run at once."""
    if spark is None:
        return cores()
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Connect has no context; this machine is the best guess.
        return cores()


def spread(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    spark: SparkSession | None = None,
    told: Callable[[], None] | None = None,
    workers: int | None = None,
) -> list[Result]:
    """The result of every item, in no particular order. `told` is called after each.

    `function` and its items travel by pickle: a function of a module that executors have, or a `partial`.
    """
    hear = told or (lambda: None)
    if not items:
        return []
    if spark is None:
        return _on_threads(function, items, hear, workers or cores())
    return _on_spark(function, items, hear, spark)


def _on_threads(
    function: Callable[[Item], Result], items: Sequence[Item], told: Callable[[], None], workers: int
) -> list[Result]:
    results: list[Result] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="forebay-job") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                results.append(future.result())
                told()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _on_spark(
    function: Callable[[Item], Result], items: Sequence[Item], told: Callable[[], None], spark: SparkSession
) -> list[Result]:
    attempts = _attempts_of(spark)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        from forebay.spark._worker import begin, settle

        begin()
        context = TaskContext.get()
        is_last = context is not None and context.attemptNumber() + 1 >= attempts
        for batch in batches:
            for number in batch.column(0).to_pylist():
                data = pickle.dumps(attempt(function, items[number], is_last=is_last))
                yield pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], schema=RESULT)
        settle()

    numbers = spark.range(0, len(items), 1, len(items))
    with _Watch(spark, told) as watch:
        rows = numbers.mapInArrow(work, "result binary").toArrow().column(0)
    results: list[Any] = [pickle.loads(row) for row in rows.to_pylist()]
    for result in results:
        if isinstance(result, ForebayError):
            raise result
    for _ in range(len(results) - watch.told):
        told()
    return results


def _attempts_of(spark: SparkSession) -> int:
    """How often Spark tries a task: in local mode once, or as the master says after a comma."""
    if local := re.fullmatch(r"local(?:\[[^,\]]*,?\s*(\d*)\])?", spark.conf.get("spark.master", "") or ""):
        return int(local[1] or 1)
    return int(spark.conf.get("spark.task.maxFailures", ATTEMPTS_OF_SPARK) or ATTEMPTS_OF_SPARK)


def attempt(
    function: Callable[[Item], Result], item: Item, *, is_last: bool = False
) -> Result | ForebayError:
    """The result, or an error that would come again, or has no other chance. Others are raised."""
    try:
        return function(item)
    except ForebayError as error:
        passes = isinstance(error, Unavailable | OutcomeUnknown)
        is_final = isinstance(error, UsageError | NotFound) or getattr(error, "final", False)
        if is_last or (is_final and not passes):
            return error
        raise


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
        self._thread = threading.Thread(target=self._watch, name="forebay-progress", daemon=True)

    def _stages(self) -> list[int]:
        return [] if self._tracker is None else list(self._tracker.getActiveStageIds())

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS) and self._error is None:
            try:
                new = [stage for stage in self._stages() if stage not in self._before]
                infos = [self._tracker.getStageInfo(stage) for stage in new]
                done = max((info.numCompletedTasks for info in infos if info is not None), default=0)
                while self.told < done:
                    self.told += 1
                    self._tell()
            except BaseException as error:  # Whoever listens may end the job; it is raised when it is over.
                self._error = error

    def __enter__(self) -> _Watch:
        if self._tracker is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error
