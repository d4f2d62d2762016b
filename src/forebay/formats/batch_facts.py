"""What an encoded `bytes-batch-v1` batch says of itself, from its ends, without a look at what is between.

Only of batches whose checksum was found right, or that were encoded a moment ago.

Whoever refers to a batch keeps a crc32c of the whole of it. A batch ends with the masked checksum of
everything before it, so once that was found right, four more bytes give the checksum of the whole:

    crc32c(batch) = crc32c(last 4 bytes, continued from the unmasked number in these 4 bytes)
"""

from __future__ import annotations

from crc32c import crc32c

from forebay.formats.bytes_batch import _CHECKSUM, _PREFIX, _unmasked

__all__ = ["plain_bytes", "whole_checksum"]


def plain_bytes(data: bytes | memoryview) -> int:
    """Bytes of the body before compression."""
    size: int = _PREFIX.unpack_from(data)[5]
    return size


def whole_checksum(data: bytes | memoryview) -> int:
    """crc32c of the whole batch."""
    end = data[-_CHECKSUM.size :]
    [masked] = _CHECKSUM.unpack(end)
    return crc32c(end, _unmasked(masked))
