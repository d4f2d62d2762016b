"""Errors that come over the wire: from a name and a sentence back to the tree.

The broker tells the name of the error and its message. Names of `forebay.errors` become that class again
where it is built from a message alone; the errors of the engines behind the broker, whose classes a client
does not have, become `Refused` with the name in `error_type`. Whatever the name: what the broker says
certainly did not happen is a `NotDone`, and what it does not know is an `OutcomeUnknown`. Where the name is
not known here the status decides: "not now" (a broker that stops, or has too many connections) is worth
another attempt, and a defect of the broker says nothing about what was done before it.
"""

from __future__ import annotations

from typing import Final

from forebay import errors
from forebay.errors import ForebayError, NotDone, OutcomeUnknown

__all__ = ["Refused", "error_from", "is_transient"]


class Refused(NotDone):
    """The broker refused it: it certainly did not happen. `error_type` is the broker's name for why."""

    def __init__(self, error_type: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{error_type}: {message}", hint=hint)
        self.error_type = error_type


OUT_OF_SEQUENCE: Final = "OutOfSequence"
_ALIASES: Final = {"BackPressureRejected": "Backpressure", "Timeout": "Unavailable"}
_BY_MESSAGE: Final[dict[str, type[ForebayError]]] = {
    name: getattr(errors, name)
    for name in (
        "AccessDenied",
        "Backpressure",
        "Closed",
        "FormatError",
        "InvalidUrl",
        "SessionExpired",
        "StorageDamaged",
        "StorageFull",
        "Unavailable",
        "Unsupported",
        "UsageError",
    )
}
_UNKNOWN: Final = frozenset({"OutcomeUnknown"})
_TRANSIENT: Final = frozenset({"Contended"})
"""Names without a class here that say: try again."""
_NOT_NOW: Final = frozenset({408, 429, 503})
"""Statuses of requests that were refused before anything was done for them, for now."""
_BY_STATUS: Final = {400: "UsageError", 401: "AccessDenied", 403: "AccessDenied", 413: "UsageError"}


def error_from(
    error_type: str, message: str, *, hint: str = "", operation: str = "request", status: int = 409
) -> ForebayError:
    """The error that the broker told; `status` is that of the answer, where the answer is the error."""
    name = _ALIASES.get(error_type, error_type)
    if name in _UNKNOWN:
        return OutcomeUnknown(operation, reason=message, hint=hint)
    if name in _BY_MESSAGE:
        return _BY_MESSAGE[name](message, hint=hint)
    if status in _NOT_NOW:
        return errors.Unavailable(f"{error_type}: {message}", hint=hint)
    if status >= 500:
        return OutcomeUnknown(operation, reason=f"{error_type}: {message}", hint=hint)
    return Refused(error_type, message, hint=hint)


def error_of_status(status: int, text: str, operation: str) -> ForebayError:
    """The error of an answer that has no error of ours in it: from a proxy on the way, say."""
    message = f"{operation}: HTTP {status}{': ' if text else ''}{text[:200]}"
    if status in _BY_STATUS:
        return error_from(_BY_STATUS[status], message)
    if status in _NOT_NOW:
        return errors.Unavailable(message, hint="try again later")
    if status >= 500 or status < 400:
        # Something in between may have answered for a broker that did its work.
        return OutcomeUnknown(operation, reason=message)
    return Refused(f"HTTP {status}", message)


def is_transient(error: ForebayError) -> bool:
    """Whether it certainly did not happen and another attempt may succeed."""
    if isinstance(error, Refused):
        return error.error_type in _TRANSIENT
    return isinstance(error, errors.Unavailable | errors.Backpressure)
