"""Back-pressure: a writer that may not run away from its bucket.

Local disks fill up when the bucket cannot be reached, and what is not in the bucket lives on one machine. A
gate stands between the two: the writer tells it what it wrote, the tier how far the persisted root reaches,
and between them is the lag. Above the soft bound the writer is slowed down, the more the nearer it comes to
the hard one; above the hard one it is refused with `Backpressure`, and nothing was written.

The lag is held as runs of chunks, each at least a 64th of the hard bound, so its cost does not grow with the
number of chunks. A run counts until all of it is in the bucket: the lag is never told too small.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from forebay.errors import Backpressure, UsageError
from forebay.kit.clock import Clock

__all__ = ["LagGate", "LagLimits"]

RUNS_PER_BOUND = 64
"""Runs into which the hard bound is divided: how exactly the lag is known."""


@dataclass(frozen=True, slots=True)
class LagLimits:
    """How far a writer may be ahead of its bucket."""

    bytes_slow: int = 2 * 1024**3
    """Bytes not yet in the bucket from which on appends are slowed down. At least 1, at most `bytes_max`."""
    bytes_max: int = 8 * 1024**3
    """Bytes not yet in the bucket from which on appends are refused. At least 1."""
    age_ms_max: int | None = None
    """Age of the oldest chunk not yet in the bucket, in milliseconds, from which on appends are refused. At
    least 1. None: age alone refuses nothing."""
    wait_ms_max: int = 1_000
    """Longest wait of one slowed append, just below the hard bound, in milliseconds. At least 0."""

    def __post_init__(self) -> None:
        if (
            not 1 <= self.bytes_slow <= self.bytes_max
            or self.wait_ms_max < 0
            or (self.age_ms_max is not None and self.age_ms_max < 1)
        ):
            raise UsageError(f"not usable limits: {self}", hint="see the range under each field")


@dataclass(slots=True)
class _Run:
    next_offset: int
    bytes: int
    timestamp: int


class LagGate:
    """What one stream's writer has written and its tier has not persisted yet."""

    def __init__(self, limits: LagLimits, *, clock: Clock) -> None:
        self.limits = limits
        self.bytes = 0
        """Bytes of chunks that no persisted root holds."""
        self.refused = 0
        """Appends that were refused."""
        self._clock = clock
        self._run_bytes = max(limits.bytes_max // RUNS_PER_BOUND, 1)
        self._runs: deque[_Run] = deque()
        self._tiered = 0

    @property
    def age_ms(self) -> int:
        """Age of the oldest chunk that no persisted root holds. 0 where there is none."""
        return max(self._clock.now_ms() - self._runs[0].timestamp, 0) if self._runs else 0

    def wrote(self, next_offset: int, size: int, timestamp: int) -> None:
        """The writer has appended `size` bytes that end before `next_offset`."""
        if next_offset <= self._tiered:
            return
        self.bytes += size
        last = self._runs[-1] if self._runs else None
        if last is not None and last.bytes < self._run_bytes:
            last.next_offset, last.bytes = next_offset, last.bytes + size
        else:
            self._runs.append(_Run(next_offset, size, timestamp))

    def tiered(self, next_offset: int) -> None:
        """A persisted root reaches up to `next_offset`."""
        self._tiered = max(self._tiered, next_offset)
        while self._runs and self._runs[0].next_offset <= next_offset:
            self.bytes -= self._runs.popleft().bytes

    def check(self) -> None:
        """Raise `Backpressure` where a hard bound is reached."""
        reason = ""
        if self.bytes >= self.limits.bytes_max:
            reason = f"{self.bytes:,} bytes are not in the bucket yet, {self.limits.bytes_max:,} may be"
        elif self.limits.age_ms_max is not None and self.age_ms >= self.limits.age_ms_max:
            reason = f"the oldest chunk that is not in the bucket yet is {self.age_ms:,} ms old"
        if reason:
            self.refused += 1
            raise Backpressure(reason, hint="wait until the tier has caught up; see its health for why")

    @property
    def wait_s(self) -> float:
        """Seconds that the next append should wait: none up to the soft bound, then more and more."""
        over = self.bytes - self.limits.bytes_slow
        if over <= 0:
            return 0.0
        span = max(self.limits.bytes_max - self.limits.bytes_slow, 1)
        return min(over / span, 1.0) * self.limits.wait_ms_max / 1000

    async def admit(self) -> None:
        """Wait as long as the lag asks for, then return, or raise `Backpressure`."""
        if self.wait_s:
            await self._clock.sleep(self.wait_s)
        self.check()
