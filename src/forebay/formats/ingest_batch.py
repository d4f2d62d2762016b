"""The data batch of the claiming queue: a JSON array of base64 strings, in the order of ingestion.

    [ "PHRpbWVzdGFtcD4...", "dmFsdWUtYmluYXJ5..." ]
      entry 0               entry 1                  standard alphabet, padded

The format is the draft's and has no length, version or checksum of its own: a batch that was cut short is
malformed JSON and is refused as such. Base64 adds a third to every entry; whoever minds uses the buffer with
its binary batches. The codec is msgspec's, one call per batch in either direction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt

__all__ = ["BATCH_BYTES_MAX", "decode", "encode", "encoded_bytes", "json_problem"]

BATCH_BYTES_MAX: Final = 1 << 30
"""Largest batch object that is decoded."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[bytes]).decode
_AT_BYTE: Final = re.compile(r"\(byte (\d+)\)")


def encode(entries: Sequence[bytes]) -> bytes:
    """The batch. An entry is any bytes, the empty ones included."""
    for entry in entries:
        # Text, numbers and None are JSON as well, but nobody would get them back.
        if not isinstance(entry, (bytes, bytearray, memoryview)):
            raise UsageError(f"an entry is {type(entry).__name__}, not bytes", hint="encode each entry first")
    return _encode(list(entries))


def encoded_bytes(entries: Sequence[bytes]) -> int:
    """Bytes that `encode` will make of these entries, without making them."""
    return 2 + sum([(len(entry) + 2) // 3 * 4 + 3 for entry in entries]) - (1 if entries else 0)


def decode(data: bytes, *, name: str = "ingest batch", bytes_max: int = BATCH_BYTES_MAX) -> list[bytes]:
    """The entries of a batch. Raises `Corrupt` or `LimitExceeded`; `name` says of which object."""
    if len(data) > bytes_max:
        raise LimitExceeded("BATCH_BYTES_MAX", limit=bytes_max, actual=len(data), hint=f"{name} is too large")
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json_problem(name, error) from error


def json_problem(name: str, error: Exception) -> Corrupt:
    """What a JSON decoder said, as the error of a format: its byte where it is known, else the first one."""
    found = _AT_BYTE.search(str(error))
    return Corrupt(name, int(found[1]) if found else 0, str(error))
