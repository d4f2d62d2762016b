"""Bounds of what the broker takes from outside, each with a name that its error message carries.

The log has bounds of its own (`RECORD_BYTES_MAX` and others); these here are met before a byte of a request
is looked at, or before anything is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from forebay.errors import UsageError

__all__ = [
    "HEADERS_MAX",
    "HEADER_BYTES_MAX",
    "PIPELINE_MAX",
    "REFUSALS_MAX",
    "TARGET_BYTES_MAX",
    "HttpLimits",
]

HEADER_BYTES_MAX: Final = 32 * 1024
"""Bytes of all headers of one request; more is answered with 431."""
HEADERS_MAX: Final = 100
"""Headers of one request; more is answered with 431."""
TARGET_BYTES_MAX: Final = 8 * 1024
"""Bytes of the path and query of one request; more is answered with 414."""
REFUSALS_MAX: Final = 128
"""Connections above `connections_max` that are told so; further ones are ended without a word. No more than a
quarter of `connections_max`, and one."""
PIPELINE_MAX: Final = 16
"""Requests of one connection under way at once. Further ones wait in the socket."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How much a client may ask for, and how slowly."""

    body_max_bytes: int = 32 * 1024 * 1024
    """Bytes of one request body; more is answered with 413. At least 1."""
    bodies_max_bytes: int = 256 * 1024 * 1024
    """Bytes of all bodies being received or worked on; above it requests are answered with 503. At least
    `body_max_bytes`."""
    connections_max: int = 4_096
    """Connections open at once; one more is answered with 503 and closed, or only closed where many come.
    At least 1. `forebay serve` takes fewer where the limit on open files has no room for them."""
    partitions_max: int = 1_000
    """Partitions of one request to /produce or /consume. At least 1."""
    records_max: int = 1_000_000
    """Records of one request to /produce, and of one answer of /consume. At least 1."""
    record_max_bytes: int = 16 * 1024 * 1024
    """Bytes of one record's value. 1 to 16 MiB."""
    consume_max_bytes: int = 16 * 1024 * 1024
    """Bytes of records of one answer of /consume, whatever the request says, unless a single record is
    larger. At least 1."""
    answers_max_bytes: int = 256 * 1024 * 1024
    """Bytes of answers that their clients have not taken; above it /consume gives no records but 503. Answers
    that are being made count as well: they wait for each other. At least 1."""
    wait_max_ms: int = 60_000
    """Milliseconds a long poll waits at most, whatever the request says. At least 0."""
    waits_max: int = 20_000
    """Requests waiting for records at once; one more is answered with 429. At least 1."""
    tails_max: int = 1_000
    """Streams of server-sent events at once; one more is answered with 429. At least 1."""
    head_timeout_ms: int = 10_000
    """Milliseconds from the first byte of a request to the end of its headers, and from a new connection to
    its first byte. At least 1."""
    body_timeout_ms: int = 30_000
    """Milliseconds from the end of the headers to the end of the body, plus the time that what has arrived
    takes at `body_rate_min_bytes`. At least 1."""
    body_rate_min_bytes: int = 64 * 1024
    """Bytes per second that a body must arrive with once `body_timeout_ms` have passed. At least 1."""
    idle_timeout_ms: int = 75_000
    """Milliseconds a connection may stay open between two requests. At least 1."""
    write_timeout_ms: int = 30_000
    """Milliseconds a client may take no bytes of an answer. At least 1."""

    @property
    def refusals_max(self) -> int:
        """Connections above `connections_max` that are told so."""
        return min(REFUSALS_MAX, 1 + self.connections_max // 4)

    def __post_init__(self) -> None:
        for field in fields(self):
            low = 0 if field.name == "wait_max_ms" else 1
            if getattr(self, field.name) < low:
                raise UsageError(f"{field.name} is {getattr(self, field.name)}", hint=f"it is at least {low}")
        if self.bodies_max_bytes < self.body_max_bytes:
            raise UsageError(
                f"bodies_max_bytes is {self.bodies_max_bytes}", hint="it is at least body_max_bytes"
            )
