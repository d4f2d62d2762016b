"""One run: brokers, generators, samples, the account, the page. Everything lies in one directory afterwards.

    resolved-config.json    every setting
    stack.json              brokers, their URLs and process ids, versions, the machine
    routing-manifest.json   who owns which partition
    logs/                   what brokers and generators wrote
    client-samples.jsonl    per generator and second
    broker-samples.jsonl    per broker and second
    ledger-N.arrow          every request of generator N, and what it was told
    remap-events.jsonl      requests that went to another owner, since theirs was gone
    client-summary.json     what clients meant and were told
    summary.json            all of it together, with the reconciliation
    report.html             the same for people

Brokers are started here unless URLs are given. Whatever happens, what was started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from forebay import aio
from forebay._version import __version__
from forebay.client import aio as client_aio
from forebay.errors import ForebayError, OutcomeUnknown
from forebay.loadtest._brokers import BrokerRun, start_broker
from forebay.loadtest._generator import Plan
from forebay.loadtest._ledger import read_ledgers
from forebay.loadtest._reconcile import InLog, reconcile
from forebay.loadtest._records import parse_block, run_mark
from forebay.loadtest._report import html_report
from forebay.loadtest._routing import owner_sets, routing_manifest
from forebay.loadtest._scenario import Scenario

__all__ = ["Run", "write_report"]

START_DELAY_S = 1.0
"""Seconds that generators get to start before the load begins, on top of what each start takes."""
GENERATOR_BUSY = 0.9
"""Share of a core above which a generator is thought to hold the run back."""
BEHIND_S = 0.5
"""Seconds that a paced generator may be late before its latencies are doubted."""
NINES = (0.0, 0.301, 0.602, 1.0, 1.301, 2.0, 2.301, 3.0)
"""Where the chart of percentiles has points: 0, 50, 75, 90, 95, 99, 99.5 and 99.9 percent."""


class Run:
    """A scenario being run. `await Run(...).run()` gives the summary."""

    def __init__(
        self, scenario: Scenario, results: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._scenario = scenario
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        self.name = f"{stamp}-{scenario.name}"
        self.directory = results / self.name
        self._say = say
        self._brokers: list[BrokerRun] = []
        self._samples: list[dict[str, Any]] = []
        self._broker_samples: list[dict[str, Any]] = []
        self._ends: list[dict[str, Any]] = []
        self._began = 0.0
        self._warnings: list[str] = []

    async def run(self) -> dict[str, Any]:
        """All of it."""
        await asyncio.to_thread((self.directory / "logs").mkdir, parents=True)
        self._write("resolved-config.json", self._scenario.resolved())
        try:
            await self._start_brokers()
            sets = self._route()
            await self._create_topic()
            await self._load(sets)
            self._say("reading back what is in the log")
            log = await self._read_back()
        finally:
            for broker in self._brokers:
                await broker.stop()
        return await asyncio.to_thread(self._summarize, log)

    # -- before

    @property
    def _where(self) -> list[str]:
        scenario = self._scenario
        if scenario.store:
            return ["--store", scenario.store, "--coordinator", scenario.coordinator]
        return ["--data", str(self.directory / "data")]

    async def _start_brokers(self) -> None:
        scenario = self._scenario
        if scenario.urls:
            self._brokers = [
                BrokerRun(f"broker-{number}", url) for number, url in enumerate(scenario.urls, 1)
            ]
        else:
            self._say(f"starting {scenario.brokers} brokers")
            environment = {"FOREBAY_LOADTEST_RUN": self.name, "FOREBAY_LOADTEST_SCENARIO": scenario.name}
            for number in range(1, scenario.brokers + 1):
                name = f"broker-{number}"
                log = self.directory / "logs" / f"{name}.log"
                broker = await start_broker(name, self._where, scenario.serve_options, log, environment)
                self._brokers.append(broker)
        stack = {
            "run": self.name,
            "forebay": __version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "brokers": [
                {"name": each.name, "url": each.url, "pid": each.process.pid if each.process else None}
                for each in self._brokers
            ],
        }
        self._write("stack.json", stack)

    def _route(self) -> list[list[str]]:
        scenario = self._scenario
        names = [each.name for each in self._brokers]
        sets = owner_sets(scenario.topic, scenario.partitions, names, scenario.owners, scenario.seed)
        self._write(
            "routing-manifest.json",
            routing_manifest(scenario.topic, sets, names, scenario.seed, scenario.selection),
        )
        return sets

    async def _create_topic(self) -> None:
        scenario = self._scenario
        async with client_aio.connect(self._brokers[0].url) as client:
            # Left from an earlier run: its records would be strangers.
            with contextlib.suppress(ForebayError):
                await client.topics.delete(scenario.topic)
            try:
                await client.topics.create(scenario.topic, partitions=scenario.partitions)
            except OutcomeUnknown:
                await client.topics.describe(scenario.topic)

    # -- during

    async def _load(self, sets: list[list[str]]) -> None:
        scenario = self._scenario
        start_at = time.time() + START_DELAY_S + 0.5 * scenario.processes
        plans = [self._plan(number, sets, start_at) for number in range(scenario.processes)]
        self._say(f"load for {scenario.duration_s:g} s from {scenario.processes} processes")
        self._began = time.monotonic() + (start_at - time.time())
        work = [asyncio.create_task(self._generate(number, plan)) for number, plan in enumerate(plans)]
        beside = [asyncio.create_task(self._collect()), asyncio.create_task(self._kill())]
        try:
            await asyncio.gather(*work)
        finally:
            for task in [*beside, *work]:
                task.cancel()
            await asyncio.gather(*beside, *work, return_exceptions=True)
        await self._sample_brokers()

    def _plan(self, number: int, sets: list[list[str]], start_at: float) -> Plan:
        scenario = self._scenario
        return Plan(
            run=self.name,
            process=number,
            topic=scenario.topic,
            urls={each.name: each.url for each in self._brokers},
            owners=sets,
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
            ledger=str(self.directory / f"ledger-{number}.arrow"),
            remaps=str(self.directory / "logs" / f"remaps-{number}.jsonl"),
            start_at=start_at,
        )

    async def _generate(self, number: int, plan: Plan) -> None:
        path = self.directory / "logs" / f"plan-{number}.json"
        path.write_bytes(msgspec.json.encode(plan))
        with (self.directory / "logs" / f"generator-{number}.log").open("wb") as sink:
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
            await self._sample_brokers()

    async def _sample_brokers(self) -> None:
        found = await asyncio.gather(*(broker.sample() for broker in self._brokers))
        now = time.monotonic() - self._began
        self._broker_samples += [{"t_s": now, **each} for each in found]

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
        for broker in self._brokers:
            async with client_aio.connect(broker.url) as client:
                with contextlib.suppress(ForebayError):
                    await client.health()
                    yield client
                    return

    def _summarize(self, log: dict[int, InLog]) -> dict[str, Any]:
        ledger = read_ledgers(sorted(self.directory.glob("ledger-*.arrow")))
        killed = {each.name for each in self._brokers if each.killed}
        counted = {each.name: each.last.get("wal", {}).get("records") for each in self._brokers}
        account = reconcile(ledger, log, counted, killed)
        client = self._client_summary(ledger)
        self._lines("client-samples.jsonl", self._samples)
        self._lines("broker-samples.jsonl", self._broker_samples)
        remaps = [path.read_text() for path in sorted((self.directory / "logs").glob("remaps-*.jsonl"))]
        (self.directory / "remap-events.jsonl").write_text("".join(remaps))
        self._write("client-summary.json", client)
        summary = {
            "run": self.name,
            "scenario": self._scenario.resolved(),
            "client": client,
            "reconciliation": account,
            "remaps": sum(text.count("\n") for text in remaps),
            "killed": sorted(killed),
            "warnings": self._warnings,
            "broker_totals": {each.name: each.last for each in self._brokers},
            "broker_samples": self._broker_samples,
            "artifacts": sorted(path.name for path in self.directory.iterdir()),
        }
        self._write("summary.json", summary)
        write_report(self.directory)
        return summary

    def _client_summary(self, ledger: dict[str, Any]) -> dict[str, Any]:
        scenario = self._scenario
        acked = ledger["outcome"] == 0
        latencies = np.sort(ledger["latency_s"][acked]) * 1000
        wall_s = max([scenario.duration_s, *(each["wall_s"] for each in self._ends)])
        records = int(ledger["count"][acked].sum())
        shares = [each["cpu_s"] / each["wall_s"] for each in self._ends]
        behind_s = max([each["behind_s"] for each in self._ends], default=0.0)
        busy = bool(shares) and max(shares) > GENERATOR_BUSY
        if busy:
            self._warnings.append(
                f"the generator is the bottleneck: {max(shares):.0%} of a core; add processes"
            )
        if scenario.rate_bytes_per_s and behind_s > BEHIND_S:
            self._warnings.append(
                f"the offered rate was not reached: requests began up to {behind_s:.1f} s late"
            )
        return {
            "processes": scenario.processes,
            "requests": len(latencies),
            "attempts": int(ledger["attempts"].sum()),
            "wall_s": wall_s,
            "records_per_s": records / wall_s,
            "mb_per_s": records * scenario.record_bytes / wall_s / 1e6,
            "latency_ms": {
                name: _percentile(latencies, share)
                for name, share in (("p50", 50), ("p95", 95), ("p99", 99), ("p999", 99.9), ("max", 100))
            },
            "percentiles_ms": {str(nines): _percentile(latencies, 100 - 100 / 10**nines) for nines in NINES},
            "cpu_s": sum(each["cpu_s"] for each in self._ends),
            "cpu_share": max(shares, default=0.0),
            "cpu_us_per_record": sum(each["cpu_s"] for each in self._ends) * 1e6 / max(records, 1),
            "generator_is_bottleneck": busy,
            "behind_s": behind_s,
        }

    def _write(self, name: str, document: Any) -> None:
        (self.directory / name).write_bytes(
            msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
        )

    def _lines(self, name: str, documents: list[dict[str, Any]]) -> None:
        (self.directory / name).write_text("".join(json.dumps(each) + "\n" for each in documents))


def _percentile(latencies: Any, share: float) -> float:
    return float(np.percentile(latencies, share)) if len(latencies) else 0.0


def _note(part: InLog, batch: pa.RecordBatch, mark: int) -> None:
    seen = parse_block(batch.column("value"), mark)
    part.streams.append(seen.streams)
    part.numbers.append(seen.numbers)
    part.offsets.append(np.array(batch.column("offset")))
    part.strangers += seen.strangers


def write_report(directory: Path) -> Path:
    """The page of a run directory, from what lies in it."""
    summary = json.loads((directory / "summary.json").read_text())
    lines = (directory / "client-samples.jsonl").read_text().splitlines()
    path = directory / "report.html"
    path.write_text(html_report(summary, _together([json.loads(line) for line in lines], summary)))
    return path


def _together(samples: list[dict[str, Any]], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of all processes, second by second; the worst of their percentiles."""
    every = summary["scenario"]["sample_s"]
    size = summary["scenario"]["record_bytes"]
    by_time: dict[int, list[dict[str, Any]]] = {}
    for each in samples:
        by_time.setdefault(round(each["t_s"] / every), []).append(each)
    return [
        {
            "t_s": step * every,
            "mb_per_s": sum(each["acked_records"] for each in group) * size / every / 1e6,
            **{
                name: max([each[name] for each in group if each.get(name) is not None], default=None)
                for name in ("p50_ms", "p95_ms", "p99_ms")
            },
        }
        for step, group in sorted(by_time.items())
    ]
