"""The records of the demo: made from their position alone, so that a reader knows what it must find.

A batch is one object: its records, one per line, each of `RECORD_BYTES` bytes. Line by line it says where it
belongs, and a checksum over the whole object is kept in the head beside the object's name.
"""

from __future__ import annotations

import crc32c

__all__ = ["BATCH_RECORDS", "RECORD_BYTES", "checksum", "make_batch", "wrong_records"]

RECORD_BYTES = 256
BATCH_RECORDS = 1_000


def make_batch(writer: str, batch: int) -> bytes:
    """The records of one batch of one writer."""
    first = batch * BATCH_RECORDS
    return b"".join([_record(writer, number) for number in range(first, first + BATCH_RECORDS)])


def _record(writer: str, number: int) -> bytes:
    return f"{writer} {number:012d} ".encode().ljust(RECORD_BYTES - 1, b".") + b"\n"


def checksum(data: bytes) -> int:
    """CRC32C of a batch."""
    return crc32c.crc32c(data)


def wrong_records(writer: str, batch: int, data: bytes) -> int:
    """How many of a batch's records are not what was written: none, unless something is badly wrong."""
    wanted = make_batch(writer, batch)
    if data == wanted:
        return 0
    pairs = [slice(start, start + RECORD_BYTES) for start in range(0, len(wanted), RECORD_BYTES)]
    return max(1, sum(data[pair] != wanted[pair] for pair in pairs))
