"""Where a reader begins: `first`, `last`, `next`, an offset, a timestamp, or exactly an offset (`abs`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from forebay.errors import UsageError

__all__ = ["FIRST", "LAST", "NEXT", "Spec"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A place in a stream, as a consumer names it."""

    kind: Literal["first", "last", "next", "offset", "timestamp", "abs"]
    value: int = 0
    """Of an offset: at least 0. Of a timestamp: signed milliseconds.

    `offset` attaches to what is there; `abs` is refused with `OffsetOutOfRange` where that offset is not."""

    def __post_init__(self) -> None:
        if self.kind in ("offset", "abs") and self.value < 0:
            raise UsageError(f"offset {self.value}", hint="offsets begin with 0; use 'first'")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """From `first`, `last`, `next`, `offset:N`, `timestamp:MS` or `abs:N`."""
        if text in ("first", "last", "next"):
            return {"first": FIRST, "last": LAST, "next": NEXT}[text]
        kind, colon, number = text.partition(":")
        if colon and number.removeprefix("-").isdecimal() and abs(value := int(number)) < 1 << 63:
            match kind:
                case "offset" | "timestamp" | "abs":
                    return cls(kind, value)
        raise UsageError(
            f"{text[:100]!r} is no place in a stream",
            hint="write first, last, next, offset:N, timestamp:MILLISECONDS or abs:N",
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}" if self.kind in ("offset", "timestamp", "abs") else self.kind


FIRST: Final = Spec("first")
LAST: Final = Spec("last")
NEXT: Final = Spec("next")
