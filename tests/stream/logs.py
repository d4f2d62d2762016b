"""Local logs made for tests, and short ways to tier and read them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from forebay.formats.osiris_entry import decode_records
from forebay.kit.retry import RetryPolicy
from forebay.storage import ObjectStore
from forebay.stream import (
    BlockCache,
    ReaderConfig,
    Spec,
    StreamReader,
    StreamTier,
    StreamWriter,
    TierConfig,
    WriterConfig,
)

STREAM = "__s_1700000000000000000"
HASTY = RetryPolicy(attempts_max=3, base_ms=0, cap_ms=0, deadline_ms=60_000)


class HandClock:
    """A clock that stands still until it is set."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.ms = now_ms

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000

    async def sleep(self, seconds: float) -> None:
        self.ms += int(seconds * 1000)


def write_log(
    path: Path,
    chunks: int,
    *,
    epoch: int = 1,
    clock: HandClock | None = None,
    step_ms: int = 10,
    per_segment: int = 5,
    tag: str = "r",
) -> None:
    """Append chunks of one to three records; a record says its offset."""
    clock = clock or HandClock()
    config = WriterConfig(segment_chunks_max=per_segment)
    with StreamWriter(path, epoch=epoch, clock=clock, config=config) as writer:
        for _ in range(chunks):
            first = writer.next_offset
            writer.append([f"{tag}{first + number}".encode() for number in range(1 + first % 3)])
            clock.ms += step_ms
        writer.commit()


def tier_of(path: Path, store: ObjectStore, **named: Any) -> StreamTier:
    config = TierConfig(**{"fragment_bytes": 100, "branching": 3, "retry": HASTY} | named.pop("config", {}))
    clock = named.pop("clock", None) or HandClock()
    named.setdefault("stream", STREAM)
    named.setdefault("randomness", random.Random(1))
    return StreamTier(path, store, config=config, clock=clock, **named)


def reader_of(store: ObjectStore, local: Path | None = None, **named: Any) -> StreamReader:
    config = ReaderConfig(**{"block_bytes": 4096, "retry": HASTY} | named.pop("config", {}))
    named.setdefault("clock", HandClock())
    named.setdefault("randomness", random.Random(2))
    named.setdefault("cache", BlockCache(1 << 20))
    return StreamReader(STREAM, store, local=local, config=config, **named)


async def read_all(reader: StreamReader, spec: Spec | int = Spec("first")) -> list[bytes]:  # noqa: B008
    found: list[bytes] = []
    async for chunk in reader.chunks(spec):
        header = chunk.header
        records = decode_records(chunk.data, entries=header.entries, records=header.records)
        found += [bytes(record) for record in records]
    return found


def expected(first: int, end: int, tag: str = "r") -> list[bytes]:
    return [f"{tag}{offset}".encode() for offset in range(first, end)]
