"""A real RabbitMQ, its own client, and the sidecar beside it, all running at once.

The broker's retention removes local segments while it is published to; it is restarted in the middle, and
killed once. The bucket has everything that it ever delivered: each record at its offset, hash for hash.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stream.rabbit import RabbitServer

from forebay.formats.osiris_entry import sub_batch
from forebay.kit.clock import SystemClock
from forebay.stream import StreamWriter, WriterConfig
from forebay.testing.pytest_plugin import cannot_be_had
from forebay.testing.servers import ServerUnavailable

STREAM = "live"
SEGMENT_BYTES = 60_000
KEPT_BYTES = 200_000
"""What the broker keeps locally; rounds are smaller, and each is tiered before the next begins."""
PATIENCE_S = 60.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Delivered = list[tuple[int, str]]


@pytest.fixture
def rabbit(tmp_path: Path) -> Iterator[RabbitServer]:
    try:
        server = RabbitServer(tmp_path / "rabbit")
    except ServerUnavailable as error:
        cannot_be_had(error)
    with server:
        yield server


def forebay(*words: object) -> list[dict[str, Any]]:
    """Run a command as a user would; its JSON lines."""
    command = [sys.executable, "-m", "forebay.cli", "stream", *map(str, words), "--output", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@contextlib.asynccontextmanager
async def sidecar(rabbit: RabbitServer, bucket: Path) -> AsyncIterator[SidecarProcess]:
    """`forebay stream tier` in a process of its own, following the broker's directory."""
    words = ["tier", rabbit.streams, "--store", bucket, "--fragment", "20kB", "--fragment-age", "100ms"]
    words += ["--root-interval", "0s"]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "forebay.cli", "stream", *map(str, words), "--output", "json"],
        stdout=asyncio.subprocess.PIPE,
    )
    follower = SidecarProcess(process)
    reading = asyncio.create_task(follower.listen())
    try:
        yield follower
    finally:
        process.terminate()
        await process.wait()
        await reading


class SidecarProcess:
    """What the sidecar has told so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._news = asyncio.Condition()
        self.reports: list[dict[str, Any]] = []

    async def listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            async with self._news:
                self.reports.append(json.loads(line))
                self._news.notify_all()

    async def reached(self, offset: int) -> None:
        """Wait until a root holds everything up to `offset`."""

        def there() -> bool:
            assert self._process.returncode is None
            return any(report["next_offset"] > offset for report in self.reports)

        async with self._news, asyncio.timeout(PATIENCE_S):
            await self._news.wait_for(there)


class Client:
    """A producer and a consumer of the live broker."""

    def __init__(self, rabbit: RabbitServer) -> None:
        self._rabbit = rabbit
        self.published: list[str] = []
        self.delivered: Delivered = []
        self._arrived = asyncio.Event()

    def _parts(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self._rabbit.port, "username": "guest", "password": "guest"}

    async def create(self, kept_bytes: int = KEPT_BYTES) -> None:
        from rstream import Producer

        arguments = {"stream-max-segment-size-bytes": SEGMENT_BYTES, "max-length-bytes": kept_bytes}
        async with Producer(**self._parts()) as producer:
            await producer.create_stream(STREAM, arguments=arguments)

    async def available(self) -> None:
        """Wait until the stream has a leader: a broker takes connections before its streams are up."""
        from rstream import Producer
        from rstream.exceptions import LeaderNotAvailable, ServerError

        async with Producer(**self._parts()) as producer, asyncio.timeout(PATIENCE_S):
            client = await producer.default_client
            while True:
                with contextlib.suppress(LeaderNotAvailable, ServerError):
                    await client.query_leader_and_replicas(STREAM)
                    return
                await asyncio.sleep(0.05)

    async def round(self, draw: random.Random, records: int) -> None:
        """Publish batches, sub-batches plain and compressed, and single records; read what comes out."""
        from rstream import CompressionType, Producer

        bodies = [draw.randbytes(draw.choice((1, 20, 300, 1500))) for _ in range(records)]
        async with Producer(**self._parts()) as producer:
            at = 0
            while at < len(bodies):
                batch = bodies[at : at + draw.randint(1, 30)]
                at += len(batch)
                way = draw.randrange(4)
                if way == 0:
                    codec = draw.choice((CompressionType.No, CompressionType.Gzip))
                    await producer.send_sub_entry(STREAM, batch, compression_type=codec)
                elif way == 1:
                    await producer.send_wait(STREAM, batch[0])
                    await producer.send_batch(STREAM, batch[1:])
                else:
                    await producer.send_batch(STREAM, batch)
            # It waits for its confirmation, and whatever was sent before it is in the log by then.
            bodies.append(b"the end of a round")
            await producer.send_wait(STREAM, bodies[-1], timeout=30)
        self.published += [_digest(body) for body in bodies]
        await self._consume()

    async def _consume(self) -> None:
        """Everything from where the last consumer ended to what is published now."""
        from rstream import Consumer, ConsumerOffsetSpecification, OffsetType

        start = self.delivered[-1][0] + 1 if self.delivered else 0
        self._arrived.clear()
        consumer = Consumer(**self._parts())
        await consumer.start()
        try:
            spec = ConsumerOffsetSpecification(OffsetType.OFFSET, start)
            await consumer.subscribe(STREAM, self._take, offset_specification=spec)
            await asyncio.wait_for(self._arrived.wait(), PATIENCE_S)
            await consumer.store_offset(STREAM, "reader", self.delivered[-1][0])
        finally:
            await consumer.close()

    def _take(self, message: Any, context: Any) -> None:
        if not self.delivered or context.offset > self.delivered[-1][0]:
            self.delivered.append((context.offset, _digest(bytes(message))))
        if len(self.delivered) >= len(self.published):
            self._arrived.set()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _records(documents: list[dict[str, Any]]) -> Delivered:
    return [(each["offset"], _digest(base64.b64decode(each["data"]))) for each in documents]


async def test_everything_a_live_broker_delivered_is_in_the_bucket(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    draw = random.Random(5)
    client = Client(rabbit)
    await client.create()
    async with sidecar(rabbit, bucket) as follower:
        for number in range(6):
            if number in (2, 4):
                await asyncio.to_thread(rabbit.stop if number == 2 else rabbit.kill)
                await asyncio.to_thread(rabbit.start)
                await client.available()
            await client.round(draw, 250)
            await follower.reached(client.delivered[-1][0])
    assert sorted(digest for _, digest in client.delivered) == sorted(client.published)

    [directory] = rabbit.streams.iterdir()
    local = sorted(directory.glob("*.segment"))
    assert int(local[0].stem) > 0  # The broker has let go of its oldest segments.
    assert follower.reports[-1]["error"] is None

    assert _records(forebay("read", STREAM, "--store", bucket)) == client.delivered
    both = forebay("read", STREAM, "--store", bucket, "--local", directory)
    assert _records(both) == client.delivered
    [facts] = forebay("stats", STREAM, "--store", bucket)
    assert facts["epoch"] > 2
    assert facts["gaps"] == []
    [report] = forebay("verify", STREAM, "--store", bucket)
    assert (report["ok"], report["orphans"]) == (True, [])
    _check_restored(bucket, local, tmp_path / "restored")


def _check_restored(bucket: Path, local: list[Path], where: Path) -> None:
    """The files come back as the broker wrote them: what it still has is the same, byte for byte."""
    forebay("restore", STREAM, where, "--store", bucket)
    for segment in local:
        for suffix in (".segment", ".index"):
            path = segment.with_suffix(suffix)
            restored = (where / path.name).read_bytes()
            assert path.read_bytes().startswith(restored)
    assert len(list(where.glob("*.segment"))) > len(local)


async def test_a_broker_goes_on_with_files_that_were_restored_and_written_here(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    """Its files come back from the bucket, we write on in them, and it delivers all and writes on, too."""
    client, draw = Client(rabbit), random.Random(6)
    await client.create(kept_bytes=100_000_000)
    await client.round(draw, 300)
    await asyncio.to_thread(rabbit.stop)
    [directory] = rabbit.streams.iterdir()
    forebay("tier", rabbit.streams, "--store", tmp_path / "bucket", "--once", "--fragment", "20kB")
    shutil.rmtree(directory)
    forebay("restore", STREAM, directory, "--store", tmp_path / "bucket")
    before, ours = len(client.published), [_digest(body) for body in _write_on(directory, draw)]
    client.published += ours
    await asyncio.to_thread(rabbit.start)
    await client.available()
    client.delivered = []
    await client.round(draw, 300)
    digests = [digest for _, digest in client.delivered]
    assert digests[before : before + len(ours)] == ours
    assert sorted(digests) == sorted(client.published)
    forebay("tier", rabbit.streams, "--store", tmp_path / "bucket", "--once")
    assert _records(forebay("read", STREAM, "--store", tmp_path / "bucket")) == client.delivered


def _write_on(directory: Path, draw: random.Random) -> list[bytes]:
    """Chunks of all kinds, over a roll: entries, sub-batches, a producer's sequence, a consumer's offset."""
    config = WriterConfig(segment_bytes_max=SEGMENT_BYTES)
    written: list[bytes] = []
    with StreamWriter(directory, epoch=1, clock=SystemClock(), config=config) as writer:
        for number in range(60):
            bodies = [draw.randbytes(draw.choice((1, 20, 1500))) for _ in range(draw.randint(1, 9))]
            if number % 3 == 0:
                writer.append([bodies[0], sub_batch(bodies[1:] or [b"x"], number % 2)])
                bodies = bodies if len(bodies) > 1 else [*bodies, b"x"]
            else:
                writer.append(bodies, producer=(b"ours", number))
            written += bodies
            writer.store_offsets({b"reader": writer.next_offset - 1})
        writer.commit()
    return written
