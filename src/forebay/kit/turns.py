"""Turns of the event loop for everybody else, where one caller never waits.

A call that accepts something without waiting does not give way, `await` or not: whoever calls it in a loop
keeps the event loop to itself, and what it handed in is not even uploaded until it stops. So such a call asks
here first, and waits for one turn once this one has lasted too long.

    if turns.overdue():
        await clock.sleep(0)

A turn begins with the first question after the loop went round, which a callback of the loop notes. So calls
that come one by one, each in a turn of its own, never wait.
"""

from __future__ import annotations

import asyncio
from typing import Final

from forebay.kit.clock import Clock

__all__ = ["TURN_S_MAX", "Turns"]

TURN_S_MAX: Final = 0.002
"""Seconds for which calls may follow on each other before others have their turn."""


class Turns:
    """Tells a caller when to give way. Use from one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end: float | None = None

    def overdue(self) -> bool:
        """Whether the event loop has been kept from going round for too long."""
        now = self._clock.monotonic()
        if self._end is None:
            self._end = now + TURN_S_MAX
            asyncio.get_running_loop().call_soon(self._went_round)
        return now >= self._end

    def _went_round(self) -> None:
        self._end = None
