"""The OTLP exporter: requests as they came, over gRPC."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from forebay.dataflow._grpc_exporter import GrpcExporter
from forebay.dataflow._signals import SIGNALS, Signal

__all__ = ["OtlpExporter"]

_log = logging.getLogger(__name__)


class OtlpExporter(GrpcExporter):
    """Sends parcels to a server of OTLP."""

    def open(self) -> None:
        """A call for each signal."""
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            name: self.channel.unary_unary(each.grpc_method) for name, each in SIGNALS.items()
        }

    async def send(self, signal: Signal, data: bytes) -> None:
        """Send one request."""
        try:
            answer: bytes = await self._calls[signal.name](
                data,
                timeout=self.settings.timeout_ms / 1000,
                metadata=self.settings.headers or None,
                compression=self.compression,
            )
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            raise self.failure(signal, code, details, error.trailing_metadata()) from None
        self._note_partial_success(signal, answer)

    def _note_partial_success(self, signal: Signal, answer: bytes) -> None:
        if not answer:
            return
        try:
            partial = signal.response.FromString(answer).partial_success  # type: ignore[attr-defined]
        except Exception:
            return  # It said OK; what it added to that cannot be read.
        rejected = getattr(partial, signal.rejected_field)
        if rejected > 0:
            self.metrics.rejected.labels(self.name, signal.name).inc(rejected)
            _log.warning(
                "dataflow.exporter.partial_success: %s: %d of %s rejected: %s",
                *(self.name, rejected, signal.name, partial.error_message[:300]),
            )
