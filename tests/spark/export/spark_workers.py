"""What Spark's workers and other processes run for the tests."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from tests.spark.export.bed import open_bed

import forebay
from forebay.errors import LimitExceeded, Unavailable


def double(number: int) -> int:
    return 2 * number


def imported_from(number: int) -> str:
    """The package that an executor works with."""
    return str(forebay.__file__)


def killed_once(directory: str, number: int) -> int:
    """Dies by SIGKILL at the first attempt of every number."""
    mark = Path(directory, str(number))
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return double(number)


def unreachable(directory: str, number: int) -> int:
    """Leave a file for every attempt."""
    (Path(directory) / uuid.uuid4().hex).touch()
    raise Unavailable(f"store {number} does not answer", hint="wait")


def refuse(number: int) -> int:
    raise LimitExceeded("what may be", limit=number, actual=number + 1)


def main(directory: str, master: str = "") -> None:
    """Export with a Spark of one's own; on one machine stop before the commit and wait to be killed. On four
    executors tell which packages they work with."""
    from forebay.spark import session
    from forebay.spark.export import export
    from forebay.spark.export._spread import spread

    bed = open_bed(Path(directory))
    if master == "cluster":
        conf: dict[str, Any] = {"spark.master": "local-cluster[4,1,512]", "spark.executor.memory": "512m"}
        spark = session("test", **conf)
        print(*sorted(set(spread(imported_from, range(8), spark=spark))), flush=True)  # noqa: T201
        export(bed.config(table="cluster", dead_letter="topic:dead_cluster"), spark=spark)
        spark.stop()
        return

    def step(what: str, done: int, total: int) -> None:
        if what == "written":
            print("written", flush=True)  # noqa: T201 - the other process waits for it
            threading.Event().wait()

    export(bed.config(), spark=session("test", 2, fast_start=True), step=step)


if __name__ == "__main__":
    main(*sys.argv[1:])
