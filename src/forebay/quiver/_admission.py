"""Whether a batch may be queued: the bounds on memory, on the WAL and on all files.

**Granted.** Asking all of them costs a tenth of what a small batch costs in all. So room is asked for in
larger pieces, for batches that come soon, and what was granted counts as used, also for instances that share
a cap, until the group of the WAL that it was meant for is over. Where so much cannot be had, each batch is
asked for on its own, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from forebay.quiver._config import QuiverConfig
from forebay.quiver._finalizer import Finalizer
from forebay.quiver._group_log import GroupLog
from forebay.quiver._retention import Retention

__all__ = ["Admission"]

GRANT_BYTES: Final = 256 * 1024
"""Bytes of further batches that are asked for with one."""


class Admission:
    """See the module. `check_open` raises where the store was closed while somebody waited."""

    def __init__(
        self,
        config: QuiverConfig,
        wal: GroupLog,
        finalizer: Finalizer,
        retention: Retention,
        check_open: Callable[[], None],
    ) -> None:
        self._wal = wal
        self._finalizer = finalizer
        self._retention = retention
        self._check_open = check_open
        self._open_bytes_max = max(config.open_bytes_max, 2 * config.segment_bytes)
        self._wal_bytes_max = config.wal_bytes_max
        self._grant_bytes = min(GRANT_BYTES, config.wal_file_bytes // 4)

    async def admit(self, need: int, frame_bytes: int) -> None:
        """Have room for a batch of `need` bytes granted, or raise what `Quiver.ingest` raises."""
        retention = self._retention
        retention.granted = 0
        if self._is_free(need + self._grant_bytes):
            retention.granted = need + self._grant_bytes
            return
        # The cap is looked at last, with nothing awaited behind it: of all who waited with us, each would
        # find the room that there is for one of them.
        while True:
            if self._open_bytes > self._open_bytes_max:
                await self._admit_to_memory()
            if self._is_wal_full(frame_bytes):
                await self._admit_to_wal(frame_bytes)
            if not retention.is_over(need):
                break
            await retention.admit(need)
            if self._open_bytes <= self._open_bytes_max and not self._is_wal_full(frame_bytes):
                break
        retention.granted += need

    def _is_wal_full(self, more: int) -> bool:
        return self._wal.projected_bytes(more) > self._wal_bytes_max

    def _is_free(self, more: int) -> bool:
        return (
            self._open_bytes + more <= self._open_bytes_max
            and self._wal.projected_bytes(more) <= self._wal_bytes_max
            and not self._retention.is_over(more)
        )

    @property
    def _open_bytes(self) -> int:
        return self._finalizer.bytes + self._wal.pending_bytes

    async def _admit_to_memory(self) -> None:
        """Wait while more is in memory than segments can be written of."""
        finalizer = self._finalizer
        while self._open_bytes > self._open_bytes_max:
            if finalizer.problem is not None:
                raise finalizer.problem
            await self._wal.drained()
            finalizer.freeze_all()
            if not finalizer.is_busy:
                return
            await finalizer.changed()
            self._check_open()

    async def _admit_to_wal(self, more: int) -> None:
        """Wait while the WAL is full of what is not in segments yet."""
        wal, bound = self._wal, self._wal_bytes_max
        while wal.projected_bytes(more) > bound:
            await self._retention.trim()
            if wal.projected_bytes(more) > bound:
                await wal.drop_spares()
            if wal.projected_bytes(more) <= bound:
                return
            if self._finalizer.problem is not None:
                raise self._finalizer.problem
            await wal.drained()
            self._finalizer.freeze_all()
            if not self._finalizer.is_busy:
                return
            await self._finalizer.changed()
            self._check_open()
