"""What exporters over gRPC have in common: requests are joined, sent, and taken apart where that is needed.

Requests of one parcel are joined up to `request_bytes_max` and sent with a few calls under way at once. What
the destination says decides:

    done                                  a partial success is counted, never sent again
    INVALID_ARGUMENT                      never: a joined request is halved until it stands alone, so
    the message is too large              that nobody else pays for it; then `Refused`
    anything else                         try again later, as late as its `RetryInfo` asks

gRPC has no code for a message that is too large, nor have its implementations one text for it: `TOO_LARGE`
has those of C, Go and Node, of Java, of .NET, and two of Rust.

The specification of OTLP also lets a client drop data on UNAUTHENTICATED, PERMISSION_DENIED or UNIMPLEMENTED.
These are mistakes of operators, and mended while the data waits, so they are tried again.

A parcel that failed half-way is not begun anew when it comes again: calls that succeeded are remembered by
its key, for as many parcels as can be waiting. After a crash it is sent again: at least once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import AskedToWait, Bytes, Parcel, Refused, join
from forebay.dataflow._settings import OtlpExporterSettings
from forebay.dataflow._signals import SIGNALS, Signal, items_in, parse
from forebay.errors import OutcomeUnknown, Unavailable

__all__ = ["TOO_LARGE", "GrpcExporter"]

CALLS_MAX: Final = 4
"""Calls under way at once for one parcel."""
REMEMBERED_MAX: Final = 256
"""Parcels of which is remembered what of them arrived."""
TOO_LARGE: Final = (
    "larger than max",
    "message exceeds maximum size",
    "exceeds the maximum configured message size",
    "message length too large",
    "exceeded while decompressing message",
)
_SIZE_CODES: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OUT_OF_RANGE)
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    # A destination that was down is asked again soon after it is back; the pump does the waiting.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # One that vanished without a word (a cable, a machine without power) would be talked to until the kernel
    # gives up, a quarter of an hour; it may be back long before, at the same address. The timeout is also
    # that of the kernel for what is sent and not confirmed, so that only streams that wait need the pings.
    # They come a little less often than every five minutes, and never without a call: servers close a
    # connection with more of them (`too_many_pings`). gRPC has pings of its own, to measure the line.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
)


class GrpcExporter(ABC):
    """Sends parcels to one destination."""

    def __init__(self, name: str, settings: OtlpExporterSettings, metrics: DataflowMetrics) -> None:
        self.name = name
        self.settings = settings
        self.metrics = metrics
        self._arrived: OrderedDict[str, set[int]] = OrderedDict()

    async def start(self) -> None:
        """Make a channel. The destination need not be there yet."""
        settings = self.settings
        self.compression = (
            grpc.Compression.Gzip if settings.compression == "gzip" else grpc.Compression.NoCompression
        )
        if settings.is_tls:
            roots = await asyncio.to_thread(settings.ca_file.read_bytes) if settings.ca_file else None
            self.channel = grpc.aio.secure_channel(
                settings.target, grpc.ssl_channel_credentials(roots), options=_CHANNEL_OPTIONS
            )
        else:
            self.channel = grpc.aio.insecure_channel(settings.target, options=_CHANNEL_OPTIONS)
        self.open()

    async def stop(self) -> None:
        """Close the channel."""
        await self.channel.close()

    @abstractmethod
    def open(self) -> None:
        """Make the calls of a new channel."""

    @abstractmethod
    async def send(self, signal: Signal, data: bytes) -> None:
        """Send one request. Raises `Refused`, `Unavailable` and `OutcomeUnknown`."""

    async def take(self, parcel: Parcel) -> None:
        """Return when the destination has all of it."""
        chunks = join(parcel.requests, self.settings.request_bytes_max)
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
                raise _all_of(lasting)
            return
        if parcel.key:
            # What is refused for good need not be sent again either; the last attempt reports it.
            self._arrived[parcel.key] = arrived
            while len(self._arrived) > REMEMBERED_MAX:
                self._arrived.popitem(last=False)
        problem = next(each for each in problems if not isinstance(each, Refused))
        if isinstance(problem, Unavailable) and arrived:
            raise OutcomeUnknown("export", reason=f"a part arrived; {problem.message}") from problem
        raise problem

    async def _send_chunk(self, signal: Signal, requests: Sequence[Bytes]) -> None:
        try:
            await self.send(signal, b"".join(requests))
            return
        except Refused as error:
            problems = [error]
        if len(requests) == 1:
            problems[0].items = items_in(signal, parse(signal, bytes(requests[0])))
        else:
            problems = []
            half = len(requests) // 2
            for part in (requests[:half], requests[half:]):
                try:
                    await self._send_chunk(signal, part)
                except Refused as error:
                    problems.append(error)
        if problems:
            raise _all_of(problems)

    def failure(
        self, signal: Signal, code: grpc.StatusCode, details: str, trailing: Any = None
    ) -> Unavailable | Refused | OutcomeUnknown:
        """What a code of gRPC means."""
        text = f"{self.settings.target}: {code.name}: {details[:300]}"
        too_large = code in _SIZE_CODES and any(each in details for each in TOO_LARGE)
        if code is grpc.StatusCode.INVALID_ARGUMENT or too_large:
            return Refused(text, hint="a copy is in the store's dead letters")
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            return OutcomeUnknown(f"export of {signal.name}", reason=text, hint="it is tried again")
        if wait_s := _asked_wait_s(trailing):
            return AskedToWait(text, wait_s)
        return Unavailable(text, hint="see to the destination; it is tried again")


def _asked_wait_s(trailing: Any) -> float:
    """What the `RetryInfo` of an answer says, 0 where it has none."""
    for name, value in trailing or ():
        if name == "grpc-status-details-bin":
            try:
                for detail in Status.FromString(value).details:
                    info = RetryInfo()
                    if detail.Unpack(info):
                        return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
            except DecodeError:
                return 0.0
    return 0.0


def _all_of(problems: Sequence[Refused]) -> Refused:
    """The first of them, for all that they refused."""
    problems[0].items = sum(each.items for each in problems)
    return problems[0]
