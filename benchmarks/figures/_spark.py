"""What the figures of Spark share: a session, rows, and the processor time of a whole family of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import CannotMeasure, Sample, Variant

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["KEY_BYTES", "cpu_seconds", "per_cpu_second", "per_second", "records", "session", "to_nowhere"]

KEY_BYTES = 16
_TICK = os.sysconf("SC_CLK_TCK")


@contextmanager
def session(cores: int = 2, **conf: Any) -> Iterator[SparkSession]:
    """A session whose JVM ends with it."""
    try:
        from pyspark import SparkContext

        import forebay.spark

        spark = forebay.spark.session("forebay-benchmarks", cores, **conf)
    except Exception as error:
        raise CannotMeasure(f"no Spark here: {error}") from error
    try:
        yield spark
    finally:
        gateway = SparkContext._gateway
        spark.stop()
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(timeout=120)
        SparkContext._gateway = None
        SparkContext._jvm = None


def records(count: int, value_bytes: int, seed: int = 1) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """Keys and values: random, but made at once."""
    random = np.random.default_rng(seed)
    keys = pa.py_buffer(random.integers(0, 256, count * KEY_BYTES, np.uint8).tobytes())
    values = pa.py_buffer(random.integers(0, 256, count * value_bytes, np.uint8).tobytes())
    return _fixed(keys, count, KEY_BYTES), _fixed(values, count, value_bytes)


def _fixed(data: pa.Buffer, count: int, width: int) -> pa.BinaryArray:
    offsets = pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), count, [None, offsets, data])


def cpu_seconds() -> float:
    """Processor time of everything this process started: the JVM, the Python workers, and those that
    ended."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            times[int(entry.name)] = sum(map(int, fields[11:15])) / _TICK
    found, waiting = 0.0, list(children.get(os.getpid(), []))
    while waiting:
        process = waiting.pop()
        found += times.get(process, 0.0)
        waiting += children.get(process, [])
    return found


def to_nowhere(frame: DataFrame) -> None:
    """Read every column of every row."""
    frame.write.format("noop").mode("overwrite").save()


def per_cpu_second(work: Callable[[], float]) -> Variant:
    """Rows per second of processor time, of all processes; a run is one job or more."""

    def run(seconds: float) -> Sample:
        began, deadline, rows = cpu_seconds(), time.perf_counter() + seconds, 0.0
        while True:
            rows += work()
            if time.perf_counter() >= deadline:
                break
        return Sample(rows / (cpu_seconds() - began))

    return Variant(run, "rows per CPU second")


def per_second(work: Callable[[], float]) -> Variant:
    """Rows per second."""

    def run(seconds: float) -> Sample:
        began, rows = time.perf_counter(), 0.0
        while True:
            rows += work()
            if time.perf_counter() - began >= seconds:
                break
        return Sample(rows / (time.perf_counter() - began))

    return Variant(run, "rows/s")
