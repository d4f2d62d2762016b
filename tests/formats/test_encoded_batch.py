"""A batch that was encoded a moment ago gives the columns of its bytes, once."""

from __future__ import annotations

import pytest

from forebay.formats import bytes_batch
from forebay.formats.encoded_batch import EncodedBatch


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_columns_are_those_of_the_decoded_bytes_and_made_once(codec: bytes_batch.Codec) -> None:
    data = bytes_batch.encode(
        [b"a", b"", b"ccc"], keys=[b"k", None, b""], timestamps_ms=[1, 2, 3], codec=codec
    )
    batch = EncodedBatch(memoryview(data), 3)
    read = bytes_batch.decode(data)
    assert len(batch) == len(read)
    assert (batch.columns().values, batch.columns().keys) == (read.values, read.keys)
    assert batch.columns() is batch.columns()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_size_is_that_of_the_records_however_small_they_were_packed(codec: bytes_batch.Codec) -> None:
    batch = EncodedBatch(bytes_batch.encode([bytes(100_000)] * 3, codec=codec), 3)
    assert batch.plain_bytes == 3 * 100_000 + 3 * 4
