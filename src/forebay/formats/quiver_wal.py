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
dictionaries at all.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import pyarrow as pa

from forebay.errors import LimitExceeded
from forebay.formats._errors import Corrupt

__all__ = ["CODECS", "CONTEXT_BYTES_MAX", "SIGNAL_BYTES_MAX", "Entry", "decode", "encode", "fingerprint"]

CODECS: Final = ("none", "lz4", "zstd")
SIGNAL_BYTES_MAX: Final = 64
"""Longest name of a signal type in UTF-8 bytes."""
CONTEXT_BYTES_MAX: Final = 16_384
"""Largest context of one batch, encoded."""

_HEAD: Final = struct.Struct("<32sIBBHQ")
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
    size: int = -1
    """Logical bytes of the batch; -1 lets `encode` count them."""


def fingerprint(schema: pa.Schema) -> bytes:
    """32 bytes that tell schemas apart, metadata and dictionary types included."""
    return hashlib.blake2b(memoryview(schema.serialize()), digest_size=32).digest()


def encode(entry: Entry, codec: str) -> bytes:
    """The body, in one piece."""
    signal, context = entry.signal.encode(), b""
    if len(signal) > SIGNAL_BYTES_MAX:
        raise LimitExceeded("SIGNAL_BYTES_MAX", limit=SIGNAL_BYTES_MAX, actual=len(signal))
    if entry.context:
        context = _encode_context(dict(entry.context))
        if len(context) > CONTEXT_BYTES_MAX:
            raise LimitExceeded("CONTEXT_BYTES_MAX", limit=CONTEXT_BYTES_MAX, actual=len(context))
    batch = entry.batch
    head = _HEAD.pack(
        entry.fingerprint or fingerprint(batch.schema),
        batch.num_rows,
        CODECS.index(codec),
        len(signal),
        len(context),
        batch.nbytes if entry.size < 0 else entry.size,
    )
    sink = pa.BufferOutputStream()
    sink.write(b"".join((head, signal, context)))
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


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
    if batch.num_rows != rows or fingerprint(batch.schema) != digest:
        raise Corrupt(_WHAT, 0, "rows or schema are not those of the Arrow bytes")
    return Entry(batch, signal, context, digest, size)
