"""The partition of every row at once: crc32c of the keys as arithmetic over columns of bytes.

The rule is that of `forebay.log`: crc32c of the key modulo the number of partitions. Calling a function per
key costs a third of a second per million rows, more than everything else a sink does with them. Keys of one
length are a matrix, and the checksum goes over it two bytes at a time, some thousand rows at once so that all
of it stays in the cache; keys of mixed lengths are done length by length, and where there are more lengths
than that pays for, or keys are long, one by one.

Where the number of partitions is a power of two, only the lowest bits of the checksum are asked for. It is
linear: each of its bits is the parity of some bits of the key, which are the same for all keys of one length.
Counting them eight bytes at a time takes a sixth of the time that the whole checksum does.
"""

from __future__ import annotations

from functools import lru_cache
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
ROWS_AT_ONCE: Final = 16_384
"""Keys whose checksums are computed together."""
BITS_MAX: Final = 8
"""Bits of a checksum up to which each is computed by itself."""
WORD_BYTES: Final = 8
POLYNOMIAL: Final = 0x82F63B78


def _table(bits: int) -> npt.NDArray[np.uint32]:
    """What `bits` bits of input do to a checksum of nothing."""
    table = np.arange(1 << bits, dtype=np.uint32)
    for _ in range(bits):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_ONE: Final = _table(8)
_TWO: Final = _table(16)


def targets(keys: pa.BinaryArray, partitions: int, without_key: int) -> npt.NDArray[np.int32]:
    """The partition of each row; `without_key` for those that have none."""
    if partitions == 1:
        return np.zeros(len(keys), np.int32)
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1]
    lengths = np.diff(offsets)
    chosen = np.empty(len(keys), np.int32)
    same = len(lengths) and int(lengths.min()) == int(lengths.max())
    distinct = lengths[:1] if same else np.unique(lengths)
    if len(distinct) > LENGTHS_MAX or (len(distinct) and distinct[-1] > KEY_BYTES_MAX):
        chosen[:] = [
            without_key if key is None else partition_of(key, partitions) for key in keys.to_pylist()
        ]
        return chosen
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    if len(distinct) == 1:
        length = int(distinct[0])
        matrix = data[offsets[0] : offsets[-1]].reshape(len(keys), length)
        chosen[:] = _remainders(matrix, partitions)
    else:
        for length in distinct.tolist():
            rows = np.flatnonzero(lengths == length)
            places = offsets[:-1][rows][:, None] + np.arange(length, dtype=np.int32)
            chosen[rows] = _remainders(data[places], partitions)
    if keys.null_count:
        chosen[keys.is_null().to_numpy(zero_copy_only=False)] = without_key
    return chosen


def _remainders(keys: npt.NDArray[np.uint8], partitions: int) -> npt.NDArray[np.uint32]:
    """crc32c of each row modulo the number of partitions."""
    bits = partitions.bit_length() - 1
    # Of keys that do not fill a word the whole checksum costs no more.
    if partitions == 1 << bits and bits <= BITS_MAX and keys.shape[1] >= WORD_BYTES:
        return _lowest_bits(keys, bits)
    return _checksums(keys) % np.uint32(partitions)


def _lowest_bits(keys: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """The lowest bits of the crc32c of each row."""
    length = keys.shape[1]
    start, masks = _masks(length, bits)
    remainders = np.full(len(keys), start, np.uint32)
    for first in range(0, len(keys), ROWS_AT_ONCE):
        part = keys[first : first + ROWS_AT_ONCE]
        if length % WORD_BYTES:
            part = np.pad(part, ((0, 0), (0, -length % WORD_BYTES)))
        words = np.ascontiguousarray(np.ascontiguousarray(part).view("<u8").T)
        for bit, mask in enumerate(masks):
            seen = words[0] & mask[0]
            for word, word_mask in zip(words[1:], mask[1:], strict=True):
                seen ^= word & word_mask
            parity = (np.bitwise_count(seen) & np.uint8(1)).astype(np.uint32)
            remainders[first : first + len(part)] ^= parity << np.uint32(bit)
    return remainders


@lru_cache(maxsize=KEY_BYTES_MAX * BITS_MAX)
def _masks(length: int, bits: int) -> tuple[np.uint32, npt.NDArray[np.uint64]]:
    """The lowest bits for a key of zeros, and for each of them which bits of the key turn it over."""
    single = np.packbits(np.eye(length * 8, dtype=np.uint8), axis=1, bitorder="little")
    [zeros] = _checksums(np.zeros((1, length), np.uint8))
    turned = _checksums(single) ^ zeros
    places = np.zeros((bits, -(-length // WORD_BYTES) * WORD_BYTES * 8), np.uint8)
    for bit in range(bits):
        places[bit, : length * 8] = turned >> np.uint32(bit) & 1
    masks = np.packbits(places, axis=1, bitorder="little").view("<u8")
    return zeros & np.uint32((1 << bits) - 1), masks


def _checksums(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """crc32c of each row."""
    checksums = np.empty(len(keys), np.uint32)
    for first in range(0, len(keys), ROWS_AT_ONCE):
        part = keys[first : first + ROWS_AT_ONCE]
        checksum = np.full(len(part), 0xFFFFFFFF, np.uint32)
        even = part.shape[1] & ~1
        # Column by column, each of them in one piece.
        pairs = np.ascontiguousarray(np.ascontiguousarray(part[:, :even]).view("<u2").T)
        for pair in pairs:
            checksum = _TWO[(checksum ^ pair) & 0xFFFF] ^ (checksum >> np.uint32(16))
        if even < part.shape[1]:
            checksum = _ONE[(checksum ^ part[:, even]) & 0xFF] ^ (checksum >> np.uint32(8))
        checksums[first : first + len(part)] = checksum ^ np.uint32(0xFFFFFFFF)
    return checksums
