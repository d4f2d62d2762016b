"""How a client connects, waits and batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.errors import UsageError
from forebay.kit.retry import RetryPolicy

__all__ = ["ClientConfig", "ConsumerConfig", "ProducerConfig"]

IN_FLIGHT_PER_PARTITION_MAX = 5
"""Batches of one producer to one partition that may be unanswered: a partition remembers that many."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How to reach the broker."""

    connections_max: int = 16
    """Connections open at once; further requests wait for one. 1 to 1,000."""
    connect_timeout_s: float = 5.0
    """Seconds until a connection must stand, TLS included. Above 0."""
    request_timeout_s: float = 30.0
    """Seconds from sending a request to the end of its answer; a long poll gets its wait on top. Above 0."""
    idle_timeout_s: float = 20.0
    """Seconds after which an unused connection is not used again: shorter than the broker keeps it."""
    response_bytes_max: int = 256 * 1024 * 1024
    """Bytes of the largest answer that is taken. At least 1."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """For requests that certainly did nothing, and for those that may be repeated."""

    def __post_init__(self) -> None:
        times = (self.connect_timeout_s, self.request_timeout_s, self.idle_timeout_s)
        if not 1 <= self.connections_max <= 1000 or min(times) <= 0 or self.response_bytes_max < 1:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """When records are sent on, and how much may wait."""

    batch_bytes: int = 1024 * 1024
    """Bytes of one partition's records at which its batch is closed. 1 to 64 MiB."""
    linger_ms: int = 5
    """Milliseconds from the first record of a batch to its closing; 0: once ready tasks have run."""
    request_bytes: int = 8 * 1024 * 1024
    """Bytes of records that one request carries, unless a single batch is larger. At least 1."""
    requests_max: int = 8
    """Requests under way at once. At least 1."""
    in_flight_per_partition: int = 4
    """Unanswered batches of one partition. 1 to 5: so many a partition remembers."""
    pending_bytes_max: int = 64 * 1024 * 1024
    """Bytes sent and not yet durable. Above it `send` refuses, or waits in the synchronous client."""
    delivery_timeout_ms: int = 120_000
    """Milliseconds from the closing of a batch after which no new attempt begins. At least 1."""
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts_max=1_000_000, base_ms=50))
    """Waits between attempts; `delivery_timeout_ms` ends them."""

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight_per_partition <= IN_FLIGHT_PER_PARTITION_MAX:
            raise UsageError(
                f"in_flight_per_partition is {self.in_flight_per_partition}",
                hint=f"1 to {IN_FLIGHT_PER_PARTITION_MAX}",
            )
        low = min(self.request_bytes, self.requests_max, self.pending_bytes_max, self.delivery_timeout_ms)
        if not 1 <= self.batch_bytes <= 64 * 1024 * 1024 or self.linger_ms < 0 or low < 1:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """How much is read at once, and how long an empty read waits."""

    max_bytes: int = 8 * 1024 * 1024
    """Bytes of records that one answer carries, unless a single record is larger. At least 1."""
    partition_max_bytes: int = 4 * 1024 * 1024
    """Of these, bytes of any one partition. At least 1."""
    min_bytes: int = 1
    """Bytes that a long poll waits for. At least 0."""
    max_wait_ms: int = 1_000
    """Milliseconds that a long poll waits at the end of the log. 0 to 60,000."""

    def __post_init__(self) -> None:
        low = min(self.max_bytes, self.partition_max_bytes)
        if low < 1 or self.min_bytes < 0 or not 0 <= self.max_wait_ms <= 60_000:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")
