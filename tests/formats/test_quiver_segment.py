from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats import Corrupt, quiver_segment, quiver_wal
from forebay.formats.quiver_segment import Encoding, SegmentMeta, Source

WORDS = pa.array(["a", "b", "a"] * 10).dictionary_encode()
BATCHES = [pa.record_batch({"n": pa.array(range(at, at + 30)), "w": WORDS}) for at in range(0, 120, 30)]


def meta(codec: str = "none") -> SegmentMeta:
    return SegmentMeta(
        segment=5,
        entries=[(1, 2), (4, 5)],
        signal="logs",
        schema_hash=quiver_wal.fingerprint(BATCHES[0].schema),
        rows=120,
        codec=codec,
        raw_bytes=999,
        ingested_ms=(10, 20),
        event_ns=(1, 2),
        sources=[Source(30, 10, 0)] * 4,
        contexts=[{}],
        parts=[],
    )


def file(codec: str = "none") -> tuple[SegmentMeta, bytes]:
    encoding = Encoding.of(meta(codec), BATCHES)
    data = b"".join(encoding)
    assert encoding.size == len(data)
    return encoding.meta, data


@pytest.mark.parametrize("codec", quiver_wal.CODECS)
def test_segment_is_an_arrow_file_for_every_arrow_reader(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "seg.arrow"
    path.write_bytes(file(codec)[1])
    expected = pa.Table.from_batches(BATCHES)
    assert pa.ipc.open_file(str(path)).read_all().equals(expected)
    assert pyarrow.dataset.dataset(path, format="ipc").to_table().equals(expected)


@pytest.mark.parametrize("codec", quiver_wal.CODECS)
def test_bytes_are_those_that_arrow_itself_writes(codec: str) -> None:
    whole, data = file(codec)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    with pa.ipc.new_file(sink, BATCHES[0].schema, options=options) as writer:
        for batch in BATCHES:
            writer.write_batch(batch)
    theirs = sink.getvalue().to_pybytes()
    end = whole.parts[-1].offset + whole.parts[-1].length + 8
    assert data[:end] == theirs[:end]
    assert data.endswith(theirs[end:])


def test_large_buffers_are_written_from_where_they_lie() -> None:
    batch = pa.record_batch({"n": pa.array(range(10_000)), "w": pa.array(["some words"] * 10_000)})
    before = pa.total_allocated_bytes()
    encoding = Encoding.of(meta(), [batch, batch])
    pieces = list(encoding)
    assert pa.total_allocated_bytes() - before < batch.nbytes // 10
    lie = {buffer.address for column in batch.columns for buffer in column.buffers() if buffer}
    assert len([each for each in pieces if pa.py_buffer(each).address in lie]) == 2 * 3
    data = b"".join(pieces)
    for part in encoding.meta.parts:
        quiver_segment.check_part(memoryview(data), part)
    assert pa.ipc.open_file(data).read_all().equals(pa.Table.from_batches([batch, batch]))


def test_metadata_is_read_from_the_end_alone() -> None:
    whole, data = file()
    need = quiver_segment.footer_range(data[-100:], len(data))
    while (more := quiver_segment.footer_range(data[-need:], len(data))) > need:
        need = more
    assert need < len(data)
    assert quiver_segment.decode_meta(data[-need:], len(data)) == whole


def test_parts_cover_every_byte_of_the_data() -> None:
    whole, data = file()
    for part in whole.parts:
        quiver_segment.check_part(memoryview(data), part)
    end = whole.parts[-1].offset + whole.parts[-1].length
    for position in range(0, end, 7):
        damaged = bytearray(data)
        damaged[position] ^= 16
        bad = []
        for part in whole.parts:
            try:
                quiver_segment.check_part(memoryview(damaged), part)
            except Corrupt:
                bad.append(part)
        assert [part.offset <= position < part.offset + part.length for part in bad] == [True]


def test_flipped_bit_in_the_footers_is_seen() -> None:
    whole, data = file()
    end = whole.parts[-1].offset + whole.parts[-1].length
    # Behind the last part come the end-of-stream mark and padding, which nobody reads.
    begin = len(data) - quiver_segment.footer_range(data, len(data))
    assert begin - end < 24
    for position in range(begin, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(Corrupt):
            quiver_segment.decode_meta(bytes(damaged), len(data))


@given(st.integers(0, 2**32))
def test_scrambled_segments_are_refused_or_the_same(seed: int) -> None:
    rng = random.Random(seed)
    whole, data = file()
    scrambled = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        scrambled[rng.randrange(len(scrambled))] = rng.randrange(256)
    scrambled = scrambled[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else scrambled
    try:
        assert quiver_segment.decode_meta(bytes(scrambled), len(scrambled)) == whole
        quiver_segment.footer_range(bytes(scrambled), len(scrambled))
    except Corrupt:
        return


def test_replaced_dictionaries_are_refused_rather_than_changed() -> None:
    other = pa.record_batch({"n": pa.array(range(3)), "w": pa.array(["x", "y", "x"]).dictionary_encode()})
    with pytest.raises(pa.ArrowInvalid):
        list(Encoding.of(meta(), [BATCHES[0], other]))
