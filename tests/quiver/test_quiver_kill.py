"""Real processes, killed: what is durable comes out, and what was acknowledged stays away."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from tests.quiver.harness import batch, drain, numbers

from forebay.quiver import Quiver, QuiverConfig
from forebay.testing.kill import Child, Report

QUICK = QuiverConfig(
    segment_bytes=20_000,
    segment_open_ms=20,
    wal_bytes_max=1 << 20,
    wal_file_bytes=65_536,
    size_cap_bytes=1 << 26,
    ack_file_bytes=8_192,
    maintenance_interval_ms=20,
)
KILLS = int(os.environ.get("FOREBAY_KILLS", "8"))


async def work(report: Report, path: str, first: int) -> None:
    """Ingest and consume until killed. Names `n` for batches, `-n` for batches whose ack returned."""
    async with Quiver(path, QUICK) as quiver:
        await quiver.register("a")
        await quiver.register("b")

        async def consume() -> None:
            while (delivery := await quiver.next("b")) is not None:
                found = numbers(delivery)
                for number in found:
                    report.attempt(-number)
                if await delivery.ack():
                    for number in found:
                        report.ack(-number)

        consumer = asyncio.create_task(consume())
        number = first
        while not consumer.done():
            group = range(number, number + 8)
            for each in group:
                report.attempt(each)
            await asyncio.gather(*(quiver.ingest(batch(each, 30)) for each in group))
            for each in group:
                report.ack(each)
            number += 8
            report.mark("round")


async def test_killed_at_random_loses_nothing_and_repeats_nothing_acknowledged(tmp_path: Path) -> None:
    path, rng = tmp_path / "q", random.Random(11)
    durable: set[int] = set()
    resolved: set[int] = set()
    attempted: set[int] = set()
    perhaps: set[int] = set()
    for life in range(KILLS):
        first = 1 + life * 1_000_000
        with Child(work, arguments={"path": str(path), "first": first}) as child:
            await asyncio.to_thread(child.wait_for, "round", count=rng.randint(1, 12))
            child.kill()
        durable |= {each for each in child.acknowledged if each > 0}
        resolved |= {-each for each in child.acknowledged if each < 0}
        attempted |= {each for each in child.attempted if each > 0}
        perhaps |= {-each for each in child.attempted if each < 0}
    async with Quiver(path, QUICK) as quiver:
        assert quiver.report.is_clean
        await quiver.register("a")
        await quiver.register("b")
        await quiver.flush()
        everything = await drain(quiver, "a", timeout_s=0.3)
        rest = await drain(quiver, "b", timeout_s=0.3)
    assert durable <= set(everything) <= attempted
    assert len(everything) == len(set(everything)), "a batch is in two segments"
    assert durable - perhaps <= set(rest)
    assert not set(rest) & resolved, "delivered again after its acknowledgement was durable"
