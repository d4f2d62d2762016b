"""OTLP over gRPC: three services with one method each, on raw bytes.

The generated services would parse every request into a message and hand that on; the bytes are what is kept,
so the handlers take bytes and the intake parses for the check alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from forebay.dataflow._grpc_server import listen
from forebay.dataflow._intake import RETRY_AFTER_S, STOP_GRACE_S, Intake, Refusal
from forebay.dataflow._settings import OtlpReceiverSettings
from forebay.dataflow._signals import SIGNALS, Signal

__all__ = ["GrpcReceiver"]

_CODES: Final = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
}

_Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcReceiver:
    """One listener."""

    def __init__(self, settings: OtlpReceiverSettings, intake: Intake) -> None:
        assert settings.grpc is not None
        self._settings = settings
        self._intake = intake
        self.address = settings.grpc
        """Where it listens; with a real port after the start."""

    async def start(self) -> None:
        """Listen. Raises `Unavailable` where the address is taken."""
        settings = self._settings
        options = [
            ("grpc.max_receive_message_length", settings.request_bytes_max),
            ("grpc.max_concurrent_streams", settings.requests_max),
        ]
        handlers = [
            grpc.method_handlers_generic_handler(
                signal.grpc_service,
                {"Export": grpc.unary_unary_rpc_method_handler(self._handler(signal))},
            )
            for signal in SIGNALS.values()
        ]
        # The intake refuses with a time to wait; the limit of calls only bounds what waits in front of it.
        self._server, self.address = await listen(
            handlers, self.address, settings.tls, options, 4 * settings.requests_max
        )

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take nothing more; let what is under way end."""
        await self._server.stop(grace_s or None)

    def _handler(self, signal: Signal) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def export(data: bytes, context: _Context) -> bytes:
            try:
                await self._intake.receive(signal, data)
            except Refusal as refusal:
                await _abort(context, refusal)
            return b""

        return export


async def _abort(context: _Context, refusal: Refusal) -> None:
    code = _CODES[refusal.reason]
    message = refusal.message.encode("ascii", "replace").decode()
    trailing: tuple[tuple[str, Any], ...] = ()
    if refusal.may_retry:
        status = Status(code=code.value[0], message=message)
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S)))
        trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, message, trailing)
