"""The shared write-ahead object: layout as specified, and what a decoder must refuse."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError, LimitExceeded, UsageError
from forebay.formats import bytes_batch, shared_blob
from forebay.formats._errors import Corrupt, UnsupportedEncoding
from forebay.formats.shared_blob import Part

PARTS = [
    Part("orders", 0, 2, bytes_batch.encode([b"alpha", b"beta"])),
    Part("clicks", 7, 1, bytes_batch.encode([b"x" * 5000])),
]


def blob_of(header: Any, bodies: bytes = b"x" * 500) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"LLS1" + struct.pack(">I", len(text)) + text + bodies


def header_of(**changes: Any) -> dict[str, Any]:
    row = {"topic": "t", "partition": 0, "msg_count": 1, "encoding": "bytes-batch-v1"}
    row |= {"body_offset": 700, "body_length": 10}
    row |= {name: value for name, value in changes.items() if name not in ("version", "partitions")}
    whole: dict[str, Any] = {"version": changes.get("version", 1), "created_at_ms": 1}
    return whole | {"partitions": changes.get("partitions", [row]), "padding": " " * 300}


def test_the_layout_is_the_one_in_the_specification() -> None:
    blob, slices = shared_blob.encode(PARTS, created_at_ms=1760000000000)
    assert blob[:4] == b"LLS1"
    length = int.from_bytes(blob[4:8], "big")
    header = json.loads(blob[8 : 8 + length])
    assert header["version"] == 1
    assert header["created_at_ms"] == 1760000000000
    assert list(header["partitions"][0]) == [
        "topic",
        "partition",
        "msg_count",
        "encoding",
        "body_offset",
        "body_length",
        "crc32c",
    ]
    for part, one, row in zip(PARTS, slices, header["partitions"], strict=True):
        body = blob[row["body_offset"] : row["body_offset"] + row["body_length"]]
        assert body == part.body
        assert (one.body_offset, one.body_length) == (row["body_offset"], row["body_length"])
        assert row["crc32c"] == crc32c(body)
    assert slices[0].body_offset == 8 + length


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=20), st.integers(0, 10**6), st.binary(min_size=1, max_size=300)
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 2**48),
)
def test_what_goes_in_comes_out(rows: list[tuple[str, int, bytes]], created_at_ms: int) -> None:
    parts = [Part(topic, partition, 1, body) for topic, partition, body in rows]
    blob, slices = shared_blob.encode(parts, created_at_ms=created_at_ms)
    header = shared_blob.decode(blob)
    assert header.partitions == slices
    assert header.created_at_ms == created_at_ms
    for part, one in zip(parts, slices, strict=True):
        assert blob[one.body_offset : one.body_offset + one.body_length] == part.body


def test_the_header_is_readable_from_the_first_bytes_alone() -> None:
    blob, slices = shared_blob.encode(PARTS, created_at_ms=1)
    head = blob[: slices[0].body_offset]
    assert shared_blob.decode(head, blob_bytes=len(blob)).partitions == slices
    with pytest.raises(Corrupt):
        shared_blob.decode(head)


def test_unknown_fields_and_a_missing_checksum_are_accepted() -> None:
    header = shared_blob.decode(blob_of(header_of(colour="blue")))
    assert header.partitions[0].crc32c is None


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedEncoding, match="version 2"):
        shared_blob.decode(blob_of(header_of(version=2)))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"LLS1\0\0",
        b"LLS2" + blob_of(header_of())[4:],
        b"LLS1" + struct.pack(">I", 0xFFFFFFFF) + b"{}",
        blob_of(b"{"),
        blob_of(b"\xff\xfe"),
        blob_of(b"[" * 100_000),
        blob_of(header_of(partitions=[])),
        blob_of(header_of(msg_count=0)),
        blob_of(header_of(msg_count="many")),
        blob_of(header_of(partition=-1)),
        blob_of(header_of(body_length=0)),
        blob_of(header_of(body_length=2**62)),
        blob_of(header_of(body_offset=0)),
        blob_of(header_of(body_offset=-700)),
        blob_of(header_of(partitions=[header_of()["partitions"][0]] * 2)),
    ],
)
def test_malformed_blobs_are_refused(blob: bytes) -> None:
    with pytest.raises(Corrupt):
        shared_blob.decode(blob)


def test_random_changes_never_crash() -> None:
    randomness = random.Random(11)
    blob, _ = shared_blob.encode(PARTS, created_at_ms=1)
    for _ in range(3000):
        changed = bytearray(blob[: randomness.randrange(len(blob))] if randomness.random() < 0.2 else blob)
        for _ in range(randomness.randint(1, 4)):
            if changed:
                changed[randomness.randrange(min(len(changed), 400))] = randomness.randrange(256)
        try:
            header = shared_blob.decode(bytes(changed))
        except FormatError:
            continue
        assert all(one.body_offset + one.body_length <= len(changed) for one in header.partitions)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        shared_blob.encode([], created_at_ms=1)
    monkeypatch.setattr(shared_blob, "SLICES_MAX", 1)
    with pytest.raises(LimitExceeded, match="SLICES_MAX"):
        shared_blob.encode(PARTS, created_at_ms=1)
