"""The two small things every call needs: one deadline for everything it does, and waits that grow."""

from __future__ import annotations

import asyncio
import random

__all__ = ["Backoff", "Deadline"]

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 0.5
"""Longest wait before trying again. Short, because a server is back within a second of its restart."""


class Deadline:
    """A moment on the clock of the running loop."""

    __slots__ = ("at",)

    def __init__(self, seconds: float) -> None:
        self.at = asyncio.get_running_loop().time() + seconds

    def left_s(self) -> float:
        """Seconds until then; below zero when it is over."""
        return self.at - asyncio.get_running_loop().time()


class Backoff:
    """Waits between attempts, with jitter."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._ceiling_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        """Seconds to wait now. Never nothing, so that an attempt that fails at once cannot spin."""
        wait = self._random.uniform(self._ceiling_s / 2, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2, BACKOFF_MAX_S)
        return wait

    def reset(self) -> None:
        """After a success."""
        self._ceiling_s = BACKOFF_FIRST_S
