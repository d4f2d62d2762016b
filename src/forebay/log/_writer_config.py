"""How a writer behaves, and the parts it is made of."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from forebay.coordination import Coordinator
from forebay.errors import UsageError
from forebay.formats.bytes_batch import Codec
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy
from forebay.log._tail_cache import TailCache
from forebay.log._writer_metrics import WriterMetrics
from forebay.storage import ObjectStore

__all__ = ["WriterConfig", "WriterParts"]

COMMIT_POLICY: Final = RetryPolicy(attempts_max=60, base_ms=10, cap_ms=1_000, deadline_ms=60_000)
UPLOAD_POLICY: Final = RetryPolicy(attempts_max=10, base_ms=50, cap_ms=2_000, deadline_ms=30_000)


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """How a writer behaves."""

    auto_create: bool = True
    """Whether appending to an unknown topic creates it."""
    codec: Codec = "none"
    """Compression of the records: none or zstd."""
    upload_deadline_ms: int = 60_000
    """Milliseconds after which an object that is not committed is uploaded again. Far below the grace of the
    vacuum, which takes objects that nothing refers to. At least 1."""
    commit: RetryPolicy = field(default=COMMIT_POLICY)
    """How often and how long a commit is tried against other writers and lost replies."""
    upload: RetryPolicy = field(default=UPLOAD_POLICY)
    """How often and how long an upload is tried."""
    idle_ms: int = 1_000
    """Milliseconds without an append after which a partition's last index entry is put. At least 1."""
    cached_partitions_max: int = 100_000
    """Partitions whose control record is kept in memory. At least 1."""

    def __post_init__(self) -> None:
        if min(self.upload_deadline_ms, self.idle_ms, self.cached_partitions_max) < 1:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(frozen=True, slots=True)
class WriterParts:
    """What the writer was given, handed on to its halves."""

    store: ObjectStore
    coordinator: Coordinator
    clock: Clock
    ids: IdSource
    randomness: random.Random
    config: WriterConfig
    metrics: WriterMetrics
    name: str
    tail_cache: TailCache | None
