"""The brokers of a run directory: started, found again, stopped.

`stack.json` and `resolved-config.json` are the truth about a stack: whoever comes later (a run, a look, the
end) knows nothing but the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

import forebay
from forebay._version import __version__
from forebay.client import aio as client_aio
from forebay.errors import ForebayError, OutcomeUnknown, UsageError
from forebay.loadtest._brokers import BrokerRun, start_broker
from forebay.loadtest._machine import environment, git_state
from forebay.loadtest._routing import owner_sets, routing_manifest
from forebay.loadtest._scenario import Scenario

__all__ = ["CONFIG", "MANIFEST", "STACK", "Stack", "write_json"]

CONFIG, STACK, MANIFEST = "resolved-config.json", "stack.json", "routing-manifest.json"
Say = Callable[[str], None]


class Stack:
    """A scenario, its directory and its brokers."""

    def __init__(self, scenario: Scenario, directory: Path, say: Say = lambda _: None) -> None:
        self.scenario = scenario
        self.directory = directory
        self.brokers: list[BrokerRun] = []
        self._say = say

    @classmethod
    def new(cls, scenario: Scenario, results: Path, say: Say = lambda _: None) -> Stack:
        """One that is not there yet, in a directory of its own."""
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        return cls(scenario, results / f"{stamp}-{scenario.name}", say)

    @classmethod
    def found(cls, directory: Path, say: Say = lambda _: None) -> Stack:
        """One that was started before."""
        try:
            scenario = Scenario.from_resolved(json.loads((directory / CONFIG).read_text()))
            told = json.loads((directory / STACK).read_text())["brokers"]
            brokers = [BrokerRun(each["name"], each["url"], pid=each["pid"]) for each in told]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{directory} is no run directory with a stack", hint=f"it holds {CONFIG} and {STACK}"
            ) from error
        stack = cls(scenario, directory, say)
        stack.brokers = brokers
        return stack

    @property
    def name(self) -> str:
        """That of the run."""
        return self.directory.name

    @property
    def owners(self) -> list[list[str]]:
        """Brokers of each partition."""
        scenario = self.scenario
        names = [each.name for each in self.brokers]
        return owner_sets(scenario.topic, scenario.partitions, names, scenario.owners, scenario.seed)

    # -- up

    async def up(self) -> None:
        """Start the brokers and tell about them; where that fails, nothing is left running."""
        await asyncio.to_thread((self.directory / "logs").mkdir, parents=True)
        write_json(self.directory / CONFIG, self.scenario.resolved())
        try:
            await self._start()
        except BaseException:
            await self.down()
            raise
        await asyncio.to_thread(self._tell)

    async def _start(self) -> None:
        scenario = self.scenario
        if scenario.urls:
            self.brokers = [BrokerRun(f"broker-{number}", url) for number, url in enumerate(scenario.urls, 1)]
            return
        self._say(f"starting {scenario.brokers} brokers")
        told = {"FOREBAY_LOADTEST_RUN": self.name, "FOREBAY_LOADTEST_SCENARIO": scenario.name}
        for number in range(1, scenario.brokers + 1):
            name = f"broker-{number}"
            log = self.directory / "logs" / f"{name}.log"
            self.brokers.append(await start_broker(name, self._where, scenario.serve_options, log, told))

    @property
    def _where(self) -> list[str]:
        scenario = self.scenario
        if scenario.store:
            return ["--store", scenario.store, "--coordinator", scenario.coordinator]
        return ["--data", str(self.directory / "data")]

    def _tell(self) -> None:
        scenario, names = self.scenario, [each.name for each in self.brokers]
        stack = {
            "run": self.name,
            "forebay": __version__,
            "brokers": [self._layout(each) for each in self.brokers],
            "store": scenario.store or "data",
            "coordinator": scenario.coordinator,
            "git": git_state(Path(forebay.__file__).parent),
            "environment": environment(),
        }
        write_json(self.directory / STACK, stack)
        manifest = routing_manifest(scenario.topic, self.owners, names, scenario.seed, scenario.selection)
        write_json(self.directory / MANIFEST, manifest)

    def _layout(self, broker: BrokerRun) -> dict[str, Any]:
        place = urlsplit(broker.url)
        log = None if broker.pid is None else f"logs/{broker.name}.log"
        return {
            "name": broker.name,
            "url": broker.url,
            "host": place.hostname,
            "port": place.port,
            "pid": broker.pid,
            "log": log,
        }

    async def precreate(self, topic: str = "") -> None:
        """Make the topic anew: records of an earlier run would be strangers."""
        name = topic or self.scenario.topic
        async with client_aio.connect(self.brokers[0].url) as client:
            with contextlib.suppress(ForebayError):
                await client.topics.delete(name)
            try:
                await client.topics.create(name, partitions=self.scenario.partitions)
            except OutcomeUnknown:
                await client.topics.describe(name)

    async def delete_topic(self, topic: str) -> None:
        """Take a topic away again."""
        async with client_aio.connect(self.brokers[0].url) as client:
            await client.topics.delete(topic)

    # -- after

    async def status(self) -> list[dict[str, Any]]:
        """Who answers."""
        return [
            {"name": each.name, "url": each.url, "pid": each.pid, "healthy": await _healthy(each.url)}
            for each in self.brokers
        ]

    async def down(self) -> None:
        """End what was started, and nothing else."""
        for broker in self.brokers:
            await broker.stop()


async def _healthy(url: str) -> bool:
    try:
        async with client_aio.connect(url) as client:
            await client.health()
    except ForebayError:
        return False
    return True


def write_json(path: Path, document: Any) -> None:
    """One document, to be read by people too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
