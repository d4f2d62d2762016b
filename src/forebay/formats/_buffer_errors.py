"""What the decoders of the buffer's two formats say of bytes they cannot accept.

    FormatError
    ├── Corrupt
    │   ├── CorruptBatch
    │   └── CorruptManifest
    ├── UnsupportedEncoding
    │   ├── UnsupportedVersion
    │   └── UnsupportedCompression
    └── TooLarge                   also a LimitExceeded: the bytes may be sound, but nobody allowed so many

Every one of them names the object, the place, what was expected and what was found.
"""

from __future__ import annotations

from forebay.errors import FormatError, LimitExceeded
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = [
    "CorruptBatch",
    "CorruptManifest",
    "TooLarge",
    "UnsupportedCompression",
    "UnsupportedVersion",
]


class CorruptBatch(Corrupt):
    """A data batch that is damaged, cut short, or never was one."""


class CorruptManifest(Corrupt):
    """A queue manifest that is damaged, cut short, or never was one."""


class _UnsupportedNumber(UnsupportedEncoding):
    noun = ""

    def __init__(self, what: str, found: int, known: str) -> None:
        super().__init__(what, f"{self.noun} {found}, expected {known}")
        self.found = found
        """The number that stands there."""
        self.known = known
        """Those that this release reads."""

    def __reduce__(self) -> tuple[type[_UnsupportedNumber], tuple[str, int, str]]:  # type: ignore[override]
        return type(self), (self.what, self.found, self.known)


class UnsupportedVersion(_UnsupportedNumber):
    """A version of the format that this release does not know."""

    noun = "version"


class UnsupportedCompression(_UnsupportedNumber):
    """A compression type that this release does not know."""

    noun = "compression type"


class TooLarge(LimitExceeded, FormatError):
    """More bytes than the caller allowed, or than their own header could be trusted with."""

    def __init__(self, what: str, name: str, *, limit: int, actual: int) -> None:
        super().__init__(
            f"{what}: {name}",
            limit=limit,
            actual=actual,
            hint="raise the limit if you trust whoever wrote it; otherwise treat it as damaged",
        )
        self.what = what
        self.name = name
