"""The broker beside Apache Kafka: 1 KiB records, 4 partitions, acks = all, all on the same cores.

Kafka runs its own `ProducerPerformance`; ours is `forebay.client` in one process against `forebay serve` on
a directory, with frames in msgpack. Every turn is one run of a fixed number of records.

Three settings, since they promise different things. Kafka by default acknowledges what is in the page cache.
With `flush.messages=1` it syncs before it acknowledges, which is what ours always does. Ours syncs the object
that holds the records and the commit that makes them visible.

Kafka's tool starts anew for every turn and has no warm-up. Flat out, its first five seconds are left out; its
percentiles have them in, and ours, from a process that stays up, have nothing of the kind: read the paced
figures with that in mind.

Paced runs offer 20 MB/s; what counts is the 99th percentile from a record's due time to its acknowledgement,
as its inverse, so that higher is better like every rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, CannotMeasure, Figure, Measure, Sample, Variant, Variants, at_least
from benchmarks.peers.kafka import KafkaServer, kafka_jars
from forebay.testing._servers.process import ServerProcess

__all__ = ["broker_beside_kafka"]

RECORD_BYTES = 1024
PARTITIONS = 4
RECORDS = 600_000
"""Of one flat-out turn: 614 MB."""
WARM_UP_RECORDS = 50_000
PACED_BYTES_PER_S = 20_000_000
PACED_S, PACED_WARM_UP_S = 15, 3
"""Seconds of a paced turn, and of its warm-up."""
TURN_S = 0.2
"""What a turn asks for at least; warm-ups ask for a fraction of it."""
MB = 1_000_000
P99 = "p99 of a second"
START_TIMEOUT_S = 120


class _Ours:
    """A broker and a client, each a process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._data = directory / "data"
        self._broker = ServerProcess(
            "forebay serve",
            [
                *(sys.executable, "-m", "forebay.cli", "serve", "--data", str(self._data)),
                *("--port", "0", "--output", "json", "--batch-max-delay-ms", "5"),
            ],
            output=directory / "serve.log",
        )
        self._log = directory / "serve.log"
        self.last: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._broker.start(lambda: b"\n" in self._log.read_bytes(), timeout_s=START_TIMEOUT_S)
        url = json.loads(self._log.read_text().splitlines()[0])["url"]
        program = Path(__file__).resolve().parent.parent / "peers" / "http_producer.py"
        self._client = subprocess.Popen(
            [sys.executable, str(program), url, "kafka-peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        try:
            self._client.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._client.kill()
            self._client.wait()
        self._broker.stop()

    def produce(self, records: int, records_per_s: float = 0.0) -> dict[str, Any]:
        assert self._client.stdin is not None and self._client.stdout is not None
        self._client.stdin.write(json.dumps({"records": records, "records_per_s": records_per_s}) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise CannotMeasure("our client ended; see its messages above")
        self.last = json.loads(line)
        for path in (self._data / "llog" / "wal-shared").iterdir():
            path.unlink()  # Gigabytes of benchmark data must not fill the disk. Not measured.
        return self.last


def _count(seconds: float) -> int:
    return RECORDS if seconds >= TURN_S else WARM_UP_RECORDS


def _paced_s(seconds: float) -> int:
    return PACED_S if seconds >= TURN_S else PACED_WARM_UP_S


@suite.benchmark(
    "broker-kafka",
    "As durable as Kafka with fsync, at twice its rate; more durable than Kafka's default, at its rate.",
    Figure("flat out, Kafka syncing", of="ours", against="Kafka, fsync", target=at_least(2)),
    Figure("flat out, Kafka's default", of="ours", against="Kafka, default", target=at_least(1)),
    Figure("p99 at 20 MB/s, Kafka syncing", of="ours, paced", against="Kafka, fsync, paced"),
    Figure("p99 at 20 MB/s, Kafka's default", of="ours, paced", against="Kafka, default, paced"),
    Figure("client CPU per record", of="our client", measure=Measure.PLAIN),
    jobs=True,
)
def broker_beside_kafka(bench: Bench) -> Iterator[Variants]:
    """One node and one broker, both up all the time; turns one after the other."""
    jars = kafka_jars(bench.say)
    paced_records = PACED_BYTES_PER_S // RECORD_BYTES
    bench.say("starting Kafka and a broker")
    with KafkaServer(jars, bench.directory / "kafka") as kafka, _Ours(bench.directory / "ours") as ours:
        # Kept small: a full run sends a hundred gigabytes.
        kept = {"retention_bytes": 256 << 20, "segment_bytes": 128 << 20}
        kafka.create_topic("plain", PARTITIONS, **kept)
        kafka.create_topic("synced", PARTITIONS, flush_messages=1, **kept)

        def flat_kafka(topic: str) -> Variant:
            def run(seconds: float) -> Sample:
                done = kafka.produce(topic, _count(seconds), RECORD_BYTES)
                return Sample(done.records_per_s * RECORD_BYTES / MB)

            return Variant(run, "MB/s")

        def paced_kafka(topic: str) -> Variant:
            def run(seconds: float) -> Sample:
                done = kafka.produce(topic, paced_records * _paced_s(seconds), RECORD_BYTES, paced_records)
                return Sample(1000 / max(done.p99_ms, 1.0))

            return Variant(run, P99)

        def flat(seconds: float) -> Sample:
            done = ours.produce(_count(seconds))
            return Sample(done["records_per_s"] * RECORD_BYTES / MB, cpu_us=done["cpu_us_per_record"])

        def paced(seconds: float) -> Sample:
            done = ours.produce(paced_records * _paced_s(seconds), paced_records)
            return Sample(1000 / max(done["p99_ms"], 1.0))

        yield {
            "ours": Variant(flat, "MB/s"),
            "Kafka, fsync": flat_kafka("synced"),
            "Kafka, default": flat_kafka("plain"),
            "ours, paced": Variant(paced, P99),
            "Kafka, fsync, paced": paced_kafka("synced"),
            "Kafka, default, paced": paced_kafka("plain"),
            "our client": Variant(lambda _: Sample(ours.last["cpu_us_per_record"]), "us per record"),
        }
