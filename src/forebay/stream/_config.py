"""What can be chosen, each with its range."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.errors import UsageError
from forebay.kit.retry import RetryPolicy

__all__ = ["ReaderConfig", "RetentionPolicy", "TierConfig"]

FRAGMENT_BYTES_DEFAULT = 64 * 1024 * 1024
BRANCHING_DEFAULT = 1024


def _patient() -> RetryPolicy:
    return RetryPolicy(attempts_max=12, base_ms=20, cap_ms=5_000, deadline_ms=60_000)


def _check(config: object, name: str, least: int, most: int | None = None) -> None:
    value = getattr(config, name)
    if value < least or (most is not None and value > most):
        bounds = f"at least {least:,}" if most is None else f"{least:,} to {most:,}"
        raise UsageError(f"{name} is {value:,}, not {bounds}", hint=f"choose {bounds}")


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What may be removed from the old end of a stream. Both None: nothing."""

    max_age_ms: int | None = None
    """Milliseconds after which a fragment goes, counted from its last chunk. At least 1."""
    max_bytes: int | None = None
    """Bytes of chunks above which the oldest fragments go; the newest always stays. At least 1."""

    def __post_init__(self) -> None:
        if any(value is not None and value < 1 for value in (self.max_age_ms, self.max_bytes)):
            raise UsageError(f"not a usable retention: {self}", hint="leave out what has no limit")

    @property
    def unlimited(self) -> bool:
        """Whether nothing is ever removed."""
        return self.max_age_ms is None and self.max_bytes is None


@dataclass(frozen=True, slots=True)
class TierConfig:
    """How a stream gets into the bucket."""

    fragment_bytes: int = FRAGMENT_BYTES_DEFAULT
    """Bytes of chunks from which on a fragment is cut. 1 to 1 GiB, default 64 MiB."""
    fragment_age_ms: int = 10_000
    """Milliseconds after which the first chunk of an open fragment makes it be cut. At least 0."""
    branching: int = BRANCHING_DEFAULT
    """Entries of a group, M of the tree. 2 to 65,536, default 1,024."""
    uploads_max: int = 4
    """Fragments of a stream on their way at once, of each a megabyte in memory. 1 to 64. A sidecar has at
    most four times as many on their way for all its streams."""
    changes_max: int = 10
    """Fragments that make a new root due at once. At least 1."""
    root_interval_ms: int = 5_000
    """Milliseconds from the first change to the new root that holds it. At least 0."""
    poll_interval_ms: int = 500
    """Milliseconds between two looks at the local files. At least 1."""
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    """What the remote tier may forget. Default nothing."""
    retry: RetryPolicy = field(default_factory=_patient)
    """How failed requests are repeated."""
    request_timeout_ms: int = 45_000
    """Milliseconds that one attempt of a request may take before it is given up and repeated. At least 1."""
    lag_bytes_alarm: int = 4 * 1024**3
    """Bytes not yet uploaded from which on the tier reports itself as degraded. At least 1."""
    lag_ms_alarm: int = 300_000
    """Age of the oldest chunk not yet uploaded, in milliseconds, from which on it does. At least 1."""

    def __post_init__(self) -> None:
        _check(self, "fragment_bytes", 1, 1 << 30)
        _check(self, "branching", 2, 65_536)
        _check(self, "uploads_max", 1, 64)
        for name in ("changes_max", "poll_interval_ms", "request_timeout_ms"):
            _check(self, name, 1)
        for name in ("lag_bytes_alarm", "lag_ms_alarm"):
            _check(self, name, 1)
        for name in ("fragment_age_ms", "root_interval_ms"):
            _check(self, name, 0)


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """How a stream is read."""

    block_bytes: int = 4 * 1024 * 1024
    """Bytes of one range request; also the unit of the shared cache. 4 KiB to 64 MiB, default 4 MiB."""
    ahead_bytes: int = 16 * 1024 * 1024
    """Bytes that one reader has on their way before they are needed; as many again may wait for it.
    At least 0, default 16 MiB."""
    check_crc: bool = True
    """Whether the checksum of every chunk is compared. Default yes."""
    poll_interval_ms: int = 500
    """Milliseconds between two looks for new data at the end of the stream. At least 1."""
    request_timeout_ms: int = 10_000
    """Milliseconds that one attempt of a request may take before it is given up and repeated. At least 1.
    A reader has its chunk, or an error, within this and the deadline of `retry`."""
    retry: RetryPolicy = field(default_factory=_patient)
    """How failed requests are repeated."""

    def __post_init__(self) -> None:
        _check(self, "block_bytes", 4096, 64 * 1024 * 1024)
        _check(self, "ahead_bytes", 0)
        for name in ("poll_interval_ms", "request_timeout_ms"):
            _check(self, name, 1)
