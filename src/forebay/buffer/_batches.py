"""What a consumer or a reader hands out: a batch, or the description of one."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from forebay.formats.buffer_batch import Batch
from forebay.formats.buffer_manifest import Entry, Metadata

__all__ = ["BatchDescriptor", "ConsumedBatch"]


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """A batch in the queue, without its records."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    duplicate_of: int | None = None
    """Sequence of an earlier batch with the same location: a producer enqueued it twice."""
    entry: Entry | None = None
    """The manifest entry it was made from."""

    def metadata_of(self, index: int) -> Metadata | None:
        """What the producer said of one record; None where no item covers it."""
        return (self.entry or Entry(self.sequence, self.location, self.metadata)).metadata_of(index)


@dataclass(frozen=True, slots=True)
class ConsumedBatch:
    """A batch with its records."""

    entries: Batch
    """The records, a sequence of bytes."""
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    duplicate_of: int | None = None
    """Sequence of an earlier batch with the same location: a producer enqueued it twice."""

    def __len__(self) -> int:
        return len(self.entries)

    def to_arrow(self) -> pa.Array:
        """The records as a binary array."""
        return self.entries.to_arrow()

    def metadata_of(self, index: int) -> Metadata | None:
        """What the producer said of one record; None where no item covers it."""
        return Entry(self.sequence, self.location, self.metadata).metadata_of(index)
