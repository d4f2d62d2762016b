"""What one task of a sink stages: every row once, in its partition, in the order it came, in few objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StringType, StructType

import forebay
from forebay.errors import Unavailable, UsageError
from forebay.log import LogWriter, Publications, StagedAppend, partition_of
from forebay.spark import _buffer_sink, _log_sink
from forebay.spark._buffer_publication import QueuePublications
from forebay.spark._buffer_sink import BufferBatchWriter, BufferSinkOptions, StagedBatches
from forebay.spark._clients import Client, Deployment, client
from forebay.spark._log_sink import (
    ROWS_PER_PARTITION,
    LogBatchWriter,
    LogSinkOptions,
    StagedRows,
    _gathered,
    _Task,
)
from forebay.spark._options import Options
from forebay.spark._source import ForebaySource

ROWS = 2_000


def arriving(rows_each: int, topics: list[str | None] | None = None) -> Iterator[pa.RecordBatch]:
    """Rows with keys, in batches of some size; of `topics` in turn."""
    for first in range(0, ROWS, rows_each):
        numbers = range(first, min(first + rows_each, ROWS))
        columns = {
            "key": pa.array(
                [b"k%d" % (number % 37) if number % 11 else None for number in numbers], pa.binary()
            ),
            "value": pa.array([b"v%06d" % number for number in numbers]),
        }
        if topics:
            columns["topic"] = pa.array([topics[number % len(topics)] for number in numbers], pa.string())
        yield pa.RecordBatch.from_pydict(columns)


def staged_into(data: Path, partitions: int, batches: Iterator[pa.RecordBatch]) -> list[StagedAppend]:
    """Stage and publish, as a task and the driver do."""
    options = LogSinkOptions(Deployment(str(data)), "t", partitions, "none", None)
    opened: Client = client(options.deployment, options.codec)
    task = _Task(options, opened, 3)
    for batch in batches:
        task.add(batch)
    task.flush()
    assert task.rows == ROWS
    parts = opened.bay.parts
    publications = Publications(
        opened.bay.writer, parts.store, parts.coordinator, clock=parts.clock, ids=parts.ids
    )
    opened.run(publications.publish("name", 0, task.staged))
    return task.staged


def found(data: Path, topic: str) -> dict[int, list[bytes]]:
    with forebay.connect(data) as bay:
        table = bay.read(topic).read_all()
    rows: dict[int, list[bytes]] = {}
    for partition, value in zip(table["partition"].to_pylist(), table["value"].to_pylist(), strict=True):
        rows.setdefault(partition, []).append(value)
    return rows


def expected(partitions: int, numbers: Iterator[int]) -> dict[int, list[bytes]]:
    rows: dict[int, list[bytes]] = {}
    for number in numbers:
        key = b"k%d" % (number % 37) if number % 11 else None
        partition = 3 % partitions if key is None else partition_of(key, partitions)
        rows.setdefault(partition, []).append(b"v%06d" % number)
    return rows


@pytest.mark.parametrize("rows_each", [1, 97, ROWS])
@pytest.mark.parametrize("partitions", [1, 3, 300])
def test_rows_keep_their_order_however_they_arrive(tmp_path: Path, rows_each: int, partitions: int) -> None:
    staged = staged_into(tmp_path, partitions, arriving(rows_each))
    assert found(tmp_path, "t") == expected(partitions, iter(range(ROWS)))
    # One append for a partition of one object, whatever the number of batches.
    assert len(staged) == len(expected(partitions, iter(range(ROWS))))
    assert len({append.uri for append in staged}) == 1


@given(st.data())
def test_rows_are_moved_as_they_are(data: st.DataObject) -> None:
    widths = st.just(data.draw(st.integers(0, 3))) if data.draw(st.booleans()) else st.integers(0, 3)
    row = widths.flatmap(lambda width: st.binary(min_size=width, max_size=width))
    some = data.draw(st.lists(row | st.none() if data.draw(st.booleans()) else row, min_size=1, max_size=9))
    skipped = data.draw(st.integers(0, len(some) - 1))
    order = data.draw(st.permutations(range(len(some) - skipped)))
    column = pa.array(some, pa.binary()).slice(skipped)
    moved = _gathered(column, pa.array(order, pa.int64()))
    moved.validate(full=True)
    assert moved.to_pylist() == [some[skipped + place] for place in order]


def test_a_topic_per_row_and_a_topic_for_the_rest(tmp_path: Path) -> None:
    staged_into(tmp_path, 2, arriving(50, ["one", "two", None]))
    for place, topic in enumerate(["one", "two", "t"]):
        assert found(tmp_path, topic) == expected(2, iter(range(place, ROWS, 3)))


def test_rows_keep_their_order_whether_they_name_the_topic_or_leave_it_to_the_option(tmp_path: Path) -> None:
    staged_into(tmp_path, 3, arriving(500, ["t", None]))
    assert found(tmp_path, "t") == expected(3, iter(range(ROWS)))


@pytest.mark.parametrize(("partitions", "topics"), [(4, None), (1, ["one", "two", "three", None])])
def test_rows_are_routed_with_enough_others_of_their_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int, topics: list[str | None] | None
) -> None:
    """Were they routed with as many as one of many topics needs, an object would have too many parts."""
    routed: list[int] = []
    together = _log_sink._together

    def counted(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        routed.append(sum(batch.num_rows for batch in batches))
        return together(batches)

    monkeypatch.setattr(_log_sink, "_together", counted)
    staged_into(tmp_path, partitions, arriving(100, topics))
    least = 4 * ROWS_PER_PARTITION
    # How many partitions there are is known once the first rows are routed.
    assert [least <= rows < least + 100 for rows in routed[1:-1]] == [True] * (len(routed) - 2)


async def down(*arguments: object, **named: object) -> None:
    raise Unavailable("the store does not answer")


def test_a_write_that_is_published_has_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever is told that it has writes it again, under another name: twice."""
    options = LogSinkOptions(Deployment(str(tmp_path)), "t", 1, "none", None)
    task = _Task(options, client(options.deployment, options.codec), 0)
    task.add(pa.RecordBatch.from_pydict({"value": [b"a"]}))
    task.flush()
    writer = LogBatchWriter(options)
    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, "materialize_idle", down)
        broken.setattr(Publications, "forget", down)
        writer.commit([StagedRows(writer.name, tuple(task.staged), 1)])
    assert found(tmp_path, "t") == {0: [b"a"]}


def test_a_write_that_is_enqueued_has_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = Options({"path": str(tmp_path), "engine": "buffer"})
    options = BufferSinkOptions.parse(given, StructType().add("value", "binary"))
    task = _buffer_sink._Task(options, client(options.deployment))
    task.add(pa.RecordBatch.from_pydict({"value": [b"a"]}))
    task.flush()
    writer = BufferBatchWriter(options)
    monkeypatch.setattr(QueuePublications, "forget", down)
    writer.commit([StagedBatches(writer.name, tuple(task.staged), 1)])
    opened = client(options.deployment)
    assert opened.run(opened.buffer(options.config).stats()).entries == 1


def test_times_finer_than_milliseconds_are_rounded_down() -> None:
    # What `current_timestamp()` gives, and a time before 1970, which is not rounded up.
    batch = pa.RecordBatch.from_pydict(
        {
            "value": [b"a", b"b"],
            "timestamp": pa.array([1_704_067_200_123_456, -1], pa.timestamp("us", tz="UTC")),
        }
    )
    times = _log_sink._records(batch).timestamps_ms
    assert times is not None
    assert times.tolist() == [1_704_067_200_123, -1]


@pytest.mark.parametrize("given", ["a/../b", "load 7", "", "x" * 201])
@pytest.mark.parametrize("engine", ["log", "buffer"])
def test_a_write_id_that_is_no_name_is_refused_before_anything_is_staged(engine: str, given: str) -> None:
    schema = StructType().add("value", StringType())
    options = Options({"path": "data", "topic": "t"} if engine == "log" else {"path": "data"})
    parse = LogSinkOptions.parse if engine == "log" else BufferSinkOptions.parse
    assert parse(options, schema).write_id is None
    with pytest.raises(UsageError, match="writeId"):
        parse(Options(dict(options._given) | {"writeId": given}), schema)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topic": "a/b"}, "topic name 'a/b'"),
        ({"topic": ""}, "''"),
        ({"partitions": "100001"}, "partitions is"),
    ],
)
def test_a_topic_that_cannot_be_is_refused_before_anything_is_staged(
    given: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        LogSinkOptions.parse(
            Options({"path": "data", "topic": "t"} | given), StructType().add("value", StringType())
        )


@pytest.mark.parametrize("engine", ["log", "buffer"])
def test_a_stream_that_is_given_a_write_id_is_refused(engine: str) -> None:
    """It was ignored: who counted on it for what a new checkpoint repeats had every record twice."""
    source = ForebaySource({"engine": engine, "path": "data", "topic": "t", "writeId": "load-7"})
    if engine == "buffer":
        source = ForebaySource({"engine": engine, "path": "data", "writeId": "load-7"})
    with pytest.raises(UsageError, match="no writeId"):
        source.streamWriter(StructType().add("value", StringType()), overwrite=False)
