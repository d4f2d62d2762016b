"""What an error of the server means. The one place that knows its wordings.

Servers up to 0.14 use status codes of their own, 100 to 111, which gRPC for Python reports as UNKNOWN: only
the text tells them apart. Newer ones use standard codes and attach a reason in machine-readable form; where
it is there it decides, otherwise the text, otherwise the code.
"""

from __future__ import annotations

import enum
import re

import grpc
from google.protobuf.message import DecodeError

from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.errors import AccessDenied, ForebayError, SessionExpired, Unavailable, Unsupported

__all__ = ["Trouble", "TroubleKind", "diagnose"]

_DETAILS = "grpc-status-details-bin"
_DOMAIN = "oxia.io"
# With this very text a 0.14 server turns a stream away at the door. Newer ones word it alike at any time.
_UNREAD = re.compile(r"node is not leader for shard -?\d+")
_TEXT_MAX = 300
"""Longest piece of a server's text that goes into a message of ours."""


class TroubleKind(enum.Enum):
    """What to do about an error."""

    TRANSIENT = "transient"
    """Restart, leader change, lost connection: the same call may work in a moment."""
    NOT_LEADER = "not leader"
    """Another server leads the shard."""
    TIMEOUT = "timeout"
    WEDGED = "wedged"
    """The shard refuses every write until its server restarts."""
    SESSION_GONE = "session gone"
    NO_NAMESPACE = "no namespace"
    NO_NOTIFICATIONS = "no notifications"
    INTERNAL_ENTRY = "internal entry"
    """A lookup ran into one of the server's own records: there is none of ours in that direction."""
    DENIED = "denied"
    NOT_OXIA = "not oxia"
    OTHER = "other"


_BY_REASON = {
    "ABORTED": TroubleKind.TRANSIENT,
    "INVALID_TERM": TroubleKind.TRANSIENT,
    "INVALID_STATUS": TroubleKind.TRANSIENT,
    "NODE_IS_NOT_MEMBER": TroubleKind.TRANSIENT,
    "NODE_IS_NOT_LEADER": TroubleKind.NOT_LEADER,
    "NOT_INITIALIZED": TroubleKind.TRANSIENT,
    "RESOURCE_UNAVAILABLE": TroubleKind.TRANSIENT,
    "SHARD_NOT_FOUND": TroubleKind.TRANSIENT,
    "SESSION_NOT_FOUND": TroubleKind.SESSION_GONE,
    "NAMESPACE_NOT_FOUND": TroubleKind.NO_NAMESPACE,
    "NOTIFICATIONS_NOT_ENABLED": TroubleKind.NO_NOTIFICATIONS,
}

# The order matters: "failed to append to wal" wraps whatever the log said.
_BY_TEXT = (
    ("invalid next offset in wal", TroubleKind.WEDGED),
    ("session not found", TroubleKind.SESSION_GONE),
    ("namespace not found", TroubleKind.NO_NAMESPACE),
    ("notifications not enabled", TroubleKind.NO_NOTIFICATIONS),
    ("failed to deserialize storage entry", TroubleKind.INTERNAL_ENTRY),
    ("node is not leader", TroubleKind.NOT_LEADER),
    ("server not initialized", TroubleKind.TRANSIENT),
    ("operation was cancelled", TroubleKind.TRANSIENT),
    ("operation was aborted", TroubleKind.TRANSIENT),
    ("already closed", TroubleKind.TRANSIENT),
    ("in the wrong state", TroubleKind.TRANSIENT),
    ("invalid status", TroubleKind.TRANSIENT),
    ("invalid term", TroubleKind.TRANSIENT),
    ("context canceled", TroubleKind.TRANSIENT),
)

_BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: TroubleKind.TRANSIENT,
    grpc.StatusCode.ABORTED: TroubleKind.TRANSIENT,
    grpc.StatusCode.CANCELLED: TroubleKind.TRANSIENT,
    grpc.StatusCode.OK: TroubleKind.TRANSIENT,
    # The text of a server that ended a stream is lost when a write of ours was under way.
    grpc.StatusCode.INTERNAL: TroubleKind.TRANSIENT,
    grpc.StatusCode.DEADLINE_EXCEEDED: TroubleKind.TIMEOUT,
    grpc.StatusCode.UNAUTHENTICATED: TroubleKind.DENIED,
    grpc.StatusCode.PERMISSION_DENIED: TroubleKind.DENIED,
    grpc.StatusCode.UNIMPLEMENTED: TroubleKind.NOT_OXIA,
}

_HINTS = {
    TroubleKind.TRANSIENT: "see that the Oxia server runs and can be reached at this address",
    TroubleKind.NOT_LEADER: "the cluster is choosing a leader, or its assignments are out of date; try again",
    TroubleKind.TIMEOUT: "see that the Oxia server runs and keeps up, or raise timeout_ms in the URL",
    TroubleKind.WEDGED: "restart the Oxia server, and run 0.14.2 or newer:"
    " older ones stop taking writes when two clients write at once",
    TroubleKind.NO_NAMESPACE: "create the namespace in the cluster's configuration, or use 'default'",
    TroubleKind.NO_NOTIFICATIONS: "start the Oxia server with notifications enabled",
    TroubleKind.DENIED: "this Oxia server asks for credentials that were not given",
    TroubleKind.NOT_OXIA: "see that the address is the public port of an Oxia server",
    TroubleKind.OTHER: "the log of the Oxia server may say more",
}


class Trouble(Exception):
    """An error of a call, understood. Never leaves this package: `error` is what callers get."""

    def __init__(self, kind: TroubleKind, text: str, *, unread: bool = False) -> None:
        super().__init__(f"{kind.value}: {text}")
        self.kind = kind
        self.text = text[:_TEXT_MAX]
        self.unread = unread
        """Whether the server said so before it read any request of the call."""

    @property
    def transient(self) -> bool:
        """Whether the same call may work in a moment."""
        return self.kind in (TroubleKind.TRANSIENT, TroubleKind.NOT_LEADER)

    @property
    def hint(self) -> str:
        """The remedy."""
        return _HINTS.get(self.kind, "")

    def error(self, doing: str) -> ForebayError:
        """The error for a call that certainly had no effect."""
        message = f"{doing}: {self.text or self.kind.value}"
        match self.kind:
            case TroubleKind.SESSION_GONE:
                return SessionExpired(message, hint="open a new session and claim again")
            case TroubleKind.DENIED:
                return AccessDenied(message, hint=self.hint)
            case TroubleKind.NO_NOTIFICATIONS:
                return Unsupported(message, hint=self.hint)
            case _:
                return Unavailable(message, hint=self.hint)


def diagnose(error: grpc.aio.AioRpcError) -> Trouble:
    """What the server, or gRPC in its place, meant."""
    text = error.details() or ""
    reason = _reason(error)
    if reason in _BY_REASON:
        return Trouble(_BY_REASON[reason], text)
    if error.code() is grpc.StatusCode.UNKNOWN and _UNREAD.fullmatch(text):
        return Trouble(TroubleKind.NOT_LEADER, text, unread=True)
    lowered = text.lower()
    for piece, kind in _BY_TEXT:
        if piece in lowered:
            return Trouble(kind, text)
    return Trouble(_BY_CODE.get(error.code(), TroubleKind.OTHER), text or error.code().name)


def _reason(error: grpc.aio.AioRpcError) -> str:
    for name, value in error.trailing_metadata() or ():
        if name == _DETAILS and isinstance(value, bytes):
            try:
                for detail in pb.RpcStatus.FromString(value).details:
                    info = pb.ErrorInfo.FromString(detail.value)
                    if info.domain == _DOMAIN:
                        return info.reason
            except DecodeError:
                return ""
    return ""
