"""Data batches: the bytes of the specification, and a decoder that takes nothing else."""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any, Literal

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.opendata_vectors import vectors_folder

from forebay.errors import FormatError, LimitExceeded, UsageError
from forebay.formats import buffer_batch, record_block
from forebay.formats.buffer_batch import (
    CorruptBatch,
    TooLarge,
    UnsupportedCompression,
    UnsupportedVersion,
    decode,
    encode,
)

HELLO = bytes.fromhex("0500000068656c6c6f")
RECORDS = st.lists(st.binary(max_size=40), max_size=40)
COMPRESSIONS = st.sampled_from(buffer_batch.COMPRESSIONS)


def footer(compression: int, count: int, version: int = 1) -> bytes:
    return struct.pack("<BIH", compression, count, version)


def frame(data: bytes, **options: Any) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(level=1, **options).compress(data)
    return packed


SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


def test_the_layout_is_the_one_in_the_specification() -> None:
    assert encode([b"hello", b""]) == HELLO + bytes(4) + footer(0, 2)
    assert encode([]) == bytes.fromhex("00000000000100")


def test_zstd_frames_are_those_of_the_other_implementations() -> None:
    assert encode([b"hello"], "zstd").hex() == "28b52ffd20094900000500000068656c6c6f" + footer(1, 1).hex()
    assert encode([], "zstd").hex() == "28b52ffd2000010000" + footer(1, 0).hex()


def test_vectors_of_the_rust_implementation() -> None:
    lines = (vectors_folder() / "batch_vectors.jsonl").read_text().splitlines()
    assert len(lines) > 5
    for line in lines:
        vector = json.loads(line)
        records = [bytes.fromhex(entry) for entry in vector["entries_hex"]]
        stored = bytes.fromhex(vector["batch_hex"])
        assert encode(records, vector["compression"]) == stored, vector["name"]
        batch = decode(stored)
        assert (list(batch), batch.compression) == (records, vector["compression"])


@given(RECORDS, COMPRESSIONS)
def test_what_was_encoded_is_decoded(records: list[bytes], compression: Literal["none", "zstd"]) -> None:
    stored = encode(records, compression)
    batch = decode(stored)
    assert list(batch) == records and batch == records
    assert batch.to_arrow().to_pylist() == records
    assert (len(batch), batch.compression, batch.stored_bytes) == (len(records), compression, len(stored))
    assert encode(pa.array(records, pa.binary()), compression) == stored


@given(st.lists(RECORDS, max_size=5), COMPRESSIONS)
def test_blocks_of_several_calls_make_one_batch(
    calls: list[list[bytes]], compression: Literal["none", "zstd"]
) -> None:
    records = [record for call in calls for record in call]
    blocks = [record_block.encode(call) for call in calls]
    assert buffer_batch.encode_blocks(blocks, len(records), compression) == encode(records, compression)


def test_a_large_batch_is_a_sequence_without_being_a_list() -> None:
    records = [f"record {index}".encode() for index in range(5_000)]
    batch = decode(encode(records, "zstd"))
    assert len(batch) == 5_000 and batch[4_999] == records[-1] and batch[:2] == records[:2]
    assert batch.to_arrow().equals(pa.array(records, pa.binary()))


@pytest.mark.parametrize(
    "block",
    [
        frame(HELLO, write_content_size=False),
        frame(HELLO, write_checksum=True),
        zstandard.ZstdCompressor(level=19).compress(HELLO),
        frame(HELLO[:3]) + frame(HELLO[3:]),
        SKIPPABLE + frame(HELLO),
        frame(HELLO) + SKIPPABLE,
    ],
    ids=["no content size", "checksum", "level 19", "two frames", "skippable first", "skippable last"],
)
def test_any_sequence_of_frames_is_accepted(block: bytes) -> None:
    assert list(decode(block + footer(1, 1))) == [b"hello"]


def test_a_frame_of_nothing_holds_no_records() -> None:
    assert list(decode(frame(b"") + footer(1, 0))) == []


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"", "at least 7"),
        (b"123456", "at least 7"),
        (frame(HELLO) + b"junk" + footer(1, 1), "zstd"),
        (frame(HELLO)[:-2] + footer(1, 1), "cut short|zstd"),
        (footer(1, 0), "at least one frame"),
        (HELLO + b"more" + footer(0, 1), "4 bytes after the last record"),
        (HELLO + footer(0, 0), "9 bytes after the last record"),
        (HELLO + footer(0, 2), "cut off"),
        (struct.pack("<I", 6) + b"hello" + footer(0, 1), "6 bytes, 5 are left"),
        (HELLO + footer(0, (1 << 32) - 1), "cannot fit"),
        (frame(HELLO) + footer(1, (1 << 32) - 1), "cannot fit.*decompressed"),
        (frame(HELLO + b"?") + footer(1, 1), "1 bytes after the last record"),
    ],
)
def test_malformed_batches_are_refused_with_place_and_reason(stored: bytes, reason: str) -> None:
    with pytest.raises(CorruptBatch, match=reason) as caught:
        decode(stored, name="ingest/one.batch")
    assert caught.value.what == "ingest/one.batch"
    assert 0 <= caught.value.position <= max(len(stored), 9)


def test_unknown_versions_and_compressions_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersion, match="version 2, expected 1") as version:
        decode(HELLO + footer(0, 1, version=2))
    with pytest.raises(UnsupportedCompression, match="compression type 7") as compression:
        decode(HELLO + footer(7, 1))
    assert (version.value.found, compression.value.found) == (2, 7)
    assert str(pickle.loads(pickle.dumps(version.value))) == str(version.value)


def test_a_forged_content_size_allocates_nothing() -> None:
    forged = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 60) + b"\x01\0\0"
    with pytest.raises(TooLarge) as caught:
        decode(forged + footer(1, 1))
    assert {LimitExceeded, FormatError} <= set(caught.type.__mro__)
    modest = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 29) + b"\x01\0\0"
    with pytest.raises(CorruptBatch):
        decode(modest + footer(1, 1))


@pytest.mark.parametrize("sized", [True, False])
def test_a_bomb_stops_at_the_limit(sized: bool) -> None:
    bomb = frame(bytes(1 << 24), write_content_size=sized)
    with pytest.raises(TooLarge, match="block_bytes_max"):
        decode(bomb + footer(1, 1), block_bytes_max=1 << 20)
    record = frame(struct.pack("<I", 1 << 22) + bytes(1 << 22), write_content_size=sized)
    assert len(decode(record + footer(1, 1))[0]) == 1 << 22


def test_objects_and_blocks_over_the_limit_are_refused() -> None:
    stored = encode([bytes(100)])
    allowances: list[dict[str, Any]] = [{"batch_bytes_max": 50}, {"block_bytes_max": 50}]
    for limits in allowances:
        with pytest.raises(TooLarge, match=next(iter(limits))):
            decode(stored, **limits)


def test_an_unknown_compression_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="lz4"):
        encode([b"a"], "lz4")  # type: ignore[arg-type]


def test_the_footer_alone_tells_count_and_compression() -> None:
    found = buffer_batch.decode_footer(encode([b"a", b"b"], "zstd")[-buffer_batch.FOOTER_BYTES :])
    assert (found.compression, found.record_count) == ("zstd", 2)
    with pytest.raises(CorruptBatch):
        buffer_batch.decode_footer(b"123")


@given(st.data())
def test_mutations_never_do_anything_but_decode_or_raise(data: st.DataObject) -> None:
    compression = data.draw(COMPRESSIONS)
    stored = bytearray(encode([b"alpha", b"", b"gamma" * 30], compression))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for mutated in (bytes(stored), bytes(stored[:cut])):
        try:
            records = list(decode(mutated, block_bytes_max=1 << 20))
        except FormatError:
            continue
        assert decode(encode(records)) == records


def test_frames_without_content_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_batch, "FRAMES_MAX", 10)
    assert len(decode(frame(b"") * 10 + footer(1, 0))) == 0
    with pytest.raises(TooLarge):
        decode(frame(b"") * 11 + footer(1, 0))
