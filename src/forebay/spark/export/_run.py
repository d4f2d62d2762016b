"""The short way: `export(config)` here, `export(config, spark=spark)` there, once or for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.errors import ForebayError, NotDone, OutcomeUnknown, UsageError
from forebay.spark.export._clients import clients
from forebay.spark.export._config import ExportConfig, TargetSpec
from forebay.spark.export._exporter import Exporter, ExportReport, Step
from forebay.spark.export._runners import local_runner, spark_runner
from forebay.spark.export._spread import slots_of
from forebay.spark.export._tables import open_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["export", "export_forever", "orphans"]

INTERVAL_S_MIN = 0.1
"""Shortest pause between two looks at the source."""


def _exporter(config: ExportConfig, spark: SparkSession | None, step: Step | None) -> Exporter:
    runner = local_runner() if spark is None else spark_runner(spark)
    return Exporter(config, runner, parallelism=slots_of(spark), step=step)


def export(
    config: ExportConfig, *, spark: SparkSession | None = None, step: Step | None = None
) -> ExportReport:
    """Export everything that is there now; without `spark` on threads of this process.

    Raises `CommitConflict` where others were always first, `BadRecords` where a record cannot be decoded and
    there is no place for it, `RecordsTrimmed` where records went before they were exported.
    """
    return _exporter(config, spark, step).run_once()


def export_forever(
    config: ExportConfig,
    *,
    interval_s: float,
    stop: threading.Event,
    spark: SparkSession | None = None,
    step: Step | None = None,
    each: Callable[[ExportReport], None] | None = None,
    waiting: Callable[[ForebayError], None] | None = None,
) -> None:
    """Export again and again, `interval_s` apart, until `stop` is set; `each` hears of every round.

    A source or a table that cannot be reached is waited for, and `waiting` hears why. What no waiting heals
    is raised.
    """
    if interval_s < INTERVAL_S_MIN:
        raise UsageError(f"every {interval_s} s", hint=f"at least {INTERVAL_S_MIN} s")
    exporter = _exporter(config, spark, step)
    while not stop.is_set():
        try:
            report = exporter.run_once()
        except (OutcomeUnknown, NotDone) as error:
            if not _passes(error):
                raise
            if waiting is not None:
                waiting(error)
        else:
            if each is not None:
                each(report)
        stop.wait(interval_s)


def _passes(error: NotDone | OutcomeUnknown) -> bool:
    from forebay.errors import Unavailable
    from forebay.spark.export._errors import CommitConflict

    return isinstance(error, Unavailable | CommitConflict | OutcomeUnknown)


def orphans(target: TargetSpec, *, name: str = "forebay") -> list[str]:
    """Parquet files below a table that no commit names: left by crashes and conflicts, or just being written.

    They do no harm. A full vacuum (of delta-rs: `full=True`) deletes those of a Delta table; delete others
    when they are old.
    """
    opened = clients()
    table = open_table(target, name, opened)
    handle = table.load()
    if handle is None and target.kind == "iceberg":
        return []  # The catalog says where its files are, and knows of none.
    live = set() if handle is None else set(handle.live_files())
    store = opened.store(table.store)

    async def found() -> list[str]:
        return [info.key async for info in store.list("") if info.key.endswith(".parquet")]

    return [key for key in opened.run(found()) if key not in live and not key.startswith("_")]
