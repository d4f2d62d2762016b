"""The ends of a batch tell what the whole of it would."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats import bytes_batch
from forebay.formats.batch_facts import plain_bytes, whole_checksum
from forebay.formats.bytes_batch_join import join, open_piece

RECORDS = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


@given(RECORDS, st.sampled_from(["none", "zstd"]), st.booleans())
def test_the_checksum_of_the_whole_comes_from_its_end(
    records: list[bytes], codec: bytes_batch.Codec, keyed: bool
) -> None:
    data = bytes_batch.encode(records, keys=records if keyed else None, codec=codec)
    assert whole_checksum(data) == crc32c(data)
    joined = join([(open_piece(data), 1), (open_piece(data), 2)], codec=codec)
    assert whole_checksum(joined) == crc32c(joined)


@given(RECORDS)
def test_the_size_before_compression_is_the_same_with_and_without(records: list[bytes]) -> None:
    plain = bytes_batch.encode(records)
    assert plain_bytes(plain) == len(plain) - 20
    assert plain_bytes(bytes_batch.encode(records, codec="zstd")) == plain_bytes(plain)
