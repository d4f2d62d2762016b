"""What a producer hands in, and what he gets for it. It is looked at before it is written: what a replay
would refuse is never acknowledged.

The checks cost some microseconds per batch. Without them a batch would be durable, would be told to be, and
would be put aside as damaged after the next crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import pyarrow as pa

from forebay.errors import UsageError
from forebay.formats import Corrupt, quiver_wal
from forebay.formats.quiver_wal import SchemaForm

__all__ = ["Forms", "Receipt", "context_of"]

SCHEMAS_KEPT: Final = 256
"""Schemas whose form Quiver keeps at hand."""
NO_CONTEXT: Final[dict[str, str]] = {}
"""One for all batches without: an object for each would be looked at by every garbage collection."""


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """A batch that is durable."""

    sequence: int
    """Its place in the WAL."""
    ingested_ms: int


class Forms:
    """The form of each schema, made once."""

    def __init__(self) -> None:
        self._kept: dict[bytes, SchemaForm] = {}
        self._last: tuple[pa.Schema, SchemaForm] | None = None

    def of(self, batch: pa.RecordBatch) -> SchemaForm:
        """The form of the batch's schema. A batch of a new one is read back before anything is written.

        Schemas that differ in metadata alone, even in that of one column, have forms of their own. Raises
        `UsageError` for anything but a valid record batch, and for types that Arrow writes and does not read.
        """
        _check_batch(batch)
        schema = batch.schema
        # The last one is looked at first: a comparison costs next to nothing. Others are known by their
        # bytes, which cost less than a hash: extension types have none, and Python takes schemas for equal
        # whose metadata differs.
        found = self._last
        if found is None or not schema.equals(found[0], check_metadata=True):
            message = schema.serialize().to_pybytes()
            form = self._kept.get(message)
            if form is None:
                form = SchemaForm.of(schema)
                _check_readable(batch)
                if len(self._kept) >= SCHEMAS_KEPT:
                    self._kept.clear()
                self._kept[message] = form
            found = self._last = (schema, form)
        return found[1]


def _check_readable(batch: pa.RecordBatch) -> None:
    try:
        quiver_wal.decode(quiver_wal.encode(batch.slice(0, 1), "", {}))
    except (Corrupt, pa.ArrowException) as error:
        raise UsageError(
            f"a batch of this schema cannot be read back: {error}", hint="use a type that Arrow's IPC reads"
        ) from error


def _check_batch(batch: pa.RecordBatch) -> None:
    if not isinstance(batch, pa.RecordBatch):
        raise UsageError(
            f"a {type(batch).__name__} is no record batch", hint="ingest the batches of Table.to_batches()"
        )
    try:
        batch.validate()
    except pa.ArrowException as error:
        raise UsageError(
            f"the record batch is not valid: {error}", hint="see RecordBatch.validate"
        ) from error


def context_of(given: Mapping[str, str] | None) -> dict[str, str]:
    """A copy, or `NO_CONTEXT`. Raises `UsageError` for anything but a mapping; encoding looks at what is in
    it."""
    if given is None:
        return NO_CONTEXT
    if not isinstance(given, Mapping):
        raise UsageError(f"the context is a {type(given).__name__}", hint="a mapping from text to text")
    return dict(given)
