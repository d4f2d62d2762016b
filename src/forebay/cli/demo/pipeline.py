"""The pipeline process of the demo: three topics into three Delta tables, round after round.

It is killed with -9 in the middle and started again, and keeps nothing of its own: where to go on stands in
the tables. It prints a line of JSON per step, which the demo reads. A line on its stdin, or its end, means:
one more round, answer the questions, and leave.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.demo.events import TOPICS, Topic
from forebay.cli.demo.questions import QUESTIONS
from forebay.spark.export import (
    DeadLetterSpec,
    ExportConfig,
    SourceSpec,
    TargetSpec,
    export,
    parse_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["config_of", "dead_letters_of", "table_of"]

COMMIT_BYTES = 512 * 1024
"""Stored bytes of one commit: small, so that there is a middle to be killed in."""


def table_of(directory: Path, topic: str) -> Path:
    """Where the table of a topic lies."""
    return directory / "tables" / topic


def dead_letters_of(topic: str) -> str:
    """The topic that takes what cannot be decoded."""
    return f"{topic}-dead"


def config_of(directory: Path, topic: Topic) -> ExportConfig:
    """The export of one topic."""
    return ExportConfig(
        SourceSpec("log", (topic.name,), str(directory)),
        TargetSpec("delta", str(table_of(directory, topic.name))),
        format="json",
        schema=parse_schema(topic.schema),
        partition_by=topic.partition_by,
        dead_letter=DeadLetterSpec(topic=dead_letters_of(topic.name)),
        commit_bytes_max=COMMIT_BYTES,
        task_bytes_min=COMMIT_BYTES // 2,
    )


def _say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _rounds(directory: Path, spark: SparkSession | None, last: threading.Event) -> None:
    while True:
        is_last = last.is_set()
        moved = 0
        for topic in TOPICS:

            def step(what: str, done: int, total: int, name: str = topic.name) -> None:
                if what in ("written", "committed"):
                    _say(step=what, table=name)

            report = export(config_of(directory, topic), spark=spark, step=step)
            moved += report.records
            if report.records:
                _say(exported=topic.name, **report.as_json())
        if is_last:
            return
        if not moved:
            last.wait(0.2)


def _answers(directory: Path, spark: SparkSession) -> dict[str, list[list[Any]]]:
    """The questions, answered by Spark SQL on the files that the tables consist of now."""
    from deltalake import DeltaTable

    for topic in TOPICS:
        files = DeltaTable(str(table_of(directory, topic.name))).file_uris()
        spark.read.parquet(*files).createOrReplaceTempView(topic.name)
    return {name: [list(row) for row in spark.sql(sql).collect()] for name, sql in QUESTIONS.items()}


def main(place: str, mode: str) -> None:
    """Run until told to end."""
    directory = Path(place)
    last = threading.Event()

    def listen(wait: Callable[[], str]) -> None:
        wait()
        last.set()

    threading.Thread(target=listen, args=(sys.stdin.readline,), daemon=True).start()
    spark = None
    if mode == "spark":
        from forebay.spark import session

        spark = session("forebay-demo", fast_start=True)
    _say(ready=mode)
    _rounds(directory, spark, last)
    if spark is not None:
        _say(answers=_answers(directory, spark))
        spark.stop()
    _say(done=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
