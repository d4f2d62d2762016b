"""Parts that touch neither disk nor network: ids and checksums."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Iterator
from functools import partial

import crc32c

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variants
from benchmarks.harness.timing import variant
from forebay.kit import IdSource

__all__ = ["checksum", "ids"]

IDS = 500
"""Ids per reading of the clock."""
GB = 1e9
BLOCKS = {"64 KiB": 64 * 1024, "8 MiB": 8 * 1024 * 1024}


@suite.benchmark(
    "ids",
    "A name that sorts by time costs about as much as a random one.",
    Figure("ulid against uuid4", of="ulid", against="uuid4"),
    Figure("ulid against 128 seeded random bits as hex", of="ulid", against="random hex"),
    Figure("token against 128 seeded random bits as hex", of="token", against="random hex"),
)
def ids(bench: Bench) -> Iterator[Variants]:
    """The seeded generator asks the operating system for nothing, so it is the floor."""
    source, seeded = IdSource(), random.Random(1)
    makers: dict[str, Callable[[], object]] = {
        "uuid4": lambda: str(uuid.uuid4()),
        "random hex": lambda: f"{seeded.getrandbits(128):032x}",
        "ulid": source.ulid,
        "token": source.token,
    }

    def many(make: Callable[[], object]) -> int:
        for _ in range(IDS):
            make()
        return IDS

    yield {name: variant(partial(many, make), "ids/s") for name, make in makers.items()}


@suite.benchmark(
    "checksum",
    "Checking bytes is in the order of copying them.",
    *[
        Figure(
            f"time of crc32c against memcpy, {size}", f"crc32c {size}", f"memcpy {size}", measure=Measure.TIME
        )
        for size in BLOCKS
    ],
)
def checksum(bench: Bench) -> Iterator[Variants]:
    """Blocks that fit a cache, and blocks that do not."""

    def pair(size: int) -> tuple[Callable[[], float], Callable[[], float]]:
        data, place = os.urandom(size), memoryview(bytearray(size))

        def copy() -> float:
            place[:] = data
            return size / GB

        def check() -> float:
            crc32c.crc32c(data)
            return size / GB

        return copy, check

    variants = {}
    for name, size in BLOCKS.items():
        copy, check = pair(size)
        variants[f"memcpy {name}"] = variant(copy, "GB/s")
        variants[f"crc32c {name}"] = variant(check, "GB/s")
    yield variants
