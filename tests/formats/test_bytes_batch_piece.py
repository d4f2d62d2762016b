"""Pieces, however they came to be, are merged into the bytes that columns would have become."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.test_bytes_batch_join import encoded

from forebay.errors import LimitExceeded, UsageError
from forebay.formats import bytes_batch, bytes_batch_join
from forebay.formats.bytes_batch import BytesBatch, Codec, decode, encode, encode_batch, read_back
from forebay.formats.bytes_batch_join import columns_of, merge, open_piece
from forebay.formats.bytes_batch_piece import piece_of, piece_of_lists, piece_of_texts, pieces_of

CODECS = st.sampled_from(("none", "zstd"))


@given(st.lists(encoded(), min_size=1, max_size=5), CODECS)
def test_merged_pieces_are_the_encoded_merge_of_the_columns(
    batches: list[tuple[bytes, int]], codec: Codec
) -> None:
    columns = [decode(data) for data, _ in batches]
    expected = encode_batch(bytes_batch.merge(columns, time_ms=77), codec=codec)
    for pieces in ([open_piece(data) for data, _ in batches], [piece_of(each) for each in columns]):
        frame = merge(pieces, time_ms=77, codec=codec)
        assert frame.tobytes() == expected
        assert (len(frame), frame.crc32c) == (len(expected), crc32c(expected))


@given(st.lists(encoded(), min_size=1, max_size=5), st.data())
def test_a_batch_that_is_cut_up_gives_the_pieces_of_its_slices(
    batches: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    batch = bytes_batch.merge([decode(each) for each, _ in batches], time_ms=77)
    skipped = data.draw(st.integers(0, len(batch) - 1))
    batch = batch.slice(skipped, len(batch) - skipped)
    cuts = data.draw(st.sets(st.integers(1, len(batch) - 1))) if len(batch) > 1 else set()
    bounds = [0, *sorted(cuts), len(batch)]
    expected = [piece_of(batch.slice(first, last - first)) for first, last in pairwise(bounds)]
    found = pieces_of(batch, [len(piece) for piece in expected])
    assert [merge([piece], time_ms=1).tobytes() for piece in found] == [
        merge([piece], time_ms=1).tobytes() for piece in expected
    ]


@given(encoded())
def test_bytes_made_in_here_are_read_back_as_they_would_be_decoded(batch: tuple[bytes, int]) -> None:
    read, decoded = read_back(batch[0]), decode(batch[0])
    assert read.values == decoded.values and read.keys == decoded.keys and read.headers == decoded.headers
    assert (read.timestamps_ms is None) == (decoded.timestamps_ms is None)


@given(st.lists(st.text(max_size=9), min_size=1, max_size=6), st.data())
def test_lists_of_texts_and_of_their_bytes_become_the_batch_that_encode_makes(
    texts: list[str], data: st.DataObject
) -> None:
    count = len(texts)
    lists = st.lists(st.none() | st.text(max_size=3), min_size=count, max_size=count)
    keys = data.draw(st.none() | lists)
    times = data.draw(st.none() | st.lists(st.integers(0, 1 << 40), min_size=count, max_size=count))
    records = [text.encode() for text in texts]
    encoded_keys = None if keys is None else [None if key is None else key.encode() for key in keys]
    expected = encode(records, keys=encoded_keys, timestamps_ms=times)
    for piece in (
        piece_of_texts(texts, keys=keys, timestamps_ms=times),
        piece_of_lists(records, keys=encoded_keys, timestamps_ms=times),
        piece_of_lists([memoryview(record) for record in records], keys=encoded_keys, timestamps_ms=times),
    ):
        assert merge([piece], time_ms=1).tobytes() == expected
        assert piece.size_bytes == len(expected) - 20
        longest = max(map(len, [*records, *[key for key in encoded_keys or () if key is not None]]))
        assert piece.longest_bytes() == BytesBatch.of(records, keys=encoded_keys).longest_bytes() == longest


def test_a_ready_frame_is_passed_on_as_it_is_and_a_compressed_one_is_not() -> None:
    plain = encode([b"a" * 100], keys=[b"k"])
    assert merge([open_piece(plain)], time_ms=1).parts == [plain]
    assert merge([open_piece(encode([b"a" * 100], keys=[b"k"], codec="zstd"))], time_ms=1).tobytes() == plain
    assert merge([open_piece(plain)], time_ms=1, codec="zstd").tobytes() != plain


@pytest.mark.parametrize(
    "records", [["text"], [None], [1], "text", b"bytes", [memoryview(b"12345678").cast("I")]]
)
def test_what_is_no_list_of_bytes_is_refused(records: Any) -> None:
    with pytest.raises(TypeError):
        piece_of_lists(records)


def test_a_ready_frame_of_too_many_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_batch_join, "RECORDS_MAX", 1)
    with pytest.raises(LimitExceeded):
        merge([open_piece(encode([b"a", b"b"]))], time_ms=1)


@pytest.mark.parametrize("columns", [{"keys": [b"k"]}, {"timestamps_ms": [1, 2, 3]}])
def test_columns_of_another_length_are_refused(columns: Any) -> None:
    with pytest.raises(UsageError):
        piece_of_lists([b"a", b"b"], **columns)


def test_columns_are_had_from_a_piece_and_from_themselves() -> None:
    batch = BytesBatch.of([b"a"], keys=[None], headers=[[("h", b"v")]])
    assert columns_of(batch) is batch
    again = columns_of(piece_of(batch))
    assert again.records() == [b"a"] and again.keys == batch.keys and again.headers == batch.headers
