"""Batches from lists and arrays, and many batches of one append as one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from forebay.errors import UsageError
from forebay.formats.bytes_batch import BytesBatch, decode, encode, encode_batch, merge


def test_a_batch_of_lists_is_what_encode_makes_of_them() -> None:
    columns = {"keys": [b"k", None], "timestamps_ms": [1, 2], "headers": [{"a": b"1"}, None]}
    batch = BytesBatch.of([b"x", b""], **columns)  # type: ignore[arg-type]
    assert encode_batch(batch) == encode([b"x", b""], **columns)  # type: ignore[arg-type]
    assert len(batch) == 2


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"a", b"b"], pa.binary()),
        pa.array([b"a", b"b"], pa.large_binary()),
        pa.array(["a", "b"], pa.string()),
        pa.chunked_array([[b"a"], [b"b"]], pa.binary()),
        [b"a", b"b"],
    ],
    ids=["binary", "large", "string", "chunked", "list"],
)
def test_records_of_any_shape_become_a_binary_column(values: object) -> None:
    assert BytesBatch.of(values).records() == [b"a", b"b"]


def test_one_batch_is_merged_without_a_copy() -> None:
    batch = BytesBatch.of([b"a"])
    assert merge([batch], time_ms=5) is batch


def test_merging_keeps_the_order_and_needs_no_times() -> None:
    merged = merge([BytesBatch.of([b"a", b"b"]), BytesBatch.of([b"c"])], time_ms=5)
    assert merged.records() == [b"a", b"b", b"c"]
    assert merged.timestamps_ms is None and merged.keys is None and merged.headers is None


def test_merging_fills_columns_that_some_batches_lack() -> None:
    rich = BytesBatch.of([b"b"], keys=[b"k"], timestamps_ms=[1], headers=[[("h", b"v"), ("h", None)]])
    merged = decode(encode_batch(merge([BytesBatch.of([b"a"]), rich, BytesBatch.of([b"c"])], time_ms=9)))
    assert merged.records() == [b"a", b"b", b"c"]
    assert merged.keys is not None and merged.keys.to_pylist() == [None, b"k", None]
    assert merged.timestamps_ms is not None
    assert np.array_equal(merged.timestamps_ms, [9, 1, 9])
    assert merged.headers is not None
    assert merged.headers.to_pylist()[1] == [{"key": "h", "value": b"v"}, {"key": "h", "value": None}]


def test_slices_are_merged_as_what_they_show() -> None:
    whole = BytesBatch.of([b"aa", b"b", b"cccc"], keys=[None, b"k", None])
    merged = merge([whole.slice(1, 2), whole.slice(0, 1)], time_ms=1)
    assert decode(encode_batch(merged)).records() == [b"b", b"cccc", b"aa"]
    assert merged.keys is not None and merged.keys.to_pylist() == [b"k", None, None]


def test_nothing_cannot_be_merged() -> None:
    with pytest.raises(UsageError):
        merge([], time_ms=1)
