"""OTLP over gRPC: three services with one method each, on raw bytes.

The generated services would parse every request into a message and hand that on; the bytes are what is kept,
so the handlers take bytes and the intake parses for the check alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from forebay.dataflow._intake import RETRY_AFTER_S, Intake, Refusal
from forebay.dataflow._settings import Address, OtlpReceiverSettings, Tls
from forebay.dataflow._signals import SIGNALS, Signal
from forebay.errors import Unavailable

__all__ = ["GrpcReceiver"]

STOP_GRACE_S: Final = 10.0
"""How long requests under way may take to end when the receiver stops."""
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
            ("grpc.so_reuseport", 0),
        ]
        # The intake refuses with a time to wait; this only bounds what waits in front of it.
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4 * settings.requests_max)
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(
                    signal.grpc_service,
                    {"Export": grpc.unary_unary_rpc_method_handler(self._handler(signal))},
                )
                for signal in SIGNALS.values()
            )
        )
        try:
            port = await self._bind()
        except RuntimeError as error:
            await self._server.stop(None)
            raise Unavailable(f"cannot listen on {self.address}", hint="is the address in use?") from error
        self.address = Address(self.address.host, port)
        await self._server.start()

    async def _bind(self) -> int:
        if self._settings.tls is None:
            return self._server.add_insecure_port(str(self.address))
        credentials = await asyncio.to_thread(_credentials, self._settings.tls)
        return self._server.add_secure_port(str(self.address), credentials)

    async def stop(self) -> None:
        """Take nothing more; let what is under way end."""
        await self._server.stop(STOP_GRACE_S)

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


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    roots = tls.client_ca_file.read_bytes() if tls.client_ca_file else None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
