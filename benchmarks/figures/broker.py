"""The broker over HTTP: produce beside the same server that only decodes, latency, and idle long polls.

Servers and clients are processes of their own. The log is in memory, so that the figures are the broker's own
work and not the disk's: parsing, decoding, batching, encoding, committing, answering. A request holds 100
records of 1 KiB, each an event as services write them: a JSON object, which is text with its quotes escaped
where it is a record of a JSON body, and plain bytes in a frame. Records of one letter, which no decoder has
anything to do with, stand beside them without a target. The decoding server is the same broker, whose
handler decodes the same body into the same message and answers a fixed text.

What is compared: 128 connections, each with one request under way and the next one sent as soon as it is
answered, the same bodies to both servers; the broker flushes at 4 MiB or after 20 ms, 36 to 40 requests at a
time, with eight uploads at most. The load generator is another process, so only the server's processor time
is counted and the generator's does not matter, as long as it keeps the connections busy. Both servers run
with the garbage collector and the allocator set as `forebay serve` sets them. Before that was so, whether the
decoding server gave the memory of each body back to the kernel and fetched it again (25 page faults, as
expensive as decoding) was luck, and the ratio to it moved by half with it.

The two ratios pull at each other. With h for socket and HTTP, j for decoding JSON, p for what comes behind
it, they are (h + j) / (h + j + p) and about (h + j + p) / (h + p). Whatever makes HTTP or decoding cheaper
raises the second or lowers the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.figures._suite import suite
from benchmarks.harness import (
    Bench,
    CannotMeasure,
    Figure,
    Measure,
    Sample,
    Variant,
    Variants,
    at_least,
    at_most,
)
from benchmarks.peers.broker_server import FLUSH_DELAY_MS

__all__ = ["broker_idle", "broker_latency", "broker_produce"]

RECORDS = 100
RECORD_BYTES = 1024
CONNECTIONS = 128
PARTITIONS = 4
IDLE_POLLS = 1_000
CPU_CLOCK = 2
"""Kind of the clock of a process that Linux makes from its id: time it was scheduled."""
TURN_S_MIN = 0.5
"""Seconds of a turn at least: several flushes, and more than a moment of a busy machine."""
LATENCY_BOUND_MS = FLUSH_DELAY_MS + 20
"""The bound of the issue: flush delay, 20 ms, and the store's own time, which is none here."""


@dataclass(frozen=True)
class _Server:
    """A server process."""

    host: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Seconds of processor time it has had, all threads, to the nanosecond; /proc counts hundredths."""
        return time.clock_gettime((~self.pid << 3) | CPU_CLOCK)

    def metrics(self) -> dict[str, Any]:
        """Its metrics, as JSON."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics") as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@contextlib.contextmanager
def _serving(kind: str) -> Iterator[_Server]:
    try:
        import httptools  # noqa: F401
        import uvloop  # noqa: F401
    except ImportError as error:
        raise CannotMeasure("the extra `broker` is not installed") from error
    if not Path("/proc/self/stat").exists():
        raise CannotMeasure("there is no /proc to read processor time from")
    command = [sys.executable, "-m", "benchmarks.peers.broker_server", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        place = urlsplit(process.stdout.readline().strip())
        yield _Server(str(place.hostname), int(place.port or 0), process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# -- the client


class _Caller(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self, requests: list[bytes], answered: Callable[[_Caller, float], None]) -> None:
        self._requests = requests
        self._answered = answered
        self._turn = 0
        self._buffer = b""
        self._due = 0.0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, due: float) -> None:
        """Send the next request; its latency counts from `due`, when it should have been sent."""
        assert self.transport is not None
        self._due = due
        self.transport.write(self._requests[self._turn % len(self._requests)])
        self._turn += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self._buffer[:500].decode())
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._buffer = b""
            self._answered(self, time.perf_counter() - self._due)


@dataclass
class _Load:
    """Some connections to one server, which is a process of its own."""

    server: _Server
    requests: list[bytes]
    runner: asyncio.Runner
    callers: list[_Caller] = field(default_factory=list)
    free: deque[_Caller] = field(default_factory=deque)
    count: int = 0
    goes_on: bool = False
    latencies: list[float] = field(default_factory=list)

    def _answered(self, caller: _Caller, seconds: float) -> None:
        self.count += 1
        self.latencies.append(seconds)
        if self.goes_on:
            caller.ask(time.perf_counter())
        else:
            self.free.append(caller)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        for number in range(len(self.callers), CONNECTIONS):
            turn = number % len(self.requests)
            rotated = self.requests[turn:] + self.requests[:turn]
            make = partial(_Caller, rotated, self._answered)
            _, caller = await loop.create_connection(make, self.server.host, self.server.port)
            self.callers.append(caller)
            self.free.append(caller)

    async def _all_answered(self) -> None:
        while len(self.free) < len(self.callers):  # noqa: ASYNC110 - counted by callbacks
            await asyncio.sleep(0.005)

    async def _closed_loop(self, seconds: float) -> tuple[float, float]:
        await self._connect()
        self.count, self.goes_on = 0, True
        spent, began = self.server.cpu_s(), time.perf_counter()
        while self.free:
            self.free.popleft().ask(began)
        await asyncio.sleep(seconds)
        self.goes_on = False
        await self._all_answered()
        took, spent = time.perf_counter() - began, self.server.cpu_s() - spent
        return self.count / took, self.count / max(spent, 0.001)

    def per_cpu(self, seconds: float) -> Sample:
        """As many requests as it takes, 128 at a time: records per second of the server's processor."""
        _, rate = self.runner.run(self._closed_loop(max(seconds, TURN_S_MIN)))
        return Sample(rate * RECORDS)

    def peak(self, seconds: float) -> float:
        """Requests per second."""
        return self.runner.run(self._closed_loop(seconds))[0]

    async def _open_loop(self, per_second: float, seconds: float) -> float:
        await self._connect()
        self.latencies = []
        due = time.perf_counter()
        ends = due + seconds
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self.free:
                self.free.popleft().ask(due)
                due += 1 / per_second
        await self._all_answered()
        return statistics.quantiles(self.latencies, n=100)[98] * 1000

    def p99_ms(self, per_second: float, seconds: float) -> float:
        """99th percentile of the latency at this rate, counted from when each request was due."""
        return self.runner.run(self._open_loop(per_second, seconds))


def _events() -> list[str]:
    """Orders as a shop would send them, of exactly `RECORD_BYTES`, each another one."""
    chance = random.Random(1)
    return [_event(chance, number) for number in range(RECORDS)]


def _event(chance: random.Random, number: int) -> str:
    event: dict[str, Any] = {
        "event_id": f"{chance.getrandbits(128):032x}",
        "type": "order_placed",
        "customer": chance.randrange(1_000_000),
        "placed_at_ms": 1_700_000_000_000 + number,
        "items": [],
        "note": "",
    }
    while True:
        item = {
            "sku": f"SKU-{chance.randrange(1_000_000):06d}",
            "name": "Garden hose, 20 m",
            "quantity": chance.randrange(1, 10),
            "price": chance.randrange(1, 10_000) / 100,
        }
        longer = {**event, "items": [*event["items"], item]}
        if len(_compact(longer)) > RECORD_BYTES:
            break
        event = longer
    event["note"] = "." * (RECORD_BYTES - len(_compact(event)))
    return _compact(event)


def _compact(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _json_requests(texts: list[str]) -> list[bytes]:
    return [
        _request(
            json.dumps(
                {"topic_partitions": [{"topic": "t", "partition": number, "records": texts}]}
            ).encode(),
            "application/json",
        )
        for number in range(PARTITIONS)
    ]


def _frame_requests(texts: list[str]) -> list[bytes]:
    import msgspec

    from forebay.formats import bytes_batch

    frame = bytes_batch.encode([text.encode() for text in texts])
    return [
        _request(
            msgspec.msgpack.encode(
                {"topic_partitions": [{"topic": "t", "partition": number, "frame": frame}]}
            ),
            "application/msgpack",
        )
        for number in range(PARTITIONS)
    ]


def _request(body: bytes, kind: str) -> bytes:
    head = f"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


# -- the figures


@suite.benchmark(
    "broker-produce",
    "Producing in JSON costs little more than decoding it; ready frames cost half of JSON.",
    Figure("JSON, 100 x 1 KiB", of="produce JSON", against="decode only", target=at_least(0.8)),
    Figure("frames, 100 x 1 KiB", of="produce frames", against="produce JSON", target=at_least(2.0)),
    Figure("JSON, one letter", of="produce one letter", against="decode one letter"),
    Figure("frames, against JSON of one letter", of="produce frames", against="produce one letter"),
)
def broker_produce(bench: Bench) -> Iterator[Variants]:
    """Rates are per second of the server's processor time: client and server share the machine."""
    unit = "records/CPU s"
    with asyncio.Runner() as runner, _serving("decode") as decode, _serving("produce") as produce:
        events = _events()
        texts, frames = _json_requests(events), _frame_requests(events)
        letters = _json_requests(["x" * RECORD_BYTES] * RECORDS)
        yield {
            "decode only": Variant(_Load(decode, texts, runner).per_cpu, unit),
            "produce JSON": Variant(_Load(produce, texts, runner).per_cpu, unit),
            "produce frames": Variant(_Load(produce, frames, runner).per_cpu, unit),
            "decode one letter": Variant(_Load(decode, letters, runner).per_cpu, unit),
            "produce one letter": Variant(_Load(produce, letters, runner).per_cpu, unit),
        }


@suite.benchmark(
    "broker-latency",
    "At half load 99 of 100 batches are acknowledged within the flush delay and 20 ms.",
    Figure(
        "p99 at half load, ms",
        of="produce JSON at half load",
        target=at_most(LATENCY_BOUND_MS),
        measure=Measure.PLAIN,
    ),
)
def broker_latency(bench: Bench) -> Iterator[Variants]:
    """Half of the rate that the same machine reached a moment before; in memory, flushed every 20 ms."""
    with asyncio.Runner() as runner, _serving("produce") as produce:
        load = _Load(produce, _json_requests(_events()), runner)
        load.peak(0.5)  # The topic comes into being.
        half = max(1.0, load.peak(1.0) / 2)

        def run(seconds: float) -> Sample:
            return Sample(load.p99_ms(half, max(seconds, 0.5)))

        yield {"produce JSON at half load": Variant(run, "ms")}


@suite.benchmark(
    "broker-idle",
    "A thousand idle long polls cost next to nothing.",
    Figure("CPU share, %", of="processor", target=at_most(5.0), measure=Measure.PLAIN),
    Figure("requests to store and coordinator", of="requests", target=at_most(0.0), measure=Measure.PLAIN),
)
def broker_idle(bench: Bench) -> Iterator[Variants]:
    """All wait at the end of one partition, for longer than the measurement takes."""
    with asyncio.Runner() as runner, _serving("produce") as server:
        polls = runner.run(_poll_idle(server))

        def processor(seconds: float) -> Sample:
            spent, began = server.cpu_s(), time.perf_counter()
            time.sleep(max(seconds, 1.0))
            return Sample(100 * (server.cpu_s() - spent) / (time.perf_counter() - began))

        def requests(seconds: float) -> Sample:
            before = _asked(server)
            time.sleep(max(seconds, 1.0))
            return Sample(_asked(server) - before)

        yield {"processor": Variant(processor, "%"), "requests": Variant(requests, "requests")}
        for writer in polls:
            writer.close()


async def _poll_idle(server: _Server) -> list[asyncio.StreamWriter]:
    place = {"topic": "idle", "partition": 0}
    first = json.dumps({"topic_partitions": [{**place, "records": ["a"]}]}).encode()
    poll = json.dumps({"topic_partitions": [{**place, "fetch_offset": 2}], "max_wait_ms": 60_000}).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(_request(first, "application/json"))
    await reader.readuntil(b"\r\n\r\n")
    writers = [writer]
    for _ in range(IDLE_POLLS):
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(_request(poll, "application/json").replace(b"/produce", b"/consume", 1))
        writers.append(writer)
    while server.metrics()["consume"]["waiting"] < IDLE_POLLS:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.1)
    return writers


def _asked(server: _Server) -> float:
    found = server.metrics()["series"]["counters"]
    names = ("coordination.requests", "log.store_requests")
    # The page of metrics itself looks for groups, once in ten seconds: a scan that no poll causes.
    return sum(
        float(series["value"])
        for name in names
        for series in found[name]
        if series["labels"].get("operation") not in ("scan", "list")
    )
