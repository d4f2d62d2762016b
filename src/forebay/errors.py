"""The error tree of Forebay. It lies below every room, so that all of them can raise from it.

    ForebayError
    ├── UsageError                 the request itself is wrong; the same call can never succeed
    │   ├── InvalidKey
    │   ├── InvalidUrl
    │   ├── LimitExceeded
    │   └── Unsupported            known, but not to be had here: a missing extra, file system or server
    ├── FormatError                bytes that are not what they claim to be
    ├── NotFound                   there is no such object
    ├── NotDone                    it certainly did not happen, and will not happen later: a retry is safe
    │   ├── PreconditionFailed     somebody else was first; read again
    │   ├── Unavailable            the other side cannot be reached or cannot serve right now
    │   ├── AccessDenied           credentials or permissions
    │   ├── StorageFull
    │   ├── StorageDamaged         what is stored locally cannot be used: a corrupt database, a foreign file
    │   ├── SessionExpired         the session is over, its ephemeral keys are gone or going
    │   ├── Backpressure           a bound was reached and the caller asked not to wait
    │   └── Closed                 used after close
    └── OutcomeUnknown             it may have happened, may happen still, or not

The line between `NotDone` and `OutcomeUnknown` is the one that matters: a lost reply is never reported as a
failure. Every error carries the remedy in `hint`, one sentence for the person who reads it.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "Backpressure",
    "Closed",
    "ForebayError",
    "FormatError",
    "InvalidKey",
    "InvalidUrl",
    "LimitExceeded",
    "NotDone",
    "NotFound",
    "OutcomeUnknown",
    "PreconditionFailed",
    "SessionExpired",
    "StorageDamaged",
    "StorageFull",
    "Unavailable",
    "Unsupported",
    "UsageError",
]


class ForebayError(Exception):
    """Base of everything Forebay raises on purpose."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        """What happened, in one line."""
        self.hint = hint
        """What to do about it, in one line. Empty where the message says it all."""

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (pools, Spark workers). The default would call the constructor with
        # the finished message, which most of ours do not take.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[ForebayError], arguments: tuple[object, ...]) -> ForebayError:
    return kind.__new__(kind, *arguments)


class UsageError(ForebayError, ValueError):
    """The request itself is wrong: nothing was tried, and the same call can never succeed."""


class InvalidKey(UsageError):
    """A key that no store may hold."""

    def __init__(self, key: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"invalid key {key[:200]!r}: {reason}", hint=hint)
        self.key = key
        self.reason = reason


class InvalidUrl(UsageError):
    """A store or coordinator URL that cannot be understood."""


class LimitExceeded(UsageError):
    """A named limit was passed."""

    def __init__(self, name: str, *, limit: int, actual: int, hint: str = "") -> None:
        super().__init__(f"{name}: {actual:,} is over the limit of {limit:,}", hint=hint)
        self.name = name
        self.limit = limit
        self.actual = actual


class Unsupported(UsageError):
    """Known, but not to be had here: an extra that is not installed, a file system without attributes."""


class FormatError(ForebayError):
    """Bytes that are not what they claim to be."""


class NotFound(ForebayError, LookupError):
    """There is no such object."""

    def __init__(self, key: str, *, hint: str = "") -> None:
        super().__init__(f"{key!r} does not exist", hint=hint)
        self.key = key


class NotDone(ForebayError):
    """It certainly did not happen and will not happen later. A retry is safe."""


class PreconditionFailed(NotDone):
    """The key was not in the state the caller named. Read again, then decide."""

    def __init__(self, key: str, *, expected: object, actual: object = None) -> None:
        found = "" if actual is None else f", found {actual}"
        super().__init__(
            f"{key!r}: expected {expected}{found}", hint="read it again and retry on what is there now"
        )
        self.key = key
        self.expected = expected
        self.actual = actual
        """What was there instead, or None where the other side did not tell."""


class Unavailable(NotDone):
    """The other side cannot be reached, or cannot serve right now."""


class AccessDenied(NotDone):
    """Credentials or permissions do not allow it."""


class StorageFull(NotDone):
    """No space is left where the data should go."""


class StorageDamaged(NotDone):
    """What is stored locally cannot be used: a corrupt database, a file that is not ours."""


class SessionExpired(NotDone):
    """The session is over; its ephemeral keys are gone or going. Open a new one and claim again."""


class Backpressure(NotDone):
    """A bound was reached, and the caller asked not to wait."""


class Closed(NotDone):
    """Used after close."""


class OutcomeUnknown(ForebayError):
    """The reply was lost: it may have happened, may happen still, or not."""

    def __init__(self, operation: str, *, reason: str = "", hint: str = "") -> None:
        because = f": {reason}" if reason else ""
        super().__init__(
            f"outcome of {operation} is unknown{because}",
            hint=hint or "it may have taken effect; look before trying again",
        )
        self.operation = operation
        self.reason = reason
