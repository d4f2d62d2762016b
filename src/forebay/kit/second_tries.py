"""How a turn that ended in a refusal becomes a turn that ends in a write.

Processes that fight for one key all read it, all wait for their turn, and then all but one are refused,
since the key changed while they waited: with sixteen of them every success costs fifteen refusals. So whoever
waited for a turn and was refused keeps it for a moment. The caller reads again, tries again and succeeds,
because nobody else could write in between; every turn is then a success, and turns stay in order of arrival.

A caller who does not come back costs the others that moment. Therefore the moment is short, and after a few
in a row that nobody used, twice as many refusals as the last time get none. Not after the first: on a busy
machine anybody may come too late once, and a caller without second tries gets nothing while others fight.
"""

from __future__ import annotations

__all__ = ["SECOND_TRY_S", "SecondTries"]

SECOND_TRY_S = 0.002
"""How long a turn is kept: many times what a read and a hop between threads take, little beside a sync."""
UNUSED_MAX = 3
"""Kept turns in a row that nobody used, after which they become rare."""
SKIPS_MAX = 256
"""Most refusals in a row that keep no turn after nobody used the last one."""


class SecondTries:
    """Whether the next refusal keeps its turn. Threads may share it: a lost update costs one moment."""

    def __init__(self) -> None:
        self._skips = 0
        self._unused = 0

    def is_due(self) -> bool:
        """Whether this refusal keeps its turn. Counts it where it does not."""
        if self._skips > 0:
            self._skips -= 1
            return False
        return True

    def used(self) -> None:
        """The caller came back in time."""
        self._unused = 0

    def unused(self) -> None:
        """The caller did not come back."""
        self._unused += 1
        if self._unused >= UNUSED_MAX:
            self._skips = min(2 ** (self._unused - UNUSED_MAX), SKIPS_MAX)
