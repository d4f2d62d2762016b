"""Subscribers that nobody speaks for: said once, and removed after a time where that is asked for.

A subscriber that is registered and never reads pins everything behind it, and nothing in the store can tell
an exporter that is gone for good from one that is late. So the default is to say so, in the log and as
`quiver.subscriber.orphaned_pinned_bytes`; removing is `orphan_timeout_ms`, or `forebay quiver repair`. Time
counts from the opening of the store, or from the registration: a restart starts it anew and loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from forebay.kit.clock import Clock
from forebay.quiver._config import QuiverConfig
from forebay.quiver._stats import QuiverStats

__all__ = ["Orphans"]

_log = logging.getLogger(__name__)

SAID_AFTER_S: Final = 60.0
"""Seconds after which an orphan is named in the log."""


class Orphans:
    """See the module."""

    def __init__(
        self,
        config: QuiverConfig,
        clock: Clock,
        *,
        names: Callable[[], list[str]],
        stats: Callable[[], QuiverStats],
        unregister: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._timeout_ms = config.orphan_timeout_ms
        self._clock = clock
        self._names = names
        self._stats = stats
        self._unregister = unregister
        self._since: dict[str, float] = {}
        self._said: set[str] = set()

    async def look(self) -> None:
        """Once per pass of maintenance."""
        now = self._clock.monotonic()
        self._since = {name: self._since.get(name, now) for name in self._names()}
        self._said &= self._since.keys()
        for name, since in self._since.items():
            if self._timeout_ms is not None and (now - since) * 1000 >= self._timeout_ms:
                self._say("removed", name)
                await self._unregister(name)
            elif now - since >= SAID_AFTER_S and name not in self._said:
                self._said.add(name)
                self._say("orphaned", name)

    def _say(self, what: str, name: str) -> None:
        # None of that name where somebody else has removed it in the meantime.
        for each in self._stats().subscribers:
            if each.name == name:
                _log.warning(
                    "quiver.subscriber.%s: %s, never active, %d segments behind, %d bytes pinned",
                    *(what, name, each.lag_segments, each.pinned_bytes),
                )
