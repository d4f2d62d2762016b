"""Our own fields behind an entry: any of them may be missing, damage is never taken for absence."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats.buffer_manifest import EMPTY, CorruptManifest, NewEntry, append, decode
from forebay.formats.entry_tail import EntryTail, decode_tail, encode_tail

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TAILS = st.builds(
    EntryTail,
    st.none() | U64,
    st.none() | U32,
    st.none() | st.binary(min_size=16, max_size=16),
    st.none() | U64,
    st.none() | U32,
)


@given(TAILS)
def test_what_was_encoded_is_decoded(tail: EntryTail) -> None:
    assert decode_tail(encode_tail(tail)) == tail
    entry = decode(append(EMPTY, [NewEntry("a", (), encode_tail(tail))]).data).entries[0]
    assert entry.extension() == tail


def test_size_and_checksum_cost_twenty_four_bytes() -> None:
    encoded = encode_tail(EntryTail(object_bytes=5, crc32c=6))
    assert encoded == b"FBX1" + struct.pack("<HBHQBHI", 18, 1, 8, 5, 2, 4, 6)
    assert len(encoded) == 24


def test_unknown_fields_and_foreign_tails_are_skipped() -> None:
    assert decode_tail(b"FBX1" + struct.pack("<HBH3s", 6, 99, 3, b"new")) == EntryTail()
    assert decode_tail(b"") is None and decode_tail(b"somebody else's") is None


@pytest.mark.parametrize(
    "tail",
    [
        b"FBX1",
        b"FBX1\x01",
        b"FBX1" + struct.pack("<H", 1),
        b"FBX1" + struct.pack("<HB", 1, 1),
        b"FBX1" + struct.pack("<HBH", 3, 1, 8),
        b"FBX1" + struct.pack("<HBHI", 7, 1, 4, 0),
        b"FBX1" + struct.pack("<HBHQ", 11, 1, 8, 5)[:-1],
    ],
)
def test_a_damaged_tail_of_ours_is_refused(tail: bytes) -> None:
    with pytest.raises(CorruptManifest, match="tail"):
        decode_tail(tail)


def test_a_producer_id_has_sixteen_bytes() -> None:
    with pytest.raises(UsageError, match="5 bytes"):
        encode_tail(EntryTail(producer_id=b"short"))
