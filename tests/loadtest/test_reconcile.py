"""The account finds every kind of difference, and nothing where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from forebay.loadtest._ledger import ACKED, FAILED, UNKNOWN
from forebay.loadtest._reconcile import InLog, reconcile
from forebay.loadtest._records import HEADER_BYTES, RecordMaker, parse_block, run_mark

U64_MAX = 2**64 - 1


def ledger(*lines: tuple[int, int, int, int, int, int]) -> dict[str, Any]:
    """Lines of stream, first, count, partition, outcome, start offset."""
    names = ("stream", "first", "count", "partition", "outcome", "start_offset")
    kinds = (np.uint64, np.uint64, np.uint32, np.uint32, np.uint8, np.int64)
    columns = zip(*lines, strict=True)
    return {name: np.array(column, kind) for name, column, kind in zip(names, columns, kinds, strict=True)}


def in_log(*records: tuple[int, int, int], strangers: int = 0) -> dict[int, InLog]:
    """Records of stream, number, offset in partition 0."""
    streams, numbers, offsets = zip(*records, strict=True) if records else ((), (), ())
    part = InLog(
        [np.array(streams, np.uint64)],
        [np.array(numbers, np.uint64)],
        [np.array(offsets, np.int64)],
        strangers,
    )
    return {0: part}


THREE = [(1, 0, 1), (1, 1, 2), (1, 2, 3)]


def test_what_was_told_and_is_there_is_exact() -> None:
    found = reconcile(ledger((1, 0, 3, 0, ACKED, 1)), in_log(*THREE), {"b": 3}, set())
    assert found["exact"] and found["differences"] == []
    assert (found["records_meant"], found["records_acked"], found["records_in_log"]) == (3, 3, 3)


@pytest.mark.parametrize(
    ("lines", "records", "name"),
    [
        ([(1, 0, 3, 0, ACKED, 1)], THREE[:2], "lost"),
        ([(1, 0, 3, 0, ACKED, 5)], THREE, "misplaced"),
        ([(1, 0, 3, 1, ACKED, 1)], THREE, "misplaced"),
        ([(1, 0, 3, 0, ACKED, 1)], [*THREE, (1, 2, 4)], "duplicated"),
        ([(1, 0, 3, 0, FAILED, -1)], THREE, "resurrected"),
        ([(1, 0, 2, 0, ACKED, 1)], THREE, "strangers"),
        ([(1, 0, 3, 0, ACKED, 1)], [(1, 1, 2), (1, 0, 1), (1, 2, 3)], "out_of_order"),
        ([(1, 0, 3, 0, ACKED, 1)], [], "lost"),
    ],
)
def test_every_kind_of_difference_is_found_and_said(lines: Any, records: Any, name: str) -> None:
    found = reconcile(ledger(*lines), in_log(*records), {"b": len(records)}, set())
    assert not found["exact"]
    assert found[name] > 0
    assert found["differences"]


@pytest.mark.parametrize("records", [[], THREE], ids=["not there", "there"])
def test_an_unknown_outcome_may_be_either(records: Any) -> None:
    found = reconcile(ledger((1, 0, 3, 0, UNKNOWN, -1)), in_log(*records), {"b": len(records)}, set())
    assert found["exact"]
    assert (found["records_unknown"], found["records_unknown_in_log"]) == (3, len(records))


def test_brokers_that_counted_something_else_are_a_difference_unless_one_was_killed() -> None:
    told = ledger((1, 0, 3, 0, ACKED, 1))
    wrong = reconcile(told, in_log(*THREE), {"b": 2}, set())
    assert not wrong["exact"] and "brokers counted 2" in wrong["differences"][0]
    explained = reconcile(told, in_log(*THREE), {"b": 2}, {"b"})
    assert explained["exact"] and "b was killed" in explained["broker_difference_explained"]
    too_many = reconcile(told, in_log(*THREE), {"b": 9}, {"b"})
    assert not too_many["exact"]


def test_records_are_recognised_and_strangers_and_mangled_ones_are_not() -> None:
    maker = RecordMaker("run", 42, record_bytes=100, per_block=5, seed=1)
    values = maker.block(7).values
    seen = parse_block(values, run_mark("run"))
    assert seen.streams.tolist() == [42] * 5
    assert seen.numbers.tolist() == [7, 8, 9, 10, 11]
    assert {len(value) for value in values.to_pylist()} == {100}
    mangled = bytearray(values[0].as_py())
    mangled[16] ^= 1
    mixed = pa.array([bytes(mangled), b"short", b"", values[1].as_py()], pa.binary())
    seen = parse_block(mixed, run_mark("run"))
    assert seen.strangers == 3
    assert seen.numbers.tolist() == [U64_MAX, U64_MAX, U64_MAX, 8]
    assert parse_block(values, run_mark("another run")).strangers == 5
    assert parse_block(pa.array([b"tiny"], pa.binary()), run_mark("run")).strangers == 1


def test_a_slice_of_values_is_read_at_its_own_place() -> None:
    values = RecordMaker("run", 1, record_bytes=HEADER_BYTES, per_block=6, seed=1).block(0).values
    assert parse_block(values.slice(4, 2), run_mark("run")).numbers.tolist() == [4, 5]
