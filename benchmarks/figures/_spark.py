"""What the figures of Spark share: a session, a topic of rows, jobs, and the processor time of all processes.

A job gives both of its figures at once: rows per second by the clock, and processor time per row of the JVM
and all Python workers (microseconds per row are seconds per million rows).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.figures._memory import made_ready
from benchmarks.figures._processes import ProcessTimes, processes
from benchmarks.harness import CannotMeasure, Sample, Variant, Variants
from forebay import aio
from forebay.log import AppendGroup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "KEY_BYTES",
    "PARTITIONS",
    "cpu_seconds",
    "fill",
    "job",
    "megabytes",
    "on_one_core",
    "prepared_rows",
    "records",
    "session",
    "to_nowhere",
    "to_nowhere_as_stream",
    "warm",
]

KEY_BYTES = 16
PARTITIONS = 4
APPEND_BYTES = 4 * 1024 * 1024
MB = 1_000_000
_times = ProcessTimes(os.getpid())


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


async def fill(data: Path, rows: int, value_bytes: int, topic: str = "t") -> None:
    """A topic in a directory, as appends of 4 MiB in turn to its partitions."""
    async with aio.connect(data) as bay:
        await bay.topics.create(topic, partitions=PARTITIONS)
        step = APPEND_BYTES // (KEY_BYTES + value_bytes)
        for number, first in enumerate(range(0, rows, step)):
            keys, values = records(min(step, rows - first), value_bytes, number)
            group = AppendGroup.of(topic, number % PARTITIONS, values, keys=keys)
            [result] = await bay.writer.append_shared([group])
            result.unwrap()


def prepared_rows(spark: SparkSession, rows: int, value_bytes: int, partitions: int) -> Any:
    """A reader of the source that only hands out what it has; the sink that discards is registered too."""
    from pyspark import cloudpickle

    from benchmarks.figures import _spark_prepared

    cloudpickle.register_pickle_by_value(_spark_prepared)  # type: ignore[no-untyped-call]
    spark.dataSource.register(_spark_prepared.Prepared)
    spark.dataSource.register(_spark_prepared.Discard)
    options = {"rows": rows, "bytes": value_bytes, "partitions": partitions}
    return spark.read.format("prepared").options(**options)


def to_nowhere(frame: DataFrame) -> None:
    """Read every column of every row."""
    frame.write.format("noop").mode("overwrite").save()


def to_nowhere_as_stream(frame: DataFrame, checkpoint: Path) -> None:
    """The same as a query that ends when it has read what there is."""
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query.trigger(availableNow=True).start().awaitTermination()
    shutil.rmtree(checkpoint)


def cpu_seconds(aside: int | None = None) -> float:
    """Processor time of everything this process has started.

    Without the process `aside`: a server that idles beside the work belongs to whoever uses it.
    """
    return _times.seconds(aside)


def job(work: Callable[[], float], cpu: Callable[[], float] = cpu_seconds) -> Variant:
    """One job a turn, which tells how many rows it moved."""

    def run(seconds: float) -> Sample:
        spent, began = cpu(), time.perf_counter()
        rows = work()
        took, spent = time.perf_counter() - began, cpu() - spent
        return Sample(rows / took, cpu_us=spent * 1e6 / rows)

    return Variant(run, "rows/s")


def warm(variants: Variants, ready: Callable[[], None], runs: int = 1) -> Variants:
    """The same variants, each run before: the JVM compiles what it has run often, at the cost of who runs
    next. Before every turn the world is made `ready`, unmeasured."""
    found = made_ready(variants, ready)
    for _ in range(runs):
        for variant in found.values():
            variant.run(0)
    return found


def megabytes(variant: Variant, row_bytes: int) -> tuple[Variant, Variant]:
    """A variant, and another that tells the rate of the same turn in MB/s, whichever has its turn first."""
    untold: dict[str, list[Sample]] = {"rows": [], "MB": []}

    def turn(name: str, seconds: float) -> Sample:
        if not untold[name]:
            done = variant.run(seconds)
            for waiting in untold.values():
                waiting.append(done)
        return untold[name].pop()

    def speed(seconds: float) -> Sample:
        return Sample(turn("MB", seconds).rate * row_bytes / MB)

    return Variant(lambda seconds: turn("rows", seconds), variant.unit), Variant(speed, "MB/s")


@contextmanager
def on_one_core() -> Iterator[None]:
    """Everything that this process has started keeps to one processor; what it starts inherits that."""
    everything = os.sched_getaffinity(0)
    _keep_to({max(everything)})
    try:
        yield
    finally:
        _keep_to(everything)


def _keep_to(processors: set[int]) -> None:
    children: dict[int, list[int]] = {}
    for number, found in processes().items():
        children.setdefault(found.parent, []).append(number)
    waiting = [os.getpid()]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        try:
            threads = [int(entry.name) for entry in Path(f"/proc/{process}/task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(thread, processors)
            except OSError:
                continue  # It has ended.
