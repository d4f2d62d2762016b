from __future__ import annotations

import grpc
import grpc.aio
import pytest

from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._errors import TroubleKind, diagnose
from forebay.errors import AccessDenied, SessionExpired, Unavailable, Unsupported

UNKNOWN = grpc.StatusCode.UNKNOWN


def rpc_error(code: grpc.StatusCode, text: str, reason: str = "", raw: bytes = b"") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata()
    if reason:
        info = pb.ErrorInfo(reason=reason, domain="oxia.io").SerializeToString()
        detail = pb.RpcDetail(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=info)
        raw = pb.RpcStatus(code=5, message=text, details=[detail]).SerializeToString()
    if raw:
        trailing.add("grpc-status-details-bin", raw)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("node is not leader for shard 3", TroubleKind.NOT_LEADER),
        ("oxia: session not found", TroubleKind.SESSION_GONE),
        ("oxia: namespace not found", TroubleKind.NO_NAMESPACE),
        ("oxia: notifications not enabled on namespace", TroubleKind.NO_NOTIFICATIONS),
        ("oxia: failed to append to wal: 8 can not immediately follow 8: invalid next offset in wal",
         TroubleKind.WEDGED),
        ("failed to Deserialize storage entry: proto: wrong wireType", TroubleKind.INTERNAL_ENTRY),
        ("oxia: resource is already closed", TroubleKind.TRANSIENT),
        ("oxia: server not initialized yet", TroubleKind.TRANSIENT),
        ("oxia: operation was cancelled", TroubleKind.TRANSIENT),
        ("Received message in the wrong state. In FENCED, should be LEADER.", TroubleKind.TRANSIENT),
        ("something nobody has seen before", TroubleKind.OTHER),
    ],
)  # fmt: skip
def test_errors_of_a_0_14_server_are_told_apart_by_text(text: str, kind: TroubleKind) -> None:
    assert diagnose(rpc_error(UNKNOWN, text)).kind is kind


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", TroubleKind.SESSION_GONE),
        (grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND", TroubleKind.NO_NAMESPACE),
        (grpc.StatusCode.ABORTED, "NODE_IS_NOT_LEADER", TroubleKind.NOT_LEADER),
        (grpc.StatusCode.FAILED_PRECONDITION, "INVALID_STATUS", TroubleKind.TRANSIENT),
        (grpc.StatusCode.FAILED_PRECONDITION, "NOTIFICATIONS_NOT_ENABLED", TroubleKind.NO_NOTIFICATIONS),
    ],
)
def test_errors_of_newer_servers_are_told_apart_by_reason(
    code: grpc.StatusCode, reason: str, kind: TroubleKind
) -> None:
    assert diagnose(rpc_error(code, "worded in some new way", reason)).kind is kind


def test_reason_that_cannot_be_decoded_leaves_the_code_to_decide() -> None:
    trouble = diagnose(rpc_error(grpc.StatusCode.UNAVAILABLE, "", raw=b"\xff\xff"))
    assert trouble.kind is TroubleKind.TRANSIENT


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, TroubleKind.TRANSIENT),
        (grpc.StatusCode.CANCELLED, TroubleKind.TRANSIENT),
        (grpc.StatusCode.INTERNAL, TroubleKind.TRANSIENT),
        (grpc.StatusCode.DEADLINE_EXCEEDED, TroubleKind.TIMEOUT),
        (grpc.StatusCode.UNIMPLEMENTED, TroubleKind.NOT_OXIA),
        (grpc.StatusCode.UNAUTHENTICATED, TroubleKind.DENIED),
    ],
)
def test_codes_decide_where_the_text_says_nothing(code: grpc.StatusCode, kind: TroubleKind) -> None:
    assert diagnose(rpc_error(code, "")).kind is kind


def test_only_the_text_said_at_the_door_proves_that_nothing_was_read() -> None:
    assert diagnose(rpc_error(UNKNOWN, "node is not leader for shard 3")).unread
    assert not diagnose(rpc_error(UNKNOWN, "oxia: node is not leader")).unread
    aborted = rpc_error(grpc.StatusCode.ABORTED, "node is not leader for shard 3", "NODE_IS_NOT_LEADER")
    assert not diagnose(aborted).unread


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("invalid next offset in wal", Unavailable, "0.14.2"),
        ("oxia: namespace not found", Unavailable, "namespace"),
        ("oxia: session not found", SessionExpired, "new session"),
        ("oxia: notifications not enabled on namespace", Unsupported, "notifications"),
    ],
)
def test_every_error_names_its_remedy(text: str, error: type[Exception], hint: str) -> None:
    raised = diagnose(rpc_error(UNKNOWN, text)).error("reading 'a/b'")
    assert isinstance(raised, error)
    assert hint in raised.hint
    assert text in raised.message


def test_missing_credentials_are_access_denied() -> None:
    assert isinstance(diagnose(rpc_error(grpc.StatusCode.UNAUTHENTICATED, "")).error("x"), AccessDenied)
