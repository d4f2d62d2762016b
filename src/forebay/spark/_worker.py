"""What a Python worker of Spark does once, for all tasks that follow in it.

Spark's daemon calls `gc.collect()` in a worker after every task. A full collection visits every object of
every module that is loaded, some 30 ms with PySpark and Arrow: more than reading ten megabytes. What is
loaded when the first task has ended stays for the life of the process, so it is put aside (`gc.freeze`), and
the collections that follow visit what the tasks themselves made.

Tasks read and write objects of some megabytes, one after the other. What one frees the next one takes, so it
stays with the process: fetching it from the kernel again took a third of the time of reading (see
`forebay.kit.memory`). Arrow's own allocator gives back what is free a moment later, so Arrow takes its memory
from the C library in here, as everything else does, from one heap for all threads and blocks of all sizes. Of
the page faults of a task that writes into a topic none is left, of one that exports 60 MB one in forty.
"""

from __future__ import annotations

import gc
import os
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

from forebay.kit.memory import keep_free_memory

__all__ = ["SLOTS_VARIABLE", "begin", "settle"]

SLOTS_VARIABLE: Final = "FOREBAY_SPARK_SLOTS"
"""Variable of the environment that tells Python processes how many tasks run at once."""
KEPT_FREE_BYTES: Final = 256 * 1024 * 1024
"""Free memory that a worker keeps: a task that writes gathers 64 MiB, in order and as they came."""

_begun: set[int] = set()
_settled: set[int] = set()


def begin() -> None:
    """Keep what tasks free, once per worker. Does nothing outside of a task: other processes are not ours."""
    if os.getpid() not in _begun and TaskContext.get() is not None:
        _begun.add(os.getpid())
        # Elsewhere the allocator of the C library may be the worse one.
        if keep_free_memory(KEPT_FREE_BYTES, one_heap=True):
            pa.set_memory_pool(pa.system_memory_pool())


def settle() -> None:
    """Put aside what is loaded by now, once per worker. Does nothing outside of a task."""
    if os.getpid() in _settled or TaskContext.get() is None:
        return
    _settled.add(os.getpid())
    gc.collect()
    gc.freeze()
