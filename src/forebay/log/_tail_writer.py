"""A writer that tells a tail cache of its appends.

The cache must hold exactly what a read would return. So an append is told only after its commit, with the
time that the commit wrote, and only where the writer's own state proves that time: the control record it
remembers still has this append as its last. Where groups with and without times of their own were merged, the
times that the merge filled in are not known here; such an append is left out, and a read of it is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from forebay.formats import bytes_batch
from forebay.formats.bytes_batch import HEADERS_TYPE, BytesBatch
from forebay.formats.bytes_batch_join import columns_of
from forebay.log._append import AppendResult, Unit
from forebay.log._tail_cache import TailCache
from forebay.log._upload import Uploaded
from forebay.log._writer import LogWriter

__all__ = ["TailFedWriter"]


class TailFedWriter(LogWriter):
    """`LogWriter` with a cache: set `tail_cache` before the first append."""

    tail_cache: TailCache | None = None

    async def commit(self, uploads: Sequence[Uploaded]) -> list[list[AppendResult]]:
        """Commit, then tell the cache."""
        answers = await super().commit(uploads)
        if self.tail_cache is not None:
            for uploaded in uploads:
                for unit in uploaded.units:
                    self._tell(self.tail_cache, unit)
        return answers

    def _tell(self, cache: TailCache, unit: Unit) -> None:
        state = self._cache.get(unit.keys)
        pending = None if state is None or state.control is None else state.control.pending
        if pending is None or not unit.append_id or pending.append_id != unit.append_id:
            return
        batches = [columns_of(group.batch) for group in unit.groups]
        timed = {batch.timestamps_ms is None for batch in batches}
        if len(timed) != 1:
            return
        batch = bytes_batch.merge(batches, time_ms=0)
        if len(batch) == pending.msg_count:
            place = (unit.keys.topic, unit.keys.partition, pending.start_offset)
            cache.committed(*place, _as_stored(batch), pending.created_at_ms)


def _as_stored(batch: BytesBatch) -> BytesBatch:
    """The batch as it comes back: a record without headers has an empty list of them, not none."""
    headers = batch.headers
    if headers is None or not headers.null_count:
        return batch
    lengths = headers.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    whole = pa.ListArray.from_arrays(pa.array(offsets), headers.flatten()).cast(HEADERS_TYPE)
    return BytesBatch(batch.values, batch.keys, batch.timestamps_ms, whole)
