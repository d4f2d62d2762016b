"""From the forms that a body may have to a piece of a batch: the sections of its layout, and no arrays.

JSON has strings and `{"base64": ...}`. The common case, strings only, is one join and one encoding of them
all; a list with bytes in it goes through a list of bytes. A frame is checked as the format's own decoder
would, after a look at how large it says to be (a few bytes of compressed zeros must not become gigabytes),
and is then a few views of the body. Only headers and Arrow streams take the way through Arrow's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from forebay.broker._arrow_sizes import is_plain, spread_bytes, unpacked_bytes
from forebay.broker._errors import BadRequest
from forebay.errors import LimitExceeded
from forebay.formats.bytes_batch import HEADERS_TYPE, BytesBatch
from forebay.formats.bytes_batch_piece import Piece, open_piece, piece_of_lists, piece_of_texts
from forebay.formats.http_messages import (
    Base64,
    ProducePartition,
    ProducePartitionPacked,
    TextOrBytes,
)

__all__ = ["Columns", "arrow_columns", "check_frames", "frame_columns", "json_columns", "packed_columns"]

ARROW_COLUMNS = {"value", "key", "timestamp", "headers"}
ARROW_BATCHES_MAX = 10_000
"""Record batches of one Arrow stream."""


@dataclass(slots=True, eq=False)
class Columns:
    """A batch, before it is known to be within the limits."""

    batch: BytesBatch | Piece
    compressed: bool = False
    """Whether it took fewer bytes in the body than it has."""

    @property
    def count(self) -> int:
        """Records."""
        return len(self.batch)

    def check_count(self, left: int, records_max: int) -> None:
        """Raise `LimitExceeded` where there are too many records."""
        if self.count > left:
            actual = records_max - left + self.count
            raise LimitExceeded("records_max", limit=records_max, actual=actual, hint="send fewer at once")

    def check_sizes(self, record_max_bytes: int) -> None:
        """Raise `LimitExceeded` where a record is too large."""
        longest = self.batch.longest_bytes()
        if longest > record_max_bytes:
            hint = "put it into an object"
            raise LimitExceeded("record_max_bytes", limit=record_max_bytes, actual=longest, hint=hint)


# -- JSON


def json_columns(batch: ProducePartition) -> Columns:
    """The records of a JSON batch."""
    _same_length(batch)
    if batch.headers is None:
        return Columns(_text_piece(batch))
    return Columns(
        BytesBatch(
            _texts(batch.records),
            None if batch.keys is None else _texts(batch.keys),
            _times(batch.timestamps_ms),
            _headers([_pairs(row) for row in batch.headers]),
        )
    )


def _text_piece(batch: ProducePartition) -> Piece:
    records, keys, times = batch.records, batch.keys, batch.timestamps_ms
    try:
        return piece_of_texts(records, keys=keys, timestamps_ms=times)  # type: ignore[arg-type]
    except (TypeError, AttributeError):
        plain = [_bytes(record) or b"" for record in records]
        plain_keys = None if keys is None else [_bytes(key) for key in keys]
        return piece_of_lists(plain, keys=plain_keys, timestamps_ms=times)


def _texts(values: Sequence[TextOrBytes | None]) -> pa.BinaryArray:
    try:
        return pa.array(values, pa.string()).view(pa.binary())
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.array([_bytes(value) for value in values], pa.binary())


def _bytes(value: TextOrBytes | None) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    return value.base64 if isinstance(value, Base64) else None


def _pairs(row: Sequence[tuple[str, TextOrBytes | None]] | None) -> list[tuple[str, bytes | None]] | None:
    return None if row is None else [(name, _bytes(value)) for name, value in row]


# -- msgpack


def packed_columns(batch: ProducePartitionPacked) -> Columns:
    """The records of a msgpack batch."""
    if batch.records is None:
        raise BadRequest("a batch has neither records nor a frame", hint="send one of them")
    _same_length(batch)
    if batch.headers is None:
        piece = piece_of_lists(batch.records, keys=batch.keys, timestamps_ms=batch.timestamps_ms)
        return Columns(piece)
    return Columns(
        BytesBatch(
            pa.array(batch.records, pa.binary()),
            None if batch.keys is None else pa.array(batch.keys, pa.binary()),
            _times(batch.timestamps_ms),
            _headers(batch.headers),
        )
    )


def frame_columns(batch: ProducePartitionPacked) -> Columns:
    """The records of a ready frame, which `check_frames` has seen."""
    frame = batch.frame
    assert frame is not None
    if batch.records is not None or batch.keys or batch.timestamps_ms or batch.headers:
        raise BadRequest("a batch has a frame and other columns", hint="the frame brings its own")
    return Columns(open_piece(frame), compressed=_claimed(frame) > len(frame))


def check_frames(batches: Sequence[ProducePartitionPacked], *, bytes_max: int) -> None:
    """Raise `LimitExceeded` where the frames of a request say to be too large together."""
    size = sum([_claimed(batch.frame) for batch in batches if batch.frame is not None])
    if size > bytes_max:
        raise LimitExceeded("body_max_bytes", limit=bytes_max, actual=size, hint="send smaller frames")


def _claimed(frame: bytes | memoryview) -> int:
    # Bytes 12 to 16 say how large the body is before compression; see the layout of the format.
    return int.from_bytes(frame[12:16], "little")


# -- Arrow


def arrow_columns(body: bytes | memoryview, *, bytes_max: int) -> Columns:
    """The records of an Arrow stream: `value`, and `key`, `timestamp`, `headers` where they are there."""
    try:
        _check_size(unpacked_bytes(body, bytes_max), bytes_max)
        with pa.ipc.open_stream(body) as reader:
            _check_schema(reader.schema)
            batches = []
            size = 0
            for batch in reader:
                batch.validate(full=True)
                batches.append(batch)
                size += sum([spread_bytes(column) for column in batch.columns])
                _check_size(size, bytes_max)
                if len(batches) > ARROW_BATCHES_MAX:
                    raise LimitExceeded(
                        "ARROW_BATCHES_MAX", limit=ARROW_BATCHES_MAX, actual=len(batches), hint="send fewer"
                    )
            table = pa.Table.from_batches(batches, reader.schema)
            return Columns(_from_table(table))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise BadRequest(f"this is no Arrow stream of records: {error}") from None


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise LimitExceeded("body_max_bytes", limit=bytes_max, actual=size, hint="send less")


def _check_schema(schema: pa.Schema) -> None:
    unknown = set(schema.names) - ARROW_COLUMNS
    if "value" not in schema.names or unknown or len(set(schema.names)) < len(schema.names):
        raise BadRequest(
            f"the columns are {', '.join(schema.names)[:200]}",
            hint="value, and where you like key, timestamp, headers",
        )
    if "headers" in schema.names and not is_plain(schema.field("headers").type):
        raise BadRequest(f"headers are {schema.field('headers').type}", hint=f"send {HEADERS_TYPE}")


def _from_table(table: pa.Table) -> BytesBatch:
    if not table.num_rows:
        raise BadRequest("there are no records", hint="send at least one")
    values = _column(table, "value", pa.binary())
    assert values is not None
    if values.null_count:
        raise BadRequest("a value is null", hint="an empty record is an empty value")
    times = _column(table, "timestamp", None)
    if times is not None:
        if times.null_count:
            raise BadRequest("a timestamp is null", hint="leave the column out, or give every record one")
        times = times.cast(pa.int64() if pa.types.is_integer(times.type) else pa.timestamp("ms", tz="UTC"))
    return BytesBatch(
        values,
        _column(table, "key", pa.binary()),
        None if times is None else times.cast(pa.int64()).to_numpy(),
        _column(table, "headers", HEADERS_TYPE),
    )


def _column(table: pa.Table, name: str, kind: pa.DataType | None) -> pa.Array | None:
    if name not in table.column_names:
        return None
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    return column if kind is None or column.type == kind else column.cast(kind)


# -- shared


def _same_length(batch: ProducePartition | ProducePartitionPacked) -> None:
    count = len(batch.records or ())
    for name in ("keys", "timestamps_ms", "headers"):
        column = getattr(batch, name)
        if column is not None and len(column) != count:
            raise BadRequest(f"{len(column)} {name} for {count} records", hint="send one per record")


def _times(times: Sequence[int] | None) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    return None if times is None else np.asarray(times, np.int64)


def _headers(rows: Sequence[Sequence[tuple[str, bytes | memoryview | None]] | None]) -> pa.ListArray:
    structs = [None if not row else [{"key": name, "value": value} for name, value in row] for row in rows]
    return pa.array(structs, HEADERS_TYPE)
