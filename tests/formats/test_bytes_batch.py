"""The columnar batch: round trips, and what a decoder must refuse."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError, UsageError
from forebay.formats import bytes_batch
from forebay.formats._errors import Corrupt, UnsupportedEncoding

headers = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3)
rows = st.lists(
    st.tuples(
        st.binary(max_size=20), st.none() | st.binary(max_size=8), st.integers(-(2**63), 2**63 - 1), headers
    ),
    min_size=1,
    max_size=30,
)


def seal(body: bytes) -> bytes:
    """Give a changed batch a valid checksum, so that the checks behind it are reached."""
    checksum = crc32c(body)
    return body + struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_two_batches_of_one_size_have_different_checksums_as_a_whole() -> None:
    # Bytes that end with their own crc32c have the same crc32c, 0x48674BC7, whatever they are.
    one, two = bytes_batch.encode([b"one"]), bytes_batch.encode([b"two"])
    assert len(one) == len(two) and crc32c(one) != crc32c(two)
    assert crc32c(one[:-4] + struct.pack("<I", crc32c(one[:-4]))) == 0x48674BC7


def test_the_bytes_are_the_ones_in_the_diagram() -> None:
    plain = bytes_batch.encode([b"alpha", b""], keys=[None, b"k"], timestamps_ms=[1, -1])
    body = (
        struct.pack("<II", 5, 0) + struct.pack("<II", 0xFFFFFFFF, 1) + struct.pack("<qq", 1, -1) + b"alphak"
    )
    assert plain == seal(b"FBB1\x00\x03\x00\x00" + struct.pack("<II", 2, len(body)) + body)


@given(rows, st.sampled_from(["none", "zstd"]), st.sets(st.sampled_from(["keys", "times", "headers"])))
def test_what_goes_in_comes_out(rows: Any, codec: Any, columns: set[str]) -> None:
    values, keys, times, heads = map(list, zip(*rows, strict=True))
    data = bytes_batch.encode(
        values,
        keys=keys if "keys" in columns else None,
        timestamps_ms=times if "times" in columns else None,
        headers=heads if "headers" in columns else None,
        codec=codec,
    )
    batch = bytes_batch.decode(data)
    batch.values.validate(full=True)
    assert batch.records() == values
    assert (None if batch.keys is None else batch.keys.to_pylist()) == (keys if "keys" in columns else None)
    assert (None if batch.timestamps_ms is None else batch.timestamps_ms.tolist()) == (
        times if "times" in columns else None
    )
    if "headers" in columns:
        assert batch.headers is not None
        batch.headers.validate(full=True)
        got = [row and [(h["key"], h["value"]) for h in row] for row in batch.headers.to_pylist()]
        assert got == [list(row) or None for row in heads]
    else:
        assert batch.headers is None


def test_a_slice_of_an_arrow_array_is_encoded_as_it_looks() -> None:
    array = pa.array([b"out", b"one", None, b"three", b"out"], pa.binary()).slice(1, 3)
    data = bytes_batch.encode(array.fill_null(b""), keys=array)
    batch = bytes_batch.decode(data)
    assert batch.records() == [b"one", b"", b"three"]
    assert batch.keys is not None
    assert batch.keys.to_pylist() == [b"one", None, b"three"]


def test_decoding_copies_no_record_bytes() -> None:
    data = bytes_batch.encode([b"x" * 1000] * 10)
    values = bytes_batch.decode(data).values
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert start <= values.buffers()[2].address < start + len(data)


def test_concat_keeps_every_record_with_its_own_time() -> None:
    first = bytes_batch.decode(bytes_batch.encode([b"a", b"b"], keys=[b"k", None]))
    second = bytes_batch.decode(
        bytes_batch.encode([b"c"], timestamps_ms=[7], headers=[[("h", b"v")]], codec="zstd")
    )
    merged = bytes_batch.decode(bytes_batch.concat([(first, 100), (second, 200)]))
    assert merged.records() == [b"a", b"b", b"c"]
    assert merged.timestamps_ms is not None
    assert merged.timestamps_ms.tolist() == [100, 100, 7]
    assert merged.keys is not None
    assert merged.keys.to_pylist() == [b"k", None, None]
    assert merged.headers is not None
    # As before they were joined: a record without headers has none, not an empty list of them.
    assert merged.headers.to_pylist() == [None, None, [{"key": "h", "value": b"v"}]]


def test_a_slice_of_a_batch_has_the_same_columns() -> None:
    batch = bytes_batch.decode(
        bytes_batch.encode([b"a", b"b", b"c"], keys=[b"1", b"2", b"3"], timestamps_ms=[1, 2, 3])
    ).slice(1, 2)
    assert (batch.records(), len(batch)) == ([b"b", b"c"], 2)
    assert batch.timestamps_ms is not None
    assert batch.timestamps_ms.tolist() == [2, 3]
    assert bytes_batch.decode(bytes_batch.encode_batch(batch)).records() == [b"b", b"c"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"records": []},
        {"records": [b"a"], "keys": [b"a", b"b"]},
        {"records": [b"a"], "timestamps_ms": []},
        {"records": [b"a"], "headers": [None, None]},
        {"records": [None]},
        {"records": [b"a"], "codec": "lz4"},
    ],
)
def test_wrong_usage_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bytes_batch.encode(**wrong)


def test_an_unknown_codec_or_column_is_refused_by_name() -> None:
    body = bytes_batch.encode([b"a"])[:-4]
    with pytest.raises(UnsupportedEncoding, match="codec 2"):
        bytes_batch.decode(seal(body[:4] + b"\x02" + body[5:]))
    with pytest.raises(UnsupportedEncoding, match="columns 0x08"):
        bytes_batch.decode(seal(body[:5] + b"\x08" + body[6:]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: b"LLS1" + body[4:], "magic"),
        (lambda body: body[:8] + struct.pack("<I", 0) + body[12:], "no records"),
        (lambda body: body[:8] + struct.pack("<I", 0xFFFFFFFF) + body[12:], "4294967295 records"),
        (lambda body: body[:12] + struct.pack("<I", 0xFFFFFFFF) + body[16:], "1 records in a body"),
        (lambda body: body + b"x", "body of"),
        (lambda body: body[:16] + struct.pack("<I", 0xFFFFFFFF) + body[20:], "add up"),
        (lambda body: body[:16] + struct.pack("<I", 2) + body[20:], "after the last record"),
    ],
)
def test_damage_behind_a_valid_checksum_is_found(change: Any, reason: str) -> None:
    body = bytes_batch.encode([b"abc"])[:-4]
    with pytest.raises(Corrupt, match=reason):
        bytes_batch.decode(seal(change(body)))


def test_a_forged_zstd_size_allocates_nothing() -> None:
    body = bytes_batch.encode([b"abc" * 100], codec="zstd")[:-4]
    forged = body[:12] + struct.pack("<I", 2**31 - 1) + body[16:]
    with pytest.raises(Corrupt, match="zstd frame holds"):
        bytes_batch.decode(seal(forged))


def test_every_single_bit_flip_is_detected() -> None:
    data = bytes_batch.encode([b"abc", b"", b"defg"], keys=[None, b"k", b""])
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(FormatError):
            bytes_batch.decode(bytes(flipped))


def test_every_truncation_is_detected() -> None:
    data = bytes_batch.encode([b"abc", b"defg"])
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            bytes_batch.decode(data[:length])


def test_random_changes_behind_a_valid_checksum_never_crash() -> None:
    randomness = random.Random(7)
    samples = [
        bytes_batch.encode([b"abc", b"", b"defg"], keys=[None, b"k", b""], timestamps_ms=[1, 2, 3])[:-4],
        bytes_batch.encode([b"a"] * 5, headers=[[("n", b"v")], None, [], [("m", None)], None])[:-4],
        bytes_batch.encode([b"abc" * 9] * 7, codec="zstd")[:-4],
    ]
    for _ in range(3000):
        body = bytearray(randomness.choice(samples))
        for _ in range(randomness.randint(1, 4)):
            body[randomness.randrange(4, len(body))] = randomness.randrange(256)
        try:
            batch = bytes_batch.decode(seal(bytes(body)))
        except FormatError:
            continue
        batch.values.validate(full=True)
        if batch.headers is not None:
            batch.headers.validate(full=True)


@pytest.mark.parametrize("records", [b"abc", "abc", ["text"], [1], [b"a", "b", 3], [[b"nested"]]])
def test_records_that_are_not_lists_of_bytes_are_refused_with_a_hint(records: Any) -> None:
    with pytest.raises(UsageError, match="lists of bytes") as caught:
        bytes_batch.BytesBatch.of(records)
    assert "encode" in caught.value.hint
