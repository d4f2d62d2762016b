"""Sessions of the embedded coordinator.

Deadlines are readings of CLOCK_BOOTTIME: all processes of the machine share it, it never steps, and it counts
the time a laptop sleeps. It begins anew at every boot, so a session also names its boot and dies with it.
Renewal is a task on the owner's event loop: a process whose loop stands still has nothing to claim.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forebay.coordination._api import Session
from forebay.errors import Closed, ForebayError, SessionExpired

__all__ = ["SqliteSession", "boot_id", "boottime_ms"]

RENEWALS_PER_TIMEOUT = 3
"""How often a session renews itself within its timeout: two renewals may be late before it is over."""
RENEWAL_RETRY_MS = 200
"""Milliseconds until a renewal that failed for another reason than expiry is tried again."""


def boottime_ms() -> int:
    """Milliseconds since the machine booted, sleep included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def boot_id() -> str:
    """What tells this boot of the machine from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SqliteSession(Session):
    """A row that is kept alive. Its local deadline is never later than the stored one."""

    def __init__(
        self,
        session_id: int,
        timeout_ms: int,
        *,
        opened_ms: int,
        now_ms: Callable[[], int],
        renew: Callable[[int], Awaitable[None]],
        end: Callable[[int], Awaitable[None]],
    ) -> None:
        self.id = session_id
        self.timeout_ms = timeout_ms
        self._deadline_ms = opened_ms + timeout_ms
        self._now_ms = now_ms
        self._renew = renew
        self._end = end
        self._over = False
        self._task = asyncio.get_running_loop().create_task(self._keep_alive(), name=f"session {session_id}")

    @property
    def alive(self) -> bool:
        """Whether the stored deadline is certainly ahead."""
        return not self._over and self._now_ms() < self._deadline_ms

    async def close(self) -> None:
        """End it now, with its keys. Does nothing the second time."""
        if self.stop():
            await self._end(self.id)

    def belongs_to(self, end: Callable[[int], Awaitable[None]]) -> bool:
        """Whether it was opened by the coordinator with this bound method."""
        return self._end == end

    def stop(self) -> bool:
        """No more renewals. Whether there was still something to stop."""
        self._task.cancel()
        first, self._over = not self._over, True
        return first

    async def _keep_alive(self) -> None:
        wait_ms = self.timeout_ms / RENEWALS_PER_TIMEOUT
        while True:
            await asyncio.sleep(wait_ms / 1000)
            asked_ms = self._now_ms()
            try:
                await self._renew(self.id)
            except (SessionExpired, Closed):
                self._over = True
                return
            except ForebayError:
                wait_ms = RENEWAL_RETRY_MS
            else:
                self._deadline_ms = asked_ms + self.timeout_ms
                wait_ms = self.timeout_ms / RENEWALS_PER_TIMEOUT
