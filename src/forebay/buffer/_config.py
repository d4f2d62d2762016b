"""Everything that can be set about a queue, for producers, consumers, readers and garbage collection alike.

One class for all of them: the paths and the grace period must agree on both sides, and a queue that is
configured in one place cannot disagree with itself. `ProducerConfig` and `ConsumerConfig` are the names that
the specification uses; they are the same class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from forebay.buffer._names import batch_time_ms, check_path
from forebay.errors import UsageError
from forebay.formats.buffer_batch import COMPRESSIONS, Compression
from forebay.kit.retry import RetryPolicy

__all__ = ["BufferConfig", "ConsumerConfig", "ProducerConfig"]

MIB = 1024 * 1024
READ_RETRY = RetryPolicy(attempts_max=5, base_ms=50, cap_ms=2_000)
MISSING_BATCH_RETRY = RetryPolicy(attempts_max=3, base_ms=100, cap_ms=1_000)
UPLOAD_RETRY = RetryPolicy(attempts_max=8, base_ms=50, cap_ms=5_000, deadline_ms=60_000)
COMMIT_RETRY = RetryPolicy(attempts_max=200, base_ms=30, cap_ms=2_000, deadline_ms=60_000)


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """A queue: where it lies and how it is treated."""

    url: str = ""
    """The store, as `open_store` takes it. Not needed where a store is handed in."""
    data_path_prefix: str = "ingest"
    """Where batches are uploaded. The same for producers and consumers."""
    manifest_path: str = "ingest/manifest"
    """The one object that orders the batches. The same for producers and consumers."""

    flush_interval_ms: int = 100
    """Milliseconds from the first input of an open batch to its upload. At least 0."""
    flush_size_bytes: int = 64 * MIB
    """Bytes at which an open batch is uploaded early, framing included. A loose bound. At least 1, at most
    `batch_bytes_max`."""
    max_buffered_inputs: int = 1000
    """Calls of `produce` that are not durable yet; at the bound further ones wait. At least 1."""
    max_buffered_bytes: int = 256 * MIB
    """Bytes that are not durable yet, framing included; also the largest single call. At least 1, and at most
    `batch_bytes_max`, since one batch may hold them all."""
    batch_compression: Compression = "none"
    """Compression of batches: `none` or `zstd` (level 3)."""
    uploads_max: int = 4
    """Uploads under way at once. At least 1."""
    commit_batches_max: int = 64
    """Most batches in one compare-and-set. At least 1."""
    commit_retry: RetryPolicy = COMMIT_RETRY
    """Attempts, waits and time of one commit before its batches are given up."""
    broker_socket: str = ""
    """Unix socket of a commit broker of this machine, which then commits for the producer as long as it is
    there. Empty: the producer commits itself."""
    upload_retry: RetryPolicy = UPLOAD_RETRY
    """Attempts, waits and time of one upload before its batch is given up."""
    upload_age_ms_max: int | None = None
    """Milliseconds after which an upload is not enqueued any more but uploaded under a new name, so that
    garbage collection cannot take what is about to be enqueued. At most, and by default, half of the grace
    period."""
    on_unknown: Literal["fail", "append_again"] = "fail"
    """What to do with a batch whose entry may have been consumed already: report `CommitUnknown`, or enqueue
    it once more, which is at least once."""
    manifest_append_bytes_max: int = 64 * MIB
    """Manifest size above which producers get `QueueFull`. At least 1,024."""
    merge_metadata: bool = False
    """Make one metadata item of neighbouring calls with equal payload and time. Loses call boundaries."""
    entry_extension: bool = False
    """Write size, record count, checksum, producer and number of each batch into the tail of its entry, where
    other readers skip them. Without it manifests are the same bytes as everybody else's."""

    dequeue_acks: int = 100
    """Acknowledgements after which the manifest is rewritten without what they cover. At least 1."""
    fence_check_interval_ms: int = 0
    """Milliseconds for which a check that nobody took over holds. 0 checks at every operation."""
    read_ahead_batches: int = 4
    """Batches fetched before they are asked for. 0 fetches none."""
    read_ahead_bytes: int = 64 * MIB
    """Bytes of fetched batches that wait, as far as sizes are known or can be guessed. At least 1."""
    missing_batch: Literal["raise", "skip"] = "raise"
    """What to do where the object of a batch is gone: raise `BatchMissing`, or count it and go on."""
    missing_batch_retry: RetryPolicy = MISSING_BATCH_RETRY
    """How long to look for it before it counts as gone."""
    read_retry: RetryPolicy = READ_RETRY
    """Attempts at a read or an acknowledgement that cannot reach the store, or lost a race."""
    duplicates: Literal["deliver", "skip"] = "deliver"
    """What to do with a batch whose location was seen before: hand it out marked, or count it and go on."""
    duplicate_window: int = 1_000
    """Locations remembered for that. At least 0."""
    allow_gap: bool = False
    """Whether a consumer may resume although batches after its position are gone."""
    batch_bytes_max: int = 1024 * MIB
    """Largest batch object that is read, before and after decompression. At least 1. Producers make none that
    is larger, so a lower bound asks for lower ones of `flush_size_bytes` and `max_buffered_bytes`."""
    manifest_bytes_max: int = 1024 * MIB
    """Largest manifest that is read. At least 1,024."""

    gc_enabled: bool = True
    """Whether a consumer collects garbage while it runs."""
    gc_interval_ms: int = 300_000
    """Milliseconds between two collections. At least 1."""
    gc_grace_period_ms: int = 600_000
    """Age in milliseconds from which on an unreferenced batch may be deleted. At least 0."""
    gc_go_names: bool = False
    """Also collect batches of the Go producer, by the store's time."""
    gc_delete_keys: int = 1_000
    """Keys deleted per request; the manifest is read again before each. 1 to 1,000."""

    @property
    def upload_age_s_max(self) -> float:
        """Seconds after which an upload is too old to be enqueued. No bound without a grace period."""
        if self.upload_age_ms_max is not None:
            return self.upload_age_ms_max / 1000
        return self.gc_grace_period_ms / 2000 or math.inf

    def __post_init__(self) -> None:
        check_path(self.data_path_prefix, "data_path_prefix")
        check_path(self.manifest_path, "manifest_path")
        if self.batch_compression not in COMPRESSIONS:
            raise UsageError(
                f"batch_compression {self.batch_compression!r}", hint=f"one of: {', '.join(COMPRESSIONS)}"
            )
        if batch_time_ms(self.manifest_path.rpartition("/")[2]) is not None:
            raise UsageError(
                f"manifest_path {self.manifest_path!r} is named like a batch",
                hint="garbage collection would take it for one",
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{name} is {value!r}", hint=f"it is a whole number, at least {least}")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint=f"one of: {', '.join(values)}")
        for name in ("flush_size_bytes", "max_buffered_bytes"):
            if getattr(self, name) > self.batch_bytes_max:
                raise UsageError(
                    f"{name} is {getattr(self, name):,}, batch_bytes_max {self.batch_bytes_max:,}",
                    hint=f"a batch could become larger than consumers read: lower {name}",
                )
        if self.upload_age_ms_max is not None and 2 * self.upload_age_ms_max > self.gc_grace_period_ms:
            raise UsageError(
                f"upload_age_ms_max is {self.upload_age_ms_max}, the grace period {self.gc_grace_period_ms}",
                hint="an upload may wait at most half of the grace period of garbage collection",
            )


_LEAST = {
    "flush_interval_ms": 0,
    "flush_size_bytes": 1,
    "max_buffered_inputs": 1,
    "max_buffered_bytes": 1,
    "uploads_max": 1,
    "commit_batches_max": 1,
    "manifest_append_bytes_max": 1024,
    "dequeue_acks": 1,
    "fence_check_interval_ms": 0,
    "read_ahead_batches": 0,
    "read_ahead_bytes": 1,
    "duplicate_window": 0,
    "batch_bytes_max": 1,
    "manifest_bytes_max": 1024,
    "gc_interval_ms": 1,
    "gc_grace_period_ms": 0,
    "gc_delete_keys": 1,
}
_CHOICES = {
    "on_unknown": ("fail", "append_again"),
    "missing_batch": ("raise", "skip"),
    "duplicates": ("deliver", "skip"),
}

ProducerConfig: TypeAlias = BufferConfig
ConsumerConfig: TypeAlias = BufferConfig
