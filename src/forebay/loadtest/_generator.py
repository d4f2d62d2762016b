"""One generator process: `python -m forebay.loadtest._generator PLAN.json`; a line of JSON per sample.

A stream keeps one request under way, as an idempotent producer of its own: whatever happens to an answer, the
same request goes to another owner of the partition under the same number, and is appended once. Paced streams
measure from the moment a request was due, not from when it was sent: a stall must not hide the requests that
should have been made meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forebay.client._address import parse_address
from forebay.client._config import ClientConfig
from forebay.client._errors import error_from, is_transient
from forebay.client._pool import Pool
from forebay.client._session import Session, decoded
from forebay.errors import ForebayError, OutcomeUnknown, Unavailable
from forebay.formats.bytes_batch import encode_batch
from forebay.formats.http_messages import (
    JSON,
    MSGPACK,
    PATHS,
    Base64,
    ProducePartition,
    ProducePartitionPacked,
    ProduceRequest,
    ProduceRequestPacked,
    ProduceResponse,
    TextOrBytes,
)
from forebay.kit.clock import SystemClock
from forebay.kit.retry import RetryPolicy
from forebay.loadtest._ledger import ACKED, FAILED, UNKNOWN, Ledger
from forebay.loadtest._records import RecordMaker
from forebay.loadtest._routing import Router

__all__ = ["Plan", "main"]

WAITS = RetryPolicy(base_ms=20, cap_ms=500)


class Plan(msgspec.Struct):
    """What one process is to do."""

    run: str
    process: int
    topic: str
    urls: dict[str, str]
    """URL by broker."""
    owners: list[list[str]]
    selection: str
    streams: int
    record_bytes: int
    records_per_request: int
    rate_requests_per_s: float
    """Of this process; 0: as fast as answers come."""
    duration_s: float
    give_up_s: float
    sample_s: float
    body: str
    seed: int
    ledger: str
    remaps: str
    start_at: float
    """Unix time at which all processes begin."""


@dataclass(slots=True)
class Window:
    """What happened since the last sample."""

    acked: int = 0
    failed: int = 0
    unknown: int = 0
    latencies: list[float] = field(default_factory=list)


class Generator:
    """The streams of one process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = SystemClock()
        self.random = random.Random(plan.seed * 1000 + plan.process)
        config = ClientConfig(connections_max=1000, request_timeout_s=plan.give_up_s, connect_timeout_s=2.0)
        self.sessions = {
            broker: Session(
                parse_address(url), clock=self.clock, randomness=self.random, config=config, token=None
            )
            for broker, url in plan.urls.items()
        }
        self.router = Router(plan.owners, plan.selection, self.clock)
        self.ledger = Ledger()
        self.window = Window()
        self.remaps: list[dict[str, Any]] = []
        self.in_flight = 0
        self.behind_s = 0.0
        self.began = self.ends = 0.0

    async def run(self) -> None:
        """Load until the time is up and everything is answered or given up."""
        plan = self.plan
        await asyncio.sleep(max(0.0, plan.start_at - time.time()))
        self.began = self.clock.monotonic()
        self.ends = self.began + plan.duration_s
        sampler = asyncio.get_running_loop().create_task(self._sample())
        await asyncio.gather(*(Stream(self, number).run() for number in range(plan.streams)))
        sampler.cancel()
        self._tell_sample()
        for session in self.sessions.values():
            await session.close()
        await asyncio.to_thread(self._save)
        spent = resource.getrusage(resource.RUSAGE_SELF)
        _say(
            {
                "kind": "end",
                "process": plan.process,
                "cpu_s": spent.ru_utime + spent.ru_stime,
                "wall_s": self.clock.monotonic() - self.began,
                "behind_s": self.behind_s,
                "requests": len(self.ledger),
            }
        )

    def _save(self) -> None:
        self.ledger.save(Path(self.plan.ledger))
        Path(self.plan.remaps).write_text("".join(json.dumps(each) + "\n" for each in self.remaps))

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self.plan.sample_s)
            self._tell_sample()

    def _tell_sample(self) -> None:
        window, self.window = self.window, Window()
        spent = resource.getrusage(resource.RUSAGE_SELF)
        found = np.array(window.latencies) * 1000
        shares = (
            {f"p{each}_ms": float(np.percentile(found, each)) for each in (50, 95, 99)} if len(found) else {}
        )
        _say(
            {
                "kind": "sample",
                "process": self.plan.process,
                "t_s": self.clock.monotonic() - self.began,
                "acked_records": window.acked,
                "failed_records": window.failed,
                "unknown_records": window.unknown,
                "requests": len(window.latencies),
                "in_flight": self.in_flight,
                "cpu_s": spent.ru_utime + spent.ru_stime,
                "max_ms": float(found.max()) if len(found) else None,
                **shares,
            }
        )


class Stream:
    """One request at a time, to one partition after the other."""

    def __init__(self, generator: Generator, number: int) -> None:
        plan = generator.plan
        self._generator = generator
        self._plan = plan
        self._number = number
        self._stream = plan.process * 1_000 + number
        self._maker = RecordMaker(
            plan.run,
            self._stream,
            record_bytes=plan.record_bytes,
            per_block=plan.records_per_request,
            seed=plan.seed,
        )
        self._next = 0
        self._turn = self._stream
        self._ids: dict[int, tuple[str, int]] = {}
        """Producer id and next sequence by partition."""

    async def run(self) -> None:
        """Until the time is up."""
        generator, clock = self._generator, self._generator.clock
        rate = self._plan.rate_requests_per_s / self._plan.streams
        made = 0
        while clock.monotonic() < generator.ends:
            due = clock.monotonic()
            if rate:
                due = generator.began + (made + self._number / self._plan.streams) / rate
                if due >= generator.ends:
                    return
                await asyncio.sleep(max(0.0, due - clock.monotonic()))
                generator.behind_s = max(generator.behind_s, clock.monotonic() - due)
            await self._one(due)
            made += 1

    async def _one(self, due: float) -> None:
        generator, plan, clock = self._generator, self._plan, self._generator.clock
        partition = self._turn % len(plan.owners)
        self._turn += 1
        first, self._next = self._next, self._next + plan.records_per_request
        producer_id, sequence = self._ids.get(partition, (self._new_id(), 0))
        body, kind = self._body(partition, first, producer_id, sequence)
        generator.in_flight += 1
        outcome, offset, attempts = await self._until_told(partition, body, kind)
        generator.in_flight -= 1
        # A number that was given up is a hole: nothing passes it under the same id.
        self._ids[partition] = (producer_id, sequence + 1) if outcome == ACKED else (self._new_id(), 0)
        now = clock.monotonic()
        count = plan.records_per_request
        generator.ledger.add(
            self._stream, first, count, partition, outcome, offset, attempts, now - generator.began, now - due
        )
        window = generator.window
        window.latencies.append(now - due)
        window.acked += count if outcome == ACKED else 0
        window.failed += count if outcome == FAILED else 0
        window.unknown += count if outcome == UNKNOWN else 0

    def _new_id(self) -> str:
        return f"lt{self._generator.random.getrandbits(64):016x}{self._stream}"

    def _body(self, partition: int, first: int, producer_id: str, sequence: int) -> tuple[bytes, str]:
        batch = self._maker.block(first)
        place: dict[str, Any] = {
            "topic": self._plan.topic,
            "partition": partition,
            "producer_id": producer_id,
            "sequence": sequence,
        }
        if self._plan.body == "json":
            texts: list[TextOrBytes] = [Base64(value) for value in batch.records()]
            return msgspec.json.encode(ProduceRequest([ProducePartition(records=texts, **place)])), JSON
        packed = ProducePartitionPacked(frame=memoryview(encode_batch(batch)), **place)
        return msgspec.msgpack.encode(ProduceRequestPacked([packed])), MSGPACK

    async def _until_told(self, partition: int, body: bytes, kind: str) -> tuple[int, int, int]:
        """Outcome, first offset (-1: none) and attempts."""
        generator, clock = self._generator, self._generator.clock
        deadline = clock.monotonic() + self._plan.give_up_s
        lost = False
        avoid = ""
        attempt = 0
        while True:
            attempt += 1
            broker, remap = generator.router.choose(partition, avoid)
            if remap is not None:
                t_s = clock.monotonic() - generator.began
                generator.remaps.append(
                    {"t_s": t_s, "partition": partition, "from": remap.away_from, "to": remap.to}
                )
            try:
                offset = await self._ask(broker, body, kind)
            except ForebayError as error:
                reached = not isinstance(error, Unavailable | OutcomeUnknown)
                generator.router.done(broker, reached=reached)
                lost = lost or isinstance(error, OutcomeUnknown)
                again = is_transient(error) or isinstance(error, OutcomeUnknown)
                if not again or clock.monotonic() >= deadline:
                    return UNKNOWN if lost else FAILED, -1, attempt
                avoid = "" if reached else broker
                await asyncio.sleep(WAITS.wait_s(attempt, generator.random))
                continue
            generator.router.done(broker, reached=True)
            return ACKED, offset, attempt

    async def _ask(self, broker: str, body: bytes, kind: str) -> int:
        session = self._generator.sessions[broker]
        pool: Pool = session.pool
        response = await pool.request("POST", PATHS.PRODUCE, body=[body], content_type=kind)
        if response.status not in (200, 409, 503):
            raise session.error(response, "produce")
        try:
            [result] = decoded(response, ProduceResponse, "produce").results
        except (OutcomeUnknown, ValueError):
            if response.status == 200:
                raise OutcomeUnknown("produce", reason="the answer is not a broker's") from None
            raise session.error(response, "produce") from None
        if result.ok and result.start_offset is not None:
            return result.start_offset
        raise error_from(result.error_type or "Refused", result.error or "", operation="produce")


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main(path: str) -> None:
    """Run the plan in this file."""
    plan = msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None

    async def work() -> None:
        await Generator(plan).run()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work())


if __name__ == "__main__":
    main(sys.argv[1])
