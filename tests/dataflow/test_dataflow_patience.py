"""Destinations that ask for time, and those that say in their own words that something is too large."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from tests.dataflow.otlp_kit import Destination, logs, names_in, until
from tests.dataflow.pump_kit import WatchedQuiver, add_segment, pump_to
from tests.dataflow.test_dataflow_exporters import exporting, parcel

from forebay.dataflow._parcels import AskedToWait, Parcel, Refused
from forebay.dataflow._pump import ASKED_WAIT_S_MAX, WORKERS
from forebay.errors import ForebayError, OutcomeUnknown, Unavailable
from forebay.kit.retry import RetryPolicy
from forebay.quiver import QuiverConfig


@pytest.fixture
def destination() -> Iterator[Destination]:
    with Destination() as destination:
        yield destination


def asks_for(seconds: float, details: bytes | None = None) -> tuple[tuple[str, bytes], ...]:
    """The metadata of an answer with such a `RetryInfo`, or with other bytes in its place."""
    whole = int(seconds)
    status = Status(code=8, message="full")
    info = RetryInfo(retry_delay=Duration(seconds=whole, nanos=int((seconds - whole) * 1e9)))
    status.details.add().Pack(info)
    return (("grpc-status-details-bin", status.SerializeToString() if details is None else details),)


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_the_time_that_a_destination_asks_for_is_known(
    destination: Destination, code: grpc.StatusCode
) -> None:
    def full(_: str, __: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(asks_for(42.5))
        context.abort(code, "full")

    destination.answer = full
    async with exporting(destination) as exporter:
        with pytest.raises(AskedToWait) as caught:
            await exporter.take(parcel("logs", logs("a")))
    assert caught.value.wait_s == 42.5


async def test_details_that_are_none_ask_for_nothing(destination: Destination) -> None:
    def full(_: str, __: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(asks_for(1, details=b"\xff\xff\xff"))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    destination.answer = full
    async with exporting(destination) as exporter:
        with pytest.raises(Unavailable) as caught:
            await exporter.take(parcel("logs", logs("a")))
    assert not isinstance(caught.value, AskedToWait)


class Busy:
    """Takes nothing, and says for how long."""

    def __init__(self, error: ForebayError) -> None:
        self.error = error
        self.calls = 0

    async def take(self, parcel: Parcel) -> None:
        self.calls += 1
        raise self.error


def half_done(wait_s: float) -> OutcomeUnknown:
    error = OutcomeUnknown("export", reason="a part arrived")
    error.__cause__ = AskedToWait("full", wait_s)
    return error


@pytest.mark.parametrize(
    ("error", "least_s"),
    [
        (AskedToWait("full", 60), 50),
        (half_done(60), 50),
        (AskedToWait("full", 1e9), ASKED_WAIT_S_MAX - 10),
    ],
)
async def test_a_destination_is_left_alone_for_as_long_as_it_asks(
    tmp_path: Path, error: ForebayError, least_s: float
) -> None:
    sink = Busy(error)
    async with WatchedQuiver(tmp_path) as quiver:
        await quiver.register("out")
        pump = pump_to(sink, quiver)
        pump.start()
        await add_segment(quiver)
        await until(lambda: pump.failures)
        assert least_s < pump._pause_s() <= ASKED_WAIT_S_MAX
        # A worker was waiting for the next segment all the while.
        await until(lambda: quiver.waiting)
        await add_segment(quiver)
        await until(lambda: quiver.handed_out == 2 and not quiver.waiting)
        await until(lambda: not quiver.stats().subscribers[0].in_flight)
        await pump.stop()
    assert sink.calls == 1


class BackAfter:
    """Fails so often; then it is back. Notes how many tried at once after the first failure."""

    def __init__(self, failures: int) -> None:
        self.failures_left = failures
        self.at_once_most = self.taken = self._at_once = 0
        self._has_failed = False

    async def take(self, parcel: Parcel) -> None:
        is_probe = self._has_failed and bool(self.failures_left)
        self._at_once += is_probe
        self.at_once_most = max(self._at_once, self.at_once_most)
        # Whoever else may try does so now.
        await asyncio.sleep(0.01)
        self._at_once -= is_probe
        if not self.failures_left:
            self.taken += 1
            return
        self._has_failed = True
        self.failures_left -= 1
        raise Unavailable("down")


async def test_one_worker_tries_whether_a_destination_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.dataflow._pump._PAUSE", RetryPolicy(base_ms=1, cap_ms=1))
    sink = BackAfter(3 * WORKERS)
    async with WatchedQuiver(tmp_path, QuiverConfig(retry_base_ms=1, retry_cap_ms=2)) as quiver:
        await quiver.register("out")
        for _ in range(3 * WORKERS):
            await add_segment(quiver)
        pump = pump_to(sink, quiver)
        pump.start()
        await until(lambda: sink.taken == 3 * WORKERS)
        await pump.stop()
    assert sink.at_once_most == 1


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "grpc: received message larger than max (9 vs. 4)"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "gRPC message exceeds maximum size 4: 9"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Received message exceeds the maximum configured message size.",
        ),
        (grpc.StatusCode.OUT_OF_RANGE, "Error, decoded message length too large: found 9 bytes"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Error decompressing: size limit, of 4 bytes, exceeded while decompressing message",
        ),
    ],
)
async def test_one_that_is_too_large_for_any_server_is_refused_and_costs_no_other(
    destination: Destination, code: grpc.StatusCode, text: str
) -> None:
    def picky(signal: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        if "large" in names_in(signal, data):
            context.abort(code, text)
        return b""

    destination.answer = picky
    async with exporting(destination) as exporter:
        with pytest.raises(Refused) as caught:
            await exporter.take(parcel("logs", logs("a"), logs("large"), logs("b")))
    assert caught.value.items == 1
    assert destination.names("logs") == Counter("ab")
