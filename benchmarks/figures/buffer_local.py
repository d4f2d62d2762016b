"""A queue on local files from `produce` to durable, against writing and syncing the same bytes.

The raw side writes objects of the same size, each created, written, synced, renamed and its directory synced.
Ours does that too, and beside it encodes the records and rewrites the manifest.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from benchmarks.figures._disk import RawReplace
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Variants, at_least
from benchmarks.harness.timing import async_variant, variant
from forebay.buffer import BufferConfig, Producer
from forebay.storage import open_store

__all__ = ["buffer_local"]

RECORD_BYTES = 1024
CALL_RECORDS = 100
BATCH_CALLS = 80
BATCH_MIB = BATCH_CALLS * CALL_RECORDS * RECORD_BYTES // (1024 * 1024)
STEP_BATCHES = 12


@suite.benchmark(
    "buffer-local",
    "A queue of 1 KiB records on local files keeps most of the raw rate of the disk.",
    Figure("against write, fsync, rename, fsync", of="queue", against="raw objects", target=at_least(0.6)),
)
def buffer_local(bench: Bench) -> Iterator[Variants]:
    """Batches of about 8 MiB on both sides."""
    call = [os.urandom(RECORD_BYTES) for _ in range(CALL_RECORDS)]
    size = BATCH_CALLS * (CALL_RECORDS * (RECORD_BYTES + 4) + 16)
    raw = RawReplace(bench.directory / "raw", "object", os.urandom(size))

    def raw_step() -> int:
        return raw.step() * BATCH_MIB

    with asyncio.Runner() as runner:

        async def make() -> Producer:
            config = BufferConfig(flush_size_bytes=size, flush_interval_ms=1_000)
            return Producer(config, store=open_store(bench.directory / "store"))

        producer = runner.run(make())

        async def queue() -> int:
            for _ in range(STEP_BATCHES * BATCH_CALLS):
                await producer.produce(call)
            await producer.flush()
            # The raw side frees what it replaces; nothing here would, and the disk would fill.
            for path in (bench.directory / "store" / "ingest").glob("*.batch"):
                path.unlink()
            return STEP_BATCHES * BATCH_MIB

        yield {
            "raw objects": variant(raw_step, "MiB/s"),
            "queue": async_variant(runner, queue, "MiB/s"),
        }
        runner.run(producer.close())
