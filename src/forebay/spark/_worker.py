"""What a Python worker of Spark does once, for all tasks that follow in it.

Spark's daemon calls `gc.collect()` in a worker after every task. A full collection visits every object of
every module that is loaded, some 30 ms with PySpark and Arrow: more than reading ten megabytes. What is
loaded when the first task has ended stays for the life of the process, so it is put aside (`gc.freeze`), and
the collections that follow visit what the tasks themselves made.
"""

from __future__ import annotations

import gc
import os
from typing import Final

from pyspark import TaskContext

__all__ = ["SLOTS_VARIABLE", "settle"]

SLOTS_VARIABLE: Final = "FOREBAY_SPARK_SLOTS"
"""Variable of the environment that tells Python processes how many tasks run at once."""

_settled: set[int] = set()


def settle() -> None:
    """Put aside what is loaded by now, once per worker. Does nothing outside of a task."""
    if os.getpid() in _settled or TaskContext.get() is None:
        return
    _settled.add(os.getpid())
    gc.collect()
    gc.freeze()
