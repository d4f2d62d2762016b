"""Nodes together, in one process: ports, positions, back-pressure, and what a change of the file does."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pyarrow as pa
import pytest
from tests.dataflow.flow_files import pipeline
from tests.dataflow.otlp_kit import Destination, logs, names_in, parquet_rows, until

from forebay.dataflow import Dataflow, load
from forebay.dataflow._dispatch import Broadcast, RoundRobin, port
from forebay.dataflow._parcels import Parcel
from forebay.dataflow._persistence import Persistence
from forebay.dataflow._signals import SIGNALS
from forebay.errors import ForebayError, OutcomeUnknown, Unavailable
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import as_json
from forebay.quiver import DirectoryInUse, Quiver, QuiverFailed

PARCEL = Parcel("logs", (logs("a"),), 1, 10)


@pytest.fixture
def destination() -> Iterator[Destination]:
    destination = Destination()
    yield destination
    destination.down()


async def send(flow: Dataflow, *bodies: str) -> None:
    address = next(iter(flow.addresses.values()))["grpc"]
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        method: Any = channel.unary_unary(SIGNALS["logs"].grpc_method)
        await asyncio.gather(*(method(logs(body), timeout=30) for body in bodies))


def written(directory: Path, name: str = "parquet") -> list[str]:
    return sorted(row["body"] for row in parquet_rows(directory / name, "logs"))


async def test_each_exporter_has_a_position_of_its_own(tmp_path: Path, destination: Destination) -> None:
    data = pipeline(tmp_path, endpoint=destination.endpoint, parquet=True)
    async with Dataflow(load(data)) as flow:
        await send(flow, "a", "b")
    # The one destination is down, the other has it; only the first still waits.
    assert written(tmp_path) == ["a", "b"]
    async with Dataflow(load(data), drain_s=0) as flow:
        lags = {each.name: each.lag_segments for each in flow.stats()["persistence"].subscribers}
        assert lags["parquet"] == 0
        assert lags["otlp_exporter"] >= 1
        destination.up()
        await asyncio.to_thread(destination.wait_for, "logs", ["a", "b"])
    assert written(tmp_path) == ["a", "b"]


def two_parquets(directory: Path, strategy: str) -> bytes:
    text = pipeline(directory, parquet=True, strategy=strategy).decode()
    text = text.replace("destinations: [parquet]", "destinations: [parquet, second]")
    return (
        text
        + f"""
  second:
    kind: exporter
    plugin_urn: "urn:otel:parquet:exporter"
    config: {{path: "{directory / "second"}"}}
"""
    ).encode()


async def send_in_segments(flow: Dataflow, bodies: list[str]) -> None:
    """Each body in a segment of its own."""
    for body in bodies:
        await send(flow, body)
        await flow._stores["persistence"].quiver.flush()


async def test_broadcast_gives_everything_to_everybody(tmp_path: Path) -> None:
    async with Dataflow(load(two_parquets(tmp_path, "broadcast"))) as flow:
        await send_in_segments(flow, ["a", "b", "c", "d"])
        names = {each.name for each in flow.stats()["persistence"].subscribers}
    assert names == {"parquet", "second"}
    assert written(tmp_path) == written(tmp_path, "second") == ["a", "b", "c", "d"]


async def test_round_robin_gives_each_segment_to_one_of_them(tmp_path: Path) -> None:
    async with Dataflow(load(two_parquets(tmp_path, "round_robin"))) as flow:
        await send_in_segments(flow, ["a", "b", "c", "d"])
        names = {each.name for each in flow.stats()["persistence"].subscribers}
    assert names == {"persistence.out_port"}
    first, second = written(tmp_path), written(tmp_path, "second")
    assert sorted(first + second) == ["a", "b", "c", "d"]
    assert first
    assert second


async def test_a_removed_exporter_pins_nothing_and_a_renamed_one_gets_the_rest(
    tmp_path: Path, destination: Destination
) -> None:
    data = pipeline(tmp_path, endpoint=destination.endpoint)
    async with Dataflow(load(data)) as flow:
        await send(flow, "a")
    renamed = data.replace(b"otlp_exporter", b"new_name")
    destination.up()
    async with Dataflow(load(renamed)) as flow:
        assert [each.name for each in flow.stats()["persistence"].subscribers] == ["new_name"]
        await asyncio.to_thread(destination.wait_for, "logs", ["a"])
    without = pipeline(tmp_path, parquet=True)
    async with Dataflow(load(without)) as flow:
        assert [each.name for each in flow.stats()["persistence"].subscribers] == ["parquet"]


async def test_a_stop_that_is_hurried_waits_for_no_destination(
    tmp_path: Path, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered, draining = threading.Event(), threading.Event(), asyncio.Event()
    drain = Persistence.drain

    async def watched(store: Persistence, patience_s: float) -> None:
        draining.set()
        await drain(store, patience_s)

    def silent(*_: object) -> bytes:
        asked.set()
        answered.wait(60)
        return b""

    monkeypatch.setattr(Persistence, "drain", watched)
    destination.answer = silent
    destination.up()
    # A call that fails would end the drain as well.
    data = pipeline(tmp_path, endpoint=destination.endpoint).replace(b"timeout: 5s", b"timeout: 1h")
    flow = Dataflow(load(data), drain_s=3_600)
    await flow.start()
    try:
        await send(flow, "a")
        assert await asyncio.to_thread(asked.wait, 30)
        stopping = asyncio.create_task(flow.stop())
        await draining.wait()
        flow.hurry()
        await asyncio.wait_for(stopping, 30)
    finally:
        answered.set()
    async with Dataflow(load(data)):
        await asyncio.to_thread(destination.wait_for, "logs", ["a"])


async def test_a_stop_that_is_hurried_waits_for_no_request(
    tmp_path: Path, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.dataflow._flow.STOP_GRACE_S", 3_600)
    asked, answered = threading.Event(), threading.Event()

    def silent(*_: object) -> bytes:
        asked.set()
        answered.wait(60)
        return b""

    destination.answer = silent
    destination.up()
    flow = Dataflow(load(direct(tmp_path, destination.endpoint).replace(b"timeout: 5s", b"timeout: 1h")))
    await flow.start()
    sending = asyncio.create_task(send(flow, "a"))
    try:
        assert await asyncio.to_thread(asked.wait, 30)
        stopping = asyncio.create_task(flow.stop())
        await asyncio.sleep(0)
        flow.hurry()
        await asyncio.wait_for(stopping, 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sending
        # It was the server who gave up, and not the caller.
        assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        answered.set()


async def test_a_full_store_pushes_back_and_goes_on_when_there_is_room(
    tmp_path: Path, destination: Destination
) -> None:
    data = pipeline(tmp_path, endpoint=destination.endpoint, cap="7MB")
    accepted: list[str] = []
    async with Dataflow(load(data), drain_s=30) as flow:
        address = flow.addresses["receiver"]["grpc"]
        async with grpc.aio.insecure_channel(address) as channel:
            method: Any = channel.unary_unary(SIGNALS["logs"].grpc_method)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                for number in range(200):
                    await method(logs(f"{number} " + "x" * 200_000), timeout=30)
                    accepted.append(f"{number} " + "x" * 200_000)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(accepted) > 5
            destination.up()
            for _ in range(600):
                try:
                    await method(logs("last"), timeout=30)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
            else:
                pytest.fail("it never took anything again")
        await asyncio.to_thread(destination.wait_for, "logs", [*accepted, "last"])
    assert set(destination.names("logs")) == {*accepted, "last"}


async def test_a_request_that_an_empty_store_cannot_hold_is_refused_for_good(tmp_path: Path) -> None:
    text = pipeline(tmp_path, parquet=True, cap="2MB").replace(b"4MB", b"64KiB").replace(b"1MB", b"100KB")
    async with Dataflow(load(text)) as flow:
        with pytest.raises(grpc.aio.AioRpcError, match="size_cap") as caught:
            await send(flow, "x" * 1_500_000)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await send(flow, "x" * 700_000)


async def test_what_a_destination_refuses_for_good_goes_to_the_dead_letters(
    tmp_path: Path, destination: Destination
) -> None:
    destination.up()
    destination.answer = lambda _, __, context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "never")
    async with Dataflow(load(pipeline(tmp_path, endpoint=destination.endpoint))) as flow:
        await send(flow, "a")
    assert list((tmp_path / "quiver" / "dead").iterdir())
    async with Dataflow(load(pipeline(tmp_path, endpoint=destination.endpoint))) as flow:
        [subscriber] = flow.stats()["persistence"].subscribers
        assert (subscriber.lag_segments, subscriber.dropped) == (0, {"rejected": 1})


async def test_what_is_refused_for_good_is_not_counted_as_handed_over(
    tmp_path: Path, destination: Destination
) -> None:
    def picky(signal: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        if "bad" in names_in(signal, data):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "never")
        return b""

    destination.answer = picky
    destination.up()
    registry = MetricsRegistry()
    async with Dataflow(
        load(pipeline(tmp_path, endpoint=destination.endpoint)), metrics=registry, drain_s=30
    ) as flow:
        await send(flow, "a", "b", "bad", "c", "bad")
    counters = as_json(registry)["counters"]
    assert [each["value"] for each in counters["dataflow.exporter.items_total"]] == [3]
    assert [each["value"] for each in counters["dataflow.exporter.rejected_total"]] == [2]


async def test_a_store_that_failed_ends_the_flow_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Dataflow(load(pipeline(tmp_path, parquet=True))) as flow:

        async def broken(*_: Any, **__: Any) -> None:
            raise QuiverFailed("no such disk")

        with monkeypatch.context() as patch:
            patch.setattr(flow._stores["persistence"].quiver, "ingest", broken)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(flow, "a")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no such disk" in (await asyncio.wait_for(flow.failure(), 10)).message


async def test_a_caller_that_gives_up_disturbs_nobody(tmp_path: Path) -> None:
    async with Dataflow(load(pipeline(tmp_path, parquet=True, flush_ms=200))) as flow:
        large = "x" * 100_000
        given_up = [asyncio.ensure_future(send(flow, body)) for body in ("small", large)]
        stays = asyncio.ensure_future(send(flow, "stays", f"stays {large}"))
        await asyncio.sleep(0.05)
        for each in given_up:
            each.cancel()
        await stays
        await send(flow, "after")
    assert {"stays", f"stays {large}", "after"} <= set(written(tmp_path))


async def test_segments_that_are_not_ours_do_not_end_the_handing_on(tmp_path: Path) -> None:
    async with Quiver(tmp_path / "quiver") as quiver:
        await quiver.ingest(pa.record_batch({"foreign": [1]}), signal="logs")
    async with Dataflow(load(pipeline(tmp_path, parquet=True))) as flow:
        await send(flow, "a")
        await until(lambda: written(tmp_path))
    assert written(tmp_path) == ["a"]


def direct(directory: Path, endpoint: str) -> bytes:
    text = pipeline(directory, endpoint=endpoint).decode()
    begin, end = text.index("  persistence:"), text.index("  otlp_exporter:")
    return (text[:begin] + text[end:]).replace("[persistence]", "[otlp_exporter]").encode()


async def test_without_a_store_the_answer_is_that_of_the_destination(
    tmp_path: Path, destination: Destination
) -> None:
    async with Dataflow(load(direct(tmp_path, destination.endpoint))) as flow:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(flow, "a")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        destination.up()
        for _ in range(200):
            try:
                await send(flow, "a")
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
    assert destination.names("logs") == {"a": 1}


async def test_without_a_store_exporters_are_counted_too(tmp_path: Path, destination: Destination) -> None:
    def picky(signal: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        for name in names_in(signal, data):
            if name != "good":
                context.abort(getattr(grpc.StatusCode, name), "no")
        return b""

    destination.answer = picky
    destination.up()
    registry = MetricsRegistry()
    async with Dataflow(load(direct(tmp_path, destination.endpoint)), metrics=registry) as flow:
        await send(flow, "good", "good", "good")
        for code in ("INVALID_ARGUMENT", "UNAVAILABLE", "UNAVAILABLE"):
            with pytest.raises(grpc.aio.AioRpcError):
                await send(flow, code)
    counters = as_json(registry)["counters"]
    found = {
        kind: [
            (each["labels"]["node"], each["value"]) for each in counters[f"dataflow.exporter.{kind}_total"]
        ]
        for kind in ("items", "rejected", "failures")
    }
    node = "otlp_exporter"
    assert found == {"items": [(node, 3)], "rejected": [(node, 1)], "failures": [(node, 2)]}


async def test_one_that_is_passed_by_when_destinations_take_turns_is_counted(
    tmp_path: Path, destination: Destination
) -> None:
    registry = MetricsRegistry()
    text = pipeline(tmp_path, endpoint=destination.endpoint, parquet=True, strategy="round_robin")
    async with Dataflow(load(text), metrics=registry) as flow:  # the destination is down
        await send_in_segments(flow, ["a", "b", "c", "d"])
        await until(lambda: len(written(tmp_path)) == 4)
    counters = as_json(registry)["counters"]
    items, failures = (
        {each["labels"]["node"]: each["value"] for each in counters[f"dataflow.exporter.{kind}_total"]}
        for kind in ("items", "failures")
    )
    assert items == {"parquet": 4}
    assert failures.keys() == {"otlp_exporter"}


def two_stores(directory: Path) -> bytes:
    text = pipeline(directory, parquet=True).decode()
    second = text[text.index("  persistence:") : text.index("  parquet:")]
    text = text.replace("destinations: [parquet]", "destinations: [behind]", 1)
    text += second.replace("  persistence:", "  behind:").replace('/quiver"', '/behind"')
    return text.encode()


async def test_two_stores_in_a_row(tmp_path: Path) -> None:
    async with Dataflow(load(two_stores(tmp_path))) as flow:
        await send(flow, "a", "b", "c")
        assert set(flow.stats()) == {"persistence", "behind"}
    assert written(tmp_path) == ["a", "b", "c"]


async def test_segments_larger_than_a_record_batch_reach_the_next_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.dataflow._parcels.BATCH_BYTES_MAX", 100_000)
    registry = MetricsRegistry()
    names = [f"{each}-{'x' * 70_000}" for each in range(10)]
    async with Dataflow(load(two_stores(tmp_path)), metrics=registry) as flow:
        first = flow._stores["persistence"]
        await first._pumps[0].stop()
        await asyncio.gather(*(send(flow, each) for each in names))
        await first.quiver.flush()
        first._pumps[0].start()
    assert sorted(written(tmp_path)) == names
    counted = as_json(registry)["counters"]["dataflow.exporter.items_total"]
    assert {each["labels"]["node"]: each["value"] for each in counted} == {"behind": 10, "parquet": 10}


async def test_a_second_process_on_the_directory_is_refused_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    data = pipeline(tmp_path, parquet=True)
    async with Dataflow(load(data)) as flow:
        with pytest.raises(DirectoryInUse):
            await Dataflow(load(data)).start()
        await send(flow, "still here")
    assert written(tmp_path) == ["still here"]


async def test_many_requests_at_once_share_batches_and_none_is_lost(tmp_path: Path) -> None:
    bodies = [f"number {each}" for each in range(300)]
    more = "      response_stream_channel_size: 1000"
    async with Dataflow(load(pipeline(tmp_path, parquet=True, more_receiver=more, open_ms=60_000))) as flow:
        await send(flow, *bodies)
        [store] = flow.stats().values()
        assert store.segments == 0  # all in one open segment
    assert Counter(written(tmp_path)) == Counter(bodies)


# Ports alone.


class Sink:
    def __init__(self, problem: ForebayError | None = None) -> None:
        self.problem = problem
        self.taken = 0

    async def take(self, parcel: Parcel) -> None:
        if self.problem is not None:
            raise self.problem
        self.taken += 1


async def test_taking_turns_passes_by_whoever_certainly_did_not_take_it() -> None:
    sinks = [Sink(), Sink(Unavailable("down")), Sink()]
    turns = port(sinks, "round_robin")
    assert isinstance(turns, RoundRobin)
    for _ in range(6):
        await turns.take(PARCEL)
    assert [each.taken for each in sinks] == [2, 0, 4]
    unknown = RoundRobin([Sink(OutcomeUnknown("export")), Sink()])
    with pytest.raises(OutcomeUnknown):
        await unknown.take(PARCEL)
    nobody = RoundRobin([Sink(Unavailable("a")), Sink(Unavailable("b"))])
    with pytest.raises(Unavailable):
        await nobody.take(PARCEL)


async def test_broadcast_waits_for_all_and_tells_of_any() -> None:
    sinks = [Sink(Unavailable("down")), Sink()]
    everybody = port(sinks, "broadcast")
    assert isinstance(everybody, Broadcast)
    with pytest.raises(Unavailable):
        await everybody.take(PARCEL)
    assert sinks[1].taken == 1
