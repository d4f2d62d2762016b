"""Settings of the claiming queue, with the draft's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from forebay.errors import UsageError
from forebay.formats.ingest_manifest import consumer_name
from forebay.ingest._paths import check_manifest_path, check_path
from forebay.kit.retry import RetryPolicy

__all__ = ["CollectorConfig", "IngestorConfig", "OrphanConfig"]

UNFLUSHED_BYTES_UNLIMITED: Final = (1 << 62) - 1
DATA_PREFIX: Final = "ingest"
MANIFEST_PATH: Final = "ingest/manifest.json"
GRACE_MS: Final = 600_000

_COMMIT = RetryPolicy(attempts_max=64, base_ms=10, cap_ms=1_000, deadline_ms=60_000)


@dataclass(frozen=True, slots=True)
class IngestorConfig:
    """When to flush, where to, and how much may wait."""

    data_path_prefix: str = DATA_PREFIX
    """Where the batches lie. Letters, digits and `. _ = -` between slashes."""
    manifest_path: str = MANIFEST_PATH
    """The producer manifest."""
    flush_interval_ms: int = 100
    """Milliseconds from the first entry of an open batch to its upload. 0: once ready tasks have run."""
    flush_size_bytes: int = 64 * 1024 * 1024
    """Bytes of entries at which an open batch is uploaded. Loose by the last call. At least 1."""
    max_unflushed_bytes: int = UNFLUSHED_BYTES_UNLIMITED
    """Bytes accepted and not durable yet from which on `ingest` waits. A single larger call goes in alone."""
    uploads_max: int = 4
    """Uploads under way at once. At least 1."""
    upload_age_max_ms: int = GRACE_MS // 2
    """Milliseconds since an upload began after which it is not enqueued any more but uploaded anew: half the
    grace period of the orphan collector, which may otherwise have deleted it."""
    manifest_bytes_max: int = 64 * 1024 * 1024
    """Bytes of the producer manifest from which on `QueueFull` is raised. At least 64."""
    commit: RetryPolicy = field(default=_COMMIT)
    """How often and how long a write of the manifest is tried."""

    def __post_init__(self) -> None:
        check_path("data_path_prefix", self.data_path_prefix)
        check_manifest_path(self.manifest_path)
        _at_least(self, 0, "flush_interval_ms")
        _at_least(self, 1, "flush_size_bytes", "max_unflushed_bytes", "uploads_max", "upload_age_max_ms")
        _at_least(self, 64, "manifest_bytes_max")


@dataclass(frozen=True, slots=True)
class CollectorConfig:
    """How claims are kept, and when to clean up."""

    manifest_path: str = MANIFEST_PATH
    """The producer manifest; the consumer manifest lies beside it."""
    heartbeat_timeout_ms: int = 30_000
    """Milliseconds without a heartbeat after which a claim may be taken over. Heartbeats come three times as
    often. At least 30."""
    done_cleanup_threshold: int = 100
    """Processed locations at which they and their objects are removed. At least 1."""
    missing: Literal["raise", "skip"] = "raise"
    """What to do about a batch whose object is gone: raise `BatchMissing`, or count it, log it and go on."""
    commit: RetryPolicy = field(default=_COMMIT)
    """How often and how long a write of a manifest is tried."""
    read: RetryPolicy = field(default=RetryPolicy(attempts_max=8))
    """How often and how long the read of a batch is tried."""

    def __post_init__(self) -> None:
        check_manifest_path(self.manifest_path)
        _at_least(self, 30, "heartbeat_timeout_ms")
        _at_least(self, 1, "done_cleanup_threshold")
        if self.missing not in ("raise", "skip"):
            raise UsageError(f"missing is {self.missing!r}", hint="it is 'raise' or 'skip'")

    @property
    def consumer_manifest_path(self) -> str:
        """Where claims and finished locations are kept."""
        return consumer_name(self.manifest_path)


@dataclass(frozen=True, slots=True)
class OrphanConfig:
    """Which uploads that nobody enqueued may be deleted."""

    data_path_prefix: str = DATA_PREFIX
    """Where the batches lie. Only direct children of it are looked at."""
    manifest_path: str = MANIFEST_PATH
    """The producer manifest; the consumer manifest lies beside it."""
    grace_ms: int = GRACE_MS
    """Milliseconds a batch must have been there, by its name and by the store. Twice `upload_age_max_ms`."""
    delete_keys_max: int = 500
    """Objects deleted at once; the manifests are looked at again before each time. At least 1."""

    def __post_init__(self) -> None:
        check_path("data_path_prefix", self.data_path_prefix)
        check_manifest_path(self.manifest_path)
        _at_least(self, 1, "grace_ms", "delete_keys_max")


def _at_least(config: object, lowest: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < lowest:
            raise UsageError(f"{name} is {value!r}", hint=f"it is a whole number, at least {lowest}")
