"""One run: brokers, generators, samples, the account, the page. Everything lies in one directory afterwards.

    resolved-config.json    every setting
    stack.json              brokers, their URLs, ports and process ids; git, versions, the machine
    routing-manifest.json   who owns which partition
    logs/                   what brokers and generators wrote
    client-samples.jsonl    per generator and second; client-30s.jsonl rolls them up
    broker-samples.jsonl    per broker and second; metrics-30s.jsonl rolls them up, with the machine's
    ledger-N.arrow          every request of generator N, and what it was told
    remap-events.jsonl      requests that went to another owner, since theirs was gone
    client-summary.json     what clients meant and were told
    summary.json            all of it together, with the reconciliation
    report.html             the same for people

Brokers are started here unless URLs are given or the stack is up already. Whatever happens, what was started
is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from forebay import aio
from forebay.client import aio as client_aio
from forebay.errors import Unavailable
from forebay.loadtest._brokers import BrokerRun
from forebay.loadtest._generator import Plan
from forebay.loadtest._ledger import ACKED, read_ledgers
from forebay.loadtest._machine import host_counters
from forebay.loadtest._reconcile import InLog, reconcile
from forebay.loadtest._records import parse_block, run_mark
from forebay.loadtest._report import html_report
from forebay.loadtest._scenario import Scenario
from forebay.loadtest._stack import CONFIG, MANIFEST, STACK, Stack, write_json
from forebay.loadtest._summary import (
    client_summary,
    client_windows,
    memory_growth,
    metrics_windows,
    together,
    warnings_of,
)

__all__ = ["Run", "write_report"]

START_DELAY_S = 1.0
"""Seconds that generators get to start before the load begins, on top of what each start takes."""
ARTIFACTS = (
    CONFIG,
    STACK,
    MANIFEST,
    "logs",
    "client-samples.jsonl",
    "client-30s.jsonl",
    "broker-samples.jsonl",
    "metrics-30s.jsonl",
    "client-summary.json",
    "remap-events.jsonl",
)
"""What must be there before the account is closed."""


class Run:
    """A scenario being run. `await Run(...).run()` gives the summary."""

    def __init__(
        self,
        scenario: Scenario,
        results: Path,
        say: Callable[[str], None] = lambda _: None,
        *,
        stack: Stack | None = None,
    ) -> None:
        self._scenario = scenario
        self._stack = stack if stack is not None else Stack.new(scenario, results, say)
        self._was_up = stack is not None
        self.directory = self._stack.directory
        self.name = self.directory.name
        self._say = say
        self._samples: list[dict[str, Any]] = []
        self._broker_samples: list[dict[str, Any]] = []
        self._hosts: list[dict[str, Any]] = []
        self._ends: list[dict[str, Any]] = []
        self._before: dict[str, int] = {}
        self._peak: dict[str, float] = {}
        self._began = 0.0
        self._warnings: list[str] = []

    @classmethod
    def of(cls, stack: Stack, say: Callable[[str], None] = lambda _: None) -> Run:
        """A run on a stack that is up, and stays so."""
        return cls(stack.scenario, stack.directory.parent, say, stack=stack)

    @property
    def _brokers(self) -> list[BrokerRun]:
        return self._stack.brokers

    async def run(self) -> dict[str, Any]:
        """All of it."""
        stack = self._stack
        if not self._was_up:
            await stack.up()
        try:
            if self._scenario.peak_share:
                await self._find_peak()
            await stack.precreate()
            await self._load()
            self._say("reading back what is in the log")
            log = await self._read_back()
        finally:
            if not self._was_up and not self._scenario.keep:
                await stack.down()
        return await asyncio.to_thread(self._summarize, log)

    # -- during

    async def _find_peak(self) -> None:
        """Flat out for a while, on a topic of its own; then the rate of the run is known."""
        scenario = self._scenario
        topic = f"{scenario.topic}-peak"
        flat_out = dataclasses.replace(scenario, topic=topic, duration_s=scenario.peak_s, peak_share=0.0)
        self._say(f"measuring the peak for {scenario.peak_s:g} s")
        await self._stack.precreate(topic)
        await self._generators(flat_out, "peak-")
        ledger = read_ledgers(sorted((self.directory / "logs").glob("peak-ledger-*.arrow")))
        told = (ledger["outcome"] == ACKED) & (ledger["ended_s"].astype(np.float64) <= scenario.peak_s)
        peak = float(ledger["count"][told].sum()) * scenario.record_bytes / scenario.peak_s
        if not peak:
            raise Unavailable("no request was answered while the peak was measured", hint="see logs/")
        await self._stack.delete_topic(topic)
        rate = max(1, int(peak * scenario.peak_share))
        self._peak = {"bytes_per_s": peak, "seconds": scenario.peak_s, "share": scenario.peak_share}
        self._scenario = dataclasses.replace(scenario, rate_bytes_per_s=rate, peak_share=0.0)
        self._samples, self._ends = [], []
        self._say(f"the peak is {peak / 1e6:.1f} MB/s")

    async def _load(self) -> None:
        await self._sample()
        self._before = {each.name: each.records for each in self._brokers}
        self._broker_samples, self._hosts = [], []
        self._say(f"load for {self._scenario.duration_s:g} s from {self._scenario.processes} processes")
        beside = [asyncio.create_task(self._collect()), asyncio.create_task(self._kill())]
        try:
            await self._generators(self._scenario, "")
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        await self._sample()

    async def _generators(self, scenario: Scenario, prefix: str) -> None:
        start_at = time.time() + START_DELAY_S + 0.5 * scenario.processes
        self._began = time.monotonic() + (start_at - time.time())
        work = [
            asyncio.create_task(
                self._generate(number, self._plan(scenario, number, start_at, prefix), prefix)
            )
            for number in range(scenario.processes)
        ]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def _plan(self, scenario: Scenario, number: int, start_at: float, prefix: str) -> Plan:
        folder = self.directory / "logs" if prefix else self.directory
        return Plan(
            run=self.name,
            process=number,
            topic=scenario.topic,
            urls={each.name: each.url for each in self._brokers},
            owners=self._stack.owners,
            selection=scenario.selection,
            streams=scenario.streams,
            record_bytes=scenario.record_bytes,
            records_per_request=scenario.records_per_request,
            rate_requests_per_s=scenario.rate_bytes_per_s / scenario.request_bytes / scenario.processes,
            duration_s=scenario.duration_s,
            give_up_s=scenario.give_up_s,
            sample_s=scenario.sample_s,
            body=scenario.body,
            seed=scenario.seed,
            ledger=str(folder / f"{prefix}ledger-{number}.arrow"),
            remaps=str(self.directory / "logs" / f"{prefix}remaps-{number}.jsonl"),
            start_at=start_at,
        )

    async def _generate(self, number: int, plan: Plan, prefix: str) -> None:
        logs = self.directory / "logs"
        path = logs / f"{prefix}plan-{number}.json"
        path.write_bytes(msgspec.json.encode(plan))
        with (logs / f"{prefix}generator-{number}.log").open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "forebay.loadtest._generator",
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
            )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                document = json.loads(line)
                (self._ends if document["kind"] == "end" else self._samples).append(document)
            if await process.wait():
                self._warnings.append(f"generator {number} ended with {process.returncode}; see its log")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(self._scenario.sample_s)
            await self._sample()

    async def _sample(self) -> None:
        found = await asyncio.gather(*(broker.sample() for broker in self._brokers))
        now = time.monotonic() - self._began
        self._broker_samples += [{"t_s": now, **each} for each in found]
        self._hosts.append({"t_s": now, **host_counters()})

    async def _kill(self) -> None:
        for kill in sorted(self._scenario.kills, key=lambda each: each.at_s):
            await asyncio.sleep(max(0.0, self._began + kill.at_s - time.monotonic()))
            self._say(f"killing broker-{kill.broker}")
            await self._brokers[kill.broker - 1].kill()

    # -- after

    async def _read_back(self) -> dict[int, InLog]:
        """Straight from the store where we know it, else through a broker that is alive."""
        scenario, mark = self._scenario, run_mark(self.name)
        log = {partition: InLog() for partition in range(scenario.partitions)}
        async with self._reader() as bay:
            for partition, part in log.items():
                async for batch in await bay.read(scenario.topic, partition=partition):
                    _note(part, batch, mark)
        return log

    @contextlib.asynccontextmanager
    async def _reader(self) -> Any:
        scenario = self._scenario
        if not scenario.urls:
            place = scenario.store or self.directory / "data"
            async with aio.connect(place, scenario.coordinator or None) as bay:
                yield bay
            return
        for state, broker in zip(await self._stack.status(), self._brokers, strict=True):
            if state["healthy"]:
                async with client_aio.connect(broker.url) as client:
                    yield client
                return
        raise Unavailable("no broker is left to read the log back from", hint="see broker-samples.jsonl")

    def _summarize(self, log: dict[int, InLog]) -> dict[str, Any]:
        scenario = self._scenario
        ledger = read_ledgers(sorted(self.directory.glob("ledger-*.arrow")))
        killed = {each.name for each in self._brokers if each.killed}
        counted = {each.name: each.records - self._before.get(each.name, 0) for each in self._brokers}
        account = reconcile(ledger, log, counted, killed)
        client = client_summary(scenario, ledger, self._ends)
        memory = memory_growth(self._broker_samples, scenario.duration_s)
        remaps = self._keep(client)
        summary = {
            "run": self.name,
            "scenario": scenario.resolved(),
            "peak": self._peak,
            "client": client,
            "reconciliation": account,
            "memory": memory,
            "remaps": remaps,
            "killed": sorted(killed),
            "warnings": [*self._warnings, *warnings_of(scenario, client, memory)],
            "broker_totals": {each.name: _without_series(each.last) for each in self._brokers},
            "artifacts": {name: (self.directory / name).exists() for name in ARTIFACTS},
        }
        write_json(self.directory / "summary.json", summary)
        write_report(self.directory)
        return summary

    def _keep(self, client: dict[str, Any]) -> int:
        """Write the samples; returns the number of remaps."""
        folder, scenario = self.directory, self._scenario
        _lines(folder / "client-samples.jsonl", self._samples)
        _lines(folder / "client-30s.jsonl", client_windows(self._samples, scenario.record_bytes))
        _lines(folder / "broker-samples.jsonl", self._broker_samples)
        _lines(folder / "metrics-30s.jsonl", metrics_windows(self._broker_samples, self._hosts))
        write_json(folder / "client-summary.json", client)
        remaps = [path.read_text() for path in sorted((folder / "logs").glob("remaps-*.jsonl"))]
        (folder / "remap-events.jsonl").write_text("".join(remaps))
        return sum(text.count("\n") for text in remaps)


def _without_series(metrics: dict[str, Any]) -> dict[str, Any]:
    """The groups say the same, and are enough for an account."""
    return {name: value for name, value in metrics.items() if name != "series"}


def _lines(path: Path, documents: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in documents))


def _note(part: InLog, batch: pa.RecordBatch, mark: int) -> None:
    seen = parse_block(batch.column("value"), mark)
    part.streams.append(seen.streams)
    part.numbers.append(seen.numbers)
    part.offsets.append(np.array(batch.column("offset")))
    part.strangers += seen.strangers


def write_report(directory: Path) -> Path:
    """The page of a run directory, from what lies in it."""
    summary = json.loads((directory / "summary.json").read_text())
    clients, brokers = (
        [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for name in ("client-samples.jsonl", "broker-samples.jsonl")
    )
    scenario = summary["scenario"]
    steps = together(clients, scenario["sample_s"], scenario["record_bytes"])
    path = directory / "report.html"
    path.write_text(html_report(summary, steps, brokers))
    return path
