"""Making a local log whole again after a crash: cut off what was half written, keep what is proven.

Only the end can be torn: chunks are appended to the segment first and to the index second. From the end of
the last index go the records that are incomplete, all zero, beyond the segment, or whose chunk is not whole
by length and checksum; then the segment is cut behind the last chunk that is still named. A chunk without
index record was never acknowledged. An index record without its chunk means that the operating system wrote
them in another order.

The checksum does not cover the trailer of a chunk, so the full length is required as well.

What is removed here was never committed: `StreamWriter` acknowledges only what both files hold durably.
"""

from __future__ import annotations

import os
from pathlib import Path

from forebay.errors import FormatError
from forebay.formats import osiris_chunk, osiris_file
from forebay.formats.osiris_file import FILE_HEADER_BYTES, INDEX_HEADER, INDEX_RECORD_BYTES, SEGMENT_HEADER

__all__ = ["recover"]

SMALLEST_SEGMENT_BYTES = 48
"""A last segment of at most so many bytes holds no chunk."""


def recover(path: Path) -> None:
    """Repair the end of the log in `path`. A directory without segments stays empty."""
    _drop_unpaired(path)
    while True:
        found = _segments(path)
        if not found:
            return
        segment = found[-1]
        size = _recover_segment(segment)
        if len(found) == 1 or size > SMALLEST_SEGMENT_BYTES:
            return
        segment.unlink()
        segment.with_suffix(".index").unlink()


def _segments(path: Path) -> list[Path]:
    names = sorted(entry.name for entry in os.scandir(path) if osiris_file.parse_file_name(entry.name))
    return [path / name for name in names if name.endswith(".segment")]


def _drop_unpaired(path: Path) -> None:
    """A roll and a removal touch two files; between the two steps one of them is alone."""
    for file in list(path.iterdir()):
        parsed = osiris_file.parse_file_name(file.name)
        if parsed is not None:
            other = "index" if parsed[1] == "segment" else "segment"
            if not file.with_suffix(f".{other}").exists():
                file.unlink()


def _recover_segment(segment: Path) -> int:
    """Cut segment and index to what is whole; the bytes of the segment afterwards."""
    index = segment.with_suffix(".index")
    data = index.read_bytes()
    size = segment.stat().st_size
    if size < FILE_HEADER_BYTES or len(data) < FILE_HEADER_BYTES:
        segment.write_bytes(SEGMENT_HEADER)
        index.write_bytes(INDEX_HEADER)
        return FILE_HEADER_BYTES
    with segment.open("rb") as file:
        osiris_file.check_segment_header(file.read(FILE_HEADER_BYTES))
    records = osiris_file.decode_index(data)
    count, end = len(records), FILE_HEADER_BYTES
    with segment.open("rb") as file:
        while count:
            whole = _chunk_end(file.fileno(), size, records[count - 1])
            if whole is not None:
                end = whole
                break
            count -= 1
    _cut(index, FILE_HEADER_BYTES + count * INDEX_RECORD_BYTES)
    _cut(segment, end)
    return end


def _chunk_end(file: int, size: int, record: object) -> int | None:
    """Where the chunk of an index record ends, or None where it is not whole."""
    position, chunk_id = int(record["position"]), int(record["chunk_id"])  # type: ignore[index]
    if position < FILE_HEADER_BYTES or position + osiris_chunk.HEADER_BYTES > size:
        return None
    try:
        header = osiris_chunk.decode_header(os.pread(file, osiris_chunk.HEADER_BYTES, position))
        if header.chunk_id != chunk_id or position + header.length > size:
            return None
        osiris_chunk.decode(os.pread(file, header.length, position))
    except FormatError:
        return None
    return position + header.length


def _cut(path: Path, size: int) -> None:
    if path.stat().st_size != size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
