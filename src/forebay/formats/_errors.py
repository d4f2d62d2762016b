"""What a decoder says of bytes it cannot accept: where, what was expected, what was found."""

from __future__ import annotations

from forebay.errors import FormatError

__all__ = ["Corrupt", "UnsupportedEncoding"]


class Corrupt(FormatError):
    """The bytes are damaged, cut short, or were never of this format."""

    def __init__(self, what: str, position: int, reason: str) -> None:
        super().__init__(
            f"{what}: at byte {position}: {reason}",
            hint="the object is damaged or not of this format; compare it with a copy, or skip it knowingly",
        )
        self.what = what
        self.position = position
        """Offset of the first byte that is wrong, from the start of the decoded buffer."""
        self.reason = reason

    def __reduce__(self) -> tuple[type[Corrupt], tuple[str, int, str]]:
        return type(self), (self.what, self.position, self.reason)


class UnsupportedEncoding(FormatError):
    """A version, codec or feature that this release does not know."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}", hint="it was written by a newer release; upgrade to read it")
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnsupportedEncoding], tuple[str, str]]:
        return type(self), (self.what, self.reason)
