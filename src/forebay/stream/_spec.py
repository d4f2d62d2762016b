"""Where a reader begins: `first`, `last`, `next`, an offset, or a timestamp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from forebay.errors import UsageError

__all__ = ["FIRST", "LAST", "NEXT", "Spec"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A place in a stream, as a consumer names it."""

    kind: Literal["first", "last", "next", "offset", "timestamp"]
    value: int = 0
    """Of an offset: at least 0. Of a timestamp: signed milliseconds."""

    def __post_init__(self) -> None:
        if self.kind == "offset" and self.value < 0:
            raise UsageError(f"offset {self.value}", hint="offsets begin with 0; use 'first'")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """From `first`, `last`, `next`, `offset:N` or `timestamp:MS`."""
        if text in ("first", "last", "next"):
            return {"first": FIRST, "last": LAST, "next": NEXT}[text]
        kind, colon, number = text.partition(":")
        if colon and kind in ("offset", "timestamp") and number.removeprefix("-").isdecimal():
            value = int(number)
            if abs(value) < 1 << 63:
                return cls("offset", value) if kind == "offset" else cls("timestamp", value)
        raise UsageError(
            f"{text[:100]!r} is no place in a stream",
            hint="write first, last, next, offset:N or timestamp:MILLISECONDS",
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}" if self.kind in ("offset", "timestamp") else self.kind


FIRST: Final = Spec("first")
LAST: Final = Spec("last")
NEXT: Final = Spec("next")
