"""One Kafka node in KRaft mode, and `ProducerPerformance` against it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness import CannotMeasure
from benchmarks.peers.maven import jars_of
from forebay.testing._servers.ports import free_ports
from forebay.testing._servers.process import ServerProcess

__all__ = ["KafkaServer", "Performance", "kafka_jars"]

POM = Path(__file__).with_name("pom.xml")
TOOL_TIMEOUT_S = 300
START_TIMEOUT_S = 120
HEAP = "-Xmx1g"
_LINE = re.compile(
    r"(\d+) records sent, ([\d.]+) records/sec \(([\d.]+) MB/sec\), ([\d.]+) ms avg latency, ([\d.]+) ms max "
    r"latency, (\d+) ms 50th, (\d+) ms 95th, (\d+) ms 99th, (\d+) ms 99.9th"
)
_INTERVAL = re.compile(
    r"^(\d+) records sent, ([\d.]+) records/sec \([\d.]+ MB/sec\), [\d.]+ ms avg latency, [\d.]+ ms max "
    r"latency\.$"
)
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.check.interval.ms=5000
"""


def kafka_jars(say: Callable[[str], None] = lambda _: None) -> Path:
    """The directory of the jars. Raises `CannotMeasure` where they cannot be had."""
    return jars_of(POM, "Kafka", say)


@dataclass(frozen=True, slots=True)
class Performance:
    """What `ProducerPerformance` reports at its end."""

    records: int
    records_per_s: float
    """Without the first five seconds of a longer run: the tool has no warm-up, and Java needs one."""
    p50_ms: float
    p99_ms: float


class KafkaServer:
    """A node with its data in one directory. A context manager."""

    def __init__(self, jars: Path, directory: Path) -> None:
        self._classes = f"{jars}/*"
        self._directory = directory
        self._port, controller = free_ports(2)
        directory.mkdir(parents=True)
        properties = directory / "server.properties"
        properties.write_text(
            _PROPERTIES.format(port=self._port, controller=controller, data=directory / "data")
        )
        identity = self._java("kafka.tools.StorageTool", "random-uuid").strip().splitlines()[-1]
        self._java("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(properties))
        self._process = ServerProcess(
            "Kafka",
            ["java", HEAP, "-cp", self._classes, "kafka.Kafka", str(properties)],
            output=directory / "kafka.log",
        )

    def __enter__(self) -> Self:
        self._process.start(self._ready, timeout_s=START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.stop()

    def _ready(self) -> bool:
        return "Kafka Server started" in self._process.output_tail()

    def create_topic(self, topic: str, partitions: int, **settings: object) -> None:
        """Create a topic; `settings` are its configuration, with underscores for dots."""
        words = ["--create", "--topic", topic, "--partitions", str(partitions)]
        for name, value in settings.items():
            words += ["--config", f"{name.replace('_', '.')}={value}"]
        self._java("org.apache.kafka.tools.TopicCommand", "--bootstrap-server", self.address, *words)

    def produce(self, topic: str, records: int, record_bytes: int, records_per_s: int = -1) -> Performance:
        """One run of the performance tool, acknowledged by all, which on one node is that node."""
        printed = self._java(
            "org.apache.kafka.tools.ProducerPerformance",
            *("--topic", topic, "--num-records", str(records), "--record-size", str(record_bytes)),
            *("--throughput", str(records_per_s), "--producer-props"),
            *(f"bootstrap.servers={self.address}", "acks=all", "linger.ms=5", "batch.size=131072"),
        )
        lines = [match for match in map(_LINE.search, printed.splitlines()) if match]
        if not lines:
            raise CannotMeasure(f"ProducerPerformance said nothing usable: {printed[-300:]}")
        told = lines[-1].groups()
        return Performance(int(told[0]), _steady(printed, float(told[1])), float(told[5]), float(told[7]))

    @property
    def pid(self) -> int | None:
        """The process id, or None while it does not run."""
        return self._process.pid

    @property
    def address(self) -> str:
        """Host and port of the listener."""
        return f"127.0.0.1:{self._port}"

    def _java(self, tool: str, *words: str) -> str:
        command = [
            "java",
            "-cp",
            self._classes,
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
            tool,
            *words,
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
            cwd=self._directory,
            env=os.environ,
        )
        if done.returncode:
            raise CannotMeasure(
                f"{tool.rpartition('.')[2]} ended with {done.returncode}: {done.stderr[-300:]}"
            )
        return done.stdout


def _steady(printed: str, overall: float) -> float:
    """The rate after the first line, which the tool prints after five seconds, or that of the whole run."""
    found = [match.groups() for match in map(_INTERVAL.match, printed.splitlines()) if match][1:]
    if not found:
        return overall
    records = sum(int(count) for count, _ in found)
    return max(overall, records / sum(int(count) / float(rate) for count, rate in found))
