"""From the bytes of a request to its answer, whichever way it came.

**Back-pressure instead of loss.** A request is answered with success when the node behind has it safely. It
is refused, for the sender to try again, when too much is under way, when the store is full, or when anything
else goes wrong that may pass:

    what                                  gRPC                              HTTP
    cannot be parsed, too many items,     INVALID_ARGUMENT                  400
      refused for good by the destination
    too much under way, store full        RESOURCE_EXHAUSTED + RetryInfo    429 + Retry-After
    everything else                       UNAVAILABLE + RetryInfo           503 + Retry-After
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from forebay.dataflow._dispatch import FOR_GOOD
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Parcel, Sink
from forebay.dataflow._settings import OtapReceiverSettings, OtlpReceiverSettings
from forebay.dataflow._signals import Signal, count_items
from forebay.errors import Backpressure, ForebayError, LimitExceeded, StorageFull

__all__ = ["RETRY_AFTER_S", "STOP_GRACE_S", "Intake", "Refusal"]

_log = logging.getLogger(__name__)

Decoder: TypeAlias = Callable[[Signal, bytes], Awaitable[tuple[bytes, int]]]
"""From the bytes as they came to the request in protobuf, and the items in it."""

_SMALLER: Final = "send smaller batches"
RETRY_AFTER_S: Final = 1
"""What senders are asked to wait. They spread and lengthen it by themselves."""
STOP_GRACE_S: Final = 10.0
"""How long requests under way may take to end when a receiver stops."""


class Refusal(Exception):
    """A request that was not taken."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """`invalid`, `full` or `unavailable`."""
        self.message = message

    @property
    def may_retry(self) -> bool:
        """Whether the same request may succeed later."""
        return self.reason != "invalid"


class Intake:
    """The common part of the receivers of one node."""

    def __init__(
        self,
        name: str,
        settings: OtlpReceiverSettings | OtapReceiverSettings,
        sink: Sink,
        metrics: DataflowMetrics,
    ) -> None:
        self._name = name
        self._settings = settings
        self._sink = sink
        self._metrics = metrics
        self._requests = 0
        self._bytes = 0
        self._gauge = metrics.pending.labels(name)

    async def receive(self, signal: Signal, data: bytes, decode: Decoder | None = None) -> None:
        """Return when the request is safe. Raises `Refusal`. `decode` where it is not in protobuf."""
        self._enter(len(data))
        try:
            if decode is None:
                request, items = data, count_items(signal, data)
            else:
                request, items = await decode(signal, data)
            await self._take(signal, (request,), items, len(request))
        except Exception as error:
            raise self.refusal(error) from error
        finally:
            self._leave(len(data))

    async def receive_parts(self, signal: Signal, requests: Sequence[bytes], items: int) -> None:
        """The same for several requests that came as one and were checked; all of them are safe, or none."""
        size = sum(map(len, requests))
        self._enter(size)
        try:
            await self._take(signal, requests, items, size)
        except Exception as error:
            raise self.refusal(error) from error
        finally:
            self._leave(size)

    async def _take(self, signal: Signal, requests: Sequence[bytes], items: int, size: int) -> None:
        if items:
            await self._sink.take(Parcel(signal.name, requests, items, size))
        self._metrics.requests.labels(self._name, signal.name).inc()
        self._metrics.items.labels(self._name, signal.name).inc(items)
        self._metrics.bytes.labels(self._name, signal.name).inc(size)

    def _enter(self, size: int) -> None:
        settings = self._settings
        if size > settings.pending_bytes_max:
            # A batch of OTAP may become more than it was: it would never fit, however often it is sent.
            limit = settings.pending_bytes_max
            raise self.refusal(LimitExceeded("max_pending_size", limit=limit, actual=size, hint=_SMALLER))
        if self._requests >= settings.requests_max or self._bytes + size > settings.pending_bytes_max:
            self._metrics.refused.labels(self._name, "full").inc()
            raise Refusal("full", f"{self._requests:,} requests with {self._bytes:,} bytes are under way")
        self._requests += 1
        self._bytes += size
        self._gauge.set(self._bytes)

    def _leave(self, size: int) -> None:
        self._requests -= 1
        self._bytes -= size
        self._gauge.set(self._bytes)

    def refusal(self, error: Exception) -> Refusal:
        """What the sender is told of an error; it is counted."""
        if isinstance(error, FOR_GOOD):
            reason = "invalid"
        elif isinstance(error, Backpressure | StorageFull):
            reason = "full"
        else:
            reason = "unavailable"
            if not isinstance(error, ForebayError):
                _log.error("dataflow.receiver.failed: %s", self._name, exc_info=error)
        self._metrics.refused.labels(self._name, reason).inc()
        return Refusal(reason, str(error)[:500])
