"""Stores on a simulated disk in a simulated world, and batches that can be told apart."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pyarrow as pa
from tests.quiver.sim_disk import SimDisk

from forebay.quiver import Delivery, Quiver, QuiverConfig
from forebay.testing.world import World

T = TypeVar("T")

SMALL = QuiverConfig(
    segment_bytes=4_096,
    segment_open_ms=50,
    wal_bytes_max=65_536,
    wal_file_bytes=8_192,
    size_cap_bytes=1 << 20,
    ack_file_bytes=4_096,
    checkpoint_interval_ms=1_000,
    maintenance_interval_ms=100,
    lease_ms=5_000,
    retry_base_ms=100,
    retry_cap_ms=1_000,
    dead_letter_bytes_max=65_536,
)


def batch(number: int, rows: int = 10, *, plain: bool = False) -> pa.RecordBatch:
    """`rows` rows that all carry `number`. `plain`: without a dictionary."""
    words = pa.array([f"word {row % 3}" for row in range(rows)])
    return pa.record_batch(
        {
            "timestamp": pa.array([number * 1_000 + row for row in range(rows)], pa.int64()),
            "number": pa.array([number] * rows, pa.int64()),
            "word": words if plain else words.dictionary_encode(),
        }
    )


def numbers(delivery: Delivery) -> list[int]:
    """The numbers of the batches in a segment, once each, in order."""
    return list(dict.fromkeys(delivery.view.table()["number"].to_pylist()))


def simulate(
    scenario: Callable[[World, SimDisk], Awaitable[T]], *, seed: int = 0, disk: SimDisk | None = None
) -> T:
    """Run `scenario(world, disk)` on virtual time."""

    async def main(world: World) -> T:
        own = disk or SimDisk(random.Random(seed))
        own.clock = world.clock()
        return await scenario(world, own)

    return World(seed, seconds_max=1_000_000).run(main)


def store(world: World, disk: SimDisk, config: QuiverConfig = SMALL, **named: object) -> Quiver:
    """A store of this world."""
    return Quiver(disk, config, clock=world.clock(), randomness=world.randomness("quiver"), **named)  # type: ignore[arg-type]


async def drain(quiver: Quiver, name: str, *, timeout_s: float = 1.0) -> list[int]:
    """Read and acknowledge everything there is."""
    found: list[int] = []
    while (delivery := await quiver.next(name, timeout_s)) is not None:
        found += numbers(delivery)
        await delivery.ack()
    return found
