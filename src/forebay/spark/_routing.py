"""The partition of every row at once: crc32c of the keys as arithmetic over columns of bytes.

The rule is that of `forebay.log`: crc32c of the key modulo the number of partitions. Calling a function per
key costs a third of a second per million rows, more than everything else a sink does with them. Keys of one
length are a matrix, and the checksum goes over it column by column; keys of mixed lengths are done length by
length, and where there are more lengths than that pays for, or keys are long, one by one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.log import partition_of

__all__ = ["targets"]

LENGTHS_MAX: Final = 16
"""Lengths of keys in one batch up to which they are done length by length."""
KEY_BYTES_MAX: Final = 64
"""Longest key that is done byte by byte."""
POLYNOMIAL: Final = 0x82F63B78


def _table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE: Final = _table()


def targets(keys: pa.BinaryArray, partitions: int, without_key: int) -> npt.NDArray[np.int32]:
    """The partition of each row; `without_key` for those that have none."""
    if partitions == 1:
        return np.zeros(len(keys), np.int32)
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1]
    lengths = np.diff(offsets)
    chosen = np.empty(len(keys), np.int32)
    distinct = np.unique(lengths)
    if len(distinct) > LENGTHS_MAX or (len(distinct) and distinct[-1] > KEY_BYTES_MAX):
        chosen[:] = [
            without_key if key is None else partition_of(key, partitions) for key in keys.to_pylist()
        ]
        return chosen
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    for length in distinct.tolist():
        rows = np.flatnonzero(lengths == length) if len(distinct) > 1 else slice(None)
        starts = offsets[:-1][rows]
        checksum = np.full(len(starts), 0xFFFFFFFF, np.uint32)
        for step in range(length):
            checksum = _TABLE[(checksum ^ data[starts + step]) & 0xFF] ^ (checksum >> np.uint32(8))
        chosen[rows] = (checksum ^ np.uint32(0xFFFFFFFF)) % np.uint32(partitions)
    if keys.null_count:
        chosen[keys.is_null().to_numpy(zero_copy_only=False)] = without_key
    return chosen
