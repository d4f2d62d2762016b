"""The OTLP exporter: requests as they came, joined into larger ones, over gRPC.

Requests of one parcel are joined up to `request_bytes_max` and sent with a few calls under way at once. What
the destination says decides:

    OK                                    done; a partial success is counted, never sent again
    INVALID_ARGUMENT                      never: a joined request is halved until it stands alone, so
    RESOURCE_EXHAUSTED, message too large that nobody else pays for it; then `Refused`
    anything else                         try again later

The specification of OTLP also lets a client drop data on UNAUTHENTICATED, PERMISSION_DENIED or UNIMPLEMENTED.
These are mistakes of operators, and mended while the data waits, so they are tried again.

A parcel that failed half-way is not begun anew when it comes again: calls that succeeded are remembered by
its key, for as many parcels as can be waiting. After a crash it is sent again: at least once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Bytes, Parcel, Refused
from forebay.dataflow._settings import OtlpExporterSettings
from forebay.dataflow._signals import SIGNALS, Signal
from forebay.errors import OutcomeUnknown, Unavailable

__all__ = ["OtlpExporter"]

_log = logging.getLogger(__name__)

CALLS_MAX: Final = 4
"""Calls under way at once for one parcel."""
REMEMBERED_MAX: Final = 256
"""Parcels of which is remembered what of them arrived."""
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    # A destination that was down is asked again soon after it is back; the pump does the waiting.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class OtlpExporter:
    """Sends parcels to one destination."""

    def __init__(self, name: str, settings: OtlpExporterSettings, metrics: DataflowMetrics) -> None:
        self._name = name
        self._settings = settings
        self._metrics = metrics
        self._arrived: OrderedDict[str, set[int]] = OrderedDict()

    async def start(self) -> None:
        """Make a channel. The destination need not be there yet."""
        settings = self._settings
        self._compression = (
            grpc.Compression.Gzip if settings.compression == "gzip" else grpc.Compression.NoCompression
        )
        if settings.is_tls:
            roots = await asyncio.to_thread(settings.ca_file.read_bytes) if settings.ca_file else None
            self._channel = grpc.aio.secure_channel(
                settings.target, grpc.ssl_channel_credentials(roots), options=_CHANNEL_OPTIONS
            )
        else:
            self._channel = grpc.aio.insecure_channel(settings.target, options=_CHANNEL_OPTIONS)
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            name: self._channel.unary_unary(each.grpc_method) for name, each in SIGNALS.items()
        }

    async def stop(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def take(self, parcel: Parcel) -> None:
        """Return when the destination has all of it."""
        chunks = join(parcel.requests, self._settings.request_bytes_max)
        arrived = self._arrived.pop(parcel.key, set())
        gate = asyncio.Semaphore(CALLS_MAX)

        async def send(index: int) -> None:
            async with gate:
                if index not in arrived:
                    await self._send_chunk(SIGNALS[parcel.signal], chunks[index])
                    arrived.add(index)

        outcomes = await asyncio.gather(*map(send, range(len(chunks))), return_exceptions=True)
        problems = [each for each in outcomes if isinstance(each, BaseException)]
        lasting = [each for each in problems if isinstance(each, Refused)]
        if len(lasting) == len(problems):
            if lasting:
                raise lasting[0]
            return
        if parcel.key:
            # What is refused for good need not be sent again either; the last attempt reports it.
            self._arrived[parcel.key] = arrived
            while len(self._arrived) > REMEMBERED_MAX:
                self._arrived.popitem(last=False)
        problem = next(each for each in problems if not isinstance(each, Refused))
        if isinstance(problem, Unavailable) and arrived:
            raise OutcomeUnknown("export", reason=f"a part arrived; {problem.message}")
        raise problem

    async def _send_chunk(self, signal: Signal, requests: Sequence[Bytes]) -> None:
        try:
            await self._send(signal, b"".join(requests))
            return
        except Refused as error:
            problem: Refused | None = error
        if len(requests) > 1:
            problem = None
            half = len(requests) // 2
            for part in (requests[:half], requests[half:]):
                try:
                    await self._send_chunk(signal, part)
                except Refused as error:
                    problem = error
        if problem is not None:
            raise problem

    async def _send(self, signal: Signal, data: bytes) -> None:
        try:
            answer: bytes = await self._calls[signal.name](
                data,
                timeout=self._settings.timeout_ms / 1000,
                metadata=self._settings.headers or None,
                compression=self._compression,
            )
        except grpc.aio.AioRpcError as error:
            raise self._failure(signal, error) from None
        self._note_partial_success(signal, answer)

    def _failure(self, signal: Signal, error: grpc.aio.AioRpcError) -> Unavailable | Refused | OutcomeUnknown:
        code, details = error.code(), (error.details() or "")[:300]
        text = f"{self._settings.target}: {code.name}: {details}"
        too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details
        if code is grpc.StatusCode.INVALID_ARGUMENT or too_large:
            return Refused(text, hint="a copy is in the store's dead letters")
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            return OutcomeUnknown(f"export of {signal.name}", reason=text, hint="it is tried again")
        return Unavailable(text, hint="see to the destination; it is tried again")

    def _note_partial_success(self, signal: Signal, answer: bytes) -> None:
        if not answer:
            return
        try:
            partial = signal.response.FromString(answer).partial_success  # type: ignore[attr-defined]
        except Exception:
            return  # It said OK; what it added to that cannot be read.
        rejected = getattr(partial, signal.rejected_field)
        if rejected > 0:
            self._metrics.rejected.labels(self._name, signal.name).inc(rejected)
            _log.warning(
                "dataflow.exporter.partial_success: %s: %d of %s rejected: %s",
                *(self._name, rejected, signal.name, partial.error_message[:300]),
            )


def join(requests: Sequence[Bytes], size_max: int) -> list[list[Bytes]]:
    """Consecutive requests in groups of at most `size_max` bytes; a larger one stands alone."""
    groups: list[list[Bytes]] = []
    size = 0
    for request in requests:
        if not groups or size + len(request) > size_max:
            groups.append([])
            size = 0
        groups[-1].append(request)
        size += len(request)
    return groups
