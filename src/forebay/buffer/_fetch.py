"""From an entry of the manifest to its records, with what can go wrong on the way."""

from __future__ import annotations

import random

from crc32c import crc32c

from forebay.buffer._batches import BatchDescriptor, ConsumedBatch
from forebay.buffer._config import BufferConfig
from forebay.buffer._errors import BatchMissing
from forebay.errors import ForebayError, NotFound
from forebay.formats import buffer_batch
from forebay.formats.buffer_batch import CorruptBatch
from forebay.formats.buffer_manifest import Entry
from forebay.kit.clock import Clock
from forebay.kit.retry import retry
from forebay.storage import ObjectStore, StoredObject

__all__ = ["Fetcher", "describe"]


def describe(entry: Entry, duplicate_of: int | None = None) -> BatchDescriptor:
    """The descriptor of an entry."""
    return BatchDescriptor(entry.sequence, entry.location, entry.metadata, duplicate_of, entry)


class Fetcher:
    """Reads batches. Keeps no state, so any number of reads may run at once."""

    def __init__(
        self, store: ObjectStore, config: BufferConfig, *, clock: Clock, randomness: random.Random
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._random = randomness

    async def fetch(self, batch: BatchDescriptor) -> ConsumedBatch:
        """The records of a batch.

        Raises `BatchMissing` where the object is not there after several looks, and `CorruptBatch` where it
        is not what the entry says.
        """
        if not batch.location:
            raise CorruptBatch(f"batch {batch.sequence}", 0, "its entry has no location")
        found = await self._get(batch)
        self._verify(batch, found.data)
        limit = self._config.batch_bytes_max
        records = buffer_batch.decode(
            found.data, name=batch.location, batch_bytes_max=limit, block_bytes_max=limit
        )
        return ConsumedBatch(records, batch.sequence, batch.location, batch.metadata, batch.duplicate_of)

    async def _get(self, batch: BatchDescriptor) -> StoredObject:
        async def once() -> StoredObject:
            return await retry(
                lambda: self._store.get(batch.location),
                policy=self._config.read_retry,
                clock=self._clock,
                randomness=self._random,
            )

        def is_missing(error: ForebayError) -> bool:
            return isinstance(error, NotFound)

        try:
            return await retry(
                once,
                policy=self._config.missing_batch_retry,
                clock=self._clock,
                randomness=self._random,
                retryable=is_missing,
            )
        except NotFound as error:
            raise BatchMissing(batch.sequence, batch.location) from error

    def _verify(self, batch: BatchDescriptor, data: bytes) -> None:
        extension = batch.entry.extension() if batch.entry is not None else None
        if extension is None:
            return
        if extension.object_bytes not in (None, len(data)):
            reason = f"{len(data)} bytes, its entry says {extension.object_bytes}"
            raise CorruptBatch(batch.location, 0, reason)
        if extension.crc32c is not None and extension.crc32c != crc32c(data):
            reason = f"checksum {crc32c(data):#010x}, its entry says {extension.crc32c:#010x}"
            raise CorruptBatch(batch.location, 0, reason)
