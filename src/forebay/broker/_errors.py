"""From errors to answers: which status, which words.

    400  the request itself is wrong            UsageError, FormatError
    401  no token, or none that counts          Unauthenticated
    403  the token does not allow it            AccessDenied
    404  no such path, topic, group             NotFound, UnknownTopic
    405  the path takes other methods
    409  it was refused, or may have happened   NotDone, OutcomeUnknown, DataLost
    411, 413, 414, 415, 431, 408                as HTTP has them
    429  too many wait already                  TooManyWaits
    503  not now                                Backpressure, Unavailable, Closed: with Retry-After

An outcome that is unknown is never told as a failure: its type is `OutcomeUnknown`, its status 409, and
there is no Retry-After, since a blind repetition may write twice.
"""

from __future__ import annotations

import msgspec

from forebay.broker._http import Response
from forebay.errors import (
    AccessDenied,
    Backpressure,
    Closed,
    ForebayError,
    FormatError,
    NotDone,
    NotFound,
    Unavailable,
    UsageError,
)
from forebay.formats.http_messages import BACKPRESSURE, JSON, ErrorBody, ErrorDetail
from forebay.log import OffsetOutOfRange, UnknownTopic

__all__ = [
    "BadRequest",
    "HttpRefusal",
    "TooManyWaits",
    "Unauthenticated",
    "error_response",
    "refusal",
    "status_of",
    "type_of",
]

RETRY_AFTER_S = 1
"""Seconds that a client is asked to wait where it was refused for want of room."""


class HttpRefusal(UsageError):
    """A refusal with a status of its own."""

    def __init__(self, status: int, kind: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.kind = kind
        self.headers: tuple[tuple[str, str], ...] = ()


class BadRequest(HttpRefusal):
    """The body or the query is not what it should be."""

    def __init__(self, message: str, *, hint: str = "GET /openapi.json says what is expected") -> None:
        super().__init__(400, "BadRequest", message, hint=hint)


class Unauthenticated(HttpRefusal):
    """No token, or one that is unknown, revoked or expired."""

    def __init__(self, message: str) -> None:
        super().__init__(
            401,
            "Unauthenticated",
            message,
            hint="send Authorization: Bearer TOKEN; forebay tokens issue makes one",
        )
        self.headers = (("WWW-Authenticate", 'Bearer realm="forebay"'),)


class TooManyWaits(HttpRefusal):
    """More requests wait than the broker allows."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(
            429, "TooManyRequests", f"{name}: the limit of {limit:,} is reached", hint="try again later"
        )
        self.headers = (("Retry-After", str(RETRY_AFTER_S)),)


def type_of(error: ForebayError) -> str:
    """What an answer calls the error."""
    if isinstance(error, HttpRefusal):
        return error.kind
    return BACKPRESSURE if isinstance(error, Backpressure) else type(error).__name__


def status_of(error: ForebayError) -> int:
    """The status of an answer that is this error."""
    if isinstance(error, HttpRefusal):
        return error.status
    for kinds, status in _STATUSES:
        if isinstance(error, kinds):
            return status
    return 409


_STATUSES: tuple[tuple[tuple[type[ForebayError], ...], int], ...] = (
    ((Backpressure, Unavailable, Closed), 503),
    ((AccessDenied,), 403),
    ((NotFound, UnknownTopic), 404),
    # Before the wrong usage: some errors are both, and were tried.
    ((NotDone, OffsetOutOfRange), 409),
    ((UsageError, FormatError), 400),
)


def error_response(error: ForebayError, request_id: str) -> Response:
    """The answer that is this error."""
    status = status_of(error)
    headers = error.headers if isinstance(error, HttpRefusal) else ()
    if status == 503:
        headers = (*headers, ("Retry-After", str(RETRY_AFTER_S)))
    return refusal(status, type_of(error), error.message, error.hint, request_id, headers)


def refusal(
    status: int,
    kind: str,
    message: str,
    hint: str,
    request_id: str,
    headers: tuple[tuple[str, str], ...] = (),
) -> Response:
    """An answer with an `ErrorBody`."""
    body = msgspec.json.encode(ErrorBody(ErrorDetail(kind, message, hint, request_id)))
    return Response(status, body, JSON, headers)
