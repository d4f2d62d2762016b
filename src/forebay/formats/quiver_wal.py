"""The body of a WAL entry: one record batch and what must be known of it to rebuild a segment.

    0       32   schema fingerprint: blake2b-256 of the schema's IPC message
    32      4    rows
    36      1    codec of the Arrow bytes: 0 none, 1 lz4, 2 zstd
    37      1    length of the signal type
    38      2    length of the context
    40      8    logical size of the batch in bytes
    48      s    signal type, UTF-8
    48+s    c    context, msgpack map of text to text: headers, tenant, peer
    ...          one Arrow IPC stream: schema, dictionaries, the batch

Each entry carries its schema and its dictionaries. A schema stored once per file would save a few hundred
bytes, and would make every entry behind a damaged one unreadable; a bare record batch message would not carry
dictionaries at all. Where there are none, and no codec, the stream is put together from the schema's message,
which is made once, and the batch's: the same bytes as Arrow's stream writer gives, in a fraction of the time.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt

__all__ = [
    "CODECS",
    "CONTEXT_BYTES_MAX",
    "ROWS_MAX",
    "SCHEMA_BYTES_MAX",
    "SIGNAL_BYTES_MAX",
    "Entry",
    "SchemaForm",
    "decode",
    "encode",
    "encode_pieces",
    "fingerprint",
    "has_dictionary",
]

CODECS: Final = ("none", "lz4", "zstd")
SIGNAL_BYTES_MAX: Final = 64
"""Longest name of a signal type in UTF-8 bytes."""
CONTEXT_BYTES_MAX: Final = 16_384
"""Largest context of one batch, encoded."""
ROWS_MAX: Final = (1 << 31) - 1
"""Most rows of one batch, as many as Arrow writes: columns of nulls have no bytes that would bound them."""
SCHEMA_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest schema, metadata included, as an IPC message. A segment's footer must have room for it."""

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
_HEAD: Final = struct.Struct("<32sIBBHQ")
_LENGTH: Final = struct.Struct("<I")
"""Behind the four bytes with which every message of a stream begins."""
_WHAT: Final = "quiver WAL entry"
_decode_context = msgspec.msgpack.Decoder(dict[str, str]).decode
_encode_context = msgspec.msgpack.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch as it lies in the WAL."""

    batch: pa.RecordBatch
    signal: str
    context: Mapping[str, str] = field(default_factory=dict)
    fingerprint: bytes = b""
    size: int = 0
    """Logical bytes of the batch: those of its uncompressed message, or of its buffers where it has none."""


def fingerprint(schema: pa.Schema) -> bytes:
    """32 bytes that tell schemas apart, metadata and dictionary types included."""
    return _digest(memoryview(schema.serialize()))


def _digest(message: memoryview) -> bytes:
    return hashlib.blake2b(message, digest_size=32).digest()


def _first_message(stream: memoryview) -> memoryview:
    """The schema, of a stream that Arrow has read."""
    [length] = _LENGTH.unpack_from(stream, 4)
    return stream[: 8 + length]


def has_dictionary(kind: Any) -> bool:
    """Whether an Arrow type is a dictionary, or has one inside."""
    if pa.types.is_dictionary(kind):
        return True
    return any(has_dictionary(kind.field(index).type) for index in range(kind.num_fields))


@dataclass(frozen=True, slots=True)
class SchemaForm:
    """What is worth knowing of a schema once, for all its batches."""

    fingerprint: bytes
    message: bytes
    """Its IPC message."""
    is_plain: bool
    """No column is a dictionary, so that a batch is one message."""

    @classmethod
    def of(cls, schema: pa.Schema) -> SchemaForm:
        """Look at a schema."""
        message = schema.serialize().to_pybytes()
        if len(message) > SCHEMA_BYTES_MAX:
            raise LimitExceeded("SCHEMA_BYTES_MAX", limit=SCHEMA_BYTES_MAX, actual=len(message))
        is_plain = not any(has_dictionary(each.type) for each in schema)
        return cls(fingerprint(schema), message, is_plain)


def encode(
    batch: pa.RecordBatch, signal: str, context: Mapping[str, str] | None = None, codec: str = "none"
) -> bytes:
    """The body, in one piece."""
    return b"".join(encode_pieces(batch, signal, context or {}, codec, SchemaForm.of(batch.schema))[0])


def encode_pieces(
    batch: pa.RecordBatch, signal: str, context: Mapping[str, str], codec: str, form: SchemaForm
) -> tuple[list[bytes | memoryview], int, int]:
    """The body in pieces, so that the data is copied once, by Arrow; their bytes; and the logical size of the
    batch."""
    name, extra = _text("the signal type", signal), b""
    if len(name) > SIGNAL_BYTES_MAX:
        raise LimitExceeded("SIGNAL_BYTES_MAX", limit=SIGNAL_BYTES_MAX, actual=len(name))
    if batch.num_rows > ROWS_MAX:
        raise LimitExceeded("ROWS_MAX", limit=ROWS_MAX, actual=batch.num_rows, hint="ingest smaller batches")
    if context:
        # What is not text would be written, and would make the entry unreadable for good.
        for each in (*context, *context.values()):
            _text("the context", each)
        extra = _encode_context(dict(context))
        if len(extra) > CONTEXT_BYTES_MAX:
            raise LimitExceeded("CONTEXT_BYTES_MAX", limit=CONTEXT_BYTES_MAX, actual=len(extra))
    if form.is_plain and codec == "none":
        message = memoryview(batch.serialize())
        # The message of a slice has the slice alone, and asking Arrow to count again costs more than this.
        size = len(message)
        head = _HEAD.pack(form.fingerprint, batch.num_rows, 0, len(name), len(extra), size)
        before = b"".join((head, name, extra, form.message))
        return [before, message, _END_OF_STREAM], len(before) + size + len(_END_OF_STREAM), size
    size, stream = batch.nbytes, _stream(batch, codec)
    head = _HEAD.pack(form.fingerprint, batch.num_rows, CODECS.index(codec), len(name), len(extra), size)
    return [head + name + extra, stream], len(head) + len(name) + len(extra) + len(stream), size


def _text(what: str, value: object) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
    except UnicodeEncodeError:
        pass
    raise UsageError(f"{what} has {value!r:.80}", hint="text that can be written as UTF-8")


def _stream(batch: pa.RecordBatch, codec: str) -> memoryview:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def decode(body: bytes | memoryview) -> Entry:
    """The entry; its batch points into `body` unless it was compressed. Raises `Corrupt`."""
    view = memoryview(body)
    if len(view) < _HEAD.size:
        raise Corrupt(_WHAT, len(view), "cut short")
    digest, rows, codec, signal_size, context_size, size = _HEAD.unpack_from(view)
    begin = _HEAD.size + signal_size + context_size
    if codec >= len(CODECS) or signal_size > SIGNAL_BYTES_MAX or begin > len(view):
        raise Corrupt(_WHAT, 36, "a length or the codec is out of range")
    if context_size > CONTEXT_BYTES_MAX:
        raise Corrupt(_WHAT, 38, f"context of {context_size} bytes")
    try:
        signal = str(view[_HEAD.size : _HEAD.size + signal_size], "utf-8")
        context = _decode_context(view[_HEAD.size + signal_size : begin]) if context_size else {}
        with pa.ipc.open_stream(pa.py_buffer(view[begin:])) as reader:
            batch = reader.read_next_batch()
            batch.validate()
    except (msgspec.MsgspecError, UnicodeDecodeError, pa.ArrowException, StopIteration, OSError) as error:
        raise Corrupt(_WHAT, begin, str(error)) from error
    # The bytes of the schema are compared, not what is made of them: a process that knows an extension type,
    # or has another release of Arrow, may write the same schema in other bytes.
    if batch.num_rows != rows or _digest(_first_message(view[begin:])) != digest:
        raise Corrupt(_WHAT, 0, "rows or schema are not those of the Arrow bytes")
    return Entry(batch, signal, context, digest, size)
