"""The exact Arrow that Spark takes, from everything that is nearly it."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructType

from forebay.errors import UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.log import FetchedBatch
from forebay.spark._columns import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    LOG_SCHEMA,
    LogColumns,
    arrow_schema,
    check_schema,
    exact,
    fused,
)

TIME = pa.timestamp("us", tz="UTC")
MOMENT = datetime(2026, 11, 16, 12, 30, 15, 250_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (pa.array([b"a", None, b""], pa.large_binary()), pa.binary()),
        (pa.array([b"a", None], pa.binary_view()), pa.binary()),
        (pa.array([b"a", None, b"a"]).dictionary_encode(), pa.binary()),
        (pa.array([b"ab", None], pa.binary(2)), pa.binary()),
        (pa.array(["a", None], pa.large_string()), pa.string()),
        (pa.array(["a", None], pa.string_view()), pa.string()),
        (pa.array([MOMENT, None], pa.timestamp("ms", tz="UTC")), TIME),
        (pa.array([MOMENT, None], pa.timestamp("ns", tz="UTC")), TIME),
        (pa.array([MOMENT, None], pa.timestamp("us", tz="Europe/Berlin")), TIME),
        (pa.array([MOMENT.replace(tzinfo=None), None], pa.timestamp("us")), TIME),
        (pa.array([1, None], pa.int32()), pa.int64()),
    ],
    ids=lambda each: str(getattr(each, "type", each)),
)
def test_what_spark_refuses_is_made_exact(array: pa.Array, kind: pa.DataType) -> None:
    made = exact(array, kind)
    assert made.type == kind and str(made.type) == str(kind)
    naive = getattr(array.type, "tz", "UTC") is None
    expected = [each.replace(tzinfo=UTC) if naive and each else each for each in array.to_pylist()]
    assert made.to_pylist() == expected


def test_a_lists_child_gets_sparks_name() -> None:
    kind = arrow_schema(LOG_SCHEMA).field("headers").type
    plain = pa.array(
        [[{"key": "a", "value": b"1"}], None, []],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    made = exact(plain, kind)
    assert str(made.type) == str(kind) and made.to_pylist() == plain.to_pylist()


def test_what_is_exact_is_not_copied() -> None:
    array = pa.array([b"a", b"b"], pa.binary())
    assert exact(array, pa.binary()) is array


def fetched(start: int, values: list[bytes], **columns: object) -> FetchedBatch:
    return FetchedBatch("t", 3, start, BytesBatch.of(values, **columns), 1_000 + start)  # type: ignore[arg-type]


def test_a_run_of_batches_is_one_batch_with_every_column() -> None:
    run = [
        fetched(10, [b"a", b"b"]),
        fetched(12, [b"c"], keys=[b"k"], timestamps_ms=[5], headers=[{"h": b"v"}]),
    ]
    made = LogColumns(LOG_SCHEMA).batch(run)
    assert made.schema == arrow_schema(LOG_SCHEMA)
    assert made.to_pydict() == {
        "key": [None, None, b"k"],
        "value": [b"a", b"b", b"c"],
        "topic": ["t"] * 3,
        "partition": [3] * 3,
        "offset": [10, 11, 12],
        "timestamp": [datetime.fromtimestamp(ms / 1000, UTC) for ms in (1010, 1010, 5)],
        "headers": [None, None, [{"key": "h", "value": b"v"}]],
    }


def test_columns_without_a_value_are_not_sent_for_each_of_their_fields() -> None:
    """Arrow puts as many zeros below a list of nulls as there are rows, for each field that it could hold."""
    schema = StructType().add(LOG_SCHEMA["headers"])
    columns = LogColumns(schema)
    for rows in (1_000, 800, 3_000):
        made = columns.batch([fetched(1, [b"v"] * rows)])
        made.validate(full=True)
        assert made.column("headers").to_pylist() == [None] * rows
        assert pa.ipc.get_record_batch_size(made) < 4 * rows + rows / 8 + 1_000


async def _runs(*batches: FetchedBatch) -> list[list[FetchedBatch]]:
    async def each() -> object:
        for batch in batches:
            yield batch

    return [run async for run in fused(each())]  # type: ignore[arg-type]


async def test_small_batches_are_fused_and_large_ones_are_cut() -> None:
    small = [fetched(1 + 100 * number, [b"x"] * 100) for number in range(150)]
    first, second = await _runs(*small)
    assert (sum(map(len, first)), sum(map(len, second))) == (10_000, 5_000)
    large = fetched(1, [b"y" * 1000] * 20_000)
    runs = await _runs(large)
    assert len(runs) > 2 and sum(len(part) for run in runs for part in run) == 20_000
    assert all(sum(part.batch.values.nbytes for part in run) <= BATCH_BYTES_MAX * 1.1 for run in runs)
    offsets = np.concatenate(
        [np.arange(part.start_offset, part.end_offset + 1) for run in runs for part in run]
    )
    assert np.array_equal(offsets, np.arange(1, 20_001))
    many = await _runs(fetched(1, [b""] * (BATCH_ROWS_MAX + 1)))
    assert max(sum(map(len, run)) for run in many) <= BATCH_ROWS_MAX
    assert await _runs() == []


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "no column is chosen"), (["offset", "OFFSET"], "column 'OFFSET' is chosen twice")],
)
def test_a_schema_of_no_column_or_of_one_twice_is_refused(names: list[str], message: str) -> None:
    # Batches without a column have no rows to count, and Spark shows the other as a page of Java.
    chosen = StructType()
    for name in names:
        chosen.add(name, LongType())
    with pytest.raises(UsageError, match=message):
        check_schema(chosen, LOG_SCHEMA)


def test_the_time_of_an_append_that_spark_cannot_hold_is_none_as_well() -> None:
    schema = StructType().add(LOG_SCHEMA["timestamp"])
    batch = BytesBatch(pa.array([b"v"] * 2, pa.binary()))
    for time_ms, expected in ((5, 5_000), (-1, -1_000), (1_700_000_000_000_000_000, None), (-(2**63), None)):
        made = LogColumns(schema).batch([FetchedBatch("t", 0, 1, batch, time_ms)]).column("timestamp")
        assert made.cast(pa.int64()).to_pylist() == [expected] * 2


def test_a_time_that_spark_cannot_hold_is_none_and_not_another_one() -> None:
    """Nanoseconds, given for milliseconds, came out as some day in the year 93,852."""
    times = np.array([0, -1, 1_700_000_000_000_000_000, -(2**63), 9_223_372_036_854_775], np.int64)
    batch = BytesBatch(pa.array([b"v"] * 5, pa.binary()), None, times)
    schema = StructType().add(LOG_SCHEMA["timestamp"])
    made = LogColumns(schema).batch([FetchedBatch("t", 0, 1, batch, 5)]).column("timestamp")
    made.validate(full=True)
    assert made.cast(pa.int64()).to_pylist() == [0, -1000, None, None, 9_223_372_036_854_775_000]
