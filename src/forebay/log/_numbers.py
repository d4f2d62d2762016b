"""Numbers that callers give and records keep.

JSON has one kind of number and records have integers only: a fraction that got into one, or a truth value,
could be written, and then nobody could read the record any more. So every number is looked at on its way in.
"""

from __future__ import annotations

import operator
from typing import Final

from forebay.errors import UsageError

__all__ = ["WHOLE_MAX", "whole"]

WHOLE_MAX: Final = (1 << 63) - 1
"""Highest number in a record."""


def whole(what: str, value: object, low: int = 0, high: int = WHOLE_MAX) -> int:
    """The value as a plain integer; raises `UsageError` unless it is one within the bounds.

    The integers of numpy and the like count, truth values do not.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        shown = f"from {low:,} on" if high == WHOLE_MAX else f"from {low:,} to {high:,}"
        raise UsageError(f"{what} {value!r}", hint=f"an integer {shown}")
    return number
