"""Routing at once gives every key the partition that the log's own rule gives it."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from forebay.log import partition_of
from forebay.spark import _routing
from forebay.spark._routing import BITS_MAX, KEY_BYTES_MAX, ROWS_AT_ONCE, targets

POWERS = [1 << bits for bits in range(1, BITS_MAX + 2)]


def keys(length: int, count: int) -> list[bytes]:
    return [random.Random(f"{length} {number}").randbytes(length) for number in range(count)]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, KEY_BYTES_MAX])
@pytest.mark.parametrize("partitions", [*POWERS, 3, 12, 1000])
def test_keys_of_one_length_go_where_the_log_sends_them(length: int, partitions: int) -> None:
    made = [*keys(length, 100), bytes(length), b"\xff" * length]
    chosen = targets(pa.array(made, pa.binary()), partitions, 0)
    assert chosen.tolist() == [partition_of(key, partitions) for key in made]


def test_keys_of_many_lengths_and_rows_without_one_go_where_they_belong() -> None:
    made = [None if number % 7 == 0 else keys(number % 13, 1)[0] for number in range(200)]
    array = pa.array([b"left out", *made], pa.binary()).slice(1)
    wanted = [3 if key is None else partition_of(key, 8) for key in made]
    assert targets(array, 8, 3).tolist() == wanted


def test_more_rows_than_are_done_at_once() -> None:
    made = keys(16, ROWS_AT_ONCE + 3)
    chosen = targets(pa.array(made, pa.binary()), 4, 0)
    assert chosen.tolist() == [partition_of(key, 4) for key in made]


def test_the_whole_checksum_is_computed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    array = pa.array(keys(16, 10), pa.binary())
    targets(array, 4, 0)  # The masks of this length are made with it, once.
    monkeypatch.setattr(_routing, "_checksums", None)
    targets(array, 4, 0)
    with pytest.raises(TypeError):
        targets(array, 3, 0)
