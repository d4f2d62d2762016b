"""Blocks of records: three ways to write one, two ways to read one, all of them the same bytes."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats import Corrupt, record_block
from forebay.formats._packer import load_packer

RECORDS = st.lists(st.binary(max_size=40), max_size=60)


def plain(records: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(record)) + record for record in records)


def many(count: int = 2_000, seed: int = 1) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(draw.randrange(60)) for _ in range(count)]


@given(RECORDS, st.binary(max_size=9))
def test_every_way_of_encoding_gives_the_same_bytes(records: list[bytes], tail: bytes) -> None:
    expected = plain(records) + tail
    assert record_block.encode(records, tail) == expected
    assert record_block.encode(tuple(records), tail) == expected
    assert record_block.encode(pa.array(records, pa.binary()), tail) == expected
    if records:
        assert record_block._join(records, tail) == expected


@given(st.integers(0, 300), st.integers(0, 50))
def test_records_of_equal_length_are_joined_in_one_go(count: int, length: int) -> None:
    records = [bytes([index % 251]) * length for index in range(count)]
    assert record_block.encode(records) == plain(records)
    if records:
        assert record_block._join(records, b"end") == plain(records) + b"end"


def test_a_compiled_packer_and_the_join_agree() -> None:
    packer = load_packer()
    if packer is None:
        pytest.skip("no compiled packer is installed")
    assert packer(many()) == record_block._join(many(), b"")


@pytest.mark.parametrize("size", [0, 1, 100, 5_000, 200_000])
@pytest.mark.parametrize("outliers", [0, 1])
def test_large_blocks_are_the_same_bytes(size: int, outliers: int) -> None:
    records = [random.Random(size).randbytes(size)] * (2_000_000 // (size + 4))
    records[3 : 3 + outliers] = [b"x" * 100_000] * outliers
    assert record_block.encode(records, b"the end") == plain(records) + b"the end"


@pytest.mark.parametrize("tail_bytes", range(12))
def test_a_tail_of_any_length_stands_behind_the_block(tail_bytes: int) -> None:
    """One shorter than a length leaves the packer no room to make for it."""
    records, tail = many(100), b"footer bytes"[:tail_bytes]
    assert record_block.encode(records, tail) == plain(records) + tail


def test_the_callers_list_stays_as_it_is() -> None:
    records = many(100)
    record_block.encode(records, b"1234567")
    assert records == many(100)


@pytest.mark.parametrize("packed", [False, True])
def test_whatever_has_bytes_is_a_record(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiled packer, which takes nothing but `bytes`, and without."""
    if not packed:
        monkeypatch.setattr(record_block, "load_packer", lambda: None)
    numbers = memoryview(struct.pack("<3I", 1, 2, 3)).cast("I")
    others: list[Any] = [bytearray(b"abc"), memoryview(b""), numbers, b"plain"]
    expected = plain([bytes(other) for other in others]) + b"1234567"
    assert record_block.encode(others, b"1234567") == expected
    for wrong in ("text", 5, None):
        records: list[Any] = [b"fine", wrong]
        with pytest.raises(TypeError):
            record_block.encode(records)


def test_the_tail_costs_no_second_copy_of_the_block() -> None:
    """Memory is counted, not time: packing and tail together never hold two blocks."""
    if load_packer() is None:
        pytest.skip("no compiled packer is installed")
    records = [bytes(1_000)] * 4_000
    record_block.encode(records, b"1234567")
    tracemalloc.start()
    try:
        data = record_block.encode(records, b"1234567")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * len(data)


def test_slices_and_chunks_of_arrow_arrays_are_encoded_as_what_they_show() -> None:
    records = many(100)
    array = pa.array(records, pa.binary())
    assert record_block.encode(array.slice(10, 30)) == plain(records[10:40])
    assert record_block.encode(pa.chunked_array([array[:7], array[7:]])) == plain(records)
    assert record_block.encode(array.cast(pa.large_binary())) == plain(records)


def test_a_null_or_a_number_is_not_a_record() -> None:
    with pytest.raises(UsageError, match="null"):
        record_block.encode(pa.array([b"a", None], pa.binary()))
    with pytest.raises(UsageError, match="int64"):
        record_block.encode(pa.array([1, 2]))


@given(RECORDS)
def test_what_was_encoded_is_decoded(records: list[bytes]) -> None:
    block = plain(records)
    assert record_block.decode_list(block, len(records)) == records
    assert record_block.decode_array(block, len(records)).to_pylist() == records
    assert record_block.encoded_size(records) == len(block)


def test_large_blocks_go_through_a_parquet_page() -> None:
    records = many()
    block = plain(records)
    assert record_block.decode_list(memoryview(block), len(records)) == records
    array = record_block.decode_array(block, len(records))
    assert array.type == pa.binary() and array.to_pylist() == records


@pytest.mark.parametrize("count", [3, 2_000])
def test_both_decoders_refuse_what_is_not_exactly_the_records(count: int) -> None:
    records = many(count)
    block = plain(records)
    for data, number, reason in (
        (block + b"x", count, "1 bytes after the last record"),
        (block, count - 1, "after the last record"),
        (block, count + 1, "cut off|cannot fit|is left"),
        (block[:-1], count, "are left|cut off"),
        (b"\xff\xff\xff\xff" + block, count + 1, "record 0"),
        (block, (1 << 32) - 1, "cannot fit"),
        (block, 0, "after the last record"),
    ):
        for decode in (record_block.decode_list, record_block.decode_array):
            with pytest.raises(Corrupt, match=reason):
                decode(data, number)


def test_the_error_names_the_byte_where_the_block_goes_wrong() -> None:
    records = many()
    block = bytearray(plain(records))
    place = len(plain(records[:1_500]))
    block[place : place + 4] = struct.pack("<I", 1 << 30)
    with pytest.raises(Corrupt, match="record 1500 of 2000") as caught:
        record_block.decode_array(bytes(block), len(records))
    assert caught.value.position == place


@given(st.data())
def test_mutations_are_refused_or_decode_the_same_in_both_ways(data: st.DataObject) -> None:
    block = bytearray(plain(many(450, seed=2)))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    try:
        walked = record_block._walk(bytes(block), 450)
    except Corrupt:
        with pytest.raises(Corrupt):
            record_block.decode_array(bytes(block), 450)
    else:
        assert record_block.decode_array(bytes(block), 450).to_pylist() == walked
