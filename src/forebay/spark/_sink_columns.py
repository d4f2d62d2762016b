"""What a sink takes, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import StructType

from forebay.errors import UsageError

__all__ = ["check_columns", "refuse_write_id"]


def check_columns(schema: StructType, columns: Mapping[str, Sequence[str]], *, of: str) -> None:
    """Raise `UsageError` where a schema has no `value`, or a column that is not among those of `of`.

    `columns` names the types that each may have.
    """
    if "value" not in schema.fieldNames():
        raise UsageError("there is no column 'value'", hint="select(... as value): bytes or text")
    for field in schema.fields:
        kinds = columns.get(field.name)
        if kinds is None:
            raise UsageError(f"{of} has no column {field.name!r}", hint=f"select only: {', '.join(columns)}")
        if field.dataType.simpleString() not in kinds:
            raise UsageError(
                f"column {field.name!r} is {field.dataType.simpleString()}",
                hint=f"it is {' or '.join(kinds)}",
            )


def refuse_write_id(write_id: str | None) -> None:
    """Raise `UsageError` where a streaming write is given an id: what makes it once is its checkpoint."""
    if write_id is not None:
        raise UsageError(
            "a streaming write has no writeId", hint="its batches are known by the checkpoint; leave it out"
        )
