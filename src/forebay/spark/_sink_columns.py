"""The columns that a sink takes, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import StructType

from forebay.errors import UsageError

__all__ = ["check_columns"]


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
