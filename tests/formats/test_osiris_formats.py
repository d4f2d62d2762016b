"""Osiris formats: equal to what a real RabbitMQ wrote, and firm against what nobody wrote."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.shared import BLOOM, EMPTY, ONE, VARY, delivered, osiris_files, segments

from forebay.errors import FormatError, LimitExceeded, UsageError
from forebay.formats import (
    Corrupt,
    UnsupportedEncoding,
    osiris_bloom,
    osiris_chunk,
    osiris_codec,
    osiris_entry,
    osiris_file,
    osiris_tracking,
)
from forebay.formats.osiris_entry import SubBatch
from forebay.formats.osiris_tracking import Track


def chunk_of(records: list[bytes], chunk_id: int = 0, **named: Any) -> bytes:
    return osiris_chunk.encode(records, chunk_id=chunk_id, **{"timestamp": 1000, "epoch": 1} | named)


def three_chunks() -> bytes:
    first = chunk_of([b"a", b"bb"])
    second = chunk_of([b"c" * 30] * 4, 2, bloom=osiris_bloom.build([b"red"], 16))
    return first + second + chunk_of([b"d"], 6, trailer=osiris_tracking.encode([Track(0, b"me", 7)]))


@pytest.mark.parametrize(("stream", "name"), [(VARY, "vary"), (ONE, "one")])
def test_every_record_of_a_real_broker_is_decoded(stream: str, name: str) -> None:
    found = []
    for path in segments(stream):
        data = path.read_bytes()
        osiris_file.check_segment_header(data)
        walk = osiris_chunk.walk(data, 8)
        assert walk.end == len(data)
        for position in walk.positions:
            chunk = osiris_chunk.decode(data, int(position))
            if chunk.header.type == osiris_chunk.USER:
                records = osiris_entry.decode_records(
                    chunk.data, entries=chunk.header.entries, records=chunk.header.records
                )
                for number, record in enumerate(records):
                    digest = hashlib.sha256(record).hexdigest()[:16]
                    found.append((chunk.header.chunk_id + number, len(record), digest))
    assert found == delivered(name)


@pytest.mark.parametrize("stream", [VARY, ONE, BLOOM, EMPTY])
def test_chunks_and_indexes_of_a_real_broker_are_written_again_byte_for_byte(stream: str) -> None:
    for path in segments(stream):
        data = path.read_bytes()
        walk = osiris_chunk.walk(data, 8)
        for position in walk.positions:
            chunk = osiris_chunk.decode(data, int(position))
            header = chunk.header
            again = osiris_chunk.encode(
                osiris_entry.decode_entries(chunk.data, header.entries),
                chunk_id=header.chunk_id,
                timestamp=header.timestamp,
                epoch=header.epoch,
                chunk_type=header.type,
                bloom=chunk.bloom,
                trailer=chunk.trailer,
            )
            assert again == data[position : position + header.length]
        records = np.empty(len(walk.positions), osiris_file.INDEX_DTYPE)
        for name in ("chunk_id", "timestamp", "epoch", "type"):
            records[name] = walk.headers[name]
        records["position"] = walk.positions
        written = path.with_suffix(".index").read_bytes()
        assert osiris_file.encode_index(records) == written
        decoded = osiris_file.decode_index(written)
        osiris_file.check_index(decoded)
        assert (decoded == records).all()


def test_tracking_of_a_real_broker_is_decoded_and_written_again() -> None:
    kinds = set()
    for path in segments(VARY):
        data = path.read_bytes()
        for position in osiris_chunk.walk(data, 8).positions:
            chunk = osiris_chunk.decode(data, int(position))
            snapshot = chunk.header.type == osiris_chunk.TRACKING_SNAPSHOT
            blocks = chunk.trailer
            if chunk.header.type != osiris_chunk.USER:
                [entry] = osiris_entry.decode_entries(chunk.data, 1)
                assert isinstance(entry, memoryview)
                blocks = entry
            tracks = osiris_tracking.decode(blocks, snapshot=snapshot)
            assert osiris_tracking.encode(tracks, snapshot=snapshot) == blocks
            kinds |= {(chunk.header.type, track.kind) for track in tracks}
    assert {(0, 0), (1, 1), (2, 0), (2, 1)} <= kinds


def test_real_bloom_filters_are_built_alike_and_matched() -> None:
    # Chunk k of the file: k % 5 = 0 no value, 1 and 4 one value, 2 mixed with unfiltered, 3 two values.
    # A record begins with the number of its chunk, its own number and the value of the chunk.
    unasked = osiris_bloom.Matcher([b"surely-not-there"])
    number = 0
    for path in segments(BLOOM):
        data = path.read_bytes()
        for position in osiris_chunk.walk(data, 8).positions:
            chunk = osiris_chunk.decode(data, int(position))
            count = chunk.header.records
            records = osiris_entry.decode_records(chunk.data, entries=chunk.header.entries, records=count)
            value = bytes(records[0]).split(b"/")[2].split(b" ")[0]
            expected = osiris_bloom.build([value], 16)
            asked = osiris_bloom.Matcher([value])
            kind, bloom = number % 5, bytes(chunk.bloom)
            if count > 1:  # A single record of two values has only one of them.
                assert asked.matches(bloom) == (kind != 0)
            assert not unasked.matches(bloom)
            if kind in (1, 4):
                assert bloom == expected
            elif kind == 2 and count > 1:
                assert bloom == osiris_bloom.build([value, b""], 16)
            elif kind == 0:
                assert osiris_bloom.Matcher([value], match_unfiltered=True).matches(bloom)
            number += 1
    assert number == 120


@pytest.mark.parametrize(
    ("value", "at_16", "at_64", "at_255"),
    [
        (b"x", (37, 63), (453, 285), (1750, 470)),
        (b"blue", (125, 93), (343, 488), (54, 1087)),
        (b"abcdefghijkl", (9, 29), (150, 121), (391, 1141)),
        (b"abcdefghijklmnop", (93, 119), (80, 23), (782, 555)),
    ],
)
def test_filter_positions_are_those_of_erlang(
    value: bytes, at_16: tuple[int, int], at_64: tuple[int, int], at_255: tuple[int, int]
) -> None:
    assert [osiris_bloom.positions(value, size) for size in (16, 64, 255)] == [at_16, at_64, at_255]


def test_a_filter_never_misses_a_value_and_knows_unfiltered_entries() -> None:
    bloom = osiris_bloom.build([b"red", b"", b"green"], 32)
    assert osiris_bloom.Matcher([b"red"]).matches(bloom)
    assert osiris_bloom.Matcher([b"blue", b"green"]).matches(bloom)
    assert osiris_bloom.Matcher([b"blue"], match_unfiltered=True).matches(bloom)
    assert not osiris_bloom.Matcher([b"blue"]).matches(bloom)
    assert osiris_bloom.build([b"", b""], 32) == b""
    assert not osiris_bloom.Matcher([b"red"]).matches(b"")
    with pytest.raises(UsageError):
        osiris_bloom.build([b"red"], 15)
    with pytest.raises(UsageError):
        osiris_bloom.positions(b"", 16)


@pytest.mark.parametrize("codec", sorted(osiris_codec.CODECS.values()))
def test_sub_batches_of_every_codec_come_back(codec: int) -> None:
    records = [b"alpha", b"", b"x" * 100_000, bytes(range(256))]
    batch = osiris_entry.sub_batch(records, codec)
    data = chunk_of([b"before", batch, b"after"])  # type: ignore[list-item]
    chunk = osiris_chunk.decode(data)
    assert (chunk.header.entries, chunk.header.records) == (3, 6)
    found = osiris_entry.decode_records(chunk.data, entries=3, records=6)
    assert [bytes(record) for record in found] == [b"before", *records, b"after"]


@pytest.mark.parametrize(
    "codec", [osiris_codec.GZIP, osiris_codec.SNAPPY, osiris_codec.LZ4, osiris_codec.ZSTD]
)
def test_a_bomb_is_refused_before_it_takes_memory(codec: int) -> None:
    packed = osiris_codec.compress(codec, bytes(10_000_000))
    for size in (0, 100, 9_999_999, 10_000_001):
        with pytest.raises(Corrupt):
            osiris_codec.decompress(codec, packed, size)
    for cut in (0, 3, len(packed) // 2, len(packed) - 1):
        with pytest.raises(Corrupt):
            osiris_codec.decompress(codec, packed[:cut], 10_000_000)
    with pytest.raises(Corrupt):
        SubBatch(codec, 1, 1 << 31, packed).unpack()


def test_raw_snappy_and_unknown_codecs() -> None:
    import pyarrow as pa

    packed = pa.Codec("snappy").compress(b"hello" * 50, asbytes=True)
    assert osiris_codec.decompress(osiris_codec.SNAPPY, packed, 250) == b"hello" * 50
    damaged = bytearray(osiris_codec.compress(osiris_codec.SNAPPY, b"hello" * 50))
    damaged[16] ^= 1
    with pytest.raises(Corrupt):
        osiris_codec.decompress(osiris_codec.SNAPPY, damaged, 250)
    with pytest.raises(UnsupportedEncoding):
        osiris_codec.decompress(6, b"x", 1)
    with pytest.raises(UnsupportedEncoding):
        osiris_codec.compress(6, b"x")


def test_walk_finds_every_chunk_and_leaves_a_partial_one_out() -> None:
    data = three_chunks()
    whole = osiris_chunk.walk(data)
    assert whole.headers["chunk_id"].tolist() == [0, 2, 6]
    assert whole.end == len(data)
    last = int(whole.positions[-1])
    for cut in range(last, len(data)):
        part = osiris_chunk.walk(data[:cut])
        assert part.end == last
        assert len(part.positions) == 2
    assert osiris_chunk.walk(b"").end == 0


@pytest.mark.parametrize("seed", range(10))
def test_walk_over_runs_of_one_length_is_that_of_a_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    pieces: list[bytes] = []
    starts: list[int] = []
    chunk_id = at = 0
    while len(pieces) < 300:
        size = draw.choice([0, 5, 5, 70])
        for _ in range(draw.choice([1, 7, 8, 9, 60])):
            trailer = bytes(draw.choice([0, 0, 0, 1]) * 5)
            pieces.append(chunk_of([b"x" * (size - len(trailer))], chunk_id, trailer=trailer))
            starts.append(at)
            at += len(pieces[-1])
            chunk_id += 1
    data = b"".join(pieces)
    walk = osiris_chunk.walk(data)
    assert walk.positions.tolist() == starts
    assert walk.headers["chunk_id"].tolist() == list(range(chunk_id))
    cut = draw.randrange(len(data))
    assert osiris_chunk.walk(data[:cut]).end == max(end for end in [*starts, at] if end <= cut)


def test_walk_refuses_a_hole_between_chunks() -> None:
    with pytest.raises(Corrupt, match="expected 2"):
        osiris_chunk.walk(chunk_of([b"a", b"b"]) + chunk_of([b"c"], 3))


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, 0x51, UnsupportedEncoding),
        (0, 0x40, Corrupt),
        (1, 3, UnsupportedEncoding),
        (3, 0, Corrupt),
        (7, 0, Corrupt),
        (24, 0xFF, Corrupt),
        (44, 15, Corrupt),
        (47, 1, UnsupportedEncoding),
        (36, 0xFF, Corrupt),
        (32, 1, Corrupt),
        (50, 1, Corrupt),
    ],
)
def test_a_damaged_header_is_refused(at: int, value: int, error: type[Exception]) -> None:
    data = bytearray(chunk_of([b"alpha"]))
    data[at] = value
    with pytest.raises(error):
        osiris_chunk.decode(data)


def test_a_chunk_is_refused_at_every_length_but_its_own() -> None:
    data = chunk_of([b"alpha"], trailer=b"\0\1a" + bytes(8))
    for cut in range(len(data)):
        with pytest.raises(Corrupt):
            osiris_chunk.decode(data[:cut])


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        chunk_of([b""] * 65_536)
    with pytest.raises(UsageError):
        chunk_of([])
    with pytest.raises(UsageError):
        chunk_of([b"a"], bloom=b"x" * 15)
    with pytest.raises(UsageError):
        chunk_of([b"a"], timestamp=1 << 63)
    with pytest.raises(LimitExceeded):
        osiris_entry.sub_batch([])
    with pytest.raises(LimitExceeded):
        osiris_tracking.encode([Track(0, b"x" * 256, 1)])


def test_records_of_one_length_are_a_sequence_like_any_other() -> None:
    records = [b"%03d" % number for number in range(50)]
    chunk = osiris_chunk.decode(chunk_of(records))
    found = osiris_entry.decode_records(chunk.data, entries=50, records=50)
    assert isinstance(found, osiris_entry.EqualRecords)
    assert [bytes(found[number]) for number in range(50)] == records
    assert [bytes(record) for record in found[-3:]] == records[-3:]
    assert [bytes(record) for record in found] == records
    assert bytes(found[-1]) == b"049"
    with pytest.raises(IndexError):
        found[50]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=30))
def test_records_come_back(records: list[bytes]) -> None:
    chunk = osiris_chunk.decode(chunk_of(records))
    found = osiris_entry.decode_records(chunk.data, entries=len(records), records=len(records))
    assert [bytes(record) for record in found] == records


@given(st.binary(max_size=200), st.integers(1, 5), st.integers(1, 8))
def test_entries_of_noise_are_refused_or_whole(noise: bytes, entries: int, records: int) -> None:
    try:
        found = osiris_entry.decode_records(noise, entries=entries, records=records)
    except FormatError:
        return
    assert len(found) == records


@given(st.binary(max_size=120), st.booleans())
def test_tracking_of_noise_is_refused_or_written_again(noise: bytes, snapshot: bool) -> None:
    try:
        tracks = osiris_tracking.decode(noise, snapshot=snapshot)
    except FormatError:
        return
    assert osiris_tracking.encode(tracks, snapshot=snapshot) == noise


def test_no_damage_of_one_byte_in_data_goes_unseen() -> None:
    good = osiris_files() / VARY
    data = bytearray((good / "00000000000000002450.segment").read_bytes())
    walk = osiris_chunk.walk(data, 8)
    draw = random.Random(7)
    for position in walk.positions:
        header = osiris_chunk.decode_header(data, int(position))
        at = int(position) + 48 + header.bloom_bytes + draw.randrange(header.data_bytes)
        data[at] ^= 1 << draw.randrange(8)
        with pytest.raises(Corrupt, match="checksum"):
            osiris_chunk.decode(data, int(position))


@pytest.mark.parametrize("seed", range(30))
def test_mutated_segments_never_do_worse_than_a_format_error(seed: int) -> None:
    draw = random.Random(seed)
    data = bytearray(three_chunks())
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    data = data[: draw.randint(1, len(data))]
    try:
        for position in osiris_chunk.walk(data).positions:
            chunk = osiris_chunk.decode(data, int(position))
            header = chunk.header
            osiris_entry.decode_records(chunk.data, entries=header.entries, records=header.records)
            osiris_tracking.decode(chunk.trailer)
    except FormatError:
        pass


def test_file_headers_and_names() -> None:
    with pytest.raises(UnsupportedEncoding):
        osiris_file.check_segment_header(b"OSIL" + struct.pack(">I", 2))
    with pytest.raises(Corrupt):
        osiris_file.check_index_header(b"OSIL" + struct.pack(">I", 1))
    with pytest.raises(Corrupt):
        osiris_file.check_index_header(b"OSI")
    assert osiris_file.file_name(26061613, "segment") == "00000000000026061613.segment"
    assert osiris_file.parse_file_name("00000000000026061613.index") == (26061613, "index")
    assert osiris_file.parse_file_name("26061613.index") is None
    assert len(osiris_file.decode_index(osiris_file.INDEX_HEADER + bytes(28))) == 0


def test_an_index_that_goes_back_is_refused() -> None:
    records = np.zeros(2, osiris_file.INDEX_DTYPE)
    records["position"] = [8, 100]
    with pytest.raises(Corrupt):
        osiris_file.check_index(records)
    records["chunk_id"] = [0, 1]
    osiris_file.check_index(records)
    records["position"] = [9, 100]
    with pytest.raises(Corrupt):
        osiris_file.check_index(records)


def test_the_checksum_is_that_of_zlib_over_the_data_alone() -> None:
    data = chunk_of([b"alpha"], bloom=bytes(16), trailer=b"")
    assert int.from_bytes(data[32:36], "big") == zlib.crc32(data[64:])
