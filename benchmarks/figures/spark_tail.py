"""A streaming query at the end of a topic: what the source adds to a trigger, and what it asks for.

A query with four partitions and a trigger of zero reads one record at a time into the sink that discards.
Spark tells what each part of a trigger took: finding the end of the log (`latestOffset`), making the batch
(`getBatch`) and planning it (`queryPlanning`, which asks the source for its tasks) are the source's overhead;
reading and the two files of the checkpoint are not.

A look at a topic of a thousand partitions is counted in round trips, those in which one request had to wait
for another's answer: requests that are under way together are one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import forebay
from benchmarks.figures._spark import PARTITIONS, session
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_most
from forebay.coordination import Coordinator
from forebay.log import Positions
from forebay.sync import Bay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Trips", "spark_tail"]

MANY = 1_000
TRIGGERS = 5
"""Triggers with a record of one turn; their median counts."""
TRIGGER_TIMEOUT_S = 120
OVERHEAD = ("latestOffset", "getBatch", "queryPlanning")
ON_THE_WAY_S = 0.002
"""How long a request is made to take, so that those that do not wait for each other are seen to overlap."""


class Trips:
    """Passes the requests of a coordinator on and counts those that waited for the answer of another."""

    def __init__(self, inner: Coordinator) -> None:
        self._inner = inner
        self._answered = 0
        self.longest = 0
        """Round trips, one after the other, since `forget`."""

    scan_all = Coordinator.scan_all

    def forget(self) -> None:
        """Begin anew."""
        self._answered = self.longest = 0

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Any] = getattr(self._inner, name)

        async def request(*arguments: Any, **named: Any) -> Any:
            trip = self._answered + 1
            await asyncio.sleep(ON_THE_WAY_S)
            answer = await call(*arguments, **named)
            self._answered = max(self._answered, trip)
            self.longest = max(self.longest, trip)
            return answer

        return request


class _Look:
    """The end of a topic of many partitions, as a stream reader that has looked before finds it."""

    def __init__(self, data: Path) -> None:
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        from forebay.spark._clients import client
        from forebay.spark._columns import LOG_SCHEMA
        from forebay.spark._log_source import LogStreamReader
        from forebay.spark._options import LogOptions, Options

        with forebay.connect(data) as bay:
            bay.topics.create("many", partitions=MANY)
        options = {"path": str(data), "subscribe": "many", "startingOffsets": "earliest"}
        parsed = LogOptions.parse(Options(options), streaming=True)
        self._reader, self._limit = LogStreamReader(parsed, LOG_SCHEMA), ReadAllAvailable()
        opened = client(parsed.deployment)
        parts = opened.bay.parts
        self._trips = Trips(parts.coordinator)
        opened._positions = Positions(
            cast(Coordinator, self._trips), clock=parts.clock, randomness=parts.randomness
        )
        self._start = self._reader.initialOffset()

    def trips(self, seconds: float) -> Sample:
        """Round trips of one call of `latestOffset`."""
        self._trips.forget()
        assert len(self._reader.latestOffset(self._start, self._limit)["many"]) == MANY
        return Sample(float(self._trips.longest))


class _Tail:
    """A query that waits at the end of a topic."""

    def __init__(self, bay: Bay, query: StreamingQuery) -> None:
        self._bay, self._query = bay, query
        self._number = 0

    def trigger_ms(self) -> dict[str, int]:
        """Append a record, wait until it was read, and tell what its trigger took."""
        before = self._last()
        with self._bay.producer() as out:
            out.send("t", [b"x"], partition=self._number % PARTITIONS).result(timeout=TRIGGER_TIMEOUT_S)
        self._number += 1
        deadline = time.monotonic() + TRIGGER_TIMEOUT_S
        while (seen := self._last()) is None or seen == before:
            assert self._query.isActive and time.monotonic() < deadline, self._query.exception()
            time.sleep(0.005)
        return dict(seen[1])

    def _last(self) -> tuple[int, dict[str, int]] | None:
        """Number and durations of the last batch that had a record."""
        for progress in reversed(self._query.recentProgress):
            if progress["numInputRows"]:
                return progress["batchId"], progress["durationMs"]
        return None


@contextmanager
def _tail(spark: SparkSession, data: Path, checkpoint: Path) -> Iterator[_Tail]:
    with forebay.connect(data) as bay:
        bay.topics.create("t", partitions=PARTITIONS)
        reader = spark.readStream.format("forebay").options(path=str(data), subscribe="t")
        frame = reader.option("startingOffsets", "earliest").load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(processingTime="0 seconds").start()
        try:
            yield _Tail(bay, query)
        finally:
            query.stop()


@suite.benchmark(
    "spark-tail",
    "At the end of a topic the source takes a few milliseconds of a trigger and one round trip.",
    Figure("overhead of a trigger, ms", "overhead", target=at_most(50), measure=Measure.PLAIN),
    Figure("of it latestOffset, ms", "latestOffset", measure=Measure.PLAIN),
    Figure("whole trigger with one record, ms", "trigger", measure=Measure.PLAIN),
    Figure(
        "round trips of latestOffset, 1,000 partitions", "trips", target=at_most(1), measure=Measure.PLAIN
    ),
    jobs=True,
)
def spark_tail(bench: Bench) -> Iterator[Variants]:
    """One record at a time; then a thousand partitions with none."""
    look = _Look(bench.directory / "many")
    with (
        session() as spark,
        _tail(spark, bench.directory / "data", bench.directory / "checkpoint") as tail,
    ):
        bench.say("the first triggers")
        for _ in range(TRIGGERS):
            tail.trigger_ms()
        last: list[dict[str, int]] = []

        def overhead(seconds: float) -> Sample:
            last[:] = [tail.trigger_ms() for _ in range(TRIGGERS)]
            return Sample(statistics.median(sum(each.get(name, 0) for name in OVERHEAD) for each in last))

        def part(name: str) -> Variant:
            return Variant(lambda _: Sample(statistics.median(each[name] for each in last)), "ms")

        yield {
            "overhead": Variant(overhead, "ms"),
            "latestOffset": part("latestOffset"),
            "trigger": part("triggerExecution"),
            "trips": Variant(look.trips, "round trips"),
        }
