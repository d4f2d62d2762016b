"""Which partition a record goes to, where the caller does not say.

Records with the same key go to the same partition, so that they stay in order; the choice is the crc32c of
the key modulo the number of partitions, the same for every process and release. Distinct keys are found by
Arrow, so Python sees each of them once per call, not once per record. Records without a key need no order
among themselves: all of one call go to one partition, which is another one with each call.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from forebay.formats.bytes_batch import BytesBatch

__all__ = ["partition_of", "route"]


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key."""
    return crc32c(key) % partitions


def route(batch: BytesBatch, partitions: int, turn: int) -> Iterator[tuple[int, BytesBatch]]:
    """The parts of a batch by partition, each in order. `turn` is for those without a key."""
    if batch.keys is None or partitions == 1:
        yield turn % partitions if batch.keys is None else 0, batch
        return
    targets = _targets(batch.keys, partitions, turn % partitions)
    chosen = np.unique(targets)
    for partition in chosen.tolist():
        if len(chosen) == 1:
            yield partition, batch
        else:
            yield partition, _take(batch, np.flatnonzero(targets == partition))


def _targets(keys: pa.BinaryArray, partitions: int, without_key: int) -> npt.NDArray[np.int64]:
    encoded = keys.dictionary_encode()
    distinct = [partition_of(key, partitions) for key in encoded.dictionary.to_pylist()]
    table = np.array([*distinct, without_key], np.int64)
    codes = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    chosen: npt.NDArray[np.int64] = table[codes]
    return chosen


def _take(batch: BytesBatch, places: npt.NDArray[np.int64]) -> BytesBatch:
    indices = pa.array(places)
    return BytesBatch(
        batch.values.take(indices),
        None if batch.keys is None else batch.keys.take(indices),
        None if batch.timestamps_ms is None else batch.timestamps_ms[places],
        None if batch.headers is None else batch.headers.take(indices),
    )
