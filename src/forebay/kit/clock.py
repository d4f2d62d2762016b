"""Time as a part that is handed in, so that a whole cluster can run on virtual time.

Two readings, never mixed: `now_ms` is what people and other machines call the time and may step;
`monotonic` only grows and is the one for intervals and deadlines.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What engines know of time."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch. May step either way."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment. Never steps; comparable only with readings of the same clock."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let others run for this long. Zero lets every ready task run once."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)
