"""Kinds of fields that the messages of the HTTP door share, with the bounds that a decoder checks."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

__all__ = [
    "Bytes",
    "GroupName",
    "Number",
    "Offset",
    "Partition",
    "ProducerId",
    "TimeMs",
    "TopicName",
]

TopicName: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        # `$` alone would let a line break follow, in Python though not in the document's readers.
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(?!\n)$",
        description="Letters, digits, '.', '_' and '-', first a letter, a digit or '_'.",
    ),
]
GroupName: TypeAlias = TopicName
Partition: TypeAlias = Annotated[int, Meta(ge=0, le=99_999, description="Number of a partition, from 0.")]
Offset: TypeAlias = Annotated[
    int, Meta(ge=0, le=(1 << 62), description="Place of a record in its partition.")
]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 62))]
Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=(1 << 40))]
ProducerId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
TimeMs: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=(1 << 62), description="Since the Unix epoch.")]
