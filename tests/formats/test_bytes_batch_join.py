"""Joining encoded batches gives what decoding and concatenating them gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.test_bytes_batch import seal

from forebay.errors import LimitExceeded, UsageError
from forebay.formats import Corrupt, bytes_batch
from forebay.formats import bytes_batch_join as joining
from forebay.formats.bytes_batch_join import join, open_piece

TIMES = st.integers(-(1 << 62), 1 << 62)


@st.composite
def encoded(draw: st.DrawFn) -> tuple[bytes, int]:
    records = draw(st.lists(st.binary(max_size=20), min_size=1, max_size=6))
    count = len(records)
    columns: dict[str, Any] = {}
    if draw(st.booleans()):
        columns["keys"] = draw(st.lists(st.none() | st.binary(max_size=5), min_size=count, max_size=count))
    if draw(st.booleans()):
        columns["timestamps_ms"] = draw(st.lists(TIMES, min_size=count, max_size=count))
    if draw(st.integers(0, 4)) == 0:
        header = st.none() | st.dictionaries(
            st.text(max_size=3), st.none() | st.binary(max_size=3), max_size=2
        )
        columns["headers"] = draw(st.lists(header, min_size=count, max_size=count))
    codec: bytes_batch.Codec = draw(st.sampled_from(("none", "zstd")))
    return bytes_batch.encode(records, codec=codec, **columns), draw(TIMES)


@given(st.lists(encoded(), min_size=1, max_size=6), st.sampled_from(("none", "zstd")))
def test_joined_pieces_are_the_concatenated_batches_byte_for_byte(
    batches: list[tuple[bytes, int]], codec: bytes_batch.Codec
) -> None:
    joined = join([(open_piece(data), time_ms) for data, time_ms in batches], codec=codec)
    decoded = [(bytes_batch.decode(data), time_ms) for data, time_ms in batches]
    assert joined == bytes_batch.concat(decoded, codec=codec)


@given(encoded(), st.data())
def test_a_flipped_bit_is_found(batch: tuple[bytes, int], data: st.DataObject) -> None:
    damaged = bytearray(batch[0])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        open_piece(bytes(damaged))


@given(st.binary(max_size=60))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        open_piece(data)


@pytest.mark.parametrize("columns", [0, 1, 2, 3])
def test_lengths_that_do_not_add_up_are_refused_whatever_the_checksum_says(columns: int) -> None:
    batch = bytearray(bytes_batch.encode([b"abc", b"de"])[:-4])
    batch[5] = columns
    batch[16] += 1
    with pytest.raises(Corrupt):
        open_piece(seal(bytes(batch)))


def test_nothing_and_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        join([])
    monkeypatch.setattr(joining, "RECORDS_MAX", 3)
    piece = open_piece(bytes_batch.encode([b"a", b"b"]))
    with pytest.raises(LimitExceeded):
        join([(piece, 0), (piece, 0)])


def test_times_and_missing_keys_are_filled_in() -> None:
    first = open_piece(bytes_batch.encode([b"a"], keys=[b"k"]))
    second = open_piece(bytes_batch.encode([b"b"], timestamps_ms=[5]))
    batch = bytes_batch.decode(join([(first, 7), (second, 9)]))
    assert batch.keys is not None and batch.timestamps_ms is not None
    assert batch.keys.to_pylist() == [b"k", None]
    assert np.array_equal(batch.timestamps_ms, [7, 5])
