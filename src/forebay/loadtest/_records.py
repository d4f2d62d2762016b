"""Records that know who they are, made and recognised in blocks.

    offset  size  field
    0       8     run: hash of the run's name, so that strangers are seen
    8       8     stream, u64 LE: which generator stream sent it
    16      8     number, u64 LE: which of the stream's records it is, from 0
    24      8     filler hash, u64 LE: of stream and number, so that a mangled record is seen
    32      ...   filler, the same for all records of a run

A block of records is one numpy array: the filler is copied once, four columns are written over it, and the
rows become an Arrow array that shares the memory.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.formats.bytes_batch import BytesBatch

__all__ = ["HEADER_BYTES", "RecordMaker", "Seen", "parse_block", "run_mark"]

HEADER_BYTES: Final = 32
"""Smallest record."""
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


def run_mark(run: str) -> int:
    """What every record of the run begins with."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def _mixed(streams: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (streams + np.uint64(1)) * _MIX ^ numbers * np.uint64(0xBF58476D1CE4E5B9)


class RecordMaker:
    """Makes the blocks of one stream."""

    def __init__(self, run: str, stream: int, *, record_bytes: int, per_block: int, seed: int) -> None:
        filler = random.Random(seed).randbytes(record_bytes)
        self._rows = np.tile(np.frombuffer(filler, np.uint8), (per_block, 1))
        self._offsets = np.arange(0, (per_block + 1) * record_bytes, record_bytes, dtype=np.int32)
        self._mark = np.uint64(run_mark(run))
        self._stream = np.uint64(stream)
        self._count = per_block

    def block(self, first: int) -> BytesBatch:
        """The records from number `first` on. The memory is used again by the next call."""
        head = np.empty((self._count, 4), "<u8")
        numbers = np.arange(first, first + self._count, dtype=np.uint64)
        head[:, 0], head[:, 1], head[:, 2] = self._mark, self._stream, numbers
        with np.errstate(over="ignore"):
            head[:, 3] = _mixed(np.full(self._count, self._stream), numbers)
        self._rows[:, :HEADER_BYTES] = head.view(np.uint8)
        buffers = [None, pa.py_buffer(self._offsets), pa.py_buffer(self._rows)]
        return BytesBatch(pa.Array.from_buffers(pa.binary(), self._count, buffers))


class Seen:
    """What a block of a partition holds."""

    def __init__(
        self, streams: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64], strangers: int
    ) -> None:
        self.streams = streams
        self.numbers = numbers
        self.strangers = strangers
        """Records that are not of this run, or not as they were sent."""


def parse_block(values: pa.BinaryArray, mark: int) -> Seen:
    """Recognise records. Strangers get stream and number of all ones."""
    count = len(values)
    if not count:
        return Seen(np.empty(0, np.uint64), np.empty(0, np.uint64), 0)
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + count + 1]
    data = np.frombuffer(values.buffers()[2], np.uint8)
    long_enough = np.diff(offsets) >= HEADER_BYTES
    starts = np.where(long_enough, offsets[:-1], 0).astype(np.int64)
    if len(data) < HEADER_BYTES:
        strange = np.full(count, np.uint64(2**64 - 1))
        return Seen(strange, strange, count)
    head = np.ascontiguousarray(data[starts[:, None] + np.arange(HEADER_BYTES)]).view("<u8")
    streams, numbers = head[:, 1].copy(), head[:, 2].copy()
    with np.errstate(over="ignore"):
        good = long_enough & (head[:, 0] == np.uint64(mark)) & (head[:, 3] == _mixed(streams, numbers))
    streams[~good] = numbers[~good] = np.uint64(2**64 - 1)
    return Seen(streams, numbers, int(count - good.sum()))
