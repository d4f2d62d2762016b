"""OTLP over gRPC: three services with one method each, on raw bytes.

The generated services would parse every request into a message and hand that on; the bytes are what is kept,
so the handlers take bytes and the intake parses for the check alone.

To gRPC they are handlers of streams, of which one message is read: those of single requests are called when
the request is in memory, and with many connections nothing would bound how many of them are.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio

from forebay.dataflow._grpc_server import listen, refuse
from forebay.dataflow._intake import STOP_GRACE_S, Intake, Refusal
from forebay.dataflow._settings import OtlpReceiverSettings
from forebay.dataflow._signals import SIGNALS, Signal
from forebay.errors import Backpressure

__all__ = ["GrpcReceiver"]

CALLS_FACTOR: Final = 4
"""Calls whose request is read or under way, for each request that may be under way; further ones are refused
before anything is read."""

_Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcReceiver:
    """One listener."""

    def __init__(self, settings: OtlpReceiverSettings, intake: Intake) -> None:
        assert settings.grpc is not None
        self._settings = settings
        self._intake = intake
        self._calls = 0
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
            grpc.method_handlers_generic_handler(signal.grpc_service, {"Export": self._handler(signal)})
            for signal in SIGNALS.values()
        ]
        self._server, self.address = await listen(handlers, self.address, settings.tls, options)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take nothing more; let what is under way end."""
        await self._server.stop(grace_s or None)

    def _handler(self, signal: Signal) -> Any:
        async def export(_: object, context: _Context) -> bytes:
            try:
                await self._take_one(signal, context)
            except Refusal as refusal:
                await refuse(context, refusal)
            return b""

        return grpc.stream_unary_rpc_method_handler(export)

    async def _take_one(self, signal: Signal, context: _Context) -> None:
        if self._calls >= CALLS_FACTOR * self._settings.requests_max:
            raise self._intake.refusal(Backpressure(f"{self._calls:,} calls are under way"))
        self._calls += 1
        try:
            data: Any = await context.read()
            if data is not grpc.aio.EOF:
                await self._intake.receive(signal, data)
        finally:
            self._calls -= 1
