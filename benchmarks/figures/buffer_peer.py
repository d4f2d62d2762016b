"""The buffer beside the published `opendata-buffer` crate: same records, same SeaweedFS, same flush interval.

1 KiB records, 100 ms flush. Each turn is one whole run on a queue of its own. Paced runs send 2,000 records a
second, all producers together, and what counts is the time from a record's due moment until it is durable:
the 99th percentile, as its inverse, so that higher is better like every rate. Requests per flush are those of
the last paced run. Flat out, 100 records per call, what counts is records per second until all are durable.

Our producers share one process and one event loop; the crate's share one process and its threads. Those of
ours then commit together, which is what a user gets; "apart" keeps them from it, as if each were a process of
its own. With the commit broker they hand their locations to a broker in the same process. Both sides make
every record anew, the same bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

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
from benchmarks.peers.opendata import RUN_TIMEOUT_S, OpenDataPeer, PeerError, opendata_binary
from forebay.buffer import BufferConfig, Producer, WriteHandle
from forebay.buffer._commit_broker import CommitBroker, CommitReply, CommitRequest
from forebay.buffer._commit_broker_client import BrokeredCommitter
from forebay.kit.clock import SystemClock
from forebay.storage import MemoryStore, ObjectStore, open_store
from forebay.testing.servers import SeaweedServer, ServerUnavailable

__all__ = ["buffer_beside_crate"]

RECORD_BYTES = 1024
PACED_RATE = 2_000
PER_CALL = 100
PRODUCERS = (1, 4, 16)
PACED_STRETCH = 16.0
"""A paced run takes that many turns of the plan, four seconds: the slowest percent of a shorter one is all
start-up."""
LONG_STRETCH = 40.0
"""The same for four producers, ten seconds: now and then the server answers writes that overlap only after a
second, and a shorter run may be all luck."""
WARM_UP_S = 1.0
"""Seconds of a paced run that only warms up."""
FLAT_RECORDS = 200_000
MEMORY_RECORDS = 500_000
WARM_UP_SHARE = 0.1
"""Part of the records of a flat run that only warms up. Whatever is shorter than a second does."""
FLAT_STRETCH = 4.0
"""A flat run is told that it has so many turns of the plan, a second; its records decide how long it is."""
Say: TypeAlias = Callable[[str], None]
P99 = "p99 of a second"
"""Unit of the paced variants: how often the 99th percentile fits into a second."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run."""

    records_per_s: float
    p99_ms: float
    requests_per_flush: float


class _Counting(ObjectStore):
    """Counts the requests of a store."""

    def __init__(self, inner: ObjectStore) -> None:
        self.url = inner.url
        self._inner = inner
        self.requests = 0
        self.batches = 0

    async def put(self, key: str, data: Any, when: Any = None) -> str:
        self.requests += 1
        self.batches += key.endswith(".batch")
        return await (self._inner.put(key, data) if when is None else self._inner.put(key, data, when))

    async def get(self, key: str) -> Any:
        self.requests += 1
        return await self._inner.get(key)

    async def get_if_changed(self, key: str, version: str) -> Any:
        self.requests += 1
        return await self._inner.get_if_changed(key, version)

    async def get_ranges(self, key: str, ranges: Any) -> Any:
        self.requests += 1
        return await self._inner.get_ranges(key, ranges)

    async def head(self, key: str) -> Any:
        self.requests += 1
        return await self._inner.head(key)

    def list_pages(self, prefix: str = "", **options: Any) -> Any:
        return self._inner.list_pages(prefix, **options)

    async def delete(self, keys: Any) -> Any:
        self.requests += 1
        return await self._inner.delete(keys)


class _InProcess:
    """A way to a broker in the same process."""

    def __init__(self, broker: CommitBroker) -> None:
        self._broker = broker

    async def request(self, request: CommitRequest) -> CommitReply:
        return await self._broker.commit(request)

    async def close(self) -> None:
        """Nothing is open."""


async def _produce(
    store: ObjectStore,
    producers: int,
    *,
    records: int,
    per_call: int,
    rate: float,
    broker: bool = False,
    apart: bool = False,
) -> Ran:
    """Our producers on a new queue."""
    counting = _Counting(store)
    queue = f"q{random.getrandbits(48):x}"
    config = BufferConfig(data_path_prefix=f"{queue}/data", manifest_path=f"{queue}/manifest")
    serving = CommitBroker(counting, config) if broker else None
    # Producers commit together only where their limits agree.
    configs = [replace(config, commit_batches_max=64 + apart * number) for number in range(producers)]
    latencies: list[float] = []
    began = time.perf_counter()
    await asyncio.gather(
        *[
            _one_producer(
                number, counting, each, serving, records // producers, per_call, rate / producers, latencies
            )
            for number, each in enumerate(configs)
        ]
    )
    elapsed = time.perf_counter() - began
    ordered = sorted(latencies)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] if ordered else 0.0
    return Ran(records / elapsed, p99 * 1000, counting.requests / max(counting.batches, 1))


async def _one_producer(
    name: int,
    store: ObjectStore,
    config: BufferConfig,
    broker: CommitBroker | None,
    records: int,
    per_call: int,
    rate: float,
    latencies: list[float],
) -> None:
    clock = SystemClock()
    committer = None
    if broker is not None:
        link = _InProcess(broker)
        committer = BrokeredCommitter(link, store, config, clock=clock, randomness=random.Random(1))
    async with Producer(config, store=store, committer=committer) as out:
        begin = time.perf_counter()
        for first in range(0, records, per_call):
            due = begin + first / rate if rate else time.perf_counter()
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            call = [
                (b"%d:%d:" % (name, number)).ljust(RECORD_BYTES, b"x")
                for number in range(first, min(first + per_call, records))
            ]
            _note(await out.produce(call), due, latencies)


def _note(handle: WriteHandle, due: float, latencies: list[float]) -> None:
    ticket = handle.watcher._ticket
    ticket.add_done_callback(lambda _: latencies.append(time.perf_counter() - due))


class _Sides:
    """Runs of both sides on one server."""

    def __init__(self, server: SeaweedServer, binary: Path, runner: asyncio.Runner) -> None:
        self._server = server
        self._binary = binary
        self._runner = runner
        self._store = open_store(server.url("ours"))
        self._numbers = itertools.count()

    def close(self) -> None:
        self._runner.run(self._store.close())

    def ours(self, producers: int, records: int, *, per_call: int = 1, rate: float = 0, **ways: bool) -> Ran:
        return self._runner.run(
            _produce(self._store, producers, records=records, per_call=per_call, rate=rate, **ways)
        )

    def ours_in_memory(self, producers: int, records: int) -> Ran:
        return self._runner.run(
            _produce(MemoryStore(), producers, records=records, per_call=PER_CALL, rate=0)
        )

    def crate(self, producers: int, records: int, *, per_call: int = 1, rate: float = 0) -> Ran:
        queue = f"crate/{next(self._numbers)}"
        peer = OpenDataPeer(self._binary, self._server, f"{queue}/data", f"{queue}/manifest")
        return _ran(
            peer.run(
                "produce",
                count=records,
                size=RECORD_BYTES,
                producers=producers,
                per_call=per_call,
                rate=rate,
                flush_ms=100,
            )
        )

    def crate_in_memory(self, producers: int, records: int) -> Ran:
        words = [str(self._binary), "memory", "--count", str(records), "--size", str(RECORD_BYTES)]
        words += ["--producers", str(producers), "--per-call", str(PER_CALL), "--flush-ms", "100"]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        if ended.returncode:
            raise PeerError(f"the opendata peer ended with {ended.returncode}: {ended.stderr[-500:]}")
        return _ran(json.loads(ended.stdout)["produce"])


def _ran(told: dict[str, Any]) -> Ran:
    return Ran(told["records_per_s"], told["durable_latency_ms"]["p99"], told["requests_per_flush"])


def _paced(
    say: Say,
    last: dict[str, Ran],
    name: str,
    run: Callable[[int], Ran],
    stretch: float = PACED_STRETCH,
) -> dict[str, Variant]:
    def turn(seconds: float) -> Sample:
        say(f"paced, {name}")
        last[name] = run(int(PACED_RATE * max(seconds, WARM_UP_S)))
        return Sample(1000 / last[name].p99_ms)

    return {name: Variant(turn, P99, stretch)}


def _requests(last: dict[str, Ran], name: str) -> Variant:
    return Variant(lambda seconds: Sample(last[name].requests_per_flush), "requests per flush")


def _flat(say: Say, name: str, run: Callable[[int], Ran], records: int) -> dict[str, Variant]:
    def turn(seconds: float) -> Sample:
        say(name)
        return Sample(run(int(records * (1 if seconds >= 1 else WARM_UP_SHARE))).records_per_s)

    return {name: Variant(turn, "records/s", FLAT_STRETCH)}


@suite.benchmark(
    "buffer-peer",
    "Durable sooner than through the published Rust crate, with fewer requests, at its rate.",
    Figure("paced p99, 1 producer", of="ours, 1", against="crate, 1"),
    Figure("paced p99, 4 producers", of="ours, 4", against="crate, 4", target=at_least(3)),
    Figure("paced p99, 16 producers", of="ours, 16", against="crate, 16", target=at_least(5)),
    Figure("paced p99, 16 producers, broker", of="broker, 16", against="crate, 16", target=at_least(5)),
    Figure("paced p99, 4 producers apart", of="apart, 4", against="crate, 4"),
    Figure("requests per flush, 1", of="requests of ours, 1", target=at_most(2.1), measure=Measure.PLAIN),
    Figure("requests per flush, 4", of="requests of ours, 4", target=at_most(2.1), measure=Measure.PLAIN),
    Figure(
        "requests per flush, 4, broker",
        of="requests of broker, 4",
        target=at_most(2.1),
        measure=Measure.PLAIN,
    ),
    Figure("requests per flush of the crate, 4", of="requests of crate, 4", measure=Measure.PLAIN),
    Figure("flat out, 1 producer", of="ours flat, 1", against="crate flat, 1", target=at_least(1)),
    Figure("flat out, 4 producers", of="ours flat, 4", against="crate flat, 4", target=at_least(1)),
    Figure("in memory, 1 producer", of="ours memory, 1", against="crate memory, 1", target=at_least(0.5)),
    Figure("in memory, 4 producers", of="ours memory, 4", against="crate memory, 4", target=at_least(0.5)),
    jobs=True,
)
def buffer_beside_crate(bench: Bench) -> Iterator[Variants]:
    """One server, a queue per run."""
    binary = opendata_binary(bench.say)
    bench.say("starting SeaweedFS")
    try:
        server = SeaweedServer(bench.directory)
    except ServerUnavailable as error:
        raise CannotMeasure(error.message) from error
    with server, asyncio.Runner() as runner:
        sides = _Sides(server, binary, runner)
        last: dict[str, Ran] = {}
        yield _paced_variants(bench.say, sides, last) | _flat_variants(bench.say, sides)
        sides.close()


def _paced_variants(say: Say, sides: _Sides, last: dict[str, Ran]) -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for count in PRODUCERS:
        stretch = LONG_STRETCH if count == 4 else PACED_STRETCH
        ours, crate = (
            partial(sides.ours, count, rate=PACED_RATE),
            partial(sides.crate, count, rate=PACED_RATE),
        )
        variants |= _paced(say, last, f"ours, {count}", ours, stretch)
        variants |= _paced(say, last, f"crate, {count}", crate, stretch)
    for count in (4, 16):
        run = partial(sides.ours, count, rate=PACED_RATE, broker=True)
        variants |= _paced(say, last, f"broker, {count}", run)
    apart = partial(sides.ours, 4, rate=PACED_RATE, apart=True)
    variants |= _paced(say, last, "apart, 4", apart, LONG_STRETCH)
    for name in ("ours, 1", "ours, 4", "broker, 4", "crate, 4"):
        variants[f"requests of {name}"] = _requests(last, name)
    return variants


def _flat_variants(say: Say, sides: _Sides) -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for count in (1, 4):
        ours, crate = (
            partial(sides.ours, count, per_call=PER_CALL),
            partial(sides.crate, count, per_call=PER_CALL),
        )
        variants |= _flat(say, f"ours flat, {count}", ours, FLAT_RECORDS)
        variants |= _flat(say, f"crate flat, {count}", crate, FLAT_RECORDS)
        variants |= _flat(say, f"ours memory, {count}", partial(sides.ours_in_memory, count), MEMORY_RECORDS)
        variants |= _flat(
            say, f"crate memory, {count}", partial(sides.crate_in_memory, count), MEMORY_RECORDS
        )
    return variants
