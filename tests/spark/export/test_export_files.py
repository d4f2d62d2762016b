"""Parquet files as they are written to memory."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.errors import UsageError
from forebay.spark.export import ExportConfig, SourceSpec, TargetSpec
from forebay.spark.export._files import SPARE_BYTES, encode_parquet

RANDOM = pa.table({"value": pa.array([os.urandom(1000) for _ in range(2000)]), "offset": range(2000)})
WRITTEN_OUT = pa.table({"word": pa.array(["x" * 1000] * 2000).dictionary_encode()})


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("table", [RANDOM, WRITTEN_OUT, RANDOM.slice(7, 11), RANDOM.slice(0, 0)])
def test_a_file_has_its_rows_whether_it_is_larger_than_its_table_or_not(
    table: pa.Table, compression: str
) -> None:
    data, footer = encode_parquet(table, compression)
    assert pq.read_table(pa.BufferReader(data)).to_pylist() == table.to_pylist()
    assert footer.num_rows == table.num_rows


def test_a_dictionary_that_is_written_out_is_larger_than_the_room_for_it() -> None:
    data, _ = encode_parquet(WRITTEN_OUT, "none")
    assert data.size > 2 * WRITTEN_OUT.nbytes + SPARE_BYTES


def test_a_codec_that_there_is_none_of_is_refused_before_anything_happens() -> None:
    source, target = SourceSpec.parse("orders", "data", None), TargetSpec.parse("delta:table")
    for codec in ("zstd", "snappy", "lz4", "gzip", "none"):
        data, _ = encode_parquet(RANDOM, ExportConfig(source, target, compression=codec).compression)
        assert pq.read_table(pa.BufferReader(data)).num_rows == 2000
    with pytest.raises(UsageError, match="compression is 'zip'"):
        ExportConfig(source, target, compression="zip")
